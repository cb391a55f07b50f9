"""Held-out accuracy of the start model or of any checkpoint, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.rollout.evaluate import Evaluated

Progress = Callable[[int, int], None]


class EvaluationError(ValueError):
    """Why there is no accuracy, for the person who asked for it."""


def measure(config: Config, weights: Path | None, progress: Progress) -> Evaluated:
    """Play the held-out prompts with the weights in that directory; None: with those that the run starts from."""
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, threads=0))  # all cores
    if weights is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(weights)))
    with tempfile.TemporaryFile() as complaints:
        result, status = _watch(config, complaints, progress)
        complaints.seek(0)
        tail = complaints.read().decode(errors="replace")[-2000:]
    if result.error:
        raise ConfigError(result.error)
    if status or result.done < result.total or not result.total:
        raise EvaluationError(f"the evaluation ended with status {status}:\n{tail}")
    return result


def _watch(config: Config, complaints: IO[bytes], progress: Progress) -> tuple[Evaluated, int]:
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace.rollout.evaluate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(config) + b"\n")
        child.stdin.close()
        result = Evaluated(0, 0)
        for line in child.stdout:
            result = msgspec.json.decode(line, type=Evaluated)
            progress(result.done, result.total)
    return result, child.returncode
