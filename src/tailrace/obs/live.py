"""A run as people see it: events, commands and measurements folded into figures, as they happen or from a journal.

The controller tells `LiveRun` everything it handles (`see`, `measure`) and shows `view()` as often as it likes; the
summary and the page read the journal through it too, so all say the same. A resumed run is folded from its first event.
Time is running time: what passed between a stop and the resumption does not count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.activity import WAITING, Activity, ReplicaLane
from tailrace.obs.ending import LastStop
from tailrace.obs.event_text import described
from tailrace.obs.fold import Fold, GroupCounts
from tailrace.obs.idle import ROUNDS
from tailrace.obs.moves import Moves
from tailrace.obs.savings import Savings
from tailrace.obs.spending import Spending
from tailrace.obs.trained_steps import Staleness, staleness
from tailrace.protocol import (
    WITH_THE_RUN,
    Activate,
    Command,
    ControllerRestarted,
    CutOff,
    Dismiss,
    Event,
    Forget,
    Generate,
    GiveUp,
    HostJoined,
    HostLeft,
    Parked,
    PullFailed,
    RecordEvaluation,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    RunStarted,
    SampleFailed,
    SettingsChanged,
    Stop,
    Train,
    TrainerJoined,
    TrainerLost,
    TrainerWaits,
)
from tailrace.types import ReplicaId, Version, label
from tailrace.wording import counted

MANY_LEFT_OUT = 100  # groups in a row that taught nothing are told of; or as many as in so many steps
MANY_STEPS = 10
MEAN_STEPS = 10  # over which the reward and the rate that are shown are averaged
NOTICES = 50  # kept to be shown
STALL = "publish/stall_s"
ENDED = "ended"  # the state of every process once the run is over
WAITING_FOR = "waiting_for/"  # and for what: 1 while a process waits for it
NO_ADVANTAGE = "without_advantage"
NOT_FINITE = "its loss or gradient is not finite; after three in a row the run ends"


Level = Literal["detail", "info", "warning"]  # detail: only where there is room for it
Noticed = Iterator[tuple[str, Level]]


class Notice(NamedTuple):
    """Something worth a line."""

    at: float
    text: str
    level: Level


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
    """The figures of a run at one moment. Shares lie between 0 and 1, times are seconds."""

    seconds: float
    steps: int
    total_steps: int
    version: Version  # newest that a relay has
    reward: float | None  # of the last step
    mean_reward: float | None  # of the last `MEAN_STEPS` steps
    trained_samples: int
    trained_tokens: int
    tokens_per_s: float  # trained, over the last `MEAN_STEPS` steps
    finished_tokens: int  # of all finished samples, trained or not
    staleness: Staleness
    replicas: tuple[ReplicaView, ...]
    trainer: str  # its state
    trainer_idle: float
    rollout_idle: float
    rollout_shares: Mapping[str, float]  # by state
    idle_causes: Mapping[str, Mapping[str, float]]  # of replicas and trainer: shares of their idle time
    repacks: int
    moved: int
    failures: int  # attempts at samples
    failed_samples: int  # whose last attempt failed
    publish_stall_s: float  # mean per publication
    ledger: GroupCounts
    savings: Savings
    eta_s: float | None
    notices: tuple[Notice, ...]
    measured: Mapping[str, float]  # the trainer's newest figures, each from the last mini-batch that has it
    evaluated: Mapping[str, float]  # the figures of the newest evaluation while training
    mini_batches: int  # whose figures the trainer has reported
    without_advantage: int  # of these: all advantages were zero
    stopped: str  # why the run is over

    def after_end(self) -> RunView:
        """As it is shown once the run has ended: no process generates or trains any more."""
        ended = [msgspec.structs.replace(one, state=ENDED, running=0, waiting=0) for one in self.replicas]
        return msgspec.structs.replace(self, replicas=tuple(ended), trainer=ENDED, eta_s=None)


class LiveRun:
    def __init__(
        self, config: Config, timeline: bool = False, name: str = "", keep_trained: bool = False, log: bool = False
    ) -> None:
        self.config = config
        self.name = name or config.run.name or "run"
        self.fold = Fold(config, keep_trained)
        self.activity = Activity(self.fold, timeline, log)
        self.activity.idle_causes.rounds = config.schedule.kind in ROUNDS
        self.moves = Moves()
        self.spending = Spending()
        self.notices: deque[Notice] = deque(maxlen=NOTICES)
        self.noticed: Counter[Level] = Counter()  # ever, so that a reader knows which are new
        self.measured: dict[str, float] = {}
        self.waiting: dict[str, str] = {}  # processes that are held up (r0), and by what
        self.diverging = False  # the last update that had an advantage was not finite
        self._ending = LastStop()
        self.seconds = 0.0
        self._last_now: float | None = None
        self._mini_batches = self._without_advantage = 0
        self._left_out = 0  # groups that taught nothing, since the trainer was last given any
        self._stalls = 0
        self._stall_s = 0.0

    # -------------------------------------------------------------------------------------------------------- folding

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """What control handled, and what came of it."""
        self._advance(now, event)
        fold, starting = self.fold, self.activity.first_sample_at is None
        fold.see(self.seconds, event, commands)
        self.activity.see(self.seconds, event, commands)
        self.moves.see(self.seconds, event, commands)
        self.spending.see(self.seconds, event, commands)
        if isinstance(event, SampleFailed) and not fold.ignored and _is_power_of_ten(fold.failures):
            so_far = f"{counted(fold.failures, 'attempt')} at samples failed so far"
            self._notice(f"{so_far}; t{event.trajectory}: {event.reason}", "warning")
        if starting and self.activity.first_sample_at is not None:
            self._notice("all processes are up; the first samples are assigned", "info")
        for text, level in _notices(event, commands):
            self._notice(text, level)
        self._count_left_out(commands)
        self._ending.see(event, commands)

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None:
        """What a process measured of itself."""
        if STALL in values:
            self._stalls += 1
            self._stall_s += values[STALL]
        for name, value in values.items():
            if name.startswith(WAITING_FOR):
                self._wait(source, name.removeprefix(WAITING_FOR), bool(value))
        if source == "trainer":
            self.measured.update(values)
            self._mini_batches += NO_ADVANTAGE in values
            self._without_advantage += bool(values.get(NO_ADVANTAGE))
            self.diverging = bool(values.get("skipped", self.diverging))
            if values.get("skipped"):
                self._notice(f"an update of step {step + 1} is skipped: {NOT_FINITE}", "warning")

    def _count_left_out(self, commands: Sequence[Command]) -> None:
        """Many in a row look like a run that takes long."""
        first = max(MANY_LEFT_OUT, MANY_STEPS * self.config.workload.prompts_per_step)
        for command in commands:
            if isinstance(command, Train):
                self._left_out = 0
            elif isinstance(command, Forget) and command.reason in ("filtered", "stopped"):
                self._left_out += 1
                if self._left_out % first == 0 and _is_power_of_ten(self._left_out // first):
                    waits = "and the trainer has got nothing since"
                    self._notice(f"{self._left_out:,} groups taught nothing in a row, {waits}", "warning")

    def _wait(self, source: str, subject: str, began: bool) -> None:
        """A process is held up by a slow one. The first that is, and the last, are worth a line."""
        waited_for = set(self.waiting.values())
        if began:
            self.waiting[source] = subject
        elif self.waiting.get(source) == subject:
            del self.waiting[source]
        if began and subject not in waited_for:
            self._notice(f"{subject} is slow: {source} waits for it, and others may", "warning")
        elif subject in waited_for and subject not in self.waiting.values():
            self._notice(f"nobody waits for {subject} any more", "info")

    def _advance(self, now: float, event: Event) -> None:
        if self._last_now is not None and not isinstance(event, ControllerRestarted):
            self.seconds += max(0.0, now - self._last_now)
        elif self._last_now is None:
            self.seconds = max(0.0, now)
        self._last_now = now

    def _notice(self, text: str, level: Level) -> None:
        self.notices.append(Notice(self.seconds, text, level))
        self.noticed[level] += 1

    # -------------------------------------------------------------------------------------------------------- figures

    @property
    def first_sample_at(self) -> float:
        """When the first sample was given to a replica: rates are counted from here on."""
        return self.activity.first_sample_at or 0.0

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
        steps = self.fold.steps
        seconds = steps[-1].ended - self.first_sample_at if steps else 0.0
        return self.fold.total.tokens / seconds if seconds > 0 else 0.0

    @property
    def trainer_idle(self) -> float:
        return self.activity.idle([self.activity.trainer], self.seconds)

    @property
    def rollout_idle(self) -> float:
        return self.activity.idle(list(self.activity.replicas.values()), self.seconds)

    @property
    def rollout_scoring(self) -> float:
        """The share of the time in which they had nothing to generate and waited for judges."""
        shares = self.activity.shares(list(self.activity.replicas.values()), self.seconds)
        return sum(shares.get(state, 0.0) for state in WAITING)

    def view(self, now: float | None = None) -> RunView:
        """The figures as they are; `now` is the controller's clock, which goes on while nothing happens."""
        seconds = self.seconds
        if now is not None and self._last_now is not None:
            seconds += max(0.0, now - self._last_now)
        fold, lanes = self.fold, self.activity.replicas
        rewards = [step.reward for step in fold.steps[-MEAN_STEPS:] if step.reward is not None]
        return RunView(
            seconds=seconds,
            steps=len(fold.steps),
            total_steps=self.config.run.steps,
            version=fold.version,
            reward=fold.steps[-1].reward if fold.steps else None,
            mean_reward=fmean(rewards) if rewards else None,
            trained_samples=fold.total.samples,
            trained_tokens=fold.total.tokens,
            tokens_per_s=self._recent_rate(),
            finished_tokens=fold.finished_tokens,
            staleness=staleness(fold.total.ages),
            replicas=tuple([self._replica_view(id, lanes[id], seconds) for id in sorted(lanes)]),
            trainer=self.activity.trainer.state,
            trainer_idle=self.activity.idle([self.activity.trainer], seconds),
            rollout_idle=self.activity.idle(list(lanes.values()), seconds),
            rollout_shares=self.activity.shares(list(lanes.values()), seconds),
            idle_causes=self.activity.idle_causes.shares(),
            repacks=fold.repacks,
            moved=fold.moved,
            failures=fold.failures,
            failed_samples=fold.failed_samples,
            publish_stall_s=self.publish_stall_s,
            ledger=fold.groups,
            savings=fold.savings,
            eta_s=self._eta(seconds),
            notices=tuple(self.notices),
            measured=self.measured,
            evaluated=self._evaluated(),
            mini_batches=self._mini_batches,
            without_advantage=self._without_advantage,
            stopped=self.stopped,
        )

    def _evaluated(self) -> dict[str, float]:
        newest = self.fold.evaluations[-1:]
        return {name: value for one in newest for result in one.results for name, value in result.metrics.items()}

    def _replica_view(self, id: ReplicaId, lane: ReplicaLane, now: float) -> ReplicaView:
        kv = lane.kv_tokens / lane.kv_capacity if lane.kv_capacity else 0.0
        record, idle = self.fold.replica(id), self.activity.idle([lane], now)
        counts = (record.generating, lane.waiting, idle, record.scoring)
        slow = self.waiting.get(label("replica", id))
        return ReplicaView(id, f"waits for {slow}" if slow else lane.state, record.version, min(1.0, kv), *counts)

    def _window(self) -> tuple[float, int, int]:
        """Seconds, steps and tokens of the last few steps."""
        steps = self.fold.steps[-MEAN_STEPS - 1 :]
        if not steps:
            return 0.0, 0, 0
        whole = len(self.fold.steps) == len(steps)
        start, those = (self.first_sample_at, steps) if whole else (steps[0].ended, steps[1:])
        return steps[-1].ended - start, len(those), sum(step.tokens for step in those)

    def _recent_rate(self) -> float:
        seconds, _, tokens = self._window()
        return tokens / seconds if seconds > 0 else 0.0

    def _eta(self, now: float) -> float | None:
        seconds, steps, _ = self._window()
        left = self.config.run.steps - len(self.fold.steps)
        if not steps or self.stopped:
            return None
        since = now - self.fold.steps[-1].ended
        return max(0.0, left * seconds / steps - since)


# ------------------------------------------------------------------------------------------------------- notices


def _notices(event: Event, commands: Sequence[Command]) -> Noticed:
    """Sentences for what is out of the ordinary, and for the milestones of a run."""
    if isinstance(event, RunStarted):
        yield (
            f"starting the trainer, {counted(event.relays, 'relay')} and {counted(event.replicas, 'replica')}",
            "info",
        )
    elif isinstance(event, HostJoined):
        whose = f" of the stranger {event.worker}" if event.worker else ""
        where = f" at {event.site}" if event.site else ""
        yield f"host {event.host}{whose} joined{where}, for {_brought(event)}", "info"
    elif isinstance(event, HostLeft):
        yield f"host {event.host} left: {event.reason}", "warning"
    elif isinstance(event, ReplicaJoined | TrainerJoined) and event.incarnation > 1:
        yield f"{_name(event)} is back", "info"
    elif isinstance(event, ReplicaLost | RelayLost | TrainerLost):
        level: Level = "detail" if event.reason == WITH_THE_RUN else "warning"  # of which "resumed" says enough
        yield f"{_name(event)} lost: {event.reason}", level
    elif isinstance(event, TrainerWaits):
        yield event.reason, "detail"  # the controller has said it on the terminal
    elif isinstance(event, PullFailed):
        yield f"r{event.replica} could not load version {event.version}: {event.reason}", "warning"
    elif isinstance(event, ControllerRestarted):
        yield "resumed", "info"
    elif isinstance(event, SettingsChanged):
        yield f"settings changed: {described(event)}", "info"
    elif isinstance(event, Parked):
        yield from _moves(event, commands)
    for command in commands:
        if isinstance(command, Activate):
            yield f"r{command.replica} is {'called back' if command.active else 'sent home'}", "info"
        elif isinstance(command, GiveUp):
            name = "the trainer" if command.role == "trainer" else label(command.role, command.id)
            yield f"{name} lost: {command.reason}", "warning"
        elif isinstance(command, Dismiss):
            yield f"the worker {command.worker} is quarantined: {command.reason}", "warning"
        elif isinstance(command, CutOff):
            yield f"{label(command.role, command.id)} is cut off: {command.reason}", "warning"
        elif isinstance(command, RecordEvaluation):
            yield f"v{command.version} evaluated: {'; '.join(map(str, command.results))}", "info"
    yield from _endings(commands)


def _brought(event: HostJoined) -> str:
    """What a machine has room for."""
    counts = ((len(event.replicas), "replica"), (event.ranks, "rank"))
    return " and ".join([counted(number, noun) for number, noun in counts if number]) or "nothing"


def _is_power_of_ten(number: int) -> bool:
    """A reward that always fails is reported again and again, but ever more rarely."""
    return number > 0 and set(str(number)[1:]) <= {"0"} and str(number)[0] == "1"


def _name(event: ReplicaJoined | TrainerJoined | ReplicaLost | RelayLost | TrainerLost) -> str:
    if isinstance(event, ReplicaJoined | ReplicaLost):
        return f"r{event.replica}"
    return f"h{event.relay}" if isinstance(event, RelayLost) else "the trainer"


def _moves(event: Parked, commands: Sequence[Command]) -> Noticed:
    for command in commands:
        if isinstance(command, Generate) and command.replica != event.replica:
            moved = sum(request.resume for request in command.requests)
            if moved:
                yield f"repack: {counted(moved, 'sample')} moved from r{event.replica} to r{command.replica}", "detail"


def _endings(commands: Sequence[Command]) -> Noticed:
    words = {"stale": "too stale to train on", "failed": "too few of its samples succeeded"}
    for reason, why in words.items():
        ended = sum(isinstance(command, Forget) and command.reason == reason for command in commands)
        if ended:
            yield f"{counted(ended, 'group')} dropped: {why}", "detail"
