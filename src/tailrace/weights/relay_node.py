"""A relay's data plane: receives versions into shared memory, in parts perhaps, and forwards them along the route.

The relay's process owns one `RelayNode` and passes control's commands to it; the node's threads call `on_stored` and
`on_failed` (from any thread). Chain and tree are just routes. Guarantees: a version is stored once, whole and verified,
or not at all; a target gets whatever it lacks, also what is just arriving; offering a version twice is harmless; a
version whose sender is gone is kept as far as it came, and the next sender resumes it; an older route is ignored. A
part that a trainer rank on this host has for another relay is passed on to it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock, Thread

from tailrace.types import RelayId, Struct, Version, label
from tailrace.weights.channel import STALL_S, Address, Channel, ChannelError, TokenError
from tailrace.weights.checksum import chunk_bytes
from tailrace.weights.delta_transport import DeltaReceiver
from tailrace.weights.forward import Forwarder
from tailrace.weights.messages import (
    AcceptVersion,
    AlreadyHeld,
    AnyMessage,
    BaseVersion,
    KeepAlive,
    OfferVersion,
    PullAccepted,
    PullVersion,
    ReceivingElsewhere,
    VersionRefused,
    VersionSealed,
    WriteTarget,
)
from tailrace.weights.nixl_transport import NixlTransport
from tailrace.weights.part import Part
from tailrace.weights.pass_on import pass_on
from tailrace.weights.region import SharedMemoryError
from tailrace.weights.shared_memory import SharedMemory
from tailrace.weights.streams import Hop
from tailrace.weights.transfer import CHUNK, KEEPALIVE_S, DamagedChunkError, receive, receive_in_place, send
from tailrace.weights.version_buffer import InterruptedVersionError, PartBuffer, VersionBuffer
from tailrace.weights.version_table import VersionTable
from tailrace.wire import descriptors
from tailrace.wire.tls import LOOPBACK, Identity, is_loopback, own_address

MAX_UNAUTHENTICATED = 64  # connections
CROWD_PAUSE_S = 0.002  # between two accepts when there are that many, so that they do not take the relay's time
CLOSE_S = 5.0  # for threads to notice that the node has closed
REPLACED = VersionRefused("it comes from a trainer that has been replaced")


class TransferFailure(Struct):
    """A version that was not received (`target` is None) or not forwarded to a target; the node goes on. `persistent`:
    it has failed for a while, and control should know."""

    version: Version
    target: RelayId | None
    reason: str
    persistent: bool = False


class RelayNode:
    """Listens from its creation on, at `address`. `listen` is an IP address of this host, or a network that this host
    has an address in; connections off the loopback are encrypted. `full_every` and `congestion`: as in the settings."""

    def __init__(
        self,
        id: RelayId,
        memory: SharedMemory,
        token: bytes,
        listen: str = LOOPBACK,
        port: int = 0,
        on_stored: Callable[[Version], None] = lambda version: None,
        on_failed: Callable[[TransferFailure], None] = lambda failure: None,
        chunk_mbytes: float = 0.0,
        stall_s: float = STALL_S,
        streams: int = 0,
        nixl: NixlTransport | None = None,
        full_every: int = 1,
        congestion: str = "",
    ) -> None:
        self.id, self.memory = id, memory
        self._token, self._on_stored, self._on_failed = token, on_stored, on_failed
        self._chunk = chunk_bytes(chunk_mbytes, CHUNK)
        self._stall_s, self._streams, self._nixl = stall_s, streams, nixl
        self._full_every, self._congestion = full_every, congestion
        self._passing = Hop(token, stall_s=stall_s, congestion=congestion)
        self._table = VersionTable()
        self._generation = 0  # of the newest trainer; guarded by the table
        self._lock = Lock()  # guards the next five
        self._forwarders: dict[RelayId, Forwarder] = {}
        self._draining: list[Forwarder] = []  # off the route, but still sending their last version
        self._connections: dict[Channel, Thread] = {}
        self._revision = -1
        self._closed = False
        self._max_unauthenticated = min(MAX_UNAUTHENTICATED, descriptors.shares().strangers)
        host = own_address(listen)
        self._identity = None if is_loopback(host) else Identity()
        self._listener = _listen(host, port)
        fingerprint = self._identity.fingerprint if self._identity else ""
        self.address = Address(host, self._listener.getsockname()[1], fingerprint)
        self._acceptor = Thread(target=self._accept, name=f"relay {id}", daemon=True)
        self._acceptor.start()

    # ---------------------------------------------------------------------------------------------- control's commands

    def versions(self) -> tuple[Version, ...]:
        return self._table.sealed()

    def route(self, revision: int, targets: Mapping[RelayId, Address]) -> bool:
        """From now on forward to these relays whatever they lack. False if a newer route is known."""
        with self._lock:
            if revision <= self._revision or self._closed:
                return False
            self._revision = revision
            self._draining = [forwarder for forwarder in self._draining if forwarder.is_alive()]
            for forwarder in [f for f in self._forwarders.values() if targets.get(f.target) != f.address]:
                self._draining.append(self._forwarders.pop(forwarder.target))
                forwarder.stop()
            for id, address in targets.items():
                self._forward_to(id, address)
        return True

    def drop(self, version: Version) -> None:
        """Free a version; one that is arriving is aborted. Targets that it is being sent to still get it."""
        with self._table.changed:
            self._table.dropped.add(version)
            buffer = self._table.buffers.get(version)
            if buffer is not None and buffer.arriving:
                buffer.cancel()
                return
            if buffer is not None and buffer.paused:
                buffer.discard()
            self._table.remove(version)
            self.memory.drop(version)

    def close(self) -> None:
        """Stop everything, also transfers under way. The shared memory stays."""
        with self._lock:
            self._closed = True
            forwarders = [*self._forwarders.values(), *self._draining]
            threads = [self._acceptor, *forwarders, *self._connections.values()]
            for forwarder in forwarders:
                forwarder.stop(abort=True)
            for channel in self._connections:
                channel.abort()
        self._passing.abort("the relay is closing")
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------------------------------------------- sending

    def _forward_to(self, id: RelayId, address: Address) -> None:
        if id in self._forwarders:
            self._forwarders[id].restart()
            return
        pace = (self._chunk, self._stall_s, self._streams, self._nixl, self._congestion)
        forwarder = Forwarder(id, address, self._token, self._table, self._not_forwarded, *pace)
        self._forwarders[id] = forwarder
        forwarder.start()

    def _not_forwarded(self, version: Version, target: RelayId, reason: str, persistent: bool) -> None:
        self._on_failed(TransferFailure(version, target, reason, persistent))

    def _serve_pull(self, channel: Channel, request: PullVersion) -> None:
        buffer = self._table.get(request.version)
        if buffer is None:
            channel.send(VersionRefused(f"{label('version', request.version)} is not held here"))
            return
        start = request.start if request.content_id == buffer.content_id else 0
        channel.send(PullAccepted(buffer.size, buffer.content_id, start))
        send(channel, buffer, start, self._chunk)

    # --------------------------------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # its timeout, a caller that has left again, too many open files, or our own end
                time.sleep(0.0 if self._closed else 0.01)
                continue
            channel = Channel(connection, Address(*address[:2]).host_port, self._stall_s)
            channel.set_congestion(self._congestion)
            thread = Thread(target=self._serve, args=(channel,), name=f"from {channel.peer}", daemon=True)
            with self._lock:
                if self._closed:
                    channel.close()
                    return
                crowded = self._limit_unauthenticated()
                self._connections[channel] = thread
            thread.start()
            time.sleep(CROWD_PAUSE_S if crowded else 0.0)

    def _limit_unauthenticated(self) -> bool:
        """If there are too many, the oldest one is disconnected."""
        waiting = [channel for channel in self._connections if not channel.authenticated and not channel.aborted]
        for channel in waiting[: max(0, 1 + len(waiting) - self._max_unauthenticated)]:
            channel.abort()
        return len(waiting) >= self._max_unauthenticated

    def _serve(self, channel: Channel) -> None:
        try:
            self._answer(channel)
        except ChannelError:
            pass  # what it cost is reported already; the caller sees a closed connection
        finally:
            channel.close()
            with self._lock:
                del self._connections[channel]

    def _answer(self, channel: Channel) -> None:
        try:
            request = channel.answer(self._token, self._identity)
        except TokenError:
            channel.send(VersionRefused("another token"))  # the caller cannot verify it, which tells it enough
            return
        while True:
            if isinstance(request, OfferVersion):
                self._offered(channel, request)
            elif isinstance(request, PullVersion):
                self._serve_pull(channel, request)
            channel.wait_for_request()
            request = channel.receive("the next request")

    def _offered(self, channel: Channel, request: OfferVersion) -> None:
        """A `ChannelError` if the connection is of no use any more."""
        try:
            part = Part.unpack(request.size, request.ranges)
        except ValueError as error:
            channel.send(VersionRefused(f"no such part of {label('version', request.version)}: {error}"))
            return
        if request.destination and request.destination != str(self.address):
            self._pass_on(channel, request, part)
        else:
            self._receive(channel, request, part)

    def _pass_on(self, channel: Channel, request: OfferVersion, part: Part) -> None:
        """From a rank on this host to the relay that assembles the version."""
        if self._is_replaced(request):
            channel.send(REPLACED)
            return
        try:
            with self._passing.open(Address.read(request.destination)) as receiver:
                pass_on(channel, receiver, request, part.size)
        except (ChannelError, ValueError) as error:
            channel.send(VersionRefused(f"it cannot be passed on: {error}"))
            raise ChannelError(str(error)) from error  # the sender may be in the middle of a chunk

    # ----------------------------------------------------------------------------------------------------- receiving

    def _receive(self, channel: Channel, request: OfferVersion, part: Part) -> None:
        buffer = self._admit(request, part, channel)
        if not isinstance(buffer, PartBuffer):
            channel.send(buffer)
            return
        try:
            self._end(buffer, self._receive_bytes(channel, buffer, request))
            self._wait_for_others(channel, buffer.version)
        except (ChannelError, SharedMemoryError, OSError) as error:
            self._interrupted(buffer, error)
            raise ChannelError(str(error)) from error
        channel.send(VersionSealed())

    def _receive_bytes(self, channel: Channel, buffer: PartBuffer, request: OfferVersion) -> str:
        """Returns the version's checksum, if the sender knows it."""
        lender = request.nixl  # the sender's agent, if it has NIXL
        if buffer.version.in_place:
            region = buffer.version.region
            channel.send(WriteTarget(str(region.path), region.inode))
            receive_in_place(channel, buffer)
            return ""
        buffer.version.grow()  # it may be the last part to be known, and the others ahead of it
        if not lender or self._nixl is None:
            return self._receive_from_socket(channel, buffer, request)
        with self._nixl.receiving(channel, lender) as reader:
            channel.send(AcceptVersion(buffer.written, self._nixl.wants(channel, lender, buffer.size)))
            return receive(channel, buffer, reader)

    def _receive_from_socket(self, channel: Channel, buffer: PartBuffer, request: OfferVersion) -> str:
        version, base = buffer.version, self._base(buffer.version, request)
        if base is None or base.mapped is None:
            channel.send(AcceptVersion(buffer.written))
            return receive(channel, buffer)
        version.deltas = base.deltas + 1
        channel.send(AcceptVersion(buffer.written, base=base.version))
        return receive(channel, buffer, DeltaReceiver(channel, buffer.part, base.mapped, version.encoded))

    def _base(self, version: VersionBuffer, request: OfferVersion) -> VersionBuffer | None:
        """The newest version that both ends hold, unless it is time for a whole copy."""
        with self._table.changed:
            held = [self._table.buffers.get(name.version) for name in request.bases if _is_held(name, self._table)]
        bases = [base for base in held if base and base.size == version.size and base.deltas + 1 < self._full_every]
        return max(bases, key=lambda base: base.version) if bases and not version.whole_only else None

    def _end(self, buffer: PartBuffer, checksum: str) -> None:
        """The version is sealed with its last part."""
        with self._table.changed:  # so that a `drop` comes before or after
            sealed = buffer.version.end(buffer, checksum)
            if sealed:
                self._table.forget_encoded(buffer.version)
        if sealed:
            self._on_stored(buffer.version.version)

    def _wait_for_others(self, channel: Channel, version: VersionBuffer) -> None:
        """For as long as other parts arrive."""
        arrived, until = -1, 0.0
        while version.checksum(KEEPALIVE_S) is None:
            channel.send(KeepAlive())
            if version.arrived > arrived:
                arrived, until = version.arrived, time.monotonic() + self._stall_s
            if time.monotonic() > until:
                reason = f"the other parts do not come: {arrived:,} of {version.size:,} bytes are here"
                channel.send(VersionRefused(reason))
                raise ChannelError(f"{label('version', version.version)} is given up, {reason}")

    def _is_replaced(self, request: OfferVersion) -> bool:
        """It comes from a trainer after which another one was started."""
        with self._table.changed:
            if request.from_trainer and request.generation < self._generation:
                return True
            self._generation = max(self._generation, request.generation)
            return False

    def _admit(self, request: OfferVersion, part: Part, channel: Channel) -> PartBuffer | AnyMessage:
        """The buffer of the part, a new one or the one to resume; otherwise the answer that says why not."""
        with self._table.changed:
            if self._is_replaced(request):
                return REPLACED
            version = self._table.buffers.get(request.version)
            if version is not None and version.sealed:
                return AlreadyHeld()
            buffer = version.buffer_of(part) if version is not None and _belongs_to(request, version) else None
            if version is not None and version.arriving and (buffer is None or buffer.sender is not None):
                _offer_takeover(version, buffer)
                return ReceivingElsewhere()
            if buffer is not None:
                buffer.resume(channel)
                self._table.changed.notify_all()
                return buffer
            if request.version in self._table.dropped and not request.from_trainer:
                return AlreadyHeld()
            self._discard_paused()
            return self._create(request, part, channel)

    def _create(self, request: OfferVersion, part: Part, channel: Channel) -> PartBuffer | AnyMessage:
        identity = (request.content_id, request.generation)
        try:
            version = self.memory.create(request.version, request.size, request.in_place, *identity)
        except (SharedMemoryError, OSError) as error:
            return VersionRefused(str(error))
        buffer = version.buffer_of(part)
        assert buffer is not None, "the first part of a version overlaps with none"
        buffer.resume(channel)
        self._table.add(version)
        return buffer

    def _discard_paused(self) -> None:
        """A partial version must not occupy memory for ever: it gives way to whatever comes next."""
        for buffer in [buffer for buffer in self._table.buffers.values() if buffer.paused]:
            self._discard(buffer)

    def _discard(self, buffer: VersionBuffer) -> None:
        buffer.discard()
        self._table.remove(buffer.version)

    def _interrupted(self, buffer: PartBuffer, error: Exception) -> None:
        version = buffer.version
        with self._table.changed:
            if version.sealed:
                return  # and only the sender does not know
            version.whole_only |= isinstance(error, DamagedChunkError)
            if _can_resume(version, error):
                buffer.pause(self._stall_s)
            elif self._table.buffers.get(version.version) is version:
                self._discard(version)
        if not self._closed:
            self._on_failed(TransferFailure(version.version, None, str(error)))


def _is_held(name: BaseVersion, table: VersionTable) -> bool:
    buffer = table.buffers.get(name.version)
    return buffer is not None and buffer.mapped is not None and buffer.mapped.checksum == name.checksum


def _belongs_to(request: OfferVersion, version: VersionBuffer) -> bool:
    """It is a part of the same bytes."""
    return (request.content_id, request.size) == (version.content_id, version.size) and not request.in_place


def _offer_takeover(version: VersionBuffer, buffer: PartBuffer | None) -> None:
    """Somebody else offers what is being received: disconnect its sender if that seems dead."""
    if buffer is None:
        version.offer_takeover()
    elif buffer.is_silent():
        buffer.disconnect()


def _can_resume(version: VersionBuffer, error: Exception) -> bool:
    """Only its sender is gone, or broke the protocol: what was verified is right."""
    return isinstance(error, ChannelError) and not isinstance(error, InterruptedVersionError) and not version.in_place


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise ChannelError(f"cannot listen on {host}:{port}: {error.strerror or error}; take another port") from None
    listener.settimeout(1.0)  # not every system wakes an `accept` when its socket is shut down
    return listener
