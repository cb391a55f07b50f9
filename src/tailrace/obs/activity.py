"""What every replica and the trainer were doing, when and for how long.

    replica:  starting -> idle <-> generating | scoring | pulling;  lost -> (joins again)
    trainer:  starting -> idle <-> training;                        lost -> (joins again)

A replica without work is idle: admission gave it none. One that has nothing to generate, but samples with a judge, is
scoring: its engine rests, and for another reason. An idle trainer waits for data. Until the first sample is on its
way, at the beginning as after a resumption, everybody counts as starting: that is nobody's idleness. Spans are kept
only where a timeline is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tailrace.obs.account import Load
from tailrace.protocol import (
    Command,
    ControllerRestarted,
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
    Trained,
    TrainerJoined,
    TrainerLost,
    WeightsLoaded,
)
from tailrace.types import ReplicaId, Version

AT_WORK = ("generating", "pulling", "training")
BRIEF = ("pulling", "lost")  # worth a mark however short they are
COUNTED = (*AT_WORK, "scoring", "idle", "lost")  # a part that is being started is not expected to work


class Span(NamedTuple):
    state: str
    start: float
    end: float


class Lane:
    """The states of one part, one after another."""

    def __init__(self, now: float, keep_spans: bool) -> None:
        self.state = "starting"
        self.since = now
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by state
        self.spans: list[Span] | None = [] if keep_spans else None
        self._counted_from = now

    def enter(self, state: str, now: float) -> None:
        if state == self.state:
            return
        self.settle(now)
        if self.spans is not None:
            self.spans.append(Span(self.state, self.since, now))
        self.state, self.since = state, now

    def settle(self, now: float) -> None:
        """Bring the seconds up to date."""
        self.seconds[self.state] += now - self._counted_from
        self._counted_from = now

    def timeline(self, now: float) -> list[Span]:
        spans = [*(self.spans or []), Span(self.state, self.since, now)]
        return [span for span in spans if span.end > span.start]


class ReplicaLane(Lane):
    incarnation = 0
    alive = False
    pulling = False
    version: Version = -1
    kv_tokens = 0
    kv_capacity = 0
    load = Load(0, 0)
    waiting = 0


class TrainerLane(Lane):
    incarnation = 0
    alive = False
    asked: tuple[int, int] | None = None  # step and part that it is training


class Activity:
    def __init__(self, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self.replicas: dict[ReplicaId, ReplicaLane] = {}
        self.trainer = TrainerLane(0.0, keep_spans)
        self.began: float | None = None  # when the first sample was given to a replica
        self.settling = True  # nobody has been given work since the controller was started

    def see(self, now: float, event: Event, commands: Sequence[Command], load: Mapping[ReplicaId, Load]) -> None:
        """`load` is what each of the replicas has whose samples have changed."""
        changed = set(load)
        self._hear_replica(now, event, changed)
        self._hear_trainer(event)
        if isinstance(event, ControllerRestarted):
            self._unknown(changed)
        for command in commands:
            self._obey(now, command, changed)
        for id, samples in load.items():
            self._replica(id, now).load = samples
        for id in changed:
            lane = self._replica(id, now)
            lane.enter(self._replica_state(lane), now)
        self.trainer.enter(self._trainer_state(), now)

    def idle(self, lanes: Sequence[Lane], now: float) -> float:
        """The share of the time in which these were not at work, though they should have been."""
        if self.began is None:
            return 0.0
        for lane in lanes:
            lane.settle(now)
        whole = sum(lane.seconds[state] for lane in lanes for state in COUNTED)
        busy = sum(lane.seconds[state] for lane in lanes for state in AT_WORK)
        return 1.0 - busy / whole if whole > 0 else 0.0

    def shares(self, lanes: Sequence[Lane], now: float) -> dict[str, float]:
        """How these spent their time, by state."""
        for lane in lanes:
            lane.settle(now)
        seconds = {state: sum(lane.seconds[state] for lane in lanes) for state in COUNTED}
        whole = sum(seconds.values())
        return {state: spent / whole for state, spent in seconds.items() if spent > 0}

    # ------------------------------------------------------------------------------------------------------- hearing

    def _replica(self, id: ReplicaId, now: float) -> ReplicaLane:
        if id not in self.replicas:
            self.replicas[id] = ReplicaLane(now, self.keep_spans)
        return self.replicas[id]

    def _hear_replica(self, now: float, event: Event, changed: set[ReplicaId]) -> None:
        if isinstance(event, ReplicaJoined):
            self._joined(now, event)
        elif isinstance(event, Progressed | WeightsLoaded | PullFailed | ReplicaLost):
            lane = self._replica(event.replica, now)
            if lane.incarnation != event.incarnation:
                return
            _tell(lane, event)
        else:
            return
        changed.add(event.replica)

    def _joined(self, now: float, event: ReplicaJoined) -> None:
        lane = self._replica(event.replica, now)
        if event.incarnation > lane.incarnation:
            lane.incarnation, lane.version, lane.kv_capacity = event.incarnation, event.version, event.kv_capacity
            lane.alive, lane.pulling, lane.kv_tokens, lane.waiting = True, False, 0, 0

    def _hear_trainer(self, event: Event) -> None:
        trainer = self.trainer
        if isinstance(event, TrainerJoined) and event.incarnation > trainer.incarnation:
            trainer.incarnation, trainer.alive, trainer.asked = event.incarnation, True, None
        elif isinstance(event, TrainerLost) and event.incarnation == trainer.incarnation:
            trainer.alive, trainer.asked = False, None
        elif isinstance(event, Trained) and trainer.asked == (event.step, event.part):
            trainer.asked = None

    def _unknown(self, changed: set[ReplicaId]) -> None:
        """The controller is back: who is still there will say so."""
        self.settling = True
        self.trainer.alive = False
        for lane in self.replicas.values():
            lane.alive = lane.pulling = False
        changed.update(self.replicas)

    # ------------------------------------------------------------------------------------------------------- obeying

    def _obey(self, now: float, command: Command, changed: set[ReplicaId]) -> None:
        if isinstance(command, LoadWeights):
            self._replica(command.replica, now).pulling = True
            changed.add(command.replica)
        elif isinstance(command, Train):
            self.trainer.asked = (command.step, command.part)
            self._settle(self.trainer, changed)
        elif isinstance(command, Generate):
            self.began = now if self.began is None else self.began
            self._settle(self._replica(command.replica, now), changed)
        elif isinstance(command, GiveUp | Start):
            self._gone(now, command, changed)

    def _settle(self, lane: ReplicaLane | TrainerLane, changed: set[ReplicaId]) -> None:
        """Somebody who is there has got work. After a resumption control may believe so of others for a while."""
        if self.settling and lane.alive:
            self.settling = False
            changed.update(self.replicas)

    def _gone(self, now: float, command: GiveUp | Start, changed: set[ReplicaId]) -> None:
        """What is to be started is not there."""
        if command.part == "trainer":
            self.trainer.alive, self.trainer.asked = False, None
        elif command.part == "replica":
            self._replica(command.id, now).alive = False
            changed.add(command.id)

    # -------------------------------------------------------------------------------------------------------- states

    def _replica_state(self, lane: ReplicaLane) -> str:
        if not lane.alive:
            return self._absent(lane)
        if lane.pulling:
            return "pulling"
        if lane.load.generating > 0:
            return "generating"
        return "scoring" if lane.load.scoring > 0 else self._idle

    def _trainer_state(self) -> str:
        if not self.trainer.alive:
            return self._absent(self.trainer)
        return "training" if self.trainer.asked else self._idle

    def _absent(self, lane: Lane) -> str:
        return "starting" if self.settling or lane.state == "starting" else "lost"

    @property
    def _idle(self) -> str:
        return "starting" if self.settling else "idle"


def coarse(spans: Sequence[Span], hair: float, brief: Sequence[str] = BRIEF) -> list[Span]:
    """Neighbours too short to be seen become one of the state that lasted longest, so that marks stay few."""
    drawn: list[Span] = []
    few: list[Span] = []
    for span in spans:
        if span.end - span.start >= hair or span.state in brief:
            drawn += _one_of(few)
            drawn.append(span)
            few = []
        else:
            few.append(span)
            if few[-1].end - few[0].start >= hair:
                drawn += _one_of(few)
                few = []
    return drawn + _one_of(few)


def _one_of(spans: Sequence[Span]) -> list[Span]:
    if not spans:
        return []
    longest = max(spans, key=lambda span: span.end - span.start)
    return [Span(longest.state, spans[0].start, spans[-1].end)]


def _tell(lane: ReplicaLane, event: Progressed | WeightsLoaded | PullFailed | ReplicaLost) -> None:
    lane.alive = not isinstance(event, ReplicaLost)
    if not lane.alive:
        lane.kv_tokens = lane.waiting = 0
    if isinstance(event, Progressed):
        lane.kv_tokens, lane.waiting = event.kv_tokens, event.waiting
    elif isinstance(event, WeightsLoaded):
        lane.version = event.version
    lane.pulling = lane.pulling and isinstance(event, Progressed)
