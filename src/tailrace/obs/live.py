"""A run as people see it: events, commands and measurements folded into figures, as they happen or from a journal.

The controller tells `LiveRun` everything it handles (`see`, `measure`) and shows `view()` as often as it likes; the
summary reads the journal through the same fold, so both say the same. A resumed run is folded from its first event.
Time is running time: what passed between a stop and the resumption does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.account import Account, Staleness, StepRecord, Tally, staleness
from tailrace.obs.activity import Activity, ReplicaLane
from tailrace.obs.ending import LastStop
from tailrace.protocol import (
    Command,
    ControllerRestarted,
    Event,
    Forget,
    Generate,
    GiveUp,
    HostJoined,
    HostLeft,
    Parked,
    PullFailed,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    RunStarted,
    SampleFailed,
    Stop,
    TrainerJoined,
    TrainerLost,
    VersionStored,
)
from tailrace.types import ReplicaId, Version, label

RECENT = 10  # steps over which figures are smoothed
HAPPENINGS = 50  # kept to be shown
STALL = "publish/stall_s"
ENDED = "ended"  # what a part does once the run is over
IDLE = "without_advantage"
NOT_FINITE = "its loss or gradient is not finite; after three in a row the run ends"


Weight = Literal["small", "notable", "alarming"]  # small: only where there is room for it
Told = Iterator[tuple[str, Weight]]


class Happening(NamedTuple):
    """Something worth a line."""

    at: float
    text: str
    weight: Weight


class ReplicaView(msgspec.Struct, frozen=True):
    id: ReplicaId
    state: str
    version: Version
    kv: float  # share of its capacity
    running: int  # samples that it generates, waiting ones included
    waiting: int
    idle: float  # share of the time
    scoring: int  # samples that its judges have


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run. Shares lie between 0 and 1, times are seconds."""

    seconds: float
    steps: int
    total_steps: int
    version: Version  # newest that a relay has
    reward: float | None  # of the last step
    smooth_reward: float | None
    trained_samples: int
    trained_tokens: int
    tokens_per_s: float  # trained, of the last steps
    finished_tokens: int  # of all finished samples, trained or not
    staleness: Staleness
    replicas: tuple[ReplicaView, ...]
    trainer: str  # its state
    trainer_idle: float
    rollout_idle: float
    rollout_shares: Mapping[str, float]  # by state
    repacks: int
    moved: int
    failures: int  # attempts at samples
    failed_samples: int  # whose last attempt failed
    publish_stall_s: float  # mean per publication
    ledger: Tally
    eta_s: float | None
    happenings: tuple[Happening, ...]
    measured: Mapping[str, float]  # the trainer's newest figures, each from the last mini-batch that has it
    mini_batches: int  # of which the trainer has said so
    without_advantage: int  # those of them in which there was nothing to learn
    stopped: str  # why the run is over

    def over(self) -> RunView:
        """The last look: nobody generates or trains any more, whatever the last event has left behind."""
        still = [msgspec.structs.replace(one, state=ENDED, running=0, waiting=0) for one in self.replicas]
        return msgspec.structs.replace(self, replicas=tuple(still), trainer=ENDED, eta_s=None)


class LiveRun:
    def __init__(self, config: Config, timeline: bool = False, name: str = "") -> None:
        self.config = config
        self.name = name or config.run.name or "run"
        self.account = Account(config.workload.group_size, config.groups.attempts)
        self.activity = Activity(timeline)
        self.happenings: deque[Happening] = deque(maxlen=HAPPENINGS)
        self.happened = 0  # ever, so that a reader knows which are new
        self.measured: dict[str, float] = {}
        self.diverging = False  # the last update that had anything to learn from was not finite
        self.version: Version = -1
        self._ending = LastStop()
        self.seconds = 0.0
        self._last_now: float | None = None
        self._mini_batches = self._without_advantage = 0
        self._stalls = 0
        self._stall_s = 0.0
        self._recent: deque[StepRecord] = deque(maxlen=RECENT + 1)

    # -------------------------------------------------------------------------------------------------------- folding

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """What control handled, and what came of it."""
        self._advance(now, event)
        account, steps, begins = self.account, len(self.account.steps), self.activity.began is None
        failures = account.failures
        account.see(self.seconds, event, commands)
        load = {id: account.load(id) for id in account.touched}
        self.activity.see(self.seconds, event, commands, load)
        if isinstance(event, VersionStored):
            self.version = max(self.version, event.version)
        if isinstance(event, SampleFailed) and account.failures > failures and _is_power_of_ten(account.failures):
            so_far = f"{_count(account.failures, 'attempt')} at samples failed so far"
            self._tell(f"{so_far}; t{event.trajectory}: {event.reason}", "alarming")
        if begins and self.activity.began is not None:
            self._tell("everybody is up, and the first samples are on their way", "notable")
        for text, weight in _told(event, commands):
            self._tell(text, weight)
        self._recent.extend(account.steps[steps:])
        self._ending.see(event, commands)

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None:
        """What a part measured of itself."""
        if STALL in values:
            self._stalls += 1
            self._stall_s += values[STALL]
        if source == "trainer":
            self.measured.update(values)
            self._mini_batches += IDLE in values
            self._without_advantage += bool(values.get(IDLE))
            self.diverging = bool(values.get("skipped", self.diverging))
            if values.get("skipped"):
                self._tell(f"an update of step {step + 1} is left out: {NOT_FINITE}", "alarming")

    def _advance(self, now: float, event: Event) -> None:
        if self._last_now is not None and not isinstance(event, ControllerRestarted):
            self.seconds += max(0.0, now - self._last_now)
        elif self._last_now is None:
            self.seconds = max(0.0, now)
        self._last_now = now

    def _tell(self, text: str, weight: Weight) -> None:
        self.happenings.append(Happening(self.seconds, text, weight))
        self.happened += 1

    # -------------------------------------------------------------------------------------------------------- figures

    @property
    def began(self) -> float:
        """When the first sample was given to a replica: from here on rates are counted."""
        return self.activity.began or 0.0

    @property
    def stop(self) -> Stop | None:
        """Control's order to end the run."""
        return self._ending.stop

    @property
    def stopped(self) -> str:
        return self.stop.reason if self.stop else ""

    @property
    def publish_stall_s(self) -> float:
        return self._stall_s / self._stalls if self._stalls else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second, from the first sample to the last trained step."""
        steps = self.account.steps
        seconds = steps[-1].ended - self.began if steps else 0.0
        return self.account.total.tokens / seconds if seconds > 0 else 0.0

    @property
    def trainer_idle(self) -> float:
        return self.activity.idle([self.activity.trainer], self.seconds)

    @property
    def rollout_idle(self) -> float:
        return self.activity.idle(list(self.activity.replicas.values()), self.seconds)

    @property
    def rollout_scoring(self) -> float:
        """The part of it in which they waited for their judges."""
        return self.activity.shares(list(self.activity.replicas.values()), self.seconds).get("scoring", 0.0)

    def view(self, now: float | None = None) -> RunView:
        """How things stand; `now` is the controller's clock, which goes on while nothing happens."""
        seconds = self.seconds
        if now is not None and self._last_now is not None:
            seconds += max(0.0, now - self._last_now)
        account, lanes = self.account, self.activity.replicas
        last = account.steps[-1] if account.steps else None
        rewards = [step.reward for step in list(self._recent)[-RECENT:] if step.reward is not None]
        return RunView(
            seconds=seconds,
            steps=len(account.steps),
            total_steps=self.config.run.steps,
            version=self.version,
            reward=last.reward if last else None,
            smooth_reward=fmean(rewards) if rewards else None,
            trained_samples=account.total.samples,
            trained_tokens=account.total.tokens,
            tokens_per_s=self._recent_rate(),
            finished_tokens=account.finished_tokens,
            staleness=staleness(account.total.ages),
            replicas=tuple([self._replica_view(id, lanes[id], seconds) for id in sorted(lanes)]),
            trainer=self.activity.trainer.state,
            trainer_idle=self.activity.idle([self.activity.trainer], seconds),
            rollout_idle=self.activity.idle(list(lanes.values()), seconds),
            rollout_shares=self.activity.shares(list(lanes.values()), seconds),
            repacks=account.repacks,
            moved=account.moved,
            failures=account.failures,
            failed_samples=account.failed_samples,
            publish_stall_s=self.publish_stall_s,
            ledger=account.tally,
            eta_s=self._eta(seconds),
            happenings=tuple(self.happenings),
            measured=self.measured,
            mini_batches=self._mini_batches,
            without_advantage=self._without_advantage,
            stopped=self.stopped,
        )

    def _replica_view(self, id: ReplicaId, lane: ReplicaLane, now: float) -> ReplicaView:
        kv = lane.kv_tokens / lane.kv_capacity if lane.kv_capacity else 0.0
        idle = self.activity.idle([lane], now)
        counts = (lane.load.generating, lane.waiting, idle, lane.load.scoring)
        return ReplicaView(id, lane.state, lane.version, min(1.0, kv), *counts)

    def _window(self) -> tuple[float, int, int]:
        """Seconds, steps and tokens of the last few steps."""
        steps = list(self._recent)
        if not steps:
            return 0.0, 0, 0
        whole = len(self.account.steps) == len(steps)
        begin, counted = (self.began, steps) if whole else (steps[0].ended, steps[1:])
        return steps[-1].ended - begin, len(counted), sum(step.tokens for step in counted)

    def _recent_rate(self) -> float:
        seconds, _, tokens = self._window()
        return tokens / seconds if seconds > 0 else 0.0

    def _eta(self, now: float) -> float | None:
        seconds, steps, _ = self._window()
        left = self.config.run.steps - len(self.account.steps)
        if not steps or self.stopped:
            return None
        since = now - self.account.steps[-1].ended
        return max(0.0, left * seconds / steps - since)


# ------------------------------------------------------------------------------------------------------- happenings


def _told(event: Event, commands: Sequence[Command]) -> Told:
    """Sentences for what is out of the ordinary."""
    if isinstance(event, RunStarted):
        yield (
            f"starting the trainer, {_count(event.relays, 'relay')} and {_count(event.replicas, 'replica')}",
            "notable",
        )
    elif isinstance(event, HostJoined):
        yield f"host {event.host} joined, for {_count(len(event.replicas), 'replica')}", "notable"
    elif isinstance(event, HostLeft):
        yield f"host {event.host} left: {event.reason}", "alarming"
    elif isinstance(event, ReplicaJoined | TrainerJoined) and event.incarnation > 1:
        yield f"{_name(event)} is back", "notable"
    elif isinstance(event, ReplicaLost | RelayLost | TrainerLost):
        yield f"{_name(event)} lost: {event.reason}", "alarming"
    elif isinstance(event, PullFailed):
        yield f"r{event.replica} could not load version {event.version}: {event.reason}", "alarming"
    elif isinstance(event, ControllerRestarted):
        yield "resumed", "notable"
    elif isinstance(event, Parked):
        yield from _moves(event, commands)
    for command in commands:
        if isinstance(command, GiveUp):
            name = "the trainer" if command.part == "trainer" else label(command.part, command.id)
            yield f"{name} lost: {command.reason}", "alarming"
    yield from _endings(commands)


def _is_power_of_ten(number: int) -> bool:
    """A reward that always fails is told again and again, but ever more rarely."""
    return number > 0 and set(str(number)[1:]) <= {"0"} and str(number)[0] == "1"


def _name(event: ReplicaJoined | TrainerJoined | ReplicaLost | RelayLost | TrainerLost) -> str:
    if isinstance(event, ReplicaJoined | ReplicaLost):
        return f"r{event.replica}"
    return f"h{event.relay}" if isinstance(event, RelayLost) else "the trainer"


def _moves(event: Parked, commands: Sequence[Command]) -> Told:
    for command in commands:
        if isinstance(command, Generate) and command.replica != event.replica:
            moved = sum(request.resume for request in command.requests)
            if moved:
                yield f"repack: {_count(moved, 'sample')} moved from r{event.replica} to r{command.replica}", "small"


def _endings(commands: Sequence[Command]) -> Told:
    words = {"stale": "too stale to train on", "failed": "too few samples came to a good end"}
    for reason, why in words.items():
        ended = sum(isinstance(command, Forget) and command.reason == reason for command in commands)
        if ended:
            yield f"{_count(ended, 'group')} dropped: {why}", "small"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
