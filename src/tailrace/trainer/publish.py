"""How a version leaves the trainer: copied once into host memory, then streamed to the master relay in the background.

The trainer's worker calls `snapshot` between two steps, which is the only time that training stands still, and `send`,
which returns at once. The last snapshot is kept, so that it can be sent again when another relay becomes the master. A
snapshot that comes while the one before is still being sent takes a second buffer, which exists only from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, Event, Lock, Thread

import torch
import xxhash

from tailrace.relay.layout import Layout
from tailrace.relay.link import CHUNK, STALL_S, Address, Busy, Channel, LinkError, TokenError, connect, offer
from tailrace.types import Version, label

BUFFERS = 2
CLOSE_S = 5.0
PAUSE_S = 0.1  # between two attempts to send

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
OnDone = Callable[[Version, float], None]  # the version and the seconds its sending took
OnError = Callable[[Version, str], None]  # the version and the reason


class PublishError(ValueError):
    """The weights cannot be published; the sentence says why."""


class Snapshot:
    """One buffer and the version that lies in it: a `Source` for the link."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size
        self.version: Version = -1
        self.senders = 0
        self._memory = torch.zeros(layout.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._bytes = memoryview(self._memory.numpy())  # pyright: ignore[reportArgumentType]
        self._bytes[: len(layout.header)] = layout.header
        self.tensors = layout.views(self._bytes)
        self._summing = Lock()
        self._checksum = ""

    def begin(self) -> None:
        self.version, self._checksum = -1, ""

    def ready(self, position: int) -> memoryview:
        return self._bytes[position:]

    def checksum(self) -> str:
        with self._summing:
            self._checksum = self._checksum or xxhash.xxh3_64_hexdigest(self._bytes)
            return self._checksum


class Publisher:
    """Callbacks come from a background thread, exactly one for every `send`, and none after `close`."""

    def __init__(
        self,
        layout: Layout,
        token: bytes,
        chunk_mbytes: float = 0.0,
        connect_s: float = 60.0,
        stall_s: float = STALL_S,
        wait_s: float = 600.0,
    ) -> None:
        self._layout, self._token = layout, token
        self._chunk = int(chunk_mbytes * 1e6) or CHUNK
        self._connect_s, self._stall_s, self._wait_s = connect_s, stall_s, wait_s
        self._freed = Condition()
        self._snapshots = [Snapshot(layout)]
        self._latest: Snapshot | None = None
        self._threads: list[Thread] = []
        self._channels: set[Channel] = set()
        self._closed = Event()

    def snapshot(self, version: Version, tensors: Tensors) -> float:
        """Copy the weights (and convert them, where the layout says another type). Returns the seconds it took.

        Pairs may come from a generator, so that a sharded trainer gathers one tensor at a time.
        """
        start = time.perf_counter()
        snapshot = self._free_buffer(version)
        _copy(snapshot, tensors)
        snapshot.version = version
        with self._freed:
            self._latest = snapshot
        return time.perf_counter() - start

    def send(self, address: Address | tuple[str, int], on_done: OnDone, on_error: OnError) -> None:
        """Stream the last snapshot to a relay, from a thread of its own."""
        with self._freed:
            snapshot = self._latest
            assert snapshot is not None, "send comes after snapshot"
            snapshot.senders += 1
        job = Thread(target=self._send, args=(snapshot, Address(*address), on_done, on_error), daemon=True)
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

    # ------------------------------------------------------------------------------------------------------- buffers

    def _free_buffer(self, version: Version) -> Snapshot:
        with self._freed:
            if not self._idle() and len(self._snapshots) < BUFFERS:
                self._snapshots.append(Snapshot(self._layout))
            if not self._freed.wait_for(self._idle, self._wait_s):
                busy = ", ".join(label("version", snapshot.version) for snapshot in self._snapshots)
                raise PublishError(
                    f"{label('version', version)} finds no free buffer: {busy} are being sent for {self._wait_s:.0f} s"
                )
            chosen = self._idle()[0]
            if chosen is self._latest:
                self._latest = None
            chosen.begin()
            return chosen

    def _idle(self) -> list[Snapshot]:
        return [snapshot for snapshot in self._snapshots if not snapshot.senders]

    # ------------------------------------------------------------------------------------------------------- sending

    def _send(self, snapshot: Snapshot, address: Address, on_done: OnDone, on_error: OnError) -> None:
        start = time.perf_counter()
        version = snapshot.version
        reason = self._persist(snapshot, address)
        with self._freed:
            snapshot.senders -= 1
            self._freed.notify_all()
        if self._closed.is_set():
            return
        if reason:
            on_error(version, reason)
        else:
            on_done(version, time.perf_counter() - start)

    def _persist(self, snapshot: Snapshot, address: Address) -> str:
        """Try until it is there, or until it is no use. Returns the reason of the failure, or nothing."""
        until = time.monotonic() + self._connect_s
        while True:
            try:
                reason = self._attempt(snapshot, address)
            except TokenError as error:
                return str(error)
            except LinkError as error:
                reason = str(error)
            if not reason or time.monotonic() >= until or self._closed.wait(PAUSE_S):
                return reason

    def _attempt(self, snapshot: Snapshot, address: Address) -> str:
        with connect(address, self._stall_s) as channel:
            self._note(channel)
            try:
                channel.greet(self._token, "caller")
                answer = offer(channel, snapshot, self._chunk, fresh=True)
            finally:
                with self._freed:
                    self._channels.discard(channel)
        return f"{address} is receiving it from elsewhere" if isinstance(answer, Busy) else ""

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
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the trainer may change its weights as soon as we return
    if missing:
        raise PublishError(f"{len(missing)} tensors of the layout were not given, '{min(missing)}' among them")
