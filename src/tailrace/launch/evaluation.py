"""Held-out accuracy of the start model or of any checkpoint, measured in a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from tailrace.config.dealing import cards_per_replica, visible
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.rollout.evaluate import Evaluated

Progress = Callable[[int, int], None]
SETTING_UP_S = 600.0  # until the first prompt is done: imports, a model, compiled kernels
ENDING_S = 10.0  # from its last line to its end


class EvaluationError(TailraceError):
    """Why there is no accuracy, for the person who asked for it."""


def measure(config: Config, weights: Path | None, progress: Progress) -> Evaluated:
    """Play the held-out prompts with the weights in that directory; None: with those that the run starts from.

    Where no rows are held out, its total is 0.
    """
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, threads=0))  # all cores
    if weights is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(weights)))
    with tempfile.TemporaryFile() as complaints:
        result, status = _watch(config, complaints, progress)
        complaints.seek(0)
        tail = complaints.read().decode(errors="replace")[-2000:]
    if result.error:
        wrote = f"; it wrote:\n{tail}" if config.rollout.engine == "vllm" else ""  # whose own reasons are there alone
        raise ConfigError(f"{result.error}{wrote}")
    if status or result.done < result.total:
        raise EvaluationError(f"the evaluation ended with status {status}:\n{tail}")
    return result


def _watch(config: Config, complaints: IO[bytes], progress: Progress) -> tuple[Evaluated, int]:
    patience = SETTING_UP_S + config.health.stuck_s
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace.rollout.evaluate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        env=os.environ | visible(config.rollout.cards[: cards_per_replica(config)], os.environ),
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(config) + b"\n")
        child.stdin.close()
        result = Evaluated(0, 0)
        try:
            for line in _lines(child.stdout, patience):
                result = msgspec.json.decode(line, type=Evaluated)
                progress(result.done, result.total)
            child.wait(ENDING_S)
        except TimeoutError:
            raise EvaluationError(
                f"the evaluation has said nothing for {patience:g} s, with {result.done:,} of {result.total:,} prompts "
                "done; if it is only slow, raise health.stuck_s"
            ) from None
        except subprocess.TimeoutExpired:
            raise EvaluationError(f"the evaluation did not end within {ENDING_S:g} s of its last word") from None
        finally:
            child.kill()
    return result, child.returncode


def _lines(pipe: IO[bytes], patience_s: float) -> Iterator[bytes]:
    """What it prints, line by line; TimeoutError when nothing comes for so long."""
    rest = b""
    while select.select([pipe], [], [], patience_s)[0]:
        piece = os.read(pipe.fileno(), 1 << 16)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    raise TimeoutError
