"""The weight publisher of a trainer rank: copies its part of a version once, then sends it in the background.

With one rank the part is the whole version, and goes straight to the master relay. With several, each sends its own to
the relay of its host, which passes it on to the master; if that relay is not there, to the master itself.

The trainer's worker calls `snapshot` between two steps, which is the trainer stall of a weight publish, and `send`,
which returns at once. The last snapshot is kept, so that it can be sent again when another relay becomes the master. A
snapshot that is taken while the last one is still being sent uses a second buffer, allocated when first needed.

A whole version on a GPU is written from there straight into the shared memory of a relay on this host. To a relay
elsewhere, from host memory, and in parts, weights are streamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING

from tailrace.types import Version, label
from tailrace.weights.channel import STALL_S, Address, ChannelError, TokenError, UnreachableError
from tailrace.weights.checksum import chunk_bytes
from tailrace.weights.messages import ReceivingElsewhere, WriteTarget
from tailrace.weights.region import NotOnThisHostError, SharedMemoryError
from tailrace.weights.shard import ShardLayout
from tailrace.weights.snapshot import NewSnapshot, PublishError, Tensors, WeightSnapshot
from tailrace.weights.streams import Hop
from tailrace.weights.transfer import CHUNK, OfferResult, offer_in_place

if TYPE_CHECKING:
    import torch

    from tailrace.weights.in_place import InPlaceWriter

BUFFERS = 2
CLOSE_S = 5.0
GIVE_UP_S = 20.0  # without progress; then control names another relay
RETRY_S = 0.1  # between two attempts
STOPPING = "the trainer is stopping"

OnDone = Callable[[Version, float], None]  # the version and the seconds its sending took
OnError = Callable[[Version, str], None]  # the version and the reason


@dataclass
class Delivery:
    """One `send`, to the `master` by way of the relay `via`. `give_up_at` is on the monotonic clock and moves with
    every byte of progress."""

    snapshot: WeightSnapshot
    master: Address
    via: Address
    hop: Hop
    began: float
    give_up_at: float
    on_done: OnDone
    on_error: OnError


class Publisher:
    """Callbacks come from a background thread, exactly one per `send`, and none after `close`. `device`: the GPU that
    the weights are on. `generation`: how often the trainer was started, so that relays refuse one that was replaced and
    does not know it. `new_snapshot`: for weights that are no tensors. `copied_s`: seconds from `send` until the last
    version written in place was in host memory."""

    def __init__(
        self,
        layout: ShardLayout,
        token: bytes,
        chunk_mbytes: float = 0.0,
        connect_s: float = GIVE_UP_S,
        stall_s: float = STALL_S,
        wait_s: float = 600.0,
        device: torch.device | None = None,
        generation: int = 0,
        streams: int = 0,
        new_snapshot: NewSnapshot | None = None,
    ) -> None:
        self._layout, self._token, self._device, self._streams = layout, token, device, streams
        self._generation = generation
        self._chunk = chunk_bytes(chunk_mbytes, CHUNK)
        self._connect_s, self._stall_s, self._wait_s = connect_s, stall_s, wait_s
        self._changed = Condition()  # guards the snapshots and the hops
        self._new_snapshot = new_snapshot or _of_tensors(device)
        self._snapshots = [self._new_snapshot(layout)]
        self._latest: WeightSnapshot | None = None
        self._in_place = _in_place_writer(device) if device is not None else None
        self._other_hosts: set[Address] = set()  # relays with our IP address whose shared memory is not ours
        self.copied_s = 0.0
        self._threads: list[Thread] = []
        self._hops: set[Hop] = set()
        self._closed = Event()

    @property
    def snapshot_bytes(self) -> int:
        """Of all buffers."""
        return sum(snapshot.part.size for snapshot in self._snapshots)

    def snapshot(self, version: Version, tensors: Tensors, content_id: str = "") -> float:
        """Copy the weights, converted to the types of the layout. Returns the stall in seconds. `content_id`: the one
        that all ranks give to this version; a new one if there is only one."""
        if self._device is not None:
            _finish_step()  # its end is not part of the stall
        start = time.perf_counter()
        snapshot = self._free_snapshot(version)
        snapshot.content_id = content_id or snapshot.content_id
        snapshot.copy_from(tensors)
        snapshot.version = version
        with self._changed:
            self._latest = snapshot
        return time.perf_counter() - start

    def send(self, master: Address, on_done: OnDone, on_error: OnError, via: Address | None = None) -> None:
        """Send the last snapshot to the master relay, from a thread of its own. `via`: the relay of this host."""
        with self._changed:
            snapshot = self._latest
            assert snapshot is not None, "send comes after snapshot"
            snapshot.senders += 1
        give_up_at = time.monotonic() + self._connect_s
        hop = Hop(self._token, self._chunk, self._streams, self._stall_s)
        when = (time.perf_counter(), give_up_at)
        delivery = Delivery(snapshot, master, via or master, hop, *when, on_done, on_error)
        thread = Thread(target=self._deliver, args=(delivery,), daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Abort what is being sent, and end."""
        with self._changed:
            self._closed.set()
            for hop in self._hops:
                hop.abort(STOPPING)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._in_place is not None and not any(thread.is_alive() for thread in self._threads):
            self._in_place.close()

    # ----------------------------------------------------------------------------------------------------- snapshots

    def _free_snapshot(self, version: Version) -> WeightSnapshot:
        with self._changed:
            if not self._unsent() and len(self._snapshots) < BUFFERS:
                self._snapshots.append(self._new_snapshot(self._layout))
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
        with self._changed:
            self._hops.add(delivery.hop)
        reason = STOPPING if self._closed.is_set() else self._retry(delivery)
        delivery.hop.close()
        with self._changed:
            self._hops.discard(delivery.hop)
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
                self._other_hosts.add(delivery.master)
                continue
            if not reason or time.monotonic() >= delivery.give_up_at or self._closed.wait(RETRY_S):
                return reason

    def _attempt(self, delivery: Delivery) -> str:
        sent = delivery.hop.bytes_sent
        try:
            result = self._offer_to(delivery, delivery.via)
        except UnreachableError:
            if delivery.via == delivery.master:
                raise
            result = self._offer_to(delivery, delivery.master)  # the relay of this host is not there
        finally:
            if delivery.hop.bytes_sent > sent:  # the relay keeps them, and the next attempt resumes there
                delivery.give_up_at = time.monotonic() + self._connect_s
        elsewhere = isinstance(result, ReceivingElsewhere)
        return f"{delivery.master.host_port} is receiving it from elsewhere" if elsewhere else ""

    def _offer_to(self, delivery: Delivery, address: Address) -> OfferResult:
        snapshot, writer, direct = delivery.snapshot, self._in_place, address == delivery.master
        with delivery.hop.open(address) as channel:
            same_host = direct and channel.is_local() and address not in self._other_hosts
            if writer is not None and snapshot.on_device and snapshot.part.is_whole and same_host:
                return offer_in_place(channel, snapshot, lambda target: self._write(writer, target, delivery))
            destination = "" if direct else str(delivery.master)
            return delivery.hop.offer(channel, address, snapshot, True, destination)

    def _write(self, writer: InPlaceWriter, target: WriteTarget, delivery: Delivery) -> Iterator[int]:
        yield from writer.write(target, delivery.snapshot.version, delivery.snapshot.memory)
        self.copied_s = time.perf_counter() - delivery.began


def _of_tensors(device: torch.device | None) -> NewSnapshot:
    from tailrace.weights.tensor_snapshot import on_device_if_it_fits

    return on_device_if_it_fits(device)


def _in_place_writer(device: torch.device) -> InPlaceWriter:
    from tailrace.weights.in_place import InPlaceWriter

    return InPlaceWriter(device)


def _finish_step() -> None:
    from tailrace.weights.tensor_snapshot import synchronize

    synchronize()
