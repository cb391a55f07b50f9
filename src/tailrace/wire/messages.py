"""The messages between a run's processes, and how they become bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.protocol import AnyCommand, AnyEvent
from tailrace.types import (
    GroupId,
    HostId,
    Natural,
    PromptId,
    RelayId,
    ReplicaId,
    StoreId,
    Struct,
    TrajectoryId,
    Version,
)

LOOPBACK = "127.0.0.1"
OFFER_S = 0.5  # how often a host offers itself
MOST_REPLICAS = 1024  # of other machines that a run takes
MOST_RANKS = 1024  # of the trainer
RANKS_MARK = "ranks.mark"  # a file in the folder of a run that others may join: whose checkpoints count


ShortText = Annotated[str, Meta(max_length=64)]


class WireError(TailraceError):
    """Why the processes of a run cannot be connected, for the person who started it."""


class AbsentError(WireError):
    """The run is not where it should be: not yet, not any more, or another one is. It may come."""


class ComponentSpec(Struct):
    """What a component is told when it is started: who it is and where the controller listens."""

    role: str  # replica, relay or trainer
    id: int
    incarnation: int
    endpoint: str
    token: str  # of the run, by which its components know each other
    folder: str  # of the run
    config: Config
    folder_id: tuple[int, int] = (0, 0)  # by which it is known, whatever is called so later
    key: str = ""  # of this very component, by which the controller knows it
    lifeline: int = -1  # a descriptor at whose end the component has to go
    fingerprint: str = (
        ""  # fingerprint of the controller's certificate; empty: the connection is plain, within this host
    )
    host: HostId = 0  # of whose relay a replica gets its weights, and to which a trainer's rank publishes
    listen: str = LOOPBACK  # relay: where it takes weights
    run: str = ""  # by which the files of its sample stores are known
    rank: int = 0
    step: int = 0  # trainer: the last step that the controller knows to be complete
    rank_hosts: tuple[HostId, ...] = ()  # trainer: by rank
    meeting: str = ""  # trainer: where its ranks find each other
    interface: str = ""  # trainer: by which this rank talks to the others
    rank_key: str = ""  # trainer: that all of its ranks have, and nobody else
    # trainer of a run that others may join: what a file in its folder says, so that they know it as the same
    folder_mark: str = ""
    # what it was dealt (config/dealing.py), by whoever starts it
    cards: tuple[int, ...] = ()  # the GPUs that it sees; none: those that are there, if it uses any
    memory: float = 0.0  # its share of their memory; 0: nobody has dealt
    cpus: str = ""  # near its cards ("0-31"); empty: any
    worker: str = ""  # it belongs to the stranger of this name

    @property
    def name(self) -> str:
        """Unique for every start, so that a message never reaches the successor of the component that it was meant
        for."""
        rank = f".{self.rank}" if self.rank else ""
        worker = f"@{self.worker}" if self.worker else ""
        return f"{self.role}-{self.id}{rank}/{self.incarnation}{worker}"

    @property
    def slot(self) -> tuple[str, int]:
        """Its role, with the rank if that is not the first, and its number: the same for every start."""
        return f"{self.role}.{self.rank}" if self.rank else self.role, self.id


def is_marked(spec: ComponentSpec) -> bool:
    """Whether the folder that this trainer was told is here, and the trainer is the newest."""
    return _mark(spec) == spec.folder_mark


def shares_folder(spec: ComponentSpec) -> bool:
    """Whether it is here. By the time of asking there may be a newer trainer."""
    return _mark(spec).partition(".")[0] == spec.folder_mark.partition(".")[0]


def _mark(spec: ComponentSpec) -> str:
    try:
        return (Path(spec.folder) / RANKS_MARK).read_text()
    except OSError:
        return "none"


# -------------------------------------------------------------------------------------------------- from the components


class Message(Struct, tag_field="kind", tag=True):
    """Base of all messages."""


class Beat(Message):
    """A heartbeat on the connection: the first message of each, and where datagrams do not get through."""

    waiting_for: Annotated[str, Meta(max_length=200)] = ""


class Hello(Message):
    """A component is up, or has been asked who it is. `address` is where a relay takes weights, `arena` where it keeps
    them."""

    address: Annotated[str, Meta(max_length=400)] = ""
    arena: Annotated[str, Meta(max_length=4096)] = ""


class Receipt(Struct):
    """What a sample store has of an attempt that will not grow any more, signed with a key that only this store and the
    controller have (`keys.signed_receipt`)."""

    store: Annotated[str, Meta(max_length=100)]  # the name of its process
    trajectory: TrajectoryId
    attempt: Natural
    tokens: Natural  # after the prompt
    oldest: Version  # of what was sampled; -1: nothing was
    newest: Version
    signature: Annotated[bytes, Meta(max_length=64)] = b""


class Reported(Message):
    """Something for the control plane, and what proves it: a receipt for each sample in `Finished` and `Parked`."""

    event: AnyEvent
    receipts: Annotated[tuple[Receipt, ...], Meta(max_length=1 << 16)] = ()


class Measured(Message):
    """For the table of metrics."""

    step: Annotated[int, Meta(ge=-1, lt=1 << 53)]
    values: Annotated[dict[Annotated[str, Meta(max_length=100)], float], Meta(max_length=256)]


class Offer(Message):
    """A host has room for so many replicas and ranks of the trainer, or is `leaving`, because of `reason`. Said again
    and again, with the names of the components that were started there and, of those that ended, how; so nothing has to
    be remembered of it, and none need arrive."""

    release: Annotated[str, Meta(max_length=64)]  # of Tailrace
    replicas: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)]
    store: bool = False  # it has room for a sample store too
    components: Annotated[dict[str, str], Meta(max_length=3 * MOST_REPLICAS)] = msgspec.field(
        default_factory=dict[str, str]
    )
    ranks: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    interfaces: Annotated[dict[ShortText, ShortText], Meta(max_length=256)] = msgspec.field(
        default_factory=dict[str, str]
    )  # of a host with ranks: the first address of each
    leaving: bool = False
    reason: Annotated[str, Meta(max_length=1000)] = ""
    site: Annotated[str, Meta(max_length=64)] = ""  # where it is, if it is far away


class Accused(Message):
    """From a sample store: this component has sent what it must not, and is cut off from the store."""

    component: Annotated[str, Meta(max_length=100)]
    reason: Annotated[str, Meta(max_length=4000)]


class Collapsed(Message):
    """A component gives up. `expected`: the reason is a sentence for the person who started the run, not a bug."""

    reason: str
    expected: bool = False


# -------------------------------------------------------------------------------------------------- from the controller


class Ordered(Message):
    """A command of the control plane, and what else is needed to carry it out. Tokens are in the sample stores."""

    command: AnyCommand
    # Train: of each sample, the oldest and newest version that its tokens may be of, and how many come after the prompt
    rewards: dict[TrajectoryId, float | None] = msgspec.field(default_factory=dict[TrajectoryId, float | None])
    versions: dict[TrajectoryId, tuple[Version, Version]] = msgspec.field(
        default_factory=dict[TrajectoryId, tuple[Version, Version]]
    )
    tokens: dict[TrajectoryId, Natural] = msgspec.field(default_factory=dict[TrajectoryId, Natural])
    # Publish, Route: where relays listen
    addresses: dict[RelayId, str] = msgspec.field(default_factory=dict[RelayId, str])
    arena: str = ""  # LoadWeights: where the version lies


class Grant(Struct):
    """The right to append to a sample: a replica has it until there is a larger attempt. `resume`: what is stored of
    the sample is continued, unless it is of an attempt before `began`; else it is deleted."""

    replica: ReplicaId
    trajectory: TrajectoryId
    attempt: Natural
    group: GroupId
    prompt: PromptId
    resume: bool = False
    began: Natural = 0  # the attempt that began it anew, from its prompt


class Assigned(Message):
    """To a sample store, before the replica hears of it."""

    grants: tuple[Grant, ...]


class Reconcile(Message):
    """To a sample store that has joined: all assignments that are under way, and what else has to be kept."""

    grants: tuple[Grant, ...]
    keep: tuple[TrajectoryId, ...] = ()  # what is missing of these is lost
    finished: dict[TrajectoryId, tuple[int, int]] = msgspec.field(default_factory=dict[TrajectoryId, tuple[int, int]])
    # the attempt that finished each of them, and its tokens
    prefixes: tuple[TrajectoryId, ...] = ()  # to go on from, as far as they are there
    prompts: tuple[PromptId, ...] = ()  # for the first store: those that are still needed


class StoreAddress(Struct):
    """Where a sample store listens, and the key by which it knows the component that this is sent to."""

    store: StoreId
    endpoint: str
    fingerprint: str = ""
    key: str = ""


class StoreAddresses(Message):
    """To replicas, trainers and sample stores: all sample stores that are there now, and those that will not return."""

    addresses: tuple[StoreAddress, ...]
    departed: tuple[StoreId, ...] = ()


class Introduce(Message):
    """Who are you? Your reports up to this number are known. -> Hello, the reports after it, and a joining event."""

    heard: int


class Acknowledged(Message):
    """Your reports up to this number are committed."""

    number: int


class BeatHere(Message):
    """Your datagrams do not arrive: send heartbeats on the connection too. Not `on`: they arrive again."""

    on: bool


class Wanted(Message):
    """Answer to `Offer`: these components are to be there and no others; the specs of those that were not named in
    it."""

    names: tuple[str, ...]
    specs: tuple[ComponentSpec, ...] = ()


class Dismissed(Message):
    """The run has no use for this host, because of this."""

    reason: str


class Ended(Message):
    """The run stops, for good or to be resumed. Put in order what must be, and go."""

    complete: bool


class Garbled(Struct):
    """In place of a message that could not be read, from somebody who has proven who it is."""

    what: str


FromComponent = Beat | Hello | Reported | Measured | Offer | Accused | Collapsed
FromController = (
    Ordered | Assigned | Reconcile | StoreAddresses | Introduce | Acknowledged | BeatHere | Wanted | Dismissed | Ended
)
UNNUMBERED = 0  # of what need not arrive: heartbeats, loads, introductions, offers, last words

encode = msgspec.msgpack.Encoder().encode
decode_from_component = msgspec.msgpack.Decoder(FromComponent).decode
decode_from_controller = msgspec.msgpack.Decoder(FromController).decode
