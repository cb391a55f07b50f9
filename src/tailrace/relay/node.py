"""A relay's data plane: takes versions in, keeps them in the arena, sends them on along the current route.

The relay's process owns one `RelayNode` and carries control's commands to it; the node's threads call `on_stored` and
`on_failed` (from any thread: hand them over to your own loop). Chain and tree are just routes. The promises: a version
is stored once, whole and checked, or not at all; whatever a target lacks is sent to it, also what is just arriving; a
version that is here or on its way is declined, so offering twice is harmless; one whose sender is gone is kept as far
as it came, and the next sender goes on there; an older route is ignored.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock, Thread

from tailrace.relay.arena import Arena, ArenaError
from tailrace.relay.checksum import whole_pieces
from tailrace.relay.feeder import Feeder
from tailrace.relay.link import STALL_S, Address, Channel, LinkError, TokenError
from tailrace.relay.messages import AnyMessage, Busy, Have, Offer, Pull, Refused, Sending, Stored, Want
from tailrace.relay.shelf import Parcel, ParcelError, Shelf
from tailrace.relay.transfer import CHUNK, attend, receive, send
from tailrace.types import RelayId, Struct, Version, label
from tailrace.wire import descriptors
from tailrace.wire.tls import LOOPBACK, Identity, is_loopback, own_address

MOST_STRANGERS = 64  # connections that have not yet shown that they belong to the run
PAUSE_S = 0.002  # between two of a crowd, which must not take the time of a relay
CLOSE_S = 5.0  # for threads to notice that the node has closed


class Failure(Struct):
    """A version that did not get here (`target` is None) or did not get to a target; the node goes on. `lasting`: it
    has been so for a while, and control should know."""

    version: Version
    target: RelayId | None
    reason: str
    lasting: bool = False


class RelayNode:
    """Listens as soon as it is made. `address` is where it does. `listen` is an address of this host, or a network in
    which to take this host's; off the loopback, links are encrypted."""

    def __init__(
        self,
        id: RelayId,
        arena: Arena,
        token: bytes,
        listen: str = LOOPBACK,
        port: int = 0,
        on_stored: Callable[[Version], None] = lambda version: None,
        on_failed: Callable[[Failure], None] = lambda failure: None,
        chunk_mbytes: float = 0.0,
        stall_s: float = STALL_S,
    ) -> None:
        self.id, self.arena = id, arena
        self._token, self._on_stored, self._on_failed = token, on_stored, on_failed
        self._chunk = whole_pieces(chunk_mbytes, CHUNK)
        self._stall_s = stall_s
        self._shelf = Shelf()
        self._reign = 0  # of the newest trainer that was heard of; guarded by the shelf
        self._lock = Lock()  # of the five below
        self._feeders: dict[RelayId, Feeder] = {}
        self._leaving: list[Feeder] = []  # off the route, but still busy with their last version
        self._guests: dict[Channel, Thread] = {}
        self._epoch = -1
        self._closed = False
        self._most_strangers = min(MOST_STRANGERS, descriptors.shares().strangers)
        host = own_address(listen)
        self._identity = None if is_loopback(host) else Identity()
        self._listener = _listen(host, port)
        mark = self._identity.fingerprint if self._identity else ""
        self.address = Address(host, self._listener.getsockname()[1], mark)
        self._door = Thread(target=self._accept, name=f"relay {id}", daemon=True)
        self._door.start()

    # --------------------------------------------------------------------------------------------- what control asks

    def versions(self) -> tuple[Version, ...]:
        return self._shelf.sealed()

    def route(self, epoch: int, targets: Mapping[RelayId, Address]) -> bool:
        """From now on send these relays whatever they lack. False if a newer route is known."""
        with self._lock:
            if epoch <= self._epoch or self._closed:
                return False
            self._epoch = epoch
            self._leaving = [feeder for feeder in self._leaving if feeder.is_alive()]
            for feeder in [f for f in self._feeders.values() if targets.get(f.target) != f.address]:
                self._leaving.append(self._feeders.pop(feeder.target))
                feeder.end()
            for id, address in targets.items():
                self._feed(id, address)
        return True

    def drop(self, version: Version) -> None:
        """Free a version; one that is arriving is broken off. Targets to which it is being sent still get it."""
        with self._shelf.changed:
            self._shelf.dropped.add(version)
            parcel = self._shelf.parcels.get(version)
            if parcel is not None and parcel.arriving:
                parcel.unwanted = True
                return
            if parcel is not None and parcel.waits:
                parcel.discard()
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

    def _undelivered(self, version: Version, target: RelayId, reason: str, lasting: bool) -> None:
        self._on_failed(Failure(version, target, reason, lasting))

    # ----------------------------------------------------------------------------------------------------- receiving

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # its time-out, a caller that is gone again, too many open files, or our own end
                time.sleep(0.0 if self._closed else 0.01)
                continue
            channel = Channel(connection, Address(*address[:2]).place, self._stall_s)
            guest = Thread(target=self._serve, args=(channel,), name=f"from {channel.peer}", daemon=True)
            with self._lock:
                if self._closed:
                    channel.close()
                    return
                crowded = self._make_room_for_a_stranger()
                self._guests[channel] = guest
            guest.start()
            time.sleep(PAUSE_S if crowded else 0.0)

    def _make_room_for_a_stranger(self) -> bool:
        """The one that has been here longest without proving itself goes, if there are too many."""
        strangers = [channel for channel in self._guests if not channel.known and not channel.aborted]
        for channel in strangers[: max(0, 1 + len(strangers) - self._most_strangers)]:
            channel.abort()
        return len(strangers) >= self._most_strangers

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
        try:
            request = channel.answer(self._token, self._identity)
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
        start = request.start if request.edition == parcel.edition else 0
        channel.send(Sending(parcel.size, parcel.edition, start))
        send(channel, parcel, start, self._chunk)

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
                channel.send(Want(parcel.written))
                self._seal(parcel, receive(channel, parcel))
        except (LinkError, ArenaError, OSError) as error:
            self._broke_off(parcel, error, keep=_is_harmless(error) and not request.here)
            return
        self._on_stored(parcel.version)
        channel.send(Stored())

    def _seal(self, parcel: Parcel, checksum: str = "") -> None:
        with self._shelf.changed:  # so that a `drop` comes before or after
            parcel.check_wanted()
            parcel.seal(checksum)

    def _admit(self, request: Offer, channel: Channel) -> Parcel | AnyMessage:
        """Room for a version that is new here, or what has come of it; otherwise the answer that says why not."""
        with self._shelf.changed:
            if request.fresh and request.reign < self._reign:
                return Refused("it comes from a trainer that has been replaced")
            self._reign = max(self._reign, request.reign)
            parcel = self._shelf.parcels.get(request.version)
            if parcel is not None and parcel.sealed:
                return Have()
            if parcel is not None and parcel.arriving:
                parcel.overtake()
                return Busy()
            if parcel is not None and parcel.goes_on_with(request):
                parcel.resume(channel)
                self._shelf.changed.notify_all()
                return parcel
            if request.version in self._shelf.dropped and not request.fresh:
                return Have()
            self._give_up_waiting()
            return self._make_room(request, channel)

    def _make_room(self, request: Offer, channel: Channel) -> Parcel | AnyMessage:
        try:
            writer = self.arena.create(request.version, request.size, in_place=request.here)
        except (ArenaError, OSError) as error:
            return Refused(str(error))
        parcel = Parcel(writer, request, channel, self._stall_s)
        self._shelf.put(parcel)
        return parcel

    def _give_up_waiting(self) -> None:
        """What waits for the rest of it must not take memory for ever: it gives way to whatever comes next."""
        for parcel in [parcel for parcel in self._shelf.parcels.values() if parcel.waits]:
            parcel.discard()
            self._shelf.take_away(parcel.version)

    def _broke_off(self, parcel: Parcel, error: Exception, keep: bool) -> None:
        with self._shelf.changed:
            if keep:
                parcel.pause()
            else:
                parcel.discard()
                self._shelf.take_away(parcel.version)
        if not self._closed:
            self._on_failed(Failure(parcel.version, None, str(error)))


def _is_harmless(error: Exception) -> bool:
    """Whether what has come of a version is worth keeping: only its sender is gone, or sent what it should not."""
    return isinstance(error, LinkError) and not isinstance(error, ParcelError)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise LinkError(f"cannot listen on {host}:{port}: {error.strerror or error}; take another port") from None
    listener.settimeout(1.0)  # not every system wakes an `accept` when its socket is shut down
    return listener
