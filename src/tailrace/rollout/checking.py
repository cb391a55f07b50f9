"""What a checker does with a sample that a stranger has handed in, before it is judged like any other."""

from __future__ import annotations

import numpy as np

from tailrace.engines.base import Checking, Job
from tailrace.protocol import Request
from tailrace.samples.messages import Fetched
from tailrace.types import Version


def complaint_about(
    engine: Checking, version: Version, request: Request, found: Fetched, max_completion_tokens: int
) -> str:
    """What is wrong with the tokens that its store has of it; empty: nothing. `version`: that the engine has loaded."""
    draws = request.check == "draws"
    versions = {segment.version for segment in found.prefix}
    if None in versions:
        return "it has tokens that no policy sampled"
    if draws and versions - {version}:
        return f"it has tokens of the versions {sorted(filter(None, versions))}, not of {version} alone"
    tokens = b"".join([found.row.tokens, *[segment.tokens for segment in found.prefix]])
    job = Job(
        request.trajectory, request.group, tokens, found.row.length, max_completion_tokens, failures=request.failures
    )
    logprobs = np.frombuffer(b"".join([segment.logprobs or b"" for segment in found.prefix]), "<f4")
    return engine.complaint_about(job, logprobs, draws)
