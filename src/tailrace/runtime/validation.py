"""What each component may send: only what is its own to say, and only what can be true.

Whoever has proven its name is still checked, because a run takes machines that nobody knows well, and because one wrong
figure would spread: into the journal and every later controller. Numbers are bounded by the types of
`protocol` and `wire.messages`; what depends on who sends it is in the two tables here.

    role       messages                        events, each about itself
    replica    Hello Collapsed Reported        ReplicaJoined Progressed ScoringStarted GenerationResumed
               Measured                        Finished SampleFailed Parked WeightsLoaded PullFailed
    relay      Hello Collapsed Reported        RelayJoined VersionStored LinkFailed
    store      Hello Collapsed Reported        StoreJoined PromptsAdded SamplesLost
               Measured Accused
    trainer    Hello Collapsed Reported        TrainerJoined Trained TrainFailed Checkpointed PublishFailed
               Measured
    host       Hello Offer                     none
    a stranger's replica
               Hello Collapsed Reported        ReplicaJoined Progressed HandedIn WeightsLoaded PullFailed
    a stranger's relay
               Hello Collapsed Reported        RelayJoined VersionStored

A stranger says nothing of rewards, failures or figures: it takes prompts and hands in trajectories. A replica of the
run's own says `CheckFailed` of what a stranger has handed in.

`complaint_about` looks at a message when it is heard, `complaint_about_event` at an event when it is about to be
handled, because control may have learned something in between. Each returns what is wrong with it, or nothing. What is
merely late or doubled is fine: control ignores it.

What a replica says of tokens (`Finished`, `SampleFailed`, `Parked`) it has to prove with a receipt of the sample store
that has them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from msgspec.structs import replace

from tailrace.config.tree import Config
from tailrace.control.sampling import mini_batch_sizes
from tailrace.control.state import State
from tailrace.control.storage import FIRST
from tailrace.protocol import (
    CheckFailed,
    Checkpointed,
    Event,
    Finished,
    GenerationResumed,
    HandedIn,
    LinkFailed,
    Parked,
    Progressed,
    PromptsAdded,
    PublishFailed,
    PullFailed,
    RelayJoined,
    ReplicaJoined,
    SampleFailed,
    SamplesLost,
    ScoringStarted,
    StoreJoined,
    Trained,
    TrainerJoined,
    TrainFailed,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.types import TrajectoryId
from tailrace.wire.keys import is_genuine
from tailrace.wire.messages import (
    Accused,
    Beat,
    Collapsed,
    FromComponent,
    Garbled,
    Hello,
    Measured,
    Offer,
    Receipt,
    Reported,
)

LEAP = 1000  # incarnations that a component may be ahead of what is known: one for each controller that it met
LONGEST_FINISH = 32
LONGEST_REASON = 4000  # characters; a reward may raise with a whole page
ADDRESS = re.compile(r"(?P<host>[^\s#]+):(?P<port>[0-9]{1,5})(#[0-9a-f]{64})?")

MESSAGES: dict[str, tuple[type, ...]] = {
    "replica": (Hello, Collapsed, Reported, Measured),
    "relay": (Hello, Collapsed, Reported),
    "store": (Hello, Collapsed, Reported, Measured, Accused),
    "trainer": (Hello, Collapsed, Reported, Measured),
    "host": (Hello, Offer),
    "stranger's replica": (Hello, Collapsed, Reported),
    "stranger's relay": (Hello, Collapsed, Reported),
}


def shortened(event: Event) -> Event:
    """Reasons come from anywhere; what is beyond reading is cut off."""
    reason = getattr(event, "reason", "")
    return replace(event, reason=reason[:LONGEST_REASON]) if len(reason) > LONGEST_REASON else event


class Sender(NamedTuple):
    """Who says something."""

    role: str
    id: int
    host: int
    incarnation: int  # as last known
    joined: bool
    address: str = ""  # of a relay, as it has said
    worker: str = ""  # a stranger's

    @property
    def kind(self) -> str:
        """What it may say follows from this."""
        return f"stranger's {self.role}" if self.worker else self.role


class Validation:
    """`key_of`: that of each component, by its name; receipts of stores are signed with theirs."""

    def __init__(self, config: Config, state: Callable[[], State], key_of: Callable[[str], bytes]) -> None:
        self._state = state
        self._key_of = key_of
        self._most_tokens = config.workload.max_completion_tokens
        self._mini_batches_per_step = len(
            mini_batch_sizes(config.workload.prompts_per_step, config.trainer.mini_batches)
        )
        self._events: dict[str, dict[type[Event], Callable[[Sender, Any], str]]] = {
            "replica": {
                ReplicaJoined: self._replica_joined,
                Progressed: _own_replica,
                ScoringStarted: self._judged,
                GenerationResumed: self._judged,
                Finished: self._finished,
                SampleFailed: self._sample_failed,
                Parked: self._parked,
                CheckFailed: self._check_failed,
                WeightsLoaded: _own_replica,
                PullFailed: _own_replica,
            },
            "stranger's replica": {
                ReplicaJoined: self._replica_joined,
                Progressed: _own_replica,
                HandedIn: self._handed_in,
                WeightsLoaded: _own_replica,
                PullFailed: _own_replica,
            },
            "stranger's relay": {
                RelayJoined: _relay_joined,
                VersionStored: _own_relay,
            },
            "relay": {
                RelayJoined: _relay_joined,
                VersionStored: _own_relay,
                LinkFailed: _own_relay,
            },
            "store": {
                StoreJoined: _store_joined,
                PromptsAdded: _prompts_added,
                SamplesLost: _own_store,
            },
            "trainer": {
                TrainerJoined: self._trainer_joined,
                Trained: self._trained,
                TrainFailed: self._trained,
                Checkpointed: self._checkpointed,
                PublishFailed: _nothing,
            },
        }

    # ------------------------------------------------------------------------------------------------------- messages

    def complaint_about(self, sender: Sender, message: FromComponent | Garbled) -> str:
        if isinstance(message, Garbled):
            return message.what
        if isinstance(message, Beat):  # or something of a stranger that is counted and not looked at
            return ""
        if not isinstance(message, MESSAGES[sender.kind]):
            return f"{type(message).__name__}, which is not for a {sender.kind} to say"
        match message:
            case Reported(event):
                return self._not_its_own(sender, event)
            case Hello(address, arena):
                return _bad_address(sender.role, address, arena)
            case Measured(_, values):
                return _bad_figures(sender.role, values)
            case _:
                return ""

    def _not_its_own(self, sender: Sender, event: Event) -> str:
        name = type(event).__name__
        if type(event) not in self._events[sender.kind]:
            return f"{name}, which is not for a {sender.kind} to say"
        incarnation = getattr(event, "incarnation", sender.incarnation)
        if incarnation > sender.incarnation + LEAP:
            return f"{name} of incarnation {incarnation}, and it is {sender.incarnation}"
        return ""

    # --------------------------------------------------------------------------------------------------------- events

    def complaint_about_event(self, sender: Sender, event: Event, receipts: Iterable[Receipt] = ()) -> str:
        wrong = self._events[sender.kind][type(event)](sender, event)
        if wrong or not isinstance(event, Finished | SampleFailed | Parked | HandedIn):
            return wrong
        known = {(one.trajectory, one.attempt): one for one in receipts}
        metas = event.samples if isinstance(event, Parked | HandedIn) else (event.meta,) if event.meta else ()
        return next(filter(None, (self._not_stored(meta, known.get((meta.id, meta.attempt))) for meta in metas)), "")

    def _not_stored(self, meta: TrajectoryMeta, receipt: Receipt | None) -> str:
        """What a replica says of a sample counts only as far as the sample's store has made it durable."""
        sample = self._state().assigned(meta.id, meta.attempt)
        if sample is None:
            return ""
        store = f"store {sample.store}"
        of_store = receipt is not None and receipt.store.startswith(f"store-{sample.store}/")
        if receipt is None or not of_store or not is_genuine(self._key_of(receipt.store), receipt):
            return f"t{meta.id} without a receipt of {store}"
        if receipt.tokens != meta.tokens:
            return f"t{meta.id} with {meta.tokens:,} tokens, where {store} has {receipt.tokens:,}"
        stored = (receipt.oldest, receipt.newest)
        if receipt.newest >= 0 and stored != (meta.oldest, meta.newest):
            said = f"t{meta.id} of versions {meta.oldest} to {meta.newest}"
            return f"{said}, where {store} has {receipt.oldest} to {receipt.newest}"
        return ""

    def _replica_joined(self, sender: Sender, event: ReplicaJoined) -> str:
        made = self._state().training.version
        if event.host != sender.host:
            return f"it joins on host {event.host}, and was started on {sender.host}"
        if sender.worker and event.price:
            return f"it joins at {event.price:g} dollars an hour, which is not for a stranger to say"
        return f"it joins with version {event.version}, and {made} is the newest" if event.version > made else ""

    def _judged(self, sender: Sender, event: ScoringStarted | GenerationResumed) -> str:
        foreign = (self._not_given(sender, one.trajectory, one.attempt) for one in event.samples)
        return _own_replica(sender, event) or next(filter(None, foreign), "")

    def _finished(self, sender: Sender, event: Finished) -> str:
        meta = event.meta
        wrong = _own_replica(sender, event) or self._bad_meta(sender, meta)
        if not wrong and (meta.reward is None or not isfinite(meta.reward)):
            return f"t{meta.id} with the reward {meta.reward}"
        return wrong or _bad_figures("replica", event.parts)

    def _sample_failed(self, sender: Sender, event: SampleFailed) -> str:
        wrong, meta = _own_replica(sender, event), event.meta
        if not wrong and meta is not None and (meta.id, meta.attempt) != (event.trajectory, event.attempt):
            return f"t{event.trajectory} with what is of t{meta.id}"
        if wrong or meta is None:
            return wrong or self._not_given(sender, event.trajectory, event.attempt)
        return self._bad_meta(sender, meta)

    def _parked(self, sender: Sender, event: Parked) -> str:
        wrong = _own_replica(sender, event)
        return wrong or next(filter(None, (self._bad_meta(sender, meta) for meta in event.samples)), "")

    def _check_failed(self, sender: Sender, event: CheckFailed) -> str:
        return _own_replica(sender, event) or self._not_given(sender, event.trajectory, event.attempt)

    def _handed_in(self, sender: Sender, event: HandedIn) -> str:
        wrong = _own_replica(sender, event)
        found = (self._bad_hand_in(sender, meta) for meta in event.samples)
        return wrong or next(filter(None, found), "")

    def _bad_hand_in(self, sender: Sender, meta: TrajectoryMeta) -> str:
        if meta.reward is not None:
            return f"t{meta.id} with the reward {meta.reward}, which is not for a stranger to say"
        return self._bad_meta(sender, meta) or self._of_other_version(meta)

    def _of_other_version(self, meta: TrajectoryMeta) -> str:
        """A stranger keeps the version that it was given a sample under, or it could not be checked."""
        sample = self._state().ledger.current(meta.id, meta.attempt)
        if sample is None or meta.oldest == meta.newest == sample.newest:
            return ""
        return f"t{meta.id} of versions {meta.oldest} to {meta.newest}, where it was given version {sample.newest}"

    def _bad_meta(self, sender: Sender, meta: TrajectoryMeta) -> str:
        sample = self._state().assigned(meta.id, meta.attempt)
        if sample is None:
            return ""
        made = self._state().training.version
        if not 0 <= meta.oldest <= meta.newest <= made:
            return f"t{meta.id} of versions {meta.oldest} to {meta.newest}, and {made} is the newest"
        if meta.tokens > self._most_tokens:
            return f"t{meta.id} with {meta.tokens} tokens, where {self._most_tokens} is the most"
        if len(meta.finish) > LONGEST_FINISH:
            return f"t{meta.id} with a reason to end of {len(meta.finish)} characters"
        return self._not_given(sender, meta.id, meta.attempt)

    def _not_given(self, sender: Sender, trajectory: TrajectoryId, attempt: int) -> str:
        sample = self._state().assigned(trajectory, attempt)
        foreign = sample is not None and sample.replica != sender.id
        return f"t{trajectory}, which it was not given" if foreign else ""

    def _trainer_joined(self, sender: Sender, event: TrainerJoined) -> str:
        """A process that has joined before cannot have lost anything since, nor trained what it was not told to."""
        training = self._state().training
        if not sender.joined or event.incarnation <= training.incarnation:
            return ""
        now, next_ = (training.step, training.mini_batch), (training.step, training.mini_batch + 1)
        if training.mini_batch + 1 == self._mini_batches_per_step:
            next_ = (training.step + 1, 0)
        at = (event.step, event.mini_batch)
        told = at == now or (at == next_ and bool(training.picked))
        return (
            ""
            if told
            else f"it joins at step {event.step}, mini-batch {event.mini_batch}, and was at {now[0]}, {now[1]}"
        )

    def _trained(self, sender: Sender, event: Trained | TrainFailed) -> str:
        training = self._state().training
        ahead = (event.step, event.mini_batch) > (training.step, training.mini_batch)
        return f"step {event.step}, mini-batch {event.mini_batch}, which it was not told to train" if ahead else ""

    def _checkpointed(self, sender: Sender, event: Checkpointed) -> str:
        made = self._state().training.step + 1  # it may overtake `Trained`
        return f"a checkpoint of step {event.step}, and {made} is the newest" if event.step > made else ""


def _nothing(sender: Sender, event: Event) -> str:
    return ""


def _own_replica(sender: Sender, event: Any) -> str:
    return "" if event.replica == sender.id else f"{type(event).__name__} of replica {event.replica}"


def _own_relay(sender: Sender, event: Any) -> str:
    return "" if event.relay == sender.id else f"{type(event).__name__} of relay {event.relay}"


def _own_store(sender: Sender, event: Any) -> str:
    return "" if event.store == sender.id else f"{type(event).__name__} of store {event.store}"


def _relay_joined(sender: Sender, event: RelayJoined) -> str:
    return _own_relay(sender, event) or ("" if sender.address else "it joins without an address")


def _store_joined(sender: Sender, event: StoreJoined) -> str:
    return _own_store(sender, event) or ("" if sender.address else "it joins without an address")


def _prompts_added(sender: Sender, event: PromptsAdded) -> str:
    """One store has the prompts of all. They are numbered from the first on."""
    ids = range(event.start, event.start + len(event.prompts))
    if sender.id != FIRST or any(prompt.id != id for prompt, id in zip(event.prompts, ids, strict=True)):
        return f"prompts that store {sender.id} was not asked for"
    return ""


def _bad_address(role: str, address: str, arena: str) -> str:
    """Others will connect there, and look for weights there."""
    if not address and not arena:
        return ""
    if role not in ("relay", "store"):
        return "an address, where only relays and stores have one"
    if not _is_address(address):
        return f"an address that is none: {address[:80]!r}"
    if role == "store":
        return "shared memory, where only relays have any" if arena else ""
    return "" if arena.startswith("/") and arena.isprintable() else f"shared memory that is none: {arena[:80]!r}"


def _is_address(address: str) -> bool:
    found = ADDRESS.fullmatch(address)
    try:
        return found is not None and bool(ipaddress.ip_address(found["host"])) and 0 < int(found["port"]) < 1 << 16
    except ValueError:
        return False


def _bad_figures(role: str, values: Mapping[str, float]) -> str:
    """Of the trainer they may be anything: a loss that is not finite is worth knowing."""
    unreadable = next((name for name in values if not name.isprintable()), None)
    if unreadable is not None:
        return f"a figure with the name {unreadable!r}"
    if role != "trainer" and not all(map(isfinite, values.values())):
        return "figures that are not finite"
    return ""


__all__ = ["LONGEST_REASON", "MESSAGES", "Sender", "Validation", "shortened"]
