"""How a version leaves the trainer: copied once, then brought to the master relay in the background.

The trainer's worker calls `snapshot` between two steps, which is the only time that training stands still, and `send`,
which returns at once. The last snapshot is kept, so that it can be sent again when another relay becomes the master. A
snapshot that comes while the one before is still being sent takes a second buffer, which exists only from then on.

Weights on a GPU are copied there, and go from there straight into the memory of a relay on this host. To a relay
elsewhere, and from host memory, they are streamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Event, Thread

import torch

from tailrace.errors import TailraceError
from tailrace.relay.arena import ArenaError
from tailrace.relay.checksum import whole_pieces
from tailrace.relay.layout import Layout
from tailrace.relay.link import STALL_S, Address, Channel, LinkError, TokenError, connect
from tailrace.relay.messages import Busy, Place
from tailrace.relay.transfer import CHUNK, Answer, offer, place
from tailrace.trainer.places import NotHereError, Places
from tailrace.trainer.snapshot import DeviceSnapshot, Snapshot, new_snapshot
from tailrace.types import Version, label

BUFFERS = 2
CLOSE_S = 5.0
GIVE_UP_S = 20.0  # without progress; then control names another relay
PAUSE_S = 0.1  # between two attempts to send

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
OnDone = Callable[[Version, float], None]  # the version and the seconds its sending took
OnError = Callable[[Version, str], None]  # the version and the reason


class PublishError(TailraceError):
    """The weights cannot be published; the sentence says why."""


@dataclass
class Trip:
    """A snapshot on its way to a relay, and when to stop trying."""

    snapshot: Snapshot
    address: Address
    until: float


class Publisher:
    """Callbacks come from a background thread, exactly one for every `send`, and none after `close`. `device`: the GPU
    that the weights are on. `reign`: how often the trainer has been started, so that relays refuse one that has been
    replaced and does not know it. `copied_s` is how long the last version written in place took to be in host memory
    whole, counted from `send`."""

    def __init__(
        self,
        layout: Layout,
        token: bytes,
        chunk_mbytes: float = 0.0,
        connect_s: float = GIVE_UP_S,
        stall_s: float = STALL_S,
        wait_s: float = 600.0,
        device: torch.device | None = None,
        reign: int = 0,
    ) -> None:
        self._layout, self._token, self._device = layout, token, device
        self._reign = reign
        self._chunk = whole_pieces(chunk_mbytes, CHUNK)
        self._connect_s, self._stall_s, self._wait_s = connect_s, stall_s, wait_s
        self._freed = Condition()
        self._snapshots = [new_snapshot(layout, device)]
        self._places = Places(device) if device is not None else None
        self._apart: set[Address] = set()  # relays that have our address and yet other memory
        self.copied_s = 0.0
        self._latest: Snapshot | None = None
        self._threads: list[Thread] = []
        self._channels: set[Channel] = set()
        self._closed = Event()

    def snapshot(self, version: Version, tensors: Tensors) -> float:
        """Copy the weights (and convert them, where the layout says another type). Returns the seconds it took.

        Pairs may come from a generator, so that a sharded trainer gathers one tensor at a time.
        """
        _settle()  # the end of a training step is not our doing
        start = time.perf_counter()
        snapshot = self._free_buffer(version)
        _copy(snapshot, tensors)
        snapshot.version = version
        with self._freed:
            self._latest = snapshot
        return time.perf_counter() - start

    def send(self, address: Address, on_done: OnDone, on_error: OnError) -> None:
        """Stream the last snapshot to a relay, from a thread of its own."""
        with self._freed:
            snapshot = self._latest
            assert snapshot is not None, "send comes after snapshot"
            snapshot.senders += 1
            began = snapshot.sent_at = time.perf_counter()
        job = Thread(target=self._send, args=(snapshot, address, began, on_done, on_error), daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [job]
        job.start()

    def close(self) -> None:
        """Break off what is under way, and end."""
        with self._freed:
            self._closed.set()
            for channel in self._channels:
                channel.abort()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._places is not None and not any(thread.is_alive() for thread in self._threads):
            self._places.close()

    # ------------------------------------------------------------------------------------------------------- buffers

    def _free_buffer(self, version: Version) -> Snapshot:
        with self._freed:
            if not self._idle() and len(self._snapshots) < BUFFERS:
                self._snapshots.append(new_snapshot(self._layout, self._device))
            if not self._freed.wait_for(self._idle, self._wait_s):
                busy = ", ".join(label("version", snapshot.version) for snapshot in self._snapshots)
                raise PublishError(
                    f"{label('version', version)} finds no free buffer: {busy} are being sent for {self._wait_s:.0f} s"
                )
            chosen = self._idle()[0]
            if chosen is self._latest:
                self._latest = None
            chosen.begin()
            chosen.reign = self._reign
            return chosen

    def _idle(self) -> list[Snapshot]:
        return [snapshot for snapshot in self._snapshots if not snapshot.senders]

    # ------------------------------------------------------------------------------------------------------- sending

    def _send(self, snapshot: Snapshot, address: Address, began: float, on_done: OnDone, on_error: OnError) -> None:
        version = snapshot.version
        reason = self._persist(Trip(snapshot, address, time.monotonic() + self._connect_s))
        with self._freed:
            snapshot.senders -= 1
            self._freed.notify_all()
        if self._closed.is_set():
            return
        if reason:
            on_error(version, reason)
        else:
            on_done(version, time.perf_counter() - began)

    def _persist(self, trip: Trip) -> str:
        """Try until it is there, or until it is no use. Returns the reason of the failure, or nothing."""
        while True:
            try:
                reason = self._attempt(trip)
            except TokenError as error:
                return str(error)
            except (LinkError, ArenaError, OSError, RuntimeError) as error:  # the last two: of the GPU's own making
                reason = str(error)
            except NotHereError:
                self._apart.add(trip.address)
                continue
            if not reason or time.monotonic() >= trip.until or self._closed.wait(PAUSE_S):
                return reason

    def _attempt(self, trip: Trip) -> str:
        with connect(trip.address, self._stall_s) as channel:
            self._note(channel)
            try:
                channel.call(self._token, trip.address.fingerprint)
                answer = self._hand_over(channel, trip.snapshot, trip.address)
            finally:
                if channel.carried:  # the relay has that much more, and the next attempt goes on there
                    trip.until = time.monotonic() + self._connect_s
                with self._freed:
                    self._channels.discard(channel)
        return f"{trip.address.place} is receiving it from elsewhere" if isinstance(answer, Busy) else ""

    def _hand_over(self, channel: Channel, snapshot: Snapshot, address: Address) -> Answer:
        places = self._places
        if isinstance(snapshot, DeviceSnapshot) and places and channel.is_local() and address not in self._apart:
            return place(channel, snapshot, lambda where: self._write(places, where, snapshot))
        return offer(channel, snapshot, self._chunk, fresh=True)

    def _write(self, places: Places, where: Place, snapshot: DeviceSnapshot) -> Iterator[int]:
        yield from places.fill(where, snapshot.version, snapshot.memory)
        self.copied_s = time.perf_counter() - snapshot.sent_at

    def _note(self, channel: Channel) -> None:
        with self._freed:
            if self._closed.is_set():
                raise LinkError("the trainer is stopping")
            self._channels.add(channel)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread copies nearly as fast as several, and far faster when replicas keep the cores busy: several wait for
    each other at every tensor, and each wait costs a turn of the operating system's scheduler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _copy(snapshot: Snapshot, tensors: Tensors) -> None:
    missing = set(snapshot.tensors)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    with torch.no_grad(), _one_thread():
        for name, tensor in pairs:
            if name not in missing or snapshot.tensors[name].shape != tensor.shape:
                raise PublishError(
                    f"tensor '{name}' of shape {list(tensor.shape)} is not in the layout, or twice there"
                )
            snapshot.tensors[name].copy_(tensor, non_blocking=True)
            missing.discard(name)
    _settle()  # the trainer may change its weights as soon as we return
    if missing:
        raise PublishError(f"{len(missing)} tensors of the layout were not given, '{min(missing)}' among them")


def _settle() -> None:
    """Wait for what the trainer has ordered so far, but not for a version that is on its way."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
