"""What generating costs on this fleet, fitted to what its engines report (`protocol.EngineWork`).

The time of an engine is linear in what it does: so much a decode step, more for each sequence in it and for each KV
token that it reads, and so much for each token of prefill. The four costs are least squares over the intervals between
two reports, those of long ago counting less; none is negative. Everything that control reckons in seconds of decoding
comes from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tailrace.protocol import EngineWork

MEMORY = 0.998  # weight of a report after the next one
OWN_MEMORY = 0.98  # the same of what is known of one replica alone
FEWEST = 5  # reports of a replica before it is known how fast it is
LEAST_S = 1e-9  # of an interval: no clock tells less apart, and what was done in it would count beyond all others
COSTS = 4
RIDGE = 1e-9  # of the diagonal: two costs that always came together share what they cost
NEAR = 0.02  # share of an engine's time that a cost must have had to be known of this engine


class DecodeCosts(NamedTuple):
    """Seconds."""

    step: float
    sequence: float
    kv_token: float
    prefill_token: float

    def step_s(self, sequences: float, kv: float) -> float:
        return self.step + self.sequence * sequences + self.kv_token * kv

    def rate(self, sequences: float, kv: float) -> float:
        """Tokens per second of all sequences together."""
        return sequences / self.step_s(sequences, kv) if sequences else 0.0


class Interval(NamedTuple):
    """What an engine did between two of its reports, as a part of the normal equations."""

    products: list[float]
    targets: list[float]

    @staticmethod
    def between(before: EngineWork | None, after: EngineWork) -> Interval | None:
        """None before: since it started. None: it did nothing, or has started anew."""
        row = _difference(before, after)
        seconds = after.busy_s - (before.busy_s if before else 0.0)
        if seconds < LEAST_S or min(row) < 0.0:
            return None
        weight = 1.0 / seconds  # of the square: a busy interval counts by its length
        weighted = [weight * x for x in row]
        return Interval([x * y for x in weighted for y in row], [x * seconds for x in weighted])


class Speed(msgspec.Struct):
    """The normal equations."""

    products: list[float] = msgspec.field(default_factory=lambda: [0.0] * (COSTS * COSTS))
    targets: list[float] = msgspec.field(default_factory=lambda: [0.0] * COSTS)
    reports: int = 0

    def note(self, before: EngineWork | None, after: EngineWork, memory: float = MEMORY) -> None:
        """What an engine did between two of its reports; none before: since it started."""
        if (interval := Interval.between(before, after)) is not None:
            self.add(interval, memory)

    def add(self, interval: Interval, memory: float = MEMORY) -> None:
        self.reports += 1
        self.products = [memory * old + new for old, new in zip(self.products, interval.products, strict=True)]
        self.targets = [memory * old + new for old, new in zip(self.targets, interval.targets, strict=True)]

    def costs(self) -> DecodeCosts | None:
        """None while nothing has been decoded."""
        return _costs(tuple(self.products), tuple(self.targets))

    def costs_near(self, others: DecodeCosts) -> DecodeCosts | None:
        """The same of one engine, of which less is known: where its reports do not tell two costs apart, they are as
        those of the others are to each other. None after too few reports, or if decoding seems to take no
        time at all."""
        fitted = _dot(others, [_dot(row, others) for row in self._rows()])
        if self.reports < FEWEST or fitted <= 0.0:
            return None
        scale = _dot(others, self.targets) / fitted
        usual = [scale * cost for cost in others]
        wrong = [target - _dot(row, usual) for target, row in zip(self.targets, self._rows(), strict=True)]
        kept = [i for i, cost in enumerate(usual) if cost > 0.0]
        products = list(self.products)
        for i in kept:
            products[COSTS * i + i] += NEAR * scale * scale * fitted / usual[i] ** 2
        own = dict(zip(kept, _solve(tuple(products), tuple(wrong), kept), strict=True))
        return _possible(DecodeCosts(*[max(0.0, cost + own.get(i, 0.0)) for i, cost in enumerate(usual)]))

    def _rows(self) -> list[list[float]]:
        return [self.products[COSTS * i : COSTS * (i + 1)] for i in range(COSTS)]


@lru_cache(maxsize=16)  # asked for at every assignment, and another only after a report
def _costs(products: tuple[float, ...], targets: tuple[float, ...]) -> DecodeCosts | None:
    kept = [i for i in range(COSTS) if products[COSTS * i + i] > 0.0]
    while kept:
        solved = _solve(products, targets, kept)
        if min(solved) >= 0.0:
            values = dict(zip(kept, solved, strict=True))
            return _possible(DecodeCosts(*[values.get(i, 0.0) for i in range(COSTS)]))
        kept = [i for i, value in zip(kept, solved, strict=True) if value > 0.0]
    return None


def _possible(costs: DecodeCosts) -> DecodeCosts | None:
    """A decode step takes time."""
    return costs if costs.step_s(1, 0) > 0.0 else None


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(first, second, strict=True))


def _solve(products: tuple[float, ...], targets: tuple[float, ...], kept: list[int]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and, with the ridge, definite."""
    rows = [[products[COSTS * i + j] * (1.0 + RIDGE * (i == j)) for j in kept] for i in kept]
    right = [targets[i] for i in kept]
    size = len(kept)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            right[row] -= factor * right[pivot]
            for column in range(pivot, size):
                rows[row][column] -= factor * rows[pivot][column]
    solved = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (right[row] - known) / rows[row][row]
    return solved


def _difference(before: EngineWork | None, after: EngineWork) -> tuple[float, ...]:
    if before is None:
        return (after.steps, after.decoded, after.kv_read, after.prefilled)
    return (
        after.steps - before.steps,
        after.decoded - before.decoded,
        after.kv_read - before.kv_read,
        after.prefilled - before.prefilled,
    )
