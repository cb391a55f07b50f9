"""Held-out accuracy of a model, in a process of its own: `python -m tailrace.rollout.evaluate`, settings on stdin.

Plays every held-out prompt `eval.samples` times with the run's own sampling (but `eval.temperature`), judges and
limits, and prints one line of JSON whenever more of them are done; the last line has the result. A sample whose judge
fails counts as wrong and is reported.
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
from tailrace.rollout.runner import Runner
from tailrace.scoring import EvalResult, EvalSet, PromptScore, summed_up
from tailrace.types import EVALUATION, Row, Struct

PR_SET_PDEATHSIG = 1


class Evaluated(Struct):
    """How far an evaluation is, in samples, or what came of it: a result for each set."""

    done: int
    total: int
    results: tuple[EvalResult, ...] = ()
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

    sets, rows = held_out_rows(config)
    if not rows:
        yield Evaluated(0, 0)
        return
    runner = build_runner(config, with_weights=True)
    for episode in _episodes(config, rows):
        runner.add(episode)
    try:
        yield from _play(runner, sets, config.eval.samples)
    finally:
        runner.close()


def _episodes(config: Config, rows: list[Row]) -> Iterator[Episode]:
    """The samples of a prompt are a group; their numbers give them random numbers far from those of training."""
    for number, row in enumerate(rows):
        for nth in range(config.eval.samples):
            trajectory = EVALUATION + number * config.eval.samples + nth
            request = Request(trajectory, 1, EVALUATION + number, row.id, row.length)
            yield Episode(request, row, (), 0, config.eval.temperature)


def _play(runner: Runner, sets: tuple[EvalSet, ...], samples: int) -> Iterator[Evaluated]:
    scores = [PromptScore() for one in sets for _ in range(one.prompts)]
    while runner.episodes:
        ended = runner.step()
        for one in ended:
            score = scores[(one.episode.request.trajectory - EVALUATION) // samples]
            score.add(one.reward, one.episode.completion_tokens, one.episode.finish)
        if ended:
            yield _so_far(sets, scores, samples)


def _so_far(sets: tuple[EvalSet, ...], scores: list[PromptScore], samples: int) -> Evaluated:
    results: list[EvalResult] = []
    start = 0
    for one in sets:
        results.append(summed_up(one.name, scores[start : start + one.prompts], samples))
        start += one.prompts
    return Evaluated(sum(score.samples for score in scores), len(scores) * samples, tuple(results))


def _print(progress: Evaluated) -> None:
    output(msgspec.json.encode(progress).decode())


if __name__ == "__main__":
    sys.exit(main())
