"""Phase 1 of a plan for several kinds of card: who trains, who generates in which shape, and how many cards of each.

A mixed-integer program for each trainer (a kind of card and a number of them), solved by HiGHS (`pip install
'tailrace[fleet]'`). Figures go in as they are (`fleet_rates.py` has them from the cost model), a choice comes out:

    z[r]  is 1 for the shape (GPUs of a replica) that a kind generates in, x[r] how many replicas of it there are
    T     trained tokens per second

    sum z <= 1 for each kind
    x[r] <= fits[r] z[r]                   what fits on the hosts beside the trainer; none where it is too far
    T <= rate of the trainer,  T <= sum_r rate[r] x[r]
    dollars of all cards that are used <= budget

Trainer ranks fill hosts one after the other and a replica never reaches over two, so `fits` is exact and every choice
can be placed. The goal is most T, then fewest dollars; or fewest dollars with T at least a target.

There may be hundreds of trainers, and nearly all of them are ruled out by a bound: what fractions of replicas would
reach, each kind with the figures of its best shape. Trainers are tried from the best bound on, until no bound promises
more than what was found.
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


@lru_cache(maxsize=1 << 12)  # parts of a problem often have the same solution, and rounds ask again
def best_fleet(problem: FleetProblem, goal: FleetGoal) -> FleetChoice | None:
    """The best choice; None: nothing reaches the goal."""
    if goal.tokens_per_s:
        return _cheapest(problem, goal.tokens_per_s, goal.budget)
    fastest = _fastest(problem, goal.budget)
    return fastest and (_cheapest(problem, fastest.rate * (1 - EQUAL), goal.budget) or fastest)


def _fastest(problem: FleetProblem, budget: float) -> FleetChoice | None:
    bounds = {number: _most_rate(problem, number, budget) for number in range(len(problem.trainers))}
    best: FleetChoice | None = None
    for number in sorted(bounds, key=lambda number: -bounds[number]):
        if bounds[number] < 0.0 or (best and bounds[number] <= best.rate * (1 + EQUAL)):
            break
        found = TrainerProgram(problem, number).fastest(budget)
        if found and (best is None or found.rate > best.rate):
            best = found
    return best


def _cheapest(problem: FleetProblem, tokens_per_s: float, budget: float) -> FleetChoice | None:
    bounds = {number: _least_dollars(problem, number, tokens_per_s) for number in range(len(problem.trainers))}
    best: FleetChoice | None = None
    least = budget
    for number in sorted(bounds, key=lambda number: bounds[number]):
        if bounds[number] == inf or bounds[number] > least or (best and bounds[number] >= least * (1 - EQUAL)):
            break
        found = TrainerProgram(problem, number).cheapest(tokens_per_s, least)
        if found and (best is None or found.dollars(problem.kinds) < least):
            best, least = found, found.dollars(problem.kinds)
    return best


# ------------------------------------------------------------------------------------------------------ bounds


class Stock(NamedTuple):
    """What a kind generates at best, and what it costs at best."""

    price: float  # dollars an hour for each token per second
    rate: float


def _stocks(problem: FleetProblem, trainer: int) -> list[Stock]:
    """Of every kind beside a trainer, cheapest first. A kind counts with its best figures, whichever shape has them."""
    stocks: list[Stock] = []
    for number, kind in enumerate(problem.kinds):
        shapes = [each for each in problem.replicas if each.kind == number and each.rate > 0.0]
        rate = max([each.rate * problem.fits(each, trainer) for each in shapes], default=0.0)
        if rate:
            stocks.append(Stock(min([each.ways * kind.dollars / each.rate for each in shapes]), rate))
    return sorted(stocks)


def _trainer_dollars(problem: FleetProblem, trainer: int) -> float:
    option = problem.trainers[trainer]
    return option.gpus * problem.kinds[option.kind].dollars


def _most_rate(problem: FleetProblem, trainer: int, budget: float) -> float:
    """No choice with this trainer is faster; negative: it is beyond the budget itself."""
    left, rate = budget - _trainer_dollars(problem, trainer), 0.0
    if left < 0.0:
        return -1.0
    for stock in _stocks(problem, trainer):
        taken = min(stock.rate, left / stock.price if stock.price else inf)
        rate += taken
        left -= taken * stock.price
    return min(rate, problem.trainers[trainer].rate)


def _least_dollars(problem: FleetProblem, trainer: int, tokens_per_s: float) -> float:
    """No choice with this trainer that reaches so much is cheaper; infinite: none does."""
    if problem.trainers[trainer].rate < tokens_per_s * (1 - EQUAL):
        return inf
    dollars, missing = _trainer_dollars(problem, trainer), tokens_per_s * (1 - EQUAL)
    for stock in _stocks(problem, trainer):
        taken = min(stock.rate, missing)
        dollars += taken * stock.price
        missing -= taken
    return dollars if missing <= 0.0 else inf


# ---------------------------------------------------------------------------------------------------- the program


class TrainerProgram:
    """The program of one trainer. Columns are z, x and T; rows bound their sums from above."""

    def __init__(self, problem: FleetProblem, trainer: int) -> None:
        self.problem = problem
        self.trainer = problem.trainers[trainer]
        self.dollars = _trainer_dollars(problem, trainer)
        self.shapes = len(problem.replicas)
        self.fits = np.array([problem.fits(option, trainer) for option in problem.replicas])
        self.rows = np.vstack([*self._shapes(), *self._rooms(), self._generated(), self._dollars()])

    def _row(self, z: Any = 0.0, x: Any = 0.0, rate: float = 0.0) -> np.ndarray:
        row = np.zeros(2 * self.shapes + 1)
        row[: self.shapes] = z
        row[self.shapes : -1] = x
        row[-1] = rate
        return row

    def _shapes(self) -> list[np.ndarray]:
        """At most one for each kind."""
        kinds = np.array([option.kind for option in self.problem.replicas])
        return [self._row(z=kinds == kind) for kind in range(len(self.problem.kinds))]

    def _rooms(self) -> list[np.ndarray]:
        return [self._row(x=one, z=-self.fits * one) for one in np.eye(self.shapes)]

    def _generated(self) -> np.ndarray:
        return self._row(x=[-option.rate / self.trainer.rate for option in self.problem.replicas], rate=1.0)

    def _dollars(self) -> np.ndarray:
        price = [kind.dollars for kind in self.problem.kinds]
        return self._row(x=[option.ways * price[option.kind] for option in self.problem.replicas])

    def fastest(self, budget: float) -> FleetChoice | None:
        return self._solved(self._row(rate=-1.0), budget, 0.0)

    def cheapest(self, tokens_per_s: float, budget: float) -> FleetChoice | None:
        return self._solved(self.rows[-1], budget, tokens_per_s / self.trainer.rate)

    def _solved(self, goal: np.ndarray, budget: float, least: float) -> FleetChoice | None:
        """T is a share of what the trainer can do."""
        optimize = _solver()
        above = np.zeros(len(self.rows))
        above[: len(self.problem.kinds)] = 1.0
        above[-1] = budget - self.dollars
        with _output_kept_clean():
            found = optimize.milp(
                goal,
                integrality=self._row(z=1, x=1),
                bounds=optimize.Bounds(self._row(rate=min(least, 1.0)), self._row(z=1.0, x=self.fits, rate=1.0)),
                constraints=optimize.LinearConstraint(self.rows, -np.inf, above),
                options={"time_limit": SOLVER_S, "mip_rel_gap": EQUAL},
            )
        return None if found.x is None else self._choice(found.x)

    def _choice(self, values: np.ndarray) -> FleetChoice:
        counts = np.rint(values[self.shapes : -1]).astype(int)
        pairs = zip(self.problem.replicas, counts.tolist(), strict=True)
        return FleetChoice(self.trainer, tuple([(option, count) for option, count in pairs if count]))


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
