"""Phase 1 of a plan for several kinds of card: who trains, who generates in which shape, and how many cards of each.

A mixed-integer program, solved by HiGHS (`pip install 'tailrace[fleet]'`). Figures go in as they are (`fleet_rates.py`
has them from the cost model), a choice comes out:

    y[c]  is 1 for the trainer that is taken, a kind of card and a number of them
    z[r]  is 1 for the shape (GPUs of a replica) that a kind generates in, x[r] how many replicas of it there are
    T     trained tokens per second

    sum y = 1,  sum z <= 1 for each kind,  x[r] <= fits[r] z[r]
    x[r] <= sum_c fits[r, c] y[c]          what fits on the hosts beside that trainer; none where it is too far
    T <= sum_c rate[c] y[c],  T <= sum_r rate[r] x[r]
    dollars of all cards that are used <= budget

Trainer ranks fill hosts one after the other and a replica never reaches over two, so `fits` is exact and every choice
can be placed. The goal is most T, then fewest dollars; or fewest dollars with T at least a target.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from tailrace.config import ConfigError
from tailrace.config.kinds import GpuKind

SOLVER_S = 20.0  # at most, for one solution
EQUAL = 1e-6  # share of the throughput that counts as none


class KindSupply(NamedTuple):
    """A kind of card: how many there are, on hosts of how many, and what one costs an hour."""

    name: str
    gpus: int
    gpus_per_host: int
    dollars: float


class TrainerOption(NamedTuple):
    kind: int
    gpus: int
    rate: float  # trained tokens per second


class ReplicaOption(NamedTuple):
    kind: int
    ways: int
    rate: float  # of one replica, in trained tokens per second


class FleetProblem(NamedTuple):
    kinds: tuple[KindSupply, ...]
    trainers: tuple[TrainerOption, ...]
    replicas: tuple[ReplicaOption, ...]
    too_far: frozenset[tuple[int, int]] = frozenset()  # trainer and kind: no data would be fresh enough

    def fits(self, replica: ReplicaOption, trainer: int) -> int:
        """Replicas of a shape that find room beside a trainer."""
        if (trainer, replica.kind) in self.too_far:
            return 0
        kind, chosen = self.kinds[replica.kind], self.trainers[trainer]
        supply = GpuKind(kind.name, kind.gpus, kind.gpus_per_host, replica.ways)
        return _room(supply, chosen.gpus if chosen.kind == replica.kind else 0)


@lru_cache(maxsize=1 << 16)  # a plan solves hundreds of programs with the same cards
def _room(supply: GpuKind, taken: int) -> int:
    return sum(supply.replicas_on_hosts(taken))


class FleetChoice(NamedTuple):
    """A solution: the trainer, and how many replicas of which option."""

    trainer: TrainerOption
    replicas: tuple[tuple[ReplicaOption, int], ...]

    @property
    def rate(self) -> float:
        return min(self.trainer.rate, sum(option.rate * count for option, count in self.replicas))

    def shape_of(self, kind: int) -> tuple[ReplicaOption, int] | None:
        """How a kind generates, and how many replicas there are of it."""
        return next((pair for pair in self.replicas if pair[0].kind == kind), None)

    def gpus_of(self, kind: int) -> int:
        shape = self.shape_of(kind)
        generating = shape[0].ways * shape[1] if shape else 0
        return generating + (self.trainer.gpus if self.trainer.kind == kind else 0)

    def dollars(self, kinds: Sequence[KindSupply]) -> float:
        return sum(self.gpus_of(number) * kind.dollars for number, kind in enumerate(kinds))


class FleetGoal(NamedTuple):
    """Most throughput for `budget` dollars an hour (infinite: use what there is); or, with a target, the cheapest."""

    budget: float = inf
    tokens_per_s: float = 0.0


def best_fleet(problem: FleetProblem, goal: FleetGoal) -> FleetChoice | None:
    """The best choice; None: nothing reaches the goal."""
    if not problem.trainers or not problem.replicas:
        return None
    program = FleetSolver(problem)
    if goal.tokens_per_s:
        return program.cheapest(goal.tokens_per_s, goal.budget)
    fastest = program.fastest(goal.budget)
    return fastest and (program.cheapest(fastest.rate * (1 - EQUAL), goal.budget) or fastest)


class FleetSolver:
    """Columns are y, z, x and T; rows bound their sums from above, but for the first, which is an equation."""

    def __init__(self, problem: FleetProblem) -> None:
        self.problem = problem
        self.trainers, self.shapes = len(problem.trainers), len(problem.replicas)
        self.columns = self.trainers + 2 * self.shapes + 1
        self.unit = max(option.rate for option in problem.trainers)  # T is about 1
        self.fits = np.array(
            [[problem.fits(option, number) for number in range(self.trainers)] for option in problem.replicas]
        )
        self.rows = np.vstack([self._choices(), self._rooms(), self._rates(), self._dollars()])

    def _row(self, y: Any = 0.0, z: Any = 0.0, x: Any = 0.0, rate: float = 0.0) -> np.ndarray:
        row = np.zeros(self.columns)
        row[: self.trainers] = y
        row[self.trainers : self.trainers + self.shapes] = z
        row[self.trainers + self.shapes : -1] = x
        row[-1] = rate
        return row

    def _choices(self) -> list[np.ndarray]:
        """One trainer; at most one shape for each kind."""
        kinds = np.array([option.kind for option in self.problem.replicas])
        return [self._row(y=1.0), *[self._row(z=kinds == kind) for kind in range(len(self.problem.kinds))]]

    def _rooms(self) -> list[np.ndarray]:
        rows: list[np.ndarray] = []
        for number, one in enumerate(np.eye(self.shapes)):
            rows.append(self._row(x=one, z=-self.fits[number].max() * one))
            rows.append(self._row(x=one, y=-self.fits[number]))
        return rows

    def _rates(self) -> list[np.ndarray]:
        trained = np.array([option.rate for option in self.problem.trainers]) / self.unit
        generated = np.array([option.rate for option in self.problem.replicas]) / self.unit
        return [self._row(y=-trained, rate=1.0), self._row(x=-generated, rate=1.0)]

    def _dollars(self) -> np.ndarray:
        price = [kind.dollars for kind in self.problem.kinds]
        return self._row(
            y=[option.gpus * price[option.kind] for option in self.problem.trainers],
            x=[option.ways * price[option.kind] for option in self.problem.replicas],
        )

    def fastest(self, budget: float) -> FleetChoice | None:
        return self._solved(self._row(rate=-1.0), budget, 0.0)

    def cheapest(self, tokens_per_s: float, budget: float) -> FleetChoice | None:
        return self._solved(self.rows[-1], budget, tokens_per_s / self.unit)

    def _solved(self, goal: np.ndarray, budget: float, least: float) -> FleetChoice | None:
        optimize = _solver()
        above = np.zeros(len(self.rows))
        above[: 1 + len(self.problem.kinds)] = 1.0
        above[-1] = budget
        below = np.full(len(self.rows), -np.inf)
        below[0] = 1.0
        upper = self._row(y=1.0, z=1.0, x=self.fits.max(axis=1), rate=np.inf)
        with _output_kept_clean():
            found = optimize.milp(
                goal,
                integrality=self._row(y=1, z=1, x=1),
                bounds=optimize.Bounds(self._row(rate=least), upper),
                constraints=optimize.LinearConstraint(self.rows, below, above),
                options={"time_limit": SOLVER_S, "mip_rel_gap": EQUAL},
            )
        return None if found.x is None else self._choice(found.x)

    def _choice(self, values: np.ndarray) -> FleetChoice:
        counts = np.rint(values[self.trainers + self.shapes : -1]).astype(int)
        pairs = zip(self.problem.replicas, counts.tolist(), strict=True)
        trainer = self.problem.trainers[int(values[: self.trainers].argmax())]
        return FleetChoice(trainer, tuple([(option, count) for option, count in pairs if count]))


@contextmanager
def _output_kept_clean() -> Iterator[None]:
    """HiGHS prints a line to the standard output now and then, where a plan as JSON is due: to the standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what its C library still has
        os.dup2(kept, 1)
        os.close(kept)


def _solver() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise ConfigError(
            "planning several kinds of card, or within a budget, needs a solver of mixed-integer programs; "
            "write pip install 'tailrace[fleet]'"
        ) from None
    return optimize
