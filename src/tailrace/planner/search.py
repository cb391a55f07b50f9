"""Coordinate search: LlamaRL's balance as the start, then the simulator decides, one setting at a time.

1. Screen with short runs: synchronous training at every parallelism, and each asynchronous schedule at theta*.
2. Tune the best schedules by coordinate: split, parallelism, work in flight, staleness, and the split again.
3. Run the finalists, the synchronous baseline and the user's own config longer, and choose.

The user's `schedule.max_staleness` is the most he accepts; the batch belongs to his algorithm and stays. Throughput
decides; the fleet is given, so cost per token orders alike. Within 1 % of the best, less staleness and less work in
flight win. Which points are tried depends on their results alone, so a plan is the same on any number of processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple

import msgspec

from tailrace.config import Config, ConfigError, with_values
from tailrace.config.tree import ScheduleKind
from tailrace.planner.balance import Theory, theory
from tailrace.planner.limits import check_limits
from tailrace.planner.placement import ways_to_try
from tailrace.planner.reasons import reasons_for
from tailrace.planner.search_space import ASYNC_KINDS, SearchPoint, Space
from tailrace.planner.sizing import Sizing, size
from tailrace.sim.cost_model import check_fit
from tailrace.sim.result import Result
from tailrace.sim.simulation import FleetLostError, Simulation, StandstillError

WORTH_IT = 1.05  # less than this over sync is not worth the staleness
AS_FAST = 0.99  # results this close count as equal
WORTH_TUNING = 0.85  # a schedule that screens below this share of the best is not tuned
EVENTS_PER_S = 40_000  # what one core simulates, roughly: only to size the search
SEARCH_S = 100.0  # core-seconds the search may take where the fleet allows it
FEWEST, MOST = 16, 60  # simulations

Progress = Callable[[int, int, str], None]
Evaluate = Callable[[Sequence[Config]], Iterable[Result | None]]


class Candidate(msgspec.Struct, frozen=True):
    """A config and what the simulator says of it."""

    config: Config
    result: Result


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. `best` is the baseline where asynchrony does not pay."""

    asked: Config  # the user's config
    best: Config
    result: Result
    baseline: Candidate  # sync at its best parallelism
    own: Candidate | None  # the user's config; None where the model does not fit it
    alternatives: tuple[Candidate, ...]  # the next best, best first
    gain: float  # tokens/s of the best asynchronous config over sync; 1 where there is none
    async_helps: bool
    theta_star: float  # 0 where the GPUs cannot be split
    theory: Theory | None
    reasons: tuple[str, ...]
    simulations: int
    sizing: Sizing | None = None  # of `best`; None where it is not for hosts with cards


class Effort(NamedTuple):
    """How much is simulated: how often, and how many steps each time."""

    simulations: int
    short: int
    long: int


def plan(config: Config, progress: Progress | None = None, simulations: int | None = None, processes: int = 2) -> Plan:
    """The best settings for this model, fleet and workload. `simulations` bounds the search, from 16 on."""
    check_limits(config)
    theories = theories_of(config)
    effort = effort_for(config, theories)
    if simulations is not None:
        effort = effort._replace(simulations=max(FEWEST, simulations))
    with evaluator(processes) as evaluate:
        search = Search(config, theories, effort, evaluate, progress or (lambda done, total, text: None))
        search.screen()
        search.tune_best()
        return search.conclude()


def theories_of(config: Config) -> dict[int, Theory]:
    """The balance at every tensor parallelism that fits."""
    if config.costs.measured:
        return {}  # processes of one machine are not split
    found: dict[int, Theory] = {}
    for ways in ways_to_try(config):
        try:
            found[ways] = theory(_apart(config, ways))
        except ConfigError:
            continue
    return found


def _apart(config: Config, ways: int) -> Config:
    """A split that any model which fits at all fits in: the theory then says where the split should be."""
    unit = config.split.trainer_parallel
    most = max(unit, (config.cluster.gpus - ways) // unit * unit)
    return with_values(
        config,
        {
            "schedule.kind": "partial",
            "split.colocated": False,
            "split.tensor_parallel": ways,
            "split.trainer_gpus": most,
        },
    )


def effort_for(config: Config, theories: dict[int, Theory]) -> Effort:
    """Fewer and shorter simulations for fleets whose every step takes long to simulate."""
    step_s = min((each.async_step_s for each in theories.values()), default=0.0)
    beats = config.replicas * step_s / config.health.heartbeat_s
    seconds_per_step = (2 * config.workload.trajectories_per_step + beats) / EVENTS_PER_S
    affordable = int(SEARCH_S / max(4 * seconds_per_step, 1e-9))
    short, long = (4, 10) if affordable >= FEWEST else (3, 5)
    return Effort(max(FEWEST, min(MOST, affordable)), short, long)


class Search:
    def __init__(
        self, config: Config, theories: dict[int, Theory], effort: Effort, evaluate: Evaluate, progress: Progress
    ) -> None:
        self.config = config
        self.theories = theories
        self.effort = effort
        self.evaluate = evaluate
        self.progress = progress
        self.space = Space(config, theories)
        self.found: dict[SearchPoint, Result] = {}
        self.tried: set[SearchPoint] = set()
        self.done = 0
        self.finals = min(6, effort.simulations // 3)  # long runs, kept back from the budget
        self.refusal = self.space.undivided  # or why the first asynchronous point was refused
        self.stuck = 0

    # ------------------------------------------------------------------------------------------------------ the search

    def screen(self) -> None:
        self._try(self.space.sync(), "synchronous baseline")
        self._try(self.space.starts(), "schedules at the theoretical balance")

    def tune_best(self) -> None:
        """The most promising schedule, and the next one if it comes near."""
        rates = {point: self.found[point].tokens_per_s for point in self._ranked()}
        screened: dict[ScheduleKind, float] = {
            kind: max(rate for point, rate in rates.items() if point.kind == kind)
            for kind in ASYNC_KINDS
            if any(point.kind == kind for point in rates)
        }
        near = WORTH_TUNING * max(screened.values(), default=0.0)
        for kind in sorted(screened, key=lambda kind: -screened[kind])[:2]:
            if screened[kind] >= near:
                self._tune(kind)

    def _tune(self, kind: ScheduleKind) -> None:
        self._tune_split(kind)
        for name, others in (
            ("tensor parallelism", self.space.other_ways),
            ("work in flight", self.space.other_inflight),
            ("staleness", self.space.other_staleness),
        ):
            self._try(others(self._leader(kind)), f"{kind}: {name}")
        self._tune_split(kind, widest=1)

    def _tune_split(self, kind: ScheduleKind, widest: int = 0) -> None:
        """Look to both sides, move while that helps, then look closer."""
        sizes = self.space.splits(self._leader(kind).ways)
        stride = widest or max(1, len(sizes) // 4)
        while stride and self._budget_left():
            before = self._leader(kind)
            self._try(self.space.beside(before, stride), f"{kind}: split")
            if self._leader(kind) == before:
                stride //= 2

    # ------------------------------------------------------------------------------------------------------ conclusion

    def conclude(self) -> Plan:
        baseline, own, *finalists = self._long_runs()
        if own and own.config.schedule.kind == "sync" and _rate(own) > _rate(baseline):
            baseline = own  # short runs chose the other one
        if baseline is None:
            raise ConfigError("synchronous training does not get through in the simulator; lower the rates in [faults]")
        ranked = sorted([each for each in finalists if each], key=lambda each: -_rate(each))
        contenders = [own, *ranked] if own and own.config.schedule.kind != "sync" else ranked
        best = _preferred(contenders) if contenders else None
        gain = best.result.tokens_per_s / baseline.result.tokens_per_s if best else 1.0
        helps = best is not None and gain >= WORTH_IT
        chosen = best if best and helps else baseline
        theory = self.theories.get(chosen.config.split.tensor_parallel)
        outcome = best and best.result
        reasons = reasons_for(baseline.config, helps, baseline.result, outcome, theory, self.refusal)
        return Plan(
            asked=self.config,
            best=self._full(chosen).config,
            result=chosen.result,
            baseline=self._full(baseline),
            own=own and self._full(own),
            alternatives=tuple(self._full(each) for each in ranked if each.result != chosen.result)[:3],
            gain=gain,
            async_helps=helps,
            theta_star=theory.theta_star if theory else 0.0,
            theory=theory,
            reasons=(*reasons, *self._caveats()),
            simulations=self.done,
            sizing=None if self.config.costs.measured else size(chosen.config),
        )

    def _long_runs(self) -> list[Candidate | None]:
        """The baseline, the user's own config (None where it does not fit) and the finalists."""
        finalists = [self.space.config_of(point, self.effort.long) for point in self._finalists()]
        configs = [self._best_sync(), self._own(), *finalists]
        possible = [config for config in configs if config]
        results = dict(zip(possible, self._simulate(possible, "finalists, longer"), strict=True))
        return [Candidate(config, result) if config and (result := results[config]) else None for config in configs]

    def _best_sync(self) -> Config:
        points = [point for point in self.found if point.kind == "sync"]
        if not points:  # let the user's own parallelism say what does not fit
            return self.space.config_of(SearchPoint("sync", self.config.split.tensor_parallel), self.effort.long)
        return self.space.config_of(max(points, key=lambda point: self.found[point].tokens_per_s), self.effort.long)

    def _own(self) -> Config | None:
        own = with_values(self.config, {"run.steps": self.effort.long})
        try:
            check_fit(own)
        except ConfigError:
            return None
        return own if own.colocated or self.space.trains(own.trainer_gpus) else None

    def _finalists(self) -> list[SearchPoint]:
        """What the tuning prefers, what was fastest, the best start (short runs may have underrated it), and the best
        elsewhere: at another split or schedule."""
        ranked = self._ranked()
        if not ranked:
            return []
        starts = set(self.space.starts())
        start = next((point for point in ranked if point in starts), ranked[0])
        chosen = list(dict.fromkeys((self._leader(ranked[0].kind), ranked[0], start)))
        for point in ranked:
            if all(_split_of(point) != _split_of(other) for other in chosen):
                chosen.append(point)
        return chosen[: self.finals - 2]

    def _full(self, candidate: Candidate) -> Candidate:
        """The candidate with the user's own number of steps again."""
        return Candidate(with_values(candidate.config, {"run.steps": self.config.run.steps}), candidate.result)

    def _caveats(self) -> tuple[str, ...]:
        if not self.stuck:
            return ()
        return (f"{self.stuck} of the settings tried lost their fleet or came to a standstill, and were left out.",)

    # ------------------------------------------------------------------------------------------------------ simulating

    def _ranked(self) -> list[SearchPoint]:
        """The asynchronous points that were tried, the fastest first."""
        points = [point for point in self.found if point.kind != "sync"]
        return sorted(points, key=lambda point: -self.found[point].tokens_per_s)

    def _leader(self, kind: ScheduleKind) -> SearchPoint:
        """Of the points of a schedule within 1 % of the fastest: that with the least staleness and work in flight."""
        points = [point for point in self.found if point.kind == kind]
        fastest = max(self.found[point].tokens_per_s for point in points)
        close = [point for point in points if self.found[point].tokens_per_s >= AS_FAST * fastest]
        return min(close, key=lambda point: (point.staleness, point.inflight, -self.found[point].tokens_per_s, point))

    def _budget_left(self) -> int:
        return max(0, self.effort.simulations - self.finals - self.done)

    def _try(self, points: Iterable[SearchPoint], text: str) -> None:
        """Short runs of the points that are new and can work, as far as the budget goes."""
        new: dict[SearchPoint, Config] = {}
        for point in points:
            if point in self.tried:
                continue
            self.tried.add(point)
            try:
                new[point] = self.space.config_of(point, self.effort.short)
            except ConfigError as error:
                self.refusal = self.refusal or (str(error) if point.kind != "sync" else "")
        kept = dict(list(new.items())[: self._budget_left()])
        for point, result in zip(kept, self._simulate(list(kept.values()), text), strict=True):
            if result:
                self.found[point] = result

    def _simulate(self, configs: list[Config], text: str) -> list[Result | None]:
        results: list[Result | None] = []
        total = max(self.effort.simulations, self.done + len(configs))
        self.progress(self.done, total, text)
        for result in self.evaluate(configs):
            results.append(result)
            self.done += 1
            self.stuck += result is None
            self.progress(self.done, total, text)
        return results


def _split_of(point: SearchPoint) -> tuple[str, int, int]:
    return point.kind, point.ways, point.trainer_gpus


def _rate(candidate: Candidate | None) -> float:
    return candidate.result.tokens_per_s if candidate else 0.0


def _preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest, unless one within 1 % of it is less stale."""
    fastest = max(each.result.tokens_per_s for each in candidates)
    close = [each for each in candidates if each.result.tokens_per_s >= AS_FAST * fastest]
    return min(close, key=lambda each: (each.config.schedule.max_staleness, each.config.schedule.max_inflight))


def simulate(config: Config) -> Result | None:
    """One simulation, in whatever process; None where the fleet was lost or came to a standstill."""
    try:
        return Simulation(config, until_steady=True).run()
    except (StandstillError, FleetLostError):
        return None


@contextmanager
def evaluator(processes: int) -> Iterator[Evaluate]:
    """Simulate lists of configs, in this process or in several fresh ones. Results come in the order of the configs."""
    if processes <= 1:
        yield lambda configs: map(simulate, configs)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_die_quietly)
    try:
        yield lambda configs: _largest_first(pool, configs)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _largest_first(pool: ProcessPoolExecutor, configs: Sequence[Config]) -> Iterator[Result | None]:
    """So that no process is left alone with the largest at the end."""
    order = sorted(range(len(configs)), key=lambda number: -configs[number].replicas)
    futures = {number: pool.submit(simulate, configs[number]) for number in order}
    return (futures[number].result() for number in range(len(configs)))


def _die_quietly() -> None:
    """Ctrl-C reaches the workers as well: they go without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
