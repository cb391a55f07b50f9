"""The protocol that transfers one weight version, or a part of one, over a channel; the next one may follow.

    sender    OfferVersion                        replica   PullVersion
    receiver  AcceptVersion | AlreadyHeld |       relay     PullAccepted | VersionRefused
              ReceivingElsewhere | VersionRefused
    sender    ChunkHeader and its bytes, ...      relay     ChunkHeader and its bytes, ...
    sender    EndOfVersion                        relay     EndOfVersion
    receiver  KeepAlive, ..., VersionSealed

A version may come in parts, each over a channel of its own. The receiver confirms a part once all of them are there and
the version is sealed; until then it sends `KeepAlive`.

Verified bytes are kept when a connection breaks, and the next sender resumes after them. A sender that has nothing to
send at the moment sends `KeepAlive`, so that silence means a broken connection. A chunk that is not the next one, or
whose checksums are wrong, ends the connection, and the next one resumes before it.

How the bytes of chunks get to the receiver is a `ChunkSender`'s and a `ChunkReceiver`'s matter: they follow the header
on the same socket (`OverSocket`), or the receiver reads them by NIXL (`nixl_transport.py`) if both can. Then the sender
says first which memory it lends (`RegisteredMemory`), and the receiver what it has read (`ChunkTaken`). If both have an
earlier version, only the differences follow (`delta_transport.py`).

A trainer on the receiver's host sends no bytes: it offers the version `in_place`, gets a `WriteTarget` in shared
memory, writes there, and reports its progress with `WrittenUpTo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from msgspec.structs import replace

from tailrace.types import Version, label
from tailrace.weights.channel import Channel, ChannelError, VersionRefusedError
from tailrace.weights.checksum import CHECKSUM_BYTES, PIECE
from tailrace.weights.messages import (
    AcceptVersion,
    AlreadyHeld,
    AnyMessage,
    BaseVersion,
    ChunkHeader,
    EndOfVersion,
    KeepAlive,
    OfferVersion,
    PullAccepted,
    PullVersion,
    ReceivingElsewhere,
    RegisteredMemory,
    VersionRefused,
    VersionSealed,
    WriteTarget,
    WrittenUpTo,
)
from tailrace.weights.part import Part
from tailrace.weights.version_buffer import PartBuffer

CHUNK = PIECE  # bytes; a relay forwards a chunk when it has all of it
LARGEST_CHUNK = 64 * PIECE
KEEPALIVE_S = 1.0

OfferResult = AlreadyHeld | ReceivingElsewhere | VersionSealed


class VersionSource(Protocol):
    """A version to send, or a part of one, perhaps still growing. Positions are those within the part. `content_id` and
    `generation` are as in `OfferVersion`."""

    version: Version
    part: Part
    content_id: str
    generation: int

    def ready(self, position: int, timeout_s: float) -> memoryview:
        """What is there from `position` on, in whole pieces or to the end; empty if nothing comes in time."""
        ...

    def checksums(self, start: int, end: int) -> bytes:
        """Of the pieces in this range, which `ready` has returned before."""
        ...

    def checksum(self, timeout_s: float) -> str | None:
        """Of the whole version, after `ready` has returned all of the part. None: not known in time; empty: this has
        a part only, and never knows it."""
        ...


Write = Callable[[WriteTarget], Iterator[int]]  # writes a version there, and yields how many bytes are written


class ChunkSender(Protocol):
    """The way of chunks of up to `chunk` bytes."""

    chunk: int

    def send(self, header: ChunkHeader, data: memoryview, rest: str) -> None: ...


class ChunkReceiver(Protocol):
    """The other end."""

    def connect(self, memory: RegisteredMemory) -> None: ...
    def take(self, chunk: ChunkHeader, targets: list[memoryview], rest: str) -> None: ...


class Lender(Protocol):
    """Another way than the socket; `name` is for the offer."""

    @property
    def name(self) -> str: ...
    def sending(self, channel: Channel) -> AbstractContextManager[ChunkSender]: ...


class Bases(Protocol):
    """Versions from which the differences can be sent; `names` are for the offer. `base`: None for all of it."""

    @property
    def names(self) -> tuple[BaseVersion, ...]: ...
    def sending(
        self, channel: Channel, part: Part, base: Version | None, chunk: int
    ) -> AbstractContextManager[ChunkSender]: ...


class DamagedChunkError(ChannelError):
    """A chunk has other checksums than it was sent with."""


class OverSocket:
    """Both ends of the way over a channel's own socket."""

    def __init__(self, channel: Channel, chunk: int = CHUNK) -> None:
        self._channel, self.chunk = channel, chunk

    def send(self, header: ChunkHeader, data: memoryview, rest: str) -> None:
        self._channel.send(header)
        self._channel.send_bytes(data, rest)

    def connect(self, memory: RegisteredMemory) -> None:
        raise ChannelError(f"{self._channel.peer} lends memory, which nobody has asked for")

    def take(self, chunk: ChunkHeader, targets: list[memoryview], rest: str) -> None:
        if chunk.lent or chunk.encoded:
            raise ChannelError(f"{self._channel.peer} sent a chunk in a way that nobody has asked for")
        self._channel.receive_weights(targets, rest)


def offer(
    channel: Channel,
    source: VersionSource,
    chunk: int = CHUNK,
    from_trainer: bool = False,
    destination: str = "",
    lender: Lender | None = None,
    bases: Bases | None = None,
) -> OfferResult:
    """Offer a version and send it if it is accepted; returns when the receiver has sealed it or does not need it.
    `destination` is as in `OfferVersion`; with a `lender` or `bases` the receiver may choose the way."""
    name = label("version", source.version)
    request = _offer(source, from_trainer, destination=destination, nixl=lender.name if lender else "")
    channel.send(replace(request, bases=bases.names) if bases else request)
    answer = channel.receive(f"an answer to the offer of {name}")
    if isinstance(answer, AcceptVersion):
        with _way(channel, source.part, answer, chunk, lender, bases) as sender:
            send(channel, source, answer.start, sender=sender)
        answer = confirmation(channel, source.version)
    return _result(channel, source.version, answer)


def _way(
    channel: Channel, part: Part, answer: AcceptVersion, chunk: int, lender: Lender | None, bases: Bases | None
) -> AbstractContextManager[ChunkSender]:
    """The one that the receiver has chosen."""
    if lender and answer.nixl:
        return lender.sending(channel)
    if bases:
        return bases.sending(channel, part, answer.base, chunk)
    return nullcontext(OverSocket(channel, chunk))


def offer_in_place(channel: Channel, source: VersionSource, write: Write) -> OfferResult:
    """As the trainer, to a relay on the same host: offer a version and, if it is accepted, write it there."""
    channel.send(_offer(source, from_trainer=True, in_place=True))
    answer = channel.receive(f"a write target for {label('version', source.version)}")
    if isinstance(answer, WriteTarget):
        for position in write(answer):
            channel.send(WrittenUpTo(position))
        answer = confirmation(channel, source.version)
    return _result(channel, source.version, answer)


def _offer(
    source: VersionSource, from_trainer: bool, in_place: bool = False, destination: str = "", nixl: str = ""
) -> OfferVersion:
    return OfferVersion(
        source.version,
        source.part.version_size,
        source.content_id,
        source.generation,
        from_trainer,
        in_place,
        source.part.pack(),
        destination,
        nixl,
    )


def confirmation(channel: Channel, version: Version) -> AnyMessage:
    """What the receiver says when it has everything, or cannot wait for the rest any longer."""
    while isinstance(answer := channel.receive(f"the confirmation of {label('version', version)}"), KeepAlive):
        pass
    return answer


def send(
    channel: Channel, source: VersionSource, start: int = 0, chunk: int = CHUNK, sender: ChunkSender | None = None
) -> None:
    """Send every chunk as soon as it is there; over the socket unless there is a `sender`."""
    way = sender or OverSocket(channel, chunk)
    size = source.part.size
    if not _is_boundary(start, size):
        raise ChannelError(f"{channel.peer} wants {_rest(source.version, start, size)}: no piece begins there")
    position = start
    while position < size:
        data = source.ready(position, KEEPALIVE_S)[: way.chunk]
        if not data:
            channel.send(KeepAlive())
            continue
        end = position + len(data)
        header = ChunkHeader(position, len(data), source.checksums(position, end))
        way.send(header, data, _rest(source.version, position, size))
        channel.weight_bytes_sent += len(data)
        position = end
    _send_end(channel, source)


def _send_end(channel: Channel, source: VersionSource) -> None:
    while (checksum := source.checksum(KEEPALIVE_S)) is None:
        channel.send(KeepAlive())
    channel.send(EndOfVersion(checksum))


def receive(channel: Channel, buffer: PartBuffer, receiver: ChunkReceiver | None = None) -> str:
    """Into shared memory, straight from the socket unless there is a `receiver`. Returns the version's checksum, if the
    sender knows it."""
    way = receiver or OverSocket(channel)
    while True:
        rest = _rest(buffer.version.version, buffer.written, buffer.size)
        message = channel.receive(rest)
        if isinstance(message, ChunkHeader):
            _receive_chunk(channel, buffer, message, rest, way)
        elif isinstance(message, RegisteredMemory):
            way.connect(message)
        elif isinstance(message, EndOfVersion) and buffer.written == buffer.size:
            return message.checksum
        elif not isinstance(message, KeepAlive):
            raise ChannelError(f"{channel.peer} sent {type(message).__name__} instead of {rest}")


def _receive_chunk(channel: Channel, buffer: PartBuffer, chunk: ChunkHeader, rest: str, way: ChunkReceiver) -> None:
    start, end = chunk.position, chunk.position + chunk.size
    sent = f"{channel.peer} sent bytes {start:,} to {end:,}"
    if start != buffer.written or not start < end <= buffer.size:
        raise ChannelError(f"{sent} instead of {rest}")
    check_chunk(chunk, buffer.size, sent, rest)
    way.take(chunk, buffer.claim(chunk.size), rest)
    if not buffer.confirm(chunk.size, chunk.checksums):
        raise DamagedChunkError(f"{sent} damaged, of {rest}")


def check_chunk(chunk: ChunkHeader, size: int, sent: str, rest: str) -> None:
    """ChannelError if no sender of a part of that size cuts it so."""
    if chunk.size > LARGEST_CHUNK:
        raise ChannelError(f"{sent} instead of {rest}")
    checksums = -(-chunk.size // PIECE) * CHECKSUM_BYTES
    if not _is_boundary(chunk.position + chunk.size, size) or len(chunk.checksums) != checksums:
        raise ChannelError(f"{sent} with checksums that do not match their size")


def receive_in_place(channel: Channel, buffer: PartBuffer) -> None:
    """The relay's side of `offer_in_place`: follow the progress until everything is written."""
    while buffer.written < buffer.size:
        message = channel.receive("the progress of a write in place")
        if not isinstance(message, WrittenUpTo) or not buffer.written < message.position <= buffer.size:
            raise ChannelError(f"{channel.peer} sent {message} after {buffer.written:,} of {buffer.size:,} bytes")
        channel.weights_received_at = time.monotonic()
        buffer.advance(message.position - buffer.written)


def pull(channel: Channel, version: Version, content_id: str = "", start: int = 0) -> PullAccepted:
    """Ask a relay for a version, from `start` on if it has this content id. Its bytes follow."""
    channel.send(PullVersion(version, content_id, start))
    answer = channel.receive(f"an answer to the request for {label('version', version)}")
    if isinstance(answer, PullAccepted):
        return answer
    raise _unexpected(channel, version, answer)


def _result(channel: Channel, version: Version, answer: AnyMessage) -> OfferResult:
    if isinstance(answer, AlreadyHeld | ReceivingElsewhere | VersionSealed):
        return answer
    raise _unexpected(channel, version, answer)


def _unexpected(channel: Channel, version: Version, answer: AnyMessage) -> ChannelError:
    if isinstance(answer, VersionRefused):
        return VersionRefusedError(f"{channel.peer} refused {label('version', version)}: {answer.reason}")
    return ChannelError(f"{channel.peer} answered {type(answer).__name__} about {label('version', version)}")


def _is_boundary(position: int, size: int) -> bool:
    """Between two pieces, or at the end."""
    return position == size or (position % PIECE == 0 and position < size)


def _rest(version: Version, position: int, size: int) -> str:
    return f"{label('version', version)} from byte {position:,} of {size:,} on"
