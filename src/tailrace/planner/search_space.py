"""The space that the planner searches: which settings there are to try, and what a point of it means as a config."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from tailrace.config import Config, ConfigError, with_values
from tailrace.config.tree import ScheduleKind
from tailrace.planner.balance import Theory
from tailrace.planner.placement import exact_splits, two_kinds, ways_over_hosts, ways_to_try
from tailrace.planner.sizing import fewest_ranks
from tailrace.sim.cost_model import check_fit

STALENESS = (0, 1, 2, 4, 8)
STEPS_IN_FLIGHT = (1.0, 1.5, 2.0, 3.0)
CONTINUOUS = ("partial", "trajectory")
ASYNC_KINDS: tuple[ScheduleKind, ...] = ("one_step", "stream", "partial", "trajectory", "adaptive")


class SearchPoint(NamedTuple):
    """One place in the space that is searched. In sync, only `ways` matters."""

    kind: ScheduleKind
    ways: int  # tensor_parallel
    trainer_gpus: int = 0
    inflight: int = 0  # trajectories; 0: what the schedule takes by itself
    staleness: int = 0


class Space:
    """Which points there are, and the config of each."""

    def __init__(self, config: Config, theories: dict[int, Theory]) -> None:
        self.config = config
        self.theories = theories
        self.two_kinds = two_kinds(config)  # then who has which GPUs is a matter of hardware
        self.fixed = self.two_kinds or config.costs.measured  # nothing is divided anew
        self.shared = config.split.colocated is True and not self.two_kinds  # the user wants one set of GPUs

    def config_of(self, point: SearchPoint, steps: int) -> Config:
        """Raises ConfigError where the point cannot work."""
        made = with_values(self.config, self._values(point) | {"run.steps": steps})
        check_fit(made)
        return made

    def _values(self, point: SearchPoint) -> dict[str, Any]:
        values: dict[str, Any] = {"schedule.kind": point.kind, "split.tensor_parallel": point.ways}
        shares = not self.two_kinds if point.kind == "sync" else self.shared
        said = self.config.split.colocated
        if shares != (point.kind == "sync" if said is None else said):
            values["split.colocated"] = shares
        if point.kind == "sync":
            return values
        if point.trainer_gpus:
            values["split.trainer_gpus"] = point.trainer_gpus
        values["schedule.max_staleness"] = point.staleness
        values["schedule.steps_ahead"] = self._ahead(point)
        if point.kind in CONTINUOUS:
            values["schedule.max_inflight"] = point.inflight
        return values

    def _ahead(self, point: SearchPoint) -> float | str:
        """A limit on the work ahead that the user has set is kept: it is his bound on staleness."""
        if point.kind == "stream":
            return point.staleness
        asked = self.config.schedule.steps_ahead
        return "unset" if asked is None else min(asked, point.staleness)

    def sync(self) -> list[SearchPoint]:
        if self.config.costs.measured:
            return [SearchPoint("sync", self.config.split.tensor_parallel)]
        within = [SearchPoint("sync", each) for each in ways_to_try(self.config)]
        if any(self._fits(point) for point in within):
            return within
        return [SearchPoint("sync", each) for each in ways_over_hosts(self.config)] or within

    def _fits(self, point: SearchPoint) -> bool:
        try:
            self.config_of(point, 1)
        except ConfigError:
            return False
        return True

    def starts(self) -> list[SearchPoint]:
        """Every asynchronous schedule at theta*, at the parallelism that theory likes best; without one, as it is."""
        ways, split, bound = self.config.split.tensor_parallel, 0, self.config.schedule.max_staleness
        if self.theories:
            divided = [ways for ways in self.theories if self.splits(ways)]
            if not divided:
                return []
            ways = min(divided, key=lambda ways: self.theories[ways].async_step_s)
            split = self.nearest(ways, self.theories[ways].theta_star * self.config.cluster.gpus)
        ages: dict[str, int] = {"one_step": 1, "stream": min(1, bound)}
        return [
            SearchPoint(kind, ways, split, 0, ages.get(kind, bound))
            for kind in ASYNC_KINDS
            if ages.get(kind, 0) <= bound
        ]

    def splits(self, ways: int) -> list[int]:
        """Trainer sizes that leave no GPU unused, can be placed on the hosts and hold the model."""
        if self.fixed or self.shared:
            return [0]  # as the user's config says
        return [size for size in exact_splits(self.config, ways) if self.trains(size)]

    def trains(self, gpus: int) -> bool:
        """Whether so many cards hold what training needs."""
        return gpus >= self._fewest

    @cached_property
    def _fewest(self) -> int:
        """Measured processes are no cards, and a trainer with ways of its own is not ours: no limit for these."""
        ours = self.config.split.trainer_parallel == 1 and not self.config.costs.measured
        return fewest_ranks(self.config) if ours else 1

    @property
    def undivided(self) -> str:
        """Why there is no split; empty: there is one."""
        if not self.theories or any(self.splits(ways) for ways in self.theories):
            return ""
        return f"the trainer needs {self._fewest} of the {self.config.size}, and no replica fits beside it"

    def nearest(self, ways: int, trainer_gpus: float) -> int:
        return min(self.splits(ways), key=lambda size: abs(size - trainer_gpus), default=0)

    def beside(self, point: SearchPoint, stride: int) -> list[SearchPoint]:
        """The same with a smaller and a larger trainer."""
        sizes = self.splits(point.ways)
        if point.trainer_gpus not in sizes:
            return []
        at = sizes.index(point.trainer_gpus)
        around = [at - stride, at + stride]
        return [point._replace(trainer_gpus=sizes[index]) for index in around if 0 <= index < len(sizes)]

    def other_ways(self, point: SearchPoint) -> list[SearchPoint]:
        """The same share of the GPUs at another parallelism."""
        others = [ways for ways in self.theories if ways != point.ways and self.splits(ways)]
        return [point._replace(ways=ways, trainer_gpus=self.nearest(ways, point.trainer_gpus)) for ways in others]

    def other_inflight(self, point: SearchPoint) -> list[SearchPoint]:
        if point.kind not in CONTINUOUS:
            return []
        step = self.config.workload.trajectories_per_step
        choices = {0 if steps == 1 else int(steps * step) for steps in STEPS_IN_FLIGHT}
        choices |= {self.config.schedule.max_inflight}
        return [point._replace(inflight=each) for each in sorted(choices - {point.inflight})]

    def other_staleness(self, point: SearchPoint) -> list[SearchPoint]:
        bound = self.config.schedule.max_staleness
        if point.kind == "one_step":
            return []
        ages = {age for age in STALENESS if age < bound} | {bound}
        return [point._replace(staleness=age) for age in sorted(ages - {point.staleness}, reverse=True)]
