"""Held-out accuracy of a model, in a process of its own: `python -m tailrace.rollout.evaluate`, settings on stdin.

Plays every held-out prompt once with the run's own sampling, judges and limits, and prints one line of JSON whenever
more of them are done; the last line has the result. A sample whose judge fails counts as wrong and is reported.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator

import msgspec

from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.logs import for_component, output
from tailrace.protocol import Request
from tailrace.rollout.episode import Episode
from tailrace.rollout.runner import Outcome, Runner
from tailrace.types import RIGHT_ABOVE, Struct

PR_SET_PDEATHSIG = 1
FIRST_TRAJECTORY = 1 << 40  # held-out samples have random numbers of their own, far from those of training


class Evaluated(Struct):
    """How far an evaluation is, or what came of it."""

    done: int
    total: int
    accuracy: float = 0.0  # share of rewards above `RIGHT_ABOVE`; a sample without a verdict counts as wrong
    mean_reward: float = 0.0  # of those with a verdict
    mean_tokens: float = 0.0
    failed: int = 0
    error: str = ""


def main() -> int:
    for_component()
    _end_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    try:
        for progress in evaluate(config):
            _print(progress)
    except TailraceError as error:
        _print(Evaluated(0, 0, error=str(error)))
        return 2
    return 0


def _end_with_parent() -> None:
    """A controller that is killed leaves nobody behind who computes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def evaluate(config: Config) -> Iterator[Evaluated]:
    """Yield an `Evaluated` now and then, and the final one last."""
    from tailrace.rollout.build import build_runner, held_out_rows

    rows = held_out_rows(config)
    if not rows:
        yield Evaluated(0, 0)
        return
    runner = build_runner(config, with_weights=True)
    for number, row in enumerate(rows):
        request = Request(FIRST_TRAJECTORY + number, 1, number, row.id, row.length)
        runner.add(Episode(request, row, (), 0))
    try:
        yield from _play(runner, len(rows))
    finally:
        runner.close()


def _play(runner: Runner, total: int) -> Iterator[Evaluated]:
    outcomes: list[Outcome] = []
    while runner.episodes:
        ended = runner.step()
        outcomes += ended
        if ended:
            yield _summed_up(outcomes, total)


def _summed_up(outcomes: list[Outcome], total: int) -> Evaluated:
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    right = sum(reward > RIGHT_ABOVE for reward in rewards)
    tokens = sum(outcome.episode.completion_tokens for outcome in outcomes)
    count = len(outcomes)
    mean = sum(rewards) / max(1, len(rewards))
    return Evaluated(count, total, right / count, mean, tokens / count, count - len(rewards))


def _print(progress: Evaluated) -> None:
    output(msgspec.json.encode(progress).decode())


if __name__ == "__main__":
    sys.exit(main())
