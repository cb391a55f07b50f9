"""A relay's data plane: takes versions in, keeps them in the arena, sends them on along the current route.

The relay's process owns one `RelayNode` and carries control's commands to it; the node's threads call `on_stored` and
`on_failed` (from any thread: hand them over to your own loop). Chain and tree are just routes. The promises: a version
is stored once, whole and checked, or not at all; whatever a target lacks is sent to it, also what is just arriving;
a version that is here or on its way is declined, so offering twice is harmless; an older route is ignored.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock, Thread

from tailrace.relay.arena import Arena, ArenaError
from tailrace.relay.feeder import Feeder
from tailrace.relay.link import (
    CHUNK,
    STALL_S,
    Address,
    AnyMessage,
    Busy,
    Channel,
    Have,
    LinkError,
    Offer,
    Pull,
    Refused,
    Sending,
    Stored,
    TokenError,
    Want,
    attend,
    receive,
    send,
)
from tailrace.relay.shelf import Parcel, Shelf
from tailrace.types import RelayId, Struct, Version, label

CLOSE_S = 5.0  # for threads to notice that the node has closed


class Failure(Struct):
    """A version that did not get here (`target` is None) or did not get to a target; the node goes on."""

    version: Version
    target: RelayId | None
    reason: str


class RelayNode:
    """Listens as soon as it is made. `address` is where it does."""

    def __init__(
        self,
        id: RelayId,
        arena: Arena,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        on_stored: Callable[[Version], None] = lambda version: None,
        on_failed: Callable[[Failure], None] = lambda failure: None,
        chunk_mbytes: float = 0.0,
        stall_s: float = STALL_S,
    ) -> None:
        self.id, self.arena = id, arena
        self._token, self._on_stored, self._on_failed = token, on_stored, on_failed
        self._chunk = int(chunk_mbytes * 1e6) or CHUNK
        self._stall_s = stall_s
        self._shelf = Shelf()
        self._lock = Lock()  # of the five below
        self._feeders: dict[RelayId, Feeder] = {}
        self._leaving: list[Feeder] = []  # off the route, but still busy with their last version
        self._guests: dict[Channel, Thread] = {}
        self._epoch = -1
        self._closed = False
        self._listener = _listen(host, port)
        self.address = Address(*self._listener.getsockname()[:2])
        self._door = Thread(target=self._accept, name=f"relay {id}", daemon=True)
        self._door.start()

    # --------------------------------------------------------------------------------------------- what control asks

    def versions(self) -> tuple[Version, ...]:
        return self._shelf.sealed()

    def route(self, epoch: int, targets: Mapping[RelayId, tuple[str, int]]) -> bool:
        """From now on send these relays whatever they lack. False if a newer route is known."""
        with self._lock:
            if epoch <= self._epoch or self._closed:
                return False
            self._epoch = epoch
            wanted = {id: Address(*address) for id, address in targets.items()}
            self._leaving = [feeder for feeder in self._leaving if feeder.is_alive()]
            for feeder in [f for f in self._feeders.values() if wanted.get(f.target) != f.address]:
                self._leaving.append(self._feeders.pop(feeder.target))
                feeder.end()
            for id, address in wanted.items():
                self._feed(id, address)
        return True

    def drop(self, version: Version) -> None:
        """Free a version; one that is arriving is broken off. Targets to which it is being sent still get it."""
        with self._shelf.changed:
            self._shelf.dropped.add(version)
            parcel = self._shelf.parcels.get(version)
            if parcel is not None and parcel.sealed is None:
                parcel.unwanted = True
                return
            self._shelf.take_away(version)
            self.arena.drop(version)

    def close(self) -> None:
        """Stop everything, also what is under way. The arena stays."""
        with self._lock:
            self._closed = True
            feeders = [*self._feeders.values(), *self._leaving]
            threads = [self._door, *feeders, *self._guests.values()]
            for feeder in feeders:
                feeder.end(abort=True)
            for channel in self._guests:
                channel.abort()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------------------------------------------- sending

    def _feed(self, id: RelayId, address: Address) -> None:
        if id in self._feeders:
            self._feeders[id].renew()
            return
        feeder = Feeder(id, address, self._token, self._shelf, self._undelivered, self._chunk, self._stall_s)
        self._feeders[id] = feeder
        feeder.start()

    def _undelivered(self, version: Version, target: RelayId, reason: str) -> None:
        self._on_failed(Failure(version, target, reason))

    # ----------------------------------------------------------------------------------------------------- receiving

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # its time-out, a caller that is gone again, too many open files, or our own end
                time.sleep(0.0 if self._closed else 0.01)
                continue
            channel = Channel(connection, str(Address(*address[:2])), self._stall_s)
            guest = Thread(target=self._serve, args=(channel,), name=f"from {channel.peer}", daemon=True)
            with self._lock:
                self._guests[channel] = guest
            if self._closed:
                channel.abort()
            guest.start()

    def _serve(self, channel: Channel) -> None:
        try:
            self._answer(channel)
        except LinkError:
            pass  # what it cost is reported already; the caller sees a closed connection
        finally:
            channel.close()
            with self._lock:
                del self._guests[channel]

    def _answer(self, channel: Channel) -> None:
        channel.greet(self._token, "callee")
        try:
            request = channel.receive()
        except TokenError:
            channel.send(Refused("another token"))  # which the caller cannot read, and that tells it enough
            return
        if isinstance(request, Offer):
            self._take(channel, request)
        elif isinstance(request, Pull):
            self._hand_out(channel, request)

    def _hand_out(self, channel: Channel, request: Pull) -> None:
        parcel = self._shelf.get(request.version)
        if parcel is None:
            channel.send(Refused(f"{label('version', request.version)} is not held here"))
            return
        channel.send(Sending(parcel.size))
        send(channel, parcel, self._chunk)

    def _take(self, channel: Channel, request: Offer) -> None:
        parcel = self._admit(request, channel)
        if not isinstance(parcel, Parcel):
            channel.send(parcel)
            return
        try:
            if request.here:
                channel.send(parcel.place())
                attend(channel, parcel)
                self._seal(parcel)
            else:
                channel.send(Want())
                self._seal(parcel, receive(channel, parcel, self._chunk))
        except (LinkError, ArenaError, OSError) as error:
            self._broke_off(parcel, str(error))
            return
        self._on_stored(parcel.version)
        channel.send(Stored())

    def _seal(self, parcel: Parcel, checksum: str = "") -> None:
        with self._shelf.changed:  # so that a `drop` comes before or after
            parcel.check_wanted()
            parcel.seal(checksum)

    def _admit(self, request: Offer, channel: Channel) -> Parcel | AnyMessage:
        """Room for a version that is new here; otherwise the answer that says why not."""
        with self._shelf.changed:
            parcel = self._shelf.parcels.get(request.version)
            if parcel is not None and parcel.sealed:
                return Have()
            if parcel is not None:
                parcel.overtake()
                return Busy()
            if request.version in self._shelf.dropped and not request.fresh:
                return Have()
            try:
                writer = self.arena.create(request.version, request.size, in_place=request.here)
            except (ArenaError, OSError) as error:
                return Refused(str(error))
            parcel = Parcel(writer, channel.abort, self._stall_s)
            self._shelf.put(parcel)
            return parcel

    def _broke_off(self, parcel: Parcel, reason: str) -> None:
        with self._shelf.changed:
            parcel.discard()
            self._shelf.take_away(parcel.version)
        if not self._closed:
            self._on_failed(Failure(parcel.version, None, reason))


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise LinkError(f"cannot listen on {host}:{port}: {error.strerror or error}; take another port") from None
    listener.settimeout(1.0)  # not every system wakes an `accept` when its socket is shut down
    return listener
