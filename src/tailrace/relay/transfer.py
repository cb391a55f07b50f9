"""How one version goes over a connection: a connection carries one.

    sender    Offer(version, size, edition)           puller    Pull(version)
    receiver  Want(start) | Have | Busy | Refused     relay     Sending(size, start) | Refused
    sender    Chunk and its bytes, over and over      relay     Chunk and its bytes, over and over
    sender    Total(checksum)                         relay     Total(checksum)
    receiver  Stored | Refused

What has arrived and is right is kept when a connection breaks, and `start` is where the next sender goes on. A sender
that has nothing to send at the moment says `Waiting`, so that silence means that something is wrong with this link.
A chunk that is not the next one, or not what its sums say, ends the connection and is asked for again with the next.

A sender on the receiver's own host need not send bytes at all: it offers to write them `here`, is told a `Place` in
shared memory, and says as it goes how much it has `Written` there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from tailrace.relay.checksum import PIECE, SUM
from tailrace.relay.link import Channel, LinkError, RefusedError
from tailrace.relay.messages import (
    AnyMessage,
    Busy,
    Chunk,
    Have,
    Offer,
    Place,
    Pull,
    Refused,
    Sending,
    Stored,
    Total,
    Waiting,
    Want,
    Written,
)
from tailrace.types import Version, label

CHUNK = PIECE  # bytes; a stop hands a chunk on when it has all of it
LARGEST_CHUNK = 64 * PIECE
BEAT_S = 1.0  # between two signs of life of a sender that waits

Answer = Have | Busy | Stored


class Source(Protocol):
    """A version to send. It may still be growing. `edition` and `reign` are as in `Offer`."""

    version: Version
    size: int
    edition: str
    reign: int

    def ready(self, position: int, patience_s: float) -> memoryview:
        """What is there from `position` on, in whole pieces or to the end; nothing if nothing has come meanwhile."""
        ...

    def sums(self, start: int, end: int) -> bytes:
        """Of the pieces between, which were handed out before."""
        ...

    def checksum(self, patience_s: float) -> str:
        """Of the whole; asked for when all of it has been handed out. Nothing if it is not certain yet."""
        ...


class Sink(Protocol):
    """Where a version that arrives is written."""

    version: Version
    size: int

    @property
    def written(self) -> int: ...

    def claim(self, count: int) -> memoryview: ...

    def confirm(self, count: int, sums: bytes) -> bool:
        """The next `count` bytes have come; False if they are not what these sums say."""
        ...


class Filled(Protocol):
    """A sink that somebody else fills."""

    size: int

    @property
    def written(self) -> int: ...

    def advance(self, count: int) -> None: ...


Write = Callable[[Place], Iterator[int]]  # fills the place, and yields how far it has come


def offer(channel: Channel, source: Source, chunk: int = CHUNK, fresh: bool = False) -> Answer:
    """Offer a version and, if it is wanted, send it; returns when the other side has sealed it or does not need it."""
    name = label("version", source.version)
    channel.send(Offer(source.version, source.size, source.edition, source.reign, fresh))
    answer = channel.receive(f"an answer to the offer of {name}")
    if isinstance(answer, Want):
        send(channel, source, answer.start, chunk)
        answer = channel.receive(f"the receipt of {name}")
    return _final(channel, source.version, answer)


def place(channel: Channel, source: Source, write: Write) -> Answer:
    """Offer a version of the trainer's to a relay of the same host and, if it is wanted, write it there."""
    name = label("version", source.version)
    channel.send(Offer(source.version, source.size, source.edition, source.reign, fresh=True, here=True))
    answer = channel.receive(f"a place for {name}")
    if isinstance(answer, Place):
        for position in write(answer):
            channel.send(Written(position))
        answer = channel.receive(f"the receipt of {name}")
    return _final(channel, source.version, answer)


def attend(channel: Channel, sink: Filled) -> None:
    """The other side of `place`: learn what is written, until all of it is."""
    while sink.written < sink.size:
        answer = channel.receive("word of what is written")
        if not isinstance(answer, Written) or not sink.written < answer.position <= sink.size:
            raise LinkError(f"{channel.peer} sent {answer} after {sink.written:,} of {sink.size:,} bytes")
        channel.moved = time.monotonic()
        sink.advance(answer.position - sink.written)


def send(channel: Channel, source: Source, start: int = 0, chunk: int = CHUNK) -> None:
    """Each chunk goes out as soon as it is there, whether or not the next one is."""
    if not _is_boundary(start, source.size):
        raise LinkError(f"{channel.peer} wants {_part(source.version, start, source.size)}, where nothing begins")
    position = start
    while position < source.size:
        piece = source.ready(position, BEAT_S)[:chunk]
        if not piece:
            channel.send(Waiting())
            continue
        end = position + len(piece)
        channel.send(Chunk(position, len(piece), source.sums(position, end)))
        channel.send_bytes(piece, _part(source.version, position, source.size))
        channel.carried += len(piece)
        position = end
    while not (total := source.checksum(BEAT_S)):
        channel.send(Waiting())
    channel.send(Total(total))


def receive(channel: Channel, sink: Sink) -> str:
    """Straight from the socket into the sink's memory. Returns the first sender's checksum of the whole."""
    while True:
        part = _part(sink.version, sink.written, sink.size)
        message = channel.receive(part)
        if isinstance(message, Chunk):
            _receive_chunk(channel, sink, message, part)
        elif isinstance(message, Total) and sink.written == sink.size:
            return message.checksum
        elif not isinstance(message, Waiting):
            raise LinkError(f"{channel.peer} sent {type(message).__name__} instead of {part}")


def _receive_chunk(channel: Channel, sink: Sink, chunk: Chunk, part: str) -> None:
    end = chunk.position + chunk.size
    if chunk.position != sink.written or not chunk.position < end <= sink.size or chunk.size > LARGEST_CHUNK:
        raise LinkError(f"{channel.peer} sent bytes {chunk.position:,} to {end:,} instead of {part}")
    if not _is_boundary(end, sink.size) or len(chunk.sums) != -(-chunk.size // PIECE) * SUM:
        raise LinkError(f"{channel.peer} sent bytes {chunk.position:,} to {end:,} with sums that do not fit them")
    channel.receive_bytes(sink.claim(chunk.size), part)
    if not sink.confirm(chunk.size, chunk.sums):
        raise LinkError(f"{channel.peer} sent bytes {chunk.position:,} to {end:,} damaged, of {part}")


def pull(channel: Channel, version: Version, edition: str = "", start: int = 0) -> Sending:
    """Ask a relay for a version, from `start` on if it has this edition. Its bytes follow."""
    channel.send(Pull(version, edition, start))
    answer = channel.receive(f"an answer to the request for {label('version', version)}")
    if isinstance(answer, Sending):
        return answer
    raise _unexpected(channel, version, answer)


def _final(channel: Channel, version: Version, answer: AnyMessage) -> Answer:
    if isinstance(answer, Have | Busy | Stored):
        return answer
    raise _unexpected(channel, version, answer)


def _unexpected(channel: Channel, version: Version, answer: AnyMessage) -> LinkError:
    if isinstance(answer, Refused):
        return RefusedError(f"{channel.peer} refused {label('version', version)}: {answer.reason}")
    return LinkError(f"{channel.peer} answered {type(answer).__name__} about {label('version', version)}")


def _is_boundary(position: int, size: int) -> bool:
    """Between two pieces."""
    return position == size or (position % PIECE == 0 and position < size)


def _part(version: Version, position: int, size: int) -> str:
    return f"{label('version', version)} from byte {position:,} of {size:,} on"
