"""The weight publisher of the trainer: copies a version once, then sends it to the master relay in the background.

The trainer's worker calls `snapshot` between two steps, which is the trainer stall of a weight publish, and `send`,
which returns at once. The last snapshot is kept, so that it can be sent again when another relay becomes the master. A
snapshot that is taken while the last one is still being sent uses a second buffer, allocated when first needed.

Weights on a GPU are written from there straight into the shared memory of a relay on this host. To a relay elsewhere,
and from host memory, they are streamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition, Event, Thread

import torch

from tailrace.types import Version, label
from tailrace.weights.channel import STALL_S, Address, Channel, ChannelError, TokenError, connect
from tailrace.weights.checksum import chunk_bytes
from tailrace.weights.in_place import InPlaceWriter, NotOnThisHostError
from tailrace.weights.layout import WeightLayout
from tailrace.weights.messages import ReceivingElsewhere, WriteTarget
from tailrace.weights.region import SharedMemoryError
from tailrace.weights.snapshot import PublishError, Tensors, WeightSnapshot, new_snapshot, synchronize
from tailrace.weights.transfer import CHUNK, OfferResult, offer, offer_in_place

BUFFERS = 2
CLOSE_S = 5.0
GIVE_UP_S = 20.0  # without progress; then control names another relay
RETRY_S = 0.1  # between two attempts

OnDone = Callable[[Version, float], None]  # the version and the seconds its sending took
OnError = Callable[[Version, str], None]  # the version and the reason


@dataclass
class Delivery:
    """One `send`. `give_up_at` is on the monotonic clock and moves with every byte of progress."""

    snapshot: WeightSnapshot
    address: Address
    began: float
    give_up_at: float
    on_done: OnDone
    on_error: OnError


class Publisher:
    """Callbacks come from a background thread, exactly one per `send`, and none after `close`. `device`: the GPU that
    the weights are on. `generation`: how often the trainer was started, so that relays refuse one that was replaced and
    does not know it. `copied_s`: seconds from `send` until the last version written in place was in host memory."""

    def __init__(
        self,
        layout: WeightLayout,
        token: bytes,
        chunk_mbytes: float = 0.0,
        connect_s: float = GIVE_UP_S,
        stall_s: float = STALL_S,
        wait_s: float = 600.0,
        device: torch.device | None = None,
        generation: int = 0,
    ) -> None:
        self._layout, self._token, self._device = layout, token, device
        self._generation = generation
        self._chunk = chunk_bytes(chunk_mbytes, CHUNK)
        self._connect_s, self._stall_s, self._wait_s = connect_s, stall_s, wait_s
        self._changed = Condition()  # guards the snapshots and the channels
        self._snapshots = [new_snapshot(layout, device)]
        self._latest: WeightSnapshot | None = None
        self._in_place = InPlaceWriter(device) if device is not None else None
        self._other_hosts: set[Address] = set()  # relays with our IP address whose shared memory is not ours
        self.copied_s = 0.0
        self._threads: list[Thread] = []
        self._channels: set[Channel] = set()
        self._closed = Event()

    def snapshot(self, version: Version, tensors: Tensors) -> float:
        """Copy the weights, converted to the types of the layout. Returns the stall in seconds.

        Pairs may come from a generator, so that a sharded trainer gathers one tensor at a time.
        """
        synchronize()  # the end of the training step is not part of the stall
        start = time.perf_counter()
        snapshot = self._free_snapshot(version)
        snapshot.copy_from(tensors)
        snapshot.version = version
        with self._changed:
            self._latest = snapshot
        return time.perf_counter() - start

    def send(self, address: Address, on_done: OnDone, on_error: OnError) -> None:
        """Send the last snapshot to a relay, from a thread of its own."""
        with self._changed:
            snapshot = self._latest
            assert snapshot is not None, "send comes after snapshot"
            snapshot.senders += 1
        give_up_at = time.monotonic() + self._connect_s
        delivery = Delivery(snapshot, address, time.perf_counter(), give_up_at, on_done, on_error)
        thread = Thread(target=self._deliver, args=(delivery,), daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Abort what is being sent, and end."""
        with self._changed:
            self._closed.set()
            for channel in self._channels:
                channel.abort()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._in_place is not None and not any(thread.is_alive() for thread in self._threads):
            self._in_place.close()

    # ----------------------------------------------------------------------------------------------------- snapshots

    def _free_snapshot(self, version: Version) -> WeightSnapshot:
        with self._changed:
            if not self._unsent() and len(self._snapshots) < BUFFERS:
                self._snapshots.append(new_snapshot(self._layout, self._device))
            if not self._changed.wait_for(self._unsent, self._wait_s):
                busy = ", ".join(label("version", snapshot.version) for snapshot in self._snapshots)
                raise PublishError(
                    f"{label('version', version)} finds no free buffer: {busy} are being sent for {self._wait_s:.0f} s"
                )
            free = self._unsent()[0]
            if free is self._latest:
                self._latest = None
            free.begin()
            free.generation = self._generation
            return free

    def _unsent(self) -> list[WeightSnapshot]:
        """Those that nobody is sending."""
        return [snapshot for snapshot in self._snapshots if not snapshot.senders]

    # ------------------------------------------------------------------------------------------------------- sending

    def _deliver(self, delivery: Delivery) -> None:
        version = delivery.snapshot.version
        reason = self._retry(delivery)
        with self._changed:
            delivery.snapshot.senders -= 1
            self._changed.notify_all()
        if self._closed.is_set():
            return
        if reason:
            delivery.on_error(version, reason)
        else:
            delivery.on_done(version, time.perf_counter() - delivery.began)

    def _retry(self, delivery: Delivery) -> str:
        """Try until the relay has the version, or until it is no use. Returns the reason of a failure, or nothing."""
        while True:
            try:
                reason = self._attempt(delivery)
            except TokenError as error:
                return str(error)
            except (ChannelError, SharedMemoryError, OSError, RuntimeError) as error:  # CUDA raises the last two
                reason = str(error)
            except NotOnThisHostError:
                self._other_hosts.add(delivery.address)
                continue
            if not reason or time.monotonic() >= delivery.give_up_at or self._closed.wait(RETRY_S):
                return reason

    def _attempt(self, delivery: Delivery) -> str:
        with connect(delivery.address, self._stall_s) as channel:
            self._register(channel)
            try:
                channel.call(self._token, delivery.address.fingerprint)
                result = self._offer(channel, delivery)
            finally:
                if channel.weight_bytes_sent:  # the relay keeps them, and the next attempt resumes there
                    delivery.give_up_at = time.monotonic() + self._connect_s
                with self._changed:
                    self._channels.discard(channel)
        elsewhere = isinstance(result, ReceivingElsewhere)
        return f"{delivery.address.host_port} is receiving it from elsewhere" if elsewhere else ""

    def _offer(self, channel: Channel, delivery: Delivery) -> OfferResult:
        snapshot, writer = delivery.snapshot, self._in_place
        same_host = channel.is_local() and delivery.address not in self._other_hosts
        if writer is not None and snapshot.on_device and same_host:
            return offer_in_place(channel, snapshot, lambda target: self._write(writer, target, delivery))
        return offer(channel, snapshot, self._chunk, from_trainer=True)

    def _write(self, writer: InPlaceWriter, target: WriteTarget, delivery: Delivery) -> Iterator[int]:
        yield from writer.write(target, delivery.snapshot.version, delivery.snapshot.memory)
        self.copied_s = time.perf_counter() - delivery.began

    def _register(self, channel: Channel) -> None:
        with self._changed:
            if self._closed.is_set():
                raise ChannelError("the trainer is stopping")
            self._channels.add(channel)
