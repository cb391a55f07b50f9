"""Everything the control plane knows (`State`), and the context at which one event is handled (`Context`)."""

from __future__ import annotations

import msgspec

from tailrace.config.resuming import replaced
from tailrace.config.tree import Config
from tailrace.control import sampling
from tailrace.control.fleet import Fleet, Replica
from tailrace.control.histories import PromptHistory
from tailrace.control.ledger import NONE, NOWHERE, Ledger, Sample
from tailrace.control.margin import Margin
from tailrace.control.pacing import Pacing
from tailrace.control.relays import Relays
from tailrace.control.schedules import traits
from tailrace.control.storage import Stores
from tailrace.control.strangers import Workers
from tailrace.control.training import Training
from tailrace.protocol import Command, SetTimer, SettingValue
from tailrace.scoring import EvalSet, PromptScore
from tailrace.types import EVALUATION, GroupId, ReplicaId, StoreId, TrajectoryId, Version

MUCH_DROPPED = 0.08  # of the groups


class Round(msgspec.Struct):
    """The fleet-wide round of the schedules that have a barrier. Round n makes the data of step n."""

    number: int = 0
    running: bool = False
    to_open: int = 0  # groups of this round that are not open yet


class EvalSample(msgspec.Struct, gc=False):
    """One sample of an evaluation, from when it is first given to a replica until it has ended."""

    id: TrajectoryId
    group: GroupId  # the number of the first sample of its prompt
    prompt: int  # counted over all sets
    replica: ReplicaId = NOWHERE
    store: StoreId = 0
    attempt: int = 0
    failures: int = 0


class RankedVersion(msgspec.Struct, gc=False):
    """An evaluated version, by the accuracy that decides."""

    score: float
    version: Version


class Evaluation(msgspec.Struct):
    """What is evaluated while training, and how far that is."""

    sets: tuple[EvalSet, ...] = ()
    version: Version = NONE  # under evaluation
    due: Version = NONE  # to be evaluated next
    judged: Version = NONE  # evaluated last
    began_at: float = 0.0
    first: TrajectoryId = EVALUATION  # the number of this evaluation's first sample
    each: int = 1  # samples of a prompt
    begun: int = 0  # samples of it that were ever given to a replica
    samples: dict[TrajectoryId, EvalSample] = {}  # of these: have not ended
    waiting: dict[TrajectoryId, None] = {}  # of these: have no replica
    scores: list[PromptScore] = []  # by prompt
    best: list[RankedVersion] = []  # best first
    without_gain: int = 0  # evaluations in a row that were no better than the best
    ending: str = ""  # why the run ends once this is over

    def current(self, id: TrajectoryId, attempt: int) -> EvalSample | None:
        """The sample, if a replica has it under this very assignment; None for anything late or doubled."""
        sample = self.samples.get(id)
        return sample if sample is not None and sample.attempt == attempt and sample.replica != NOWHERE else None

    @property
    def total(self) -> int:
        """Samples of the present evaluation."""
        return len(self.scores) * self.each

    @property
    def left(self) -> bool:
        """There are samples that nobody has."""
        return self.version != NONE and (bool(self.waiting) or self.begun < self.total)

    @property
    def complete(self) -> bool:
        return self.begun == self.total and not self.samples

    @property
    def kept(self) -> tuple[Version, ...]:
        """Versions that relays must not free."""
        return (self.version, self.due)


class State(msgspec.Struct):
    """A snapshot is this, encoded."""

    ledger: Ledger = msgspec.field(default_factory=Ledger)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    relays: Relays = msgspec.field(default_factory=Relays)
    training: Training = msgspec.field(default_factory=Training)
    stores: Stores = msgspec.field(default_factory=Stores)
    pacing: Pacing = msgspec.field(default_factory=Pacing)
    margin: Margin = msgspec.field(default_factory=Margin)
    history: PromptHistory = msgspec.field(default_factory=PromptHistory)
    strangers: Workers = msgspec.field(default_factory=Workers)
    round: Round = msgspec.field(default_factory=Round)
    evaluation: Evaluation = msgspec.field(default_factory=Evaluation)
    pulling: int = 0  # replicas that are loading weights
    pushing: Version = NONE  # version on its way from the trainer to the master
    fetching: bool = False
    exhausted: bool = False  # the source has no more prompts
    timers: dict[str, float] = {}  # when the next firing of each is due
    stopped: str = ""  # why the run is over
    failed: bool = False  # it is over because it could not go on; whoever resumes it has mended the cause
    repacks: int = 0
    moved: int = 0
    settings: dict[str, SettingValue] = {}  # those that differ from what the run was begun with

    def assigned(self, id: TrajectoryId, attempt: int) -> Sample | EvalSample | None:
        """The sample, of training or of an evaluation, if a replica has it under this very assignment."""
        book = self.evaluation if id >= EVALUATION else self.ledger
        return book.current(id, attempt)


class Context:
    """What the functions of this package share while they handle one event.

    Handlers bring the books up to date and leave notes here; `plane.py` then decides, in one fixed order, what they
    make possible. So no handler calls another one, and none has to know all the consequences of what it records.
    """

    def __init__(self, config: Config, state: State) -> None:
        self.config = replaced(config, state.settings)
        self.traits = traits(config)
        self.mini_batch_sizes = sampling.mini_batch_sizes(config.workload.prompts_per_step, config.trainer.mini_batches)
        self.ledger = state.ledger
        self.fleet = state.fleet
        self.relays = state.relays
        self.training = state.training
        self.stores = state.stores
        self.evaluation = state.evaluation
        self.state = state
        self.clear(0.0)

    def reconfigure(self, values: dict[str, SettingValue]) -> None:
        """Decide by these settings from now on."""
        self.state.settings = self.state.settings | values
        self.config = replaced(self.config, values)

    def clear(self, now: float) -> None:
        self.now = now
        self.commands: list[Command] = []
        self.touched: dict[ReplicaId, Replica] = {}  # may pull or take work now
        self.more_work = False  # there may be work for replicas that found none before
        self.repack_due = False
        self.fleet_changed = False  # there may be others to ask to generate

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def touch(self, replica: Replica) -> None:
        self.touched[replica.id] = replica

    def lose_place(self) -> None:
        """A step will not have a group that it was to have. In a round another one takes its place."""
        self.more_work = True
        self.state.round.to_open += self.traits.rounds

    @property
    def repeats_short(self) -> bool:
        """The trainer repeats a step, and waits for groups in the place of those that were lost with their store."""
        training = self.training
        behind = training.step < training.version and training.live and not training.busy
        return behind and len(training.picked) < self.mini_batch_sizes[training.mini_batch]

    @property
    def next_step(self) -> int:
        """The step that the trainer needs more groups for."""
        return self.training.step if self.repeats_short else self.training.version

    def admits(self, lag: int = 0) -> int:
        """How many more groups may be opened, under weights that are `lag` versions behind. While there is no trainer
        nobody knows how much it will need, and generation goes on as far as the staleness bound allows."""
        limit = int(self.state.pacing.limit) if self.traits.chooses and self.training.live else 0
        return sampling.admits(self.config, self.ledger, self._taken, lag, limit, self.state.history.useful_share)

    @property
    def lacks(self) -> float:
        """Groups that its present step would still lack, if of the open ones as many are of use as of the last ones."""
        useful = self.ledger.open_groups * self.state.history.useful_share
        return self.config.workload.prompts_per_step - len(self.ledger.ready) - self._taken - useful

    @property
    def _taken(self) -> int:
        return 0 if self.repeats_short else self.training.taken

    def steps(self, replica: Replica) -> int:
        """Decode steps of its engine until now: as last reported, and as many as there was time for since. Where
        answers are short, a whole batch may begin and end between two reports."""
        costs = self.fleet.costs(replica)
        if costs is None or not replica.assigned or replica.state == "pulling":
            return replica.steps
        batch = len(replica.assigned)
        usual = batch * self.ledger.kv_per_sample(self.config.workload.max_completion_tokens)
        since = min(self.now - replica.reported_at, self.config.health.heartbeat_s)
        return replica.steps + int(since / costs.step_s(batch, min(replica.kv_load, usual)))

    @property
    def mixed_share(self) -> float:
        """Share of the samples that may have tokens of several versions. None where many groups are dropped for their
        age: newer weights make a sample no younger, and in a batch that is filled up it ends later."""
        mixes = self.config.schedule.kind == "adaptive" and self.state.pacing.late < MUCH_DROPPED
        return self.config.schedule.mixed_share if mixes else 0.0

    @property
    def repacks(self) -> bool:
        return self.traits.chooses and self.config.repack.enabled

    @property
    def relieves(self) -> bool:
        """Faster replicas take over what slower ones would bring too late, whatever the schedule."""
        return self.config.repack.enabled and len(self.fleet.kinds) > 1

    def set_timer(self, timer: str, at: float) -> None:
        self.state.timers[timer] = at
        self.send(SetTimer(timer, at))
