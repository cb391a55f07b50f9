"""What every replica and the trainer were doing, when and for how long.

    replica:  starting -> idle <-> generating | scoring | environment | pulling;  lost -> (joins again)
    trainer:  starting -> idle <-> training;                                      lost -> (joins again)

A replica without work is idle: admission gave it none. One that has nothing to generate, but samples with a judge, is
scoring, or waits for their environment if one of them may be generated further. An idle trainer waits for data. Until
the first sample is assigned, at the beginning as after a resumption, all processes count as starting, and starting does
not count as idle. Spans are kept only where a timeline is wanted. What each of them has to do comes from the fold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tailrace.obs.fold import Fold
from tailrace.obs.idle import IdleCauses
from tailrace.obs.spans import SpanLog
from tailrace.protocol import (
    Command,
    ControllerRestarted,
    CutOff,
    Evaluate,
    Event,
    Generate,
    GiveUp,
    LoadWeights,
    Progressed,
    PullFailed,
    ReplicaJoined,
    ReplicaLost,
    Start,
    Train,
    TrainerJoined,
    TrainerLost,
    WeightsLoaded,
)
from tailrace.types import ReplicaId

BUSY = ("generating", "pulling", "training")
BRIEF = ("pulling", "lost")  # drawn however short they are
WAITING = ("scoring", "environment")  # for judges
COUNTED = (*BUSY, *WAITING, "idle", "lost")  # starting is not counted


class StateSpan(NamedTuple):
    state: str
    start: float
    end: float


class Lane:
    """The states of one process, one after another."""

    def __init__(self, now: float, keep_spans: bool) -> None:
        self.state = "starting"
        self.since = now
        self.alive = False
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by state
        self.spans: list[StateSpan] | None = [] if keep_spans else None
        self.log: SpanLog | None = None  # all of its states, to be looked at closely
        self._counted_until = now

    def enter(self, state: str, now: float, version: int = -1) -> None:
        if self.log is not None:
            self.log.enter(state, version, now)
        if state == self.state:
            return
        self.count(now)
        if self.spans is not None:
            self.spans.append(StateSpan(self.state, self.since, now))
        self.state, self.since = state, now

    def count(self, now: float) -> None:
        """Bring the seconds up to date."""
        self.seconds[self.state] += now - self._counted_until
        self._counted_until = now

    def timeline(self, now: float) -> list[StateSpan]:
        spans = [*(self.spans or []), StateSpan(self.state, self.since, now)]
        return [span for span in spans if span.end > span.start]


class ReplicaLane(Lane):
    pulling = False
    kv_tokens = 0
    kv_capacity = 0
    waiting = 0


LaneKind = TypeVar("LaneKind", bound=Lane)


class Activity:
    def __init__(self, fold: Fold, keep_spans: bool = False, keep_log: bool = False) -> None:
        self.fold = fold
        self.keep_spans = keep_spans
        self.keep_log = keep_log
        self.replicas: dict[ReplicaId, ReplicaLane] = {}
        self.trainer = self._logged(Lane(0.0, keep_spans))
        self.idle_causes = IdleCauses()
        self.first_sample_at: float | None = None
        self.starting = True  # no work was assigned since the controller was started

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """After the fold has seen it."""
        changed = set(self.fold.changed)
        self._replica_event(now, event, changed)
        self._trainer_event(event)
        if isinstance(event, ControllerRestarted):
            self._controller_restarted(changed)
        for command in commands:
            self._command(now, command, changed)
        self.idle_causes.advance(now)
        for id in changed:
            lane, state = self._replica(id, now), self._replica_state(id)
            self.idle_causes.change(lane.state, state)
            lane.enter(state, now, self.fold.replica(id).version)
        self.trainer.enter(self._trainer_state(), now, len(self.fold.steps))
        self.idle_causes.settle(self)

    def idle(self, lanes: Sequence[Lane], now: float) -> float:
        """The share of the counted time in which these were not busy."""
        if self.first_sample_at is None:
            return 0.0
        shares = self.shares(lanes, now)
        return 1.0 - sum(shares.get(state, 0.0) for state in BUSY) if shares else 0.0

    def shares(self, lanes: Sequence[Lane], now: float) -> dict[str, float]:
        """How these spent their counted time, by state."""
        for lane in lanes:
            lane.count(now)
        seconds = {state: sum(lane.seconds[state] for lane in lanes) for state in COUNTED}
        total = sum(seconds.values())
        return {state: spent / total for state, spent in seconds.items() if spent > 0}

    # ------------------------------------------------------------------------------------------------------- events

    def _logged(self, lane: LaneKind) -> LaneKind:
        lane.log = SpanLog(lane.since) if self.keep_log else None
        return lane

    def _replica(self, id: ReplicaId, now: float) -> ReplicaLane:
        if id not in self.replicas:
            self.replicas[id] = self._logged(ReplicaLane(now, self.keep_spans))
            self.idle_causes.change("", "starting")
        return self.replicas[id]

    def _replica_event(self, now: float, event: Event, changed: set[ReplicaId]) -> None:
        if not isinstance(event, Progressed | ReplicaJoined | WeightsLoaded | PullFailed | ReplicaLost):
            return
        lane = self._replica(event.replica, now)
        if self.fold.ignored or event.incarnation != self.fold.replica(event.replica).incarnation:
            return
        changed.add(event.replica)
        lane.alive = not isinstance(event, ReplicaLost)
        if isinstance(event, Progressed):
            lane.kv_tokens, lane.waiting = event.kv_tokens, event.waiting
            return
        lane.pulling = False
        if isinstance(event, ReplicaJoined | ReplicaLost):
            lane.kv_tokens = lane.waiting = 0
        if isinstance(event, ReplicaJoined):
            lane.kv_capacity = event.kv_capacity

    def _trainer_event(self, event: Event) -> None:
        if isinstance(event, TrainerJoined | TrainerLost):
            self.trainer.alive = self.trainer.alive if self.fold.ignored else isinstance(event, TrainerJoined)

    def _controller_restarted(self, changed: set[ReplicaId]) -> None:
        """Processes that are still alive will report."""
        self.starting = True
        self.trainer.alive = False
        for lane in self.replicas.values():
            lane.alive = lane.pulling = False
        changed.update(self.replicas)

    # ----------------------------------------------------------------------------------------------------- commands

    def _command(self, now: float, command: Command, changed: set[ReplicaId]) -> None:
        if isinstance(command, LoadWeights):
            self._replica(command.replica, now).pulling = True
            changed.add(command.replica)
        elif isinstance(command, Train):
            self._work_given(self.trainer, changed)
        elif isinstance(command, Generate | Evaluate):
            self.first_sample_at = now if self.first_sample_at is None else self.first_sample_at
            self._work_given(self._replica(command.replica, now), changed)
        elif isinstance(command, GiveUp | CutOff | Start):
            self._gone(now, command, changed)

    def _work_given(self, lane: Lane, changed: set[ReplicaId]) -> None:
        """Starting ends when a live process gets work; after a resumption control may assign to others too."""
        if self.starting and lane.alive:
            self.starting = False
            changed.update(self.replicas)

    def _gone(self, now: float, command: GiveUp | CutOff | Start, changed: set[ReplicaId]) -> None:
        """A process that is to be started is not running."""
        if command.role == "trainer":
            self.trainer.alive = False
        elif command.role == "replica":
            self._replica(command.id, now).alive = False
            changed.add(command.id)

    # ------------------------------------------------------------------------------------------------------- states

    def _replica_state(self, id: ReplicaId) -> str:
        lane, record = self.replicas[id], self.fold.replica(id)
        if not lane.alive:
            return self._absent(lane)
        if lane.pulling:
            return "pulling"
        if record.generating > 0:
            return "generating"
        if record.scoring > 0:
            return "scoring" if record.judging == record.scoring else "environment"
        return self._idle

    def _trainer_state(self) -> str:
        if not self.trainer.alive:
            return self._absent(self.trainer)
        return "training" if self.fold.training else self._idle

    def _absent(self, lane: Lane) -> str:
        return "starting" if self.starting or lane.state == "starting" else "lost"

    @property
    def _idle(self) -> str:
        return "starting" if self.starting else "idle"
