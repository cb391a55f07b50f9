"""The words between control and everybody else: events (facts, past tense) and commands (imperatives).

An event reports what happened to a component; a command asks a component for something, and every command that takes
time is answered by exactly one event. Both are tagged structs: the wire, the journal and the tests share this one form.

Late messages are harmless because everything carries the number that was current when it was sent: a replica, relay
or trainer has an `incarnation` that grows with every start, and every assignment of a sample has an `attempt`. Control
ignores what does not match.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from tailrace.scoring import EvalResult, EvalSet
from tailrace.types import (
    GroupId,
    HostId,
    Natural,
    Positive,
    Prompt,
    PromptId,
    RelayId,
    ReplicaId,
    StoreId,
    Struct,
    TrajectoryId,
    Version,
)

SettingValue = bool | int | float | str | tuple[int | str, ...] | None
UpdateChoice = Literal["take_along", "drain", "stay"]
Role = Literal["replica", "relay", "trainer", "store"]
# why a payload is not needed
Ending = Literal["trained", "stale", "filtered", "stopped", "failed", "lost", "regenerate", "evaluated"]
Price = Annotated[float, Meta(ge=0.0, le=1e6)]
TRAINER = 0  # the trainer is one component, whatever its number of ranks
Check = Literal["", "turn", "draws"]  # of what a stranger handed in: that its turn ends; and every token, scored again
SCORING_S = 0.25  # how long a judge has a turn before that is reported: quick rewards cost no event


class Assignment(Struct):
    """A sample, as given to a replica for the `attempt`-th time."""

    trajectory: TrajectoryId
    attempt: Natural


class JudgedTurn(Struct):
    """A turn of a sample, as given to a replica for the `attempt`-th time. `turn` counts the observations before it."""

    trajectory: TrajectoryId
    attempt: Natural
    turn: Natural
    final: bool = False  # the judge's answer ends the episode: nothing more of it will be generated


class TrajectoryMeta(Struct):
    """All that control ever sees of a trajectory: ids, counts and versions, never its tokens."""

    id: TrajectoryId
    attempt: Natural
    tokens: Natural  # sampled or inserted after the prompt
    oldest: Version
    newest: Version
    finish: str = ""
    reward: float | None = None


class Request(Struct):
    """One sample to generate. `resume`: go on from what its store holds of it. `failures`: how often its environment or
    reward has failed, which gives it other random numbers: with the same ones it would fail again. `store`: the sample
    store that its tokens go to. `check`: a stranger has generated what there is of it, which is to be checked before it
    is judged."""

    trajectory: TrajectoryId
    attempt: Natural
    group: GroupId
    prompt: PromptId
    prompt_tokens: Natural
    resume: bool = False
    failures: Natural = 0
    store: StoreId = 0
    check: Check = ""


class TrainGroup(Struct):
    """A group as the trainer gets it: the samples that made it, the sample store that has each (empty: all are in store
    0), and the rewards of those that were generated and are not trained on."""

    group: GroupId
    trajectories: tuple[TrajectoryId, ...]
    stores: tuple[StoreId, ...] = ()
    left_out: tuple[float, ...] = ()

    def located(self) -> list[tuple[TrajectoryId, StoreId]]:
        """Each sample with the store that has it."""
        return list(zip(self.trajectories, self.stores or (0,) * len(self.trajectories), strict=True))


# --------------------------------------------------------------------------------------------------------------- events


class Event(Struct, tag_field="kind", tag=True):
    """Something that happened. Subclasses say what."""


class RunStarted(Event):
    """The first event of a run: so many replicas, relays and sample stores are to be started."""

    replicas: Natural
    relays: Natural
    stores: Natural = 0


class HostJoined(Event):
    """Another machine is there, on which a relay and these replicas are to be started. Its number was never used.
    `store`: a sample store too, which has the same number. `ranks`: it has room for so many ranks of the trainer.
    `site`: where it is, if it is far away; machines of one site are near each other. `worker`: it is a stranger's, who
    has the key of this name; `salt`, which no stranger knows, decides which of its samples are scored again."""

    host: HostId
    replicas: tuple[ReplicaId, ...]
    store: bool = False
    ranks: Natural = 0
    site: str = ""
    worker: str = ""
    salt: Natural = 0


class HostLeft(Event):
    """It is gone with all that ran there, for good: should it come back, it gets another number."""

    host: HostId
    reason: str


class WorkerRevoked(Event):
    """Somebody has withdrawn the key of this stranger."""

    worker: str
    reason: str


class WorkerRefused(Event):
    """A stranger has sent what it must not."""

    worker: str
    reason: str


class PromptsAdded(Event):
    """Answer to `FetchPrompts`: the prompts from index `start` of the source on; `last` when it has no more."""

    start: Natural
    prompts: tuple[Prompt, ...]
    last: bool = False


class EvalSetsOpened(Event):
    """What there is to evaluate, told when a controller begins: sets in the order of their prompts, which are numbered
    from `EVALUATION` on. None: nothing is evaluated while training."""

    sets: tuple[EvalSet, ...] = ()


class ReplicaJoined(Event):
    """A replica is there, for the first time or again. `held`: the work it still has, if it outlived the controller."""

    replica: ReplicaId
    incarnation: Natural
    host: HostId
    version: Version
    kv_capacity: Positive  # tokens
    roofline: Positive  # largest batch whose decode step is still flat
    held: tuple[Assignment, ...] = ()
    price: Price = 0.0  # that it says it has, in dollars per hour


class PriceChanged(Event):
    """An hour of each of these replicas costs so many dollars from now on."""

    replicas: tuple[ReplicaId, ...]
    price: Price


class ReplicaLost(Event):
    """Its process ended or its connection broke."""

    replica: ReplicaId
    incarnation: Natural
    reason: str


class EngineWork(Struct):
    """What an engine has done since it started, and how long that took: what things cost is fitted to this."""

    busy_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    steps: Natural  # decode steps
    decoded: Natural  # sequences, over all decode steps
    kv_read: Natural  # KV tokens, over all decode steps
    prefilled: Natural  # tokens


class Progressed(Event):
    """A replica's load, which has changed since it was last reported."""

    replica: ReplicaId
    incarnation: Natural
    kv_tokens: Natural
    running: Natural
    waiting: Natural
    work: EngineWork | None = None


class ScoringStarted(Event):
    """A judge (a reward, a tool, an environment) has had these turns for a while, and has them still: nothing of these
    samples is generated meanwhile."""

    replica: ReplicaId
    incarnation: Natural
    samples: tuple[JudgedTurn, ...]


class GenerationResumed(Event):
    """The judge answered with an observation: these turns have begun."""

    replica: ReplicaId
    incarnation: Natural
    samples: tuple[JudgedTurn, ...]


class Finished(Event, omit_defaults=True):
    """A sample is generated and scored; its payload is in its sample store. `parts`: what its reward is made of, for
    people; control does not look at it."""

    replica: ReplicaId
    meta: TrajectoryMeta
    parts: dict[str, float] = field(default_factory=dict[str, float])


class SampleFailed(Event, omit_defaults=True):
    """The environment or the reward of a sample raised, hung or answered nonsense. `meta`: of the completion that it
    failed on, whose tokens are kept for people; control does not look at it."""

    replica: ReplicaId
    trajectory: TrajectoryId
    attempt: Natural
    reason: str
    meta: TrajectoryMeta | None = None


class Parked(Event):
    """Answer to `Release`: the replica has stopped these; their prefixes are in their sample stores."""

    replica: ReplicaId
    incarnation: Natural
    samples: tuple[TrajectoryMeta, ...]


class HandedIn(Event):
    """A stranger has generated these up to the end of a turn; nobody has checked or judged them. Their tokens are in
    their sample stores."""

    replica: ReplicaId
    samples: tuple[TrajectoryMeta, ...]


class CheckFailed(Event):
    """A checker has found that a stranger's tokens are not what its weights and the seed give."""

    replica: ReplicaId
    trajectory: TrajectoryId
    attempt: Natural
    reason: str


class WeightsLoaded(Event):
    """Answer to `LoadWeights`."""

    replica: ReplicaId
    incarnation: Natural
    version: Version


class PullFailed(Event):
    """The other answer to `LoadWeights`. `damaged`: what the relay holds is not what it was given."""

    replica: ReplicaId
    incarnation: Natural
    version: Version
    reason: str
    damaged: bool = False


class RelayJoined(Event):
    """A relay is there, holding `versions`."""

    relay: RelayId
    incarnation: Natural
    versions: tuple[Version, ...] = ()


class RelayLost(Event):
    relay: RelayId
    incarnation: Natural
    reason: str


class LinkFailed(Event):
    """A relay has not been able to get anything to the next one on its route for a while, though both may be well."""

    relay: RelayId
    incarnation: Natural
    target: RelayId
    reason: str


class PublishFailed(Event):
    """The other answer to `Publish`: the trainer has not been able to get anything to the master for a while."""

    incarnation: Natural
    version: Version
    relay: RelayId
    reason: str


class VersionStored(Event):
    """A relay holds all of a version, checked and sealed. From the master it also answers `Publish`."""

    relay: RelayId
    incarnation: Natural
    version: Version


class StoreJoined(Event):
    """A sample store is there, with what is in its file. It has to be told what of that still counts (`Reconcile`)."""

    store: StoreId
    incarnation: Natural


class StoreLost(Event):
    store: StoreId
    incarnation: Natural
    reason: str


class SamplesLost(Event):
    """A sample store was to keep these, and does not have them."""

    store: StoreId
    incarnation: Natural
    trajectories: tuple[TrajectoryId, ...]


class TrainerJoined(Event):
    """The trainer is there, with the weights after `step` steps and `mini_batch` mini-batches of the next."""

    incarnation: Natural
    step: Natural
    mini_batch: Natural = 0


class TrainerLost(Event):
    incarnation: Natural
    reason: str


class TrainerWaits(Event):
    """Answer to `Start`: there is no room for all of its ranks. It starts by itself once there is."""

    reason: str


class Trained(Event):
    """Answer to `Train`: this mini-batch of this step is in the weights."""

    incarnation: Natural
    step: Natural
    mini_batch: Natural


class TrainFailed(Event):
    """The other answer to `Train`: samples of it could not be fetched from their store. Nothing was trained."""

    incarnation: Natural
    step: Natural
    mini_batch: Natural
    reason: str


class Checkpointed(Event):
    """The weights after `step` steps are on disk: what they were trained on need not be kept for a repetition."""

    incarnation: Natural
    step: Natural


class Late(Struct):
    """One who was last heard `age_s` ago, not counting the time in which the controller could not listen."""

    role: Role
    id: Natural
    incarnation: Natural
    age_s: Annotated[float, Meta(ge=0.0)]


class Heartbeats(Event):
    """Told just before the timer `health`: whoever is live and not named here was heard in time."""

    late: tuple[Late, ...] = ()


class TimerFired(Event):
    """Answer to `SetTimer`."""

    timer: str


WITH_THE_RUN = "the run was stopped"  # why a component is lost that had nothing wrong


class ControllerRestarted(Event):
    """Control was restored from snapshot and journal: silence until now says nothing about the others."""


class SettingsChanged(Event):
    """The run was resumed with other settings: these, by dotted key. A run that had come to its end goes on if it has
    more to do now."""

    values: dict[str, SettingValue]


AnyEvent = (
    RunStarted
    | HostJoined
    | HostLeft
    | WorkerRevoked
    | WorkerRefused
    | PromptsAdded
    | EvalSetsOpened
    | ReplicaJoined
    | PriceChanged
    | ReplicaLost
    | Progressed
    | ScoringStarted
    | GenerationResumed
    | Finished
    | SampleFailed
    | Parked
    | HandedIn
    | CheckFailed
    | WeightsLoaded
    | PullFailed
    | RelayJoined
    | RelayLost
    | LinkFailed
    | PublishFailed
    | VersionStored
    | StoreJoined
    | StoreLost
    | SamplesLost
    | TrainerJoined
    | TrainerLost
    | TrainerWaits
    | Trained
    | TrainFailed
    | Checkpointed
    | Heartbeats
    | TimerFired
    | ControllerRestarted
    | SettingsChanged
)

# ------------------------------------------------------------------------------------------------------------- commands


class Command(Struct, tag_field="kind", tag=True):
    """Something to do. Subclasses say what; the comment says which event answers."""


class FetchPrompts(Command):
    """-> PromptsAdded. The index makes it harmless to ask, or to be answered, twice."""

    start: Natural
    count: Natural


class SkipPrompts(Command):
    """These prompts are not generated this time, because all samples of their last visits got the same reward, or a
    group of the same row of the data is under way. For the journal; no answer."""

    prompts: tuple[PromptId, ...]
    streaks: tuple[int, ...]  # so many visits in a row were all right; negative: all wrong; 0: only under way


class Generate(Command):
    """-> one Finished, SampleFailed, CheckFailed, or entry in Parked or HandedIn per request."""

    replica: ReplicaId
    incarnation: Natural
    requests: tuple[Request, ...]


class Evaluate(Command):
    """Generate samples of an evaluation, all under `version`, which the replica has and keeps until they have ended ->
    one Finished or SampleFailed per request."""

    replica: ReplicaId
    incarnation: Natural
    version: Version
    requests: tuple[Request, ...]


class RecordEvaluation(Command):
    """All samples of an evaluation have ended. `best`: the versions with the highest accuracy so far, best first. For
    the journal, the metrics and the summary; no answer."""

    version: Version
    results: tuple[EvalResult, ...]
    seconds: float
    best: tuple[Version, ...] = ()


class KeepCheckpoints(Command):
    """To the trainer: do not prune the checkpoints of these versions, nor those that are to be evaluated and are newer
    than `judged`. No answer."""

    incarnation: Natural
    versions: tuple[Version, ...]
    judged: Version


class Release(Command):
    """Stop these, or everything, and hand it back -> Parked. What a judge has for good stays: nothing of it will be
    generated."""

    replica: ReplicaId
    incarnation: Natural
    samples: tuple[Assignment, ...] = ()  # empty: everything


class Cancel(Command):
    """Nobody wants these any more; no answer."""

    replica: ReplicaId
    incarnation: Natural
    samples: tuple[Assignment, ...]


class LoadWeights(Command):
    """-> WeightsLoaded or PullFailed. `relay` is the one on the replica's host while that lives."""

    replica: ReplicaId
    incarnation: Natural
    version: Version
    relay: RelayId


class Explain(Command):
    """What a replica does about a newer version, and what each choice was expected to cost, in seconds of the
    replica's decoding; None: it could not be chosen. For the journal; no answer."""

    replica: ReplicaId
    version: Version
    choice: UpdateChoice
    samples: Natural  # that it has in hand
    recompute_s: float | None  # take_along: the KV is computed again under the new weights
    drain_s: float | None  # drain: it gets nothing more until the best moment to take the rest along, or the end
    stay_s: float | None  # stay: new samples start under the old weights


class Activate(Command):
    """A replica is asked to generate, or (not `active`) sent home, because cheaper ones are enough for the trainer: it
    finishes what it has, and gets neither work nor weights until it is called back. For the journal; no answer."""

    replica: ReplicaId
    incarnation: Natural
    active: bool
    cost: float  # dollars for a million useful tokens of this replica; 0: not known, or free
    needed: float  # useful tokens per second, so that the trainer does not wait; 0: all are needed
    there: float  # useful tokens per second of all that are to generate


class Train(Command):
    """-> Trained or TrainFailed. The last mini-batch of a step makes version `step + 1`."""

    incarnation: Natural
    step: Natural
    mini_batch: Natural
    last: bool
    groups: tuple[TrainGroup, ...]


class Publish(Command):
    """Push this version to the master relay -> VersionStored of that relay, or PublishFailed."""

    incarnation: Natural
    version: Version
    relay: RelayId


class Route(Command):
    """From now on forward to these relays whatever they lack; an older revision is ignored. No answer."""

    relay: RelayId
    incarnation: Natural
    revision: Natural
    targets: tuple[RelayId, ...]


class Drop(Command):
    """Free a version nobody reads. No answer."""

    relay: RelayId
    incarnation: Natural
    version: Version


class Forget(Command):
    """The payloads of these trajectories are not needed any more: free or archive them. Two reasons say that a
    store has lost them: `regenerate`, their samples are generated anew, and `lost`, a step that was trained on this
    group is repeated with another one. No answer."""

    trajectories: tuple[TrajectoryId, ...]
    reason: Ending = "trained"


class GiveUp(Command):
    """It was silent for too long, did not answer in time, or does nothing well: end what is left of it. No answer."""

    role: Role
    id: Natural
    incarnation: Natural
    reason: str


class CutOff(Command):
    """It is not heard of, and may be alive: until `until` what it has is left to it. It is hung up on, so that it says
    what it has when it is back. No answer."""

    role: Role
    id: Natural
    incarnation: Natural
    until: float
    reason: str


class Dismiss(Command):
    """Send this stranger away and let it in no more. No answer."""

    worker: str
    reason: str


class Start(Command):
    """Start a component (again) -> ReplicaJoined, RelayJoined, StoreJoined or TrainerJoined, with a larger
    incarnation."""

    role: Role
    id: Natural
    restart: Natural


class SetTimer(Command):
    """-> TimerFired, at `at` or soon after."""

    timer: str
    at: float


class Stop(Command):
    """The run is over, or cannot go on (`failed`). No answer."""

    reason: str
    failed: bool = False


AnyCommand = (
    FetchPrompts
    | SkipPrompts
    | Generate
    | Evaluate
    | RecordEvaluation
    | KeepCheckpoints
    | Release
    | Cancel
    | LoadWeights
    | Explain
    | Activate
    | Train
    | Publish
    | Route
    | Drop
    | Forget
    | GiveUp
    | CutOff
    | Dismiss
    | Start
    | SetTimer
    | Stop
)
