"""Buffers of tokens as lists of numbers, for tests: jobs made of them, and what engines hand out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tailrace.engines.base import Finish, Job, StepOutput
from tailrace.types import id_bytes, token_ids


class Added(NamedTuple):
    """What one engine step added to one sequence."""

    id: int
    tokens: list[int]
    logprobs: list[float]
    finish: Finish


def added(output: StepOutput) -> list[Added]:
    return [
        Added(id, token_ids(tokens).tolist(), np.frombuffer(logprobs, "<f4").tolist(), finish)
        for id, tokens, logprobs, finish in output.additions()
    ]


def output_of(steps: Sequence[Added]) -> StepOutput:
    """The other way round, for an engine that a test plays."""
    tokens = [token for one in steps for token in one.tokens]
    logprobs = [value for one in steps for value in one.logprobs]
    numbers = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    counts = [len(one.tokens) for one in steps]
    return StepOutput([one.id for one in steps], counts, *numbers, [one.finish for one in steps])


def job_of(id: int, group: int, ids: Sequence[int], prompt: int, max_tokens: int, failures: int = 0) -> Job:
    return Job(id, group, id_bytes(ids), prompt, max_tokens, failures)


def ids_of(job: Job) -> list[int]:
    return token_ids(job.tokens).tolist()
