"""The curves of evaluations while training: avg@k, pass@k and mean reward of every set, version by version."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.protocol import RecordEvaluation
from tailrace.types import Version

POINTS = 300  # of a curve
SETS = 32


class EvalPoint(msgspec.Struct, frozen=True, array_like=True):
    version: Version
    average: float  # avg@k
    passed: float  # pass@k
    reward: float


class EvalCurve(msgspec.Struct, frozen=True):
    """Of one set."""

    name: str
    samples: int  # the k of avg@k and pass@k
    points: list[EvalPoint]


class EvalCurves(msgspec.Struct, frozen=True):
    sets: list[EvalCurve]
    best: tuple[Version, ...]  # the best versions, best first


def eval_curves(evaluations: Sequence[RecordEvaluation]) -> EvalCurves:
    """Of a long run every second version, or fourth, and always the newest."""
    curves: dict[str, EvalCurve] = {}
    for one in _thinned(evaluations):
        for result in one.results[:SETS]:
            if result.failed >= result.prompts * result.samples:
                continue  # no sample has a verdict, as in a simulation
            curve = curves.setdefault(result.name, EvalCurve(result.name, result.samples, []))
            passed = result.passed.get(result.samples, result.accuracy)
            curve.points.append(EvalPoint(one.version, result.accuracy, passed, result.mean_reward))
    return EvalCurves(list(curves.values())[:SETS], evaluations[-1].best if evaluations else ())


def _thinned(evaluations: Sequence[RecordEvaluation]) -> Sequence[RecordEvaluation]:
    """Counted from the newest, so that it is there."""
    width = 1 + max(0, len(evaluations) - 1) // POINTS
    return evaluations[::-1][::width][::-1]
