"""What a simulation tells: throughput, idle shares, KV use, staleness, and the replicas' timeline.

Figures are taken over a window of steps in which the fleet is in its steady state: as many tokens are generated as are
trained on or thrown away (within `TOLERANCE`). What was begun on empty replicas under the first weights comes first to
the trainer and would count as throughput that nobody keeps up. A run that goes on until it is steady ends as soon as
its last `run.steps` steps are; one of fixed length is measured from its best third step on.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.fold import Fold, GroupEnd
from tailrace.obs.trained_steps import Staleness, staleness
from tailrace.sim.bound import bound
from tailrace.sim.cost_model import CostModel
from tailrace.sim.processes import SimReplica, SimTrainer
from tailrace.types import ReplicaId

TOLERANCE = 0.02


class TimelineSpan(NamedTuple):
    """A replica was in one state from `start` to `end`."""

    replica: ReplicaId
    state: str
    start: float
    end: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `tailrace simulate`. Shares lie between 0 and 1, times are virtual seconds. All but `pull_wait_s`,
    `publish_stall_s` and `virtual_s` is of the measured steps."""

    gpus: int
    schedule: str
    repack: bool
    tokens_per_s: float  # prompt and completion tokens of trained trajectories
    step_s: float
    trainer_idle: float
    rollout_idle: float
    kv_usage: float
    staleness: Staleness
    trained: int  # groups
    dropped: int
    moved: int  # trajectories
    pull_wait_s: float  # per pull of a replica
    publish_stall_s: float  # per publication
    decoded_tokens_per_s: float  # by the engines: no prompts, but also what is never trained
    dollars_per_million_tokens: float
    repacks: int
    virtual_s: float
    steps: int = 0  # that were measured
    warm_up: int = 0  # steps before them
    drift: float = 0.0  # of what was generated, the share that was neither trained nor thrown away, or the other way
    bound_tokens_per_s: float = 0.0  # what no schedule can beat here (`bound.py`)
    limit: str = ""  # what sets that bound
    useful_groups_per_s: float = 0.0  # trained groups whose rewards differ; 0: nothing is known of difficulty
    skipped: int = 0  # prompts
    filtered: int = 0  # groups, those stopped early included
    decoded_by_kind: dict[str, float] = {}  # of several kinds of card: tokens/s of one replica while it is busy


class Meter:
    def __init__(
        self, config: Config, costs: CostModel, replicas: list[SimReplica], trainer: SimTrainer, timeline: bool
    ) -> None:
        self.config = config
        self.costs = costs
        self.replicas = replicas
        self.trainer = trainer
        self.fold = Fold(config)
        self.counts: dict[int, _Counts] = {0: _Counts(Counter(), Counter(), 0, 0)}  # when control has heard of a step
        self.totals: dict[int, _Totals] = {0: _Totals(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)}  # by the trainer's clock
        self.discarded = 0  # tokens of samples that were forgotten without having been trained on
        self.timeline: list[TimelineSpan] | None = [] if timeline else None
        self._states: dict[ReplicaId, tuple[str, float]] = {}

    def stepped(self, step: int, now: float) -> None:
        if step not in self.totals:
            self.totals[step] = self._totals(now)

    def heard(self, step: int) -> None:
        """Control knows that a step is done: count what became of groups and samples until then."""
        fold = self.fold
        self.counts[step] = _Counts(Counter(fold.groups_ended), Counter(fold.total.ages), fold.moved, fold.repacks)

    def settled(self, step: int) -> bool:
        """Whether the last `run.steps` steps were in the steady state."""
        start = step - self.config.run.steps
        return start >= first_measured(self.config) and self._drift(start, step) <= TOLERANCE

    def _drift(self, start: int, end: int) -> float:
        """By how much what was generated differs from what was trained on, or thrown away with its group."""
        before, after = self.totals[start], self.totals[end]
        return abs(1.0 - (after.consumed - before.consumed) / max(after.generated - before.generated, 1e-9))

    def _window(self) -> tuple[int, int]:
        """The steps to measure: the last of a run that was to become steady, else the steadiest part after a third."""
        end = min(max(self.totals), max(self.counts))
        if end > self.config.run.steps:
            return end - self.config.run.steps, end
        starts = range(min(end - 1, max(1, end // 3)), max(1, 2 * end // 3) + 1) if end > 1 else range(1)
        steady = [start for start in starts if self._drift(start, end) <= TOLERANCE]
        return steady[0] if steady else min(starts, key=lambda start: self._drift(start, end)), end

    def mark(self, replica: SimReplica, state: str, now: float) -> None:
        """Note a change of a replica's state for the timeline."""
        if self.timeline is None:
            return
        before, since = self._states.get(replica.id, ("idle", 0.0))
        if before != state:
            self.timeline.append(TimelineSpan(replica.id, before, since, now))
            self._states[replica.id] = (state, now)

    def _totals(self, now: float) -> _Totals:
        for replica in self.replicas:
            replica.engine.advance(now)
        engines = [replica.engine for replica in self.replicas]
        return _Totals(
            now,
            sum(e.busy_s - e.lent_s for e in engines),
            sum(r.pulled_s for r in self.replicas if self.config.schedule.kind != "partial"),
            sum(e.kv_seconds for e in engines),
            sum(e.generated for e in engines),
            self.trainer.busy_s + self.trainer.stall_s,
            self.trainer.decoded + self.discarded,
        )

    def result(self, now: float) -> Result:
        if self.timeline is not None:
            self.timeline += [TimelineSpan(id, name, since, now) for id, (name, since) in self._states.items()]
        start, end = self._window()
        before, after = self.totals[start], self.totals[end]
        counted, seconds = self._counted(start, end), max(after.time - before.time, 1e-9)
        rate = sum(step.tokens for step in self.fold.steps[start:end]) / seconds
        fleet_s = max(seconds * len(self.replicas), 1e-9)
        busy = after.busy_s - before.busy_s + after.pulled_s - before.pulled_s
        pulls, best = sum(r.pulls for r in self.replicas), bound(self.config)
        return Result(
            gpus=self.config.cluster.gpus,
            schedule=self.config.schedule.kind,
            repack=self.config.schedule.kind == "trajectory" and self.config.repack.enabled,
            tokens_per_s=rate,
            step_s=seconds / max(1, end - start),
            trainer_idle=_share(1.0 - (after.trainer_s - before.trainer_s) / seconds),
            rollout_idle=_share(1.0 - busy / fleet_s),
            kv_usage=_share((after.kv_seconds - before.kv_seconds) / seconds / max(self._kv_capacity, 1.0)),
            staleness=staleness(counted.ages),
            trained=counted.ended["trained"],
            dropped=counted.ended["stale"],
            moved=counted.moved,
            pull_wait_s=sum(r.pulled_s for r in self.replicas) / max(1, pulls),
            publish_stall_s=self.trainer.stall_s / max(1, self.trainer.pushes),
            decoded_tokens_per_s=(after.generated - before.generated) / seconds,
            dollars_per_million_tokens=self.costs.dollars_per_hour / 3600.0 / max(rate, 1e-9) * 1e6,
            repacks=counted.repacks,
            virtual_s=now,
            steps=end - start,
            warm_up=start,
            drift=self._drift(start, end),
            bound_tokens_per_s=best.tokens_per_s,
            limit=best.limit,
            useful_groups_per_s=sum(step.useful for step in self.fold.steps[start:end]) / seconds,
            skipped=self.fold.savings.skipped_prompts,
            filtered=counted.ended["filtered"] + counted.ended["stopped"],
            decoded_by_kind=self._decoded_by_kind() if self.config.kinds else {},
        )

    def _decoded_by_kind(self) -> dict[str, float]:
        """Of the whole run."""
        generated, busy = Counter[str](), Counter[str]()
        for engine in (replica.engine for replica in self.replicas):
            generated[engine.costs.config.cluster.gpu] += engine.generated  # pyright: ignore[reportArgumentType]
            busy[engine.costs.config.cluster.gpu] += engine.busy_s  # pyright: ignore[reportArgumentType]
        return {kind: generated[kind] / seconds for kind, seconds in busy.items() if seconds}

    @property
    def _kv_capacity(self) -> float:
        return sum(replica.engine.capacity for replica in self.replicas)

    def _counted(self, start: int, end: int) -> _Counts:
        before, after = self.counts[start], self.counts[end]
        ended: Counter[GroupEnd] = Counter({name: after.ended[name] - before.ended[name] for name in after.ended})
        ages = Counter({age: after.ages[age] - before.ages[age] for age in after.ages})
        return _Counts(ended, ages, after.moved - before.moved, after.repacks - before.repacks)


class _Counts(NamedTuple):
    """What became of groups and samples, since the run began."""

    ended: Counter[GroupEnd]
    ages: Counter[int]
    moved: int
    repacks: int


class _Totals(NamedTuple):
    time: float
    busy_s: float
    pulled_s: float
    kv_seconds: float
    generated: float
    trainer_s: float
    consumed: float


def first_measured(config: Config) -> int:
    """The first step that may be measured: rounds begin afresh with every step, others have a pipeline to fill."""
    if config.schedule.kind in ("sync", "one_step", "stream"):
        return 2
    return max(2, config.run.steps // 3)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
