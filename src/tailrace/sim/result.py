"""What a simulation tells: throughput, idle shares, KV use, staleness, and the replicas' timeline.

Figures are taken over a window that begins when the pipeline has filled (a third of the steps, at least one), so that
short runs of every schedule can be compared.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.fold import Fold, Staleness, staleness
from tailrace.sim.cost_model import CostModel
from tailrace.sim.processes import SimReplica, SimTrainer
from tailrace.types import ReplicaId


class TimelineSpan(NamedTuple):
    """A replica was in one state from `start` to `end`."""

    replica: ReplicaId
    state: str
    start: float
    end: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `tailrace simulate`. Shares lie between 0 and 1, times are virtual seconds."""

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
    useful_groups_per_s: float = 0.0  # trained groups whose rewards differ; 0: nothing is known of difficulty
    skipped: int = 0  # prompts
    filtered: int = 0  # groups, those stopped early included


class Meter:
    def __init__(
        self, config: Config, costs: CostModel, replicas: list[SimReplica], trainer: SimTrainer, timeline: bool
    ) -> None:
        self.config = config
        self.costs = costs
        self.replicas = replicas
        self.trainer = trainer
        self.window_from = max(1, config.run.steps // 3) if config.run.steps > 1 else 0
        self.fold = Fold(config)
        self.times: dict[int, float] = {0: 0.0}  # by the trainer's clock: control may hear of a step later
        self.before = _Totals(0.0, 0.0, 0.0, 0.0, 0.0)
        self.timeline: list[TimelineSpan] | None = [] if timeline else None
        self._states: dict[ReplicaId, tuple[str, float]] = {}

    def stepped(self, step: int, now: float) -> None:
        if step in self.times:
            return
        self.times[step] = now
        if step == self.window_from:
            self.before = self._totals(now)

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
            sum(e.busy_s - e.lent_s for e in engines),
            sum(r.pulled_s for r in self.replicas if self.config.schedule.kind != "partial"),
            sum(e.kv_seconds for e in engines),
            sum(e.generated for e in engines),
            self.trainer.busy_s + self.trainer.stall_s,
        )

    def result(self, now: float) -> Result:
        if self.timeline is not None:
            self.timeline += [TimelineSpan(id, name, since, now) for id, (name, since) in self._states.items()]
        fold, end = self.fold, max(self.times)
        start = min(self.window_from, end)
        seconds = max(self.times[end] - self.times[start], 1e-9)
        after = self._totals(now)
        rate = sum(step.tokens for step in fold.steps[start:end]) / seconds
        fleet_s = max(seconds * len(self.replicas), 1e-9)
        busy = after.busy_s - self.before.busy_s + after.pulled_s - self.before.pulled_s
        pulls = sum(r.pulls for r in self.replicas)
        return Result(
            gpus=self.config.cluster.gpus,
            schedule=self.config.schedule.kind,
            repack=self.config.schedule.kind == "trajectory" and self.config.repack.enabled,
            tokens_per_s=rate,
            step_s=seconds / max(1, end - start),
            trainer_idle=_share(1.0 - (after.trainer_s - self.before.trainer_s) / seconds),
            rollout_idle=_share(1.0 - busy / fleet_s),
            kv_usage=_share((after.kv_seconds - self.before.kv_seconds) / fleet_s / self.costs.kv_capacity),
            staleness=staleness(fold.total.ages),
            trained=fold.groups.trained,
            dropped=fold.groups.dropped_stale,
            moved=fold.moved,
            pull_wait_s=sum(r.pulled_s for r in self.replicas) / max(1, pulls),
            publish_stall_s=self.trainer.stall_s / max(1, self.trainer.pushes),
            decoded_tokens_per_s=(after.generated - self.before.generated) / seconds,
            dollars_per_million_tokens=self.costs.dollars_per_hour / 3600.0 / max(rate, 1e-9) * 1e6,
            repacks=fold.repacks,
            virtual_s=now,
            useful_groups_per_s=sum(step.useful for step in fold.steps[start:end]) / seconds,
            skipped=fold.skipped_prompts,
            filtered=fold.groups.filtered + fold.groups.stopped,
        )


class _Totals(NamedTuple):
    busy_s: float
    pulled_s: float
    kv_seconds: float
    generated: float
    trainer_s: float


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
