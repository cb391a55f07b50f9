"""The wire between trainer, relays and replicas: plain TCP, one version per connection.

    both      magic, nonce
    sender    Offer(version, size)                    puller    Pull(version)
    receiver  Want | Have | Busy | Refused            relay     Sending(size) | Refused
    sender    size bytes, Total(checksum)             relay     size bytes, Total(checksum)
    receiver  Stored | Refused

A sender on the receiver's own host need not send bytes at all: it offers to write them `here`, is told a `Place` in
shared memory, and says as it goes how much it has `Written` there.

Messages are signed with a key made from the run's token and both nonces, so the token itself never travels, a recorded
message is worthless, and each side knows that the other belongs to the run. The checksum is that of the first sender,
handed on unchanged, so what any relay on the way damaged is noticed by the next. Every wait on a socket has a deadline,
and every failure is a `LinkError` that names the other side.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple, Protocol, Self

import msgspec

from tailrace.types import Struct, Version, label

MAGIC = b"tailrace relay 2"
NONCE = TAG = 32
LONGEST_MESSAGE = 1 << 16
CHUNK = 4 << 20  # bytes; large enough that a hop's fixed cost vanishes, small enough that a chain fills soon
CONNECT_S = 5.0
STALL_S = 30.0  # without a byte from the other side


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """The inverse of `str`."""
        host, _, port = text.rpartition(":")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LinkError(ValueError):
    """The other side could not be reached, broke off, or is not what it should be."""


class TokenError(LinkError):
    """The other side belongs to another run; trying again will not help."""


# ------------------------------------------------------------------------------------------------------- messages


class Message(Struct, tag_field="kind", tag=True):
    pass


class Offer(Message):
    """I can send this version. `fresh`: I am the trainer, who may bring back a version that was dropped. `here`: I want
    to write it into your memory myself."""

    version: Version
    size: int
    fresh: bool = False
    here: bool = False


class Pull(Message):
    version: Version


class Want(Message):
    """Send it."""


class Place(Message):
    """Write it to this file, which you know by its inode if you are on my host, from start to end."""

    path: str
    inode: int


class Written(Message):
    """Everything before `position` is there."""

    position: int


class Have(Message):
    """I hold it, or have dropped it: nothing to do."""


class Busy(Message):
    """It is on its way to me from elsewhere; ask again, it may break off."""


class Refused(Message):
    reason: str


class Sending(Message):
    size: int


class Total(Message):
    checksum: str


class Stored(Message):
    """It is sealed here."""


AnyMessage = Offer | Pull | Want | Place | Written | Have | Busy | Refused | Sending | Total | Stored
DECODER = msgspec.msgpack.Decoder(AnyMessage)


# ------------------------------------------------------------------------------------------------------- channel


class Channel:
    """One authenticated connection. `until` is a moment of the monotonic clock after which nothing is waited for."""

    def __init__(self, connection: socket.socket, peer: str, stall_s: float, until: float = math.inf) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self.until = until
        self._socket = connection
        self._key = b""
        self._words = (b"", b"")  # what our messages and theirs are marked with, so that none can be sent back
        self._sent = self._received = 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, token: bytes, side: Literal["caller", "callee"]) -> None:
        """Exchange nonces. Who has another token than we have is found out with the first message."""
        mine, theirs = os.urandom(NONCE), bytearray(len(MAGIC) + NONCE)
        self.send_bytes(memoryview(MAGIC + mine))
        self.receive_bytes(memoryview(theirs))
        if theirs[: len(MAGIC)] != MAGIC:
            raise LinkError(f"{self.peer} is not a relay of this version of Tailrace")
        other = bytes(theirs[len(MAGIC) :])
        nonces = (mine, other) if side == "caller" else (other, mine)
        self._key = hmac.digest(token, b"".join(nonces), "sha256")
        self._words = (b"caller", b"callee") if side == "caller" else (b"callee", b"caller")

    def send(self, message: AnyMessage) -> None:
        body = msgspec.msgpack.encode(message)
        tag = self._tag(self._words[0], self._sent, body)
        self._sent += 1
        self.send_bytes(memoryview(len(body).to_bytes(4, "big") + tag + body))

    def receive(self) -> AnyMessage:
        head = bytearray(4 + TAG)
        self.receive_bytes(memoryview(head))
        length = int.from_bytes(head[:4], "big")
        if length > LONGEST_MESSAGE:
            raise LinkError(f"{self.peer} sent a message of {length:,} bytes, which no relay does")
        body = bytearray(length)
        self.receive_bytes(memoryview(body))
        if not hmac.compare_digest(head[4:], self._tag(self._words[1], self._received, body)):
            raise TokenError(f"{self.peer} has another token: it belongs to another run")
        self._received += 1
        try:
            return DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise LinkError(f"{self.peer} sent a message that is not known here: {error}") from None

    def send_bytes(self, data: memoryview) -> None:
        with self._waiting("send to"):
            self._socket.sendall(data)

    def receive_bytes(self, room: memoryview) -> None:
        """Fill `room`; the deadline starts anew with everything that arrives."""
        place = 0
        while place < len(room):
            with self._waiting("receive from"):
                count = self._socket.recv_into(room[place:])
            if not count:
                raise LinkError(f"{self.peer} closed the connection")
            place += count

    def is_local(self) -> bool:
        """Whether both ends have the same address, and so are on one host."""
        try:
            return self._socket.getsockname()[0] == self._socket.getpeername()[0]
        except OSError:
            return False

    def abort(self) -> None:
        """Make every thread that waits on this connection give up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tag(self, side: bytes, count: int, body: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, side + count.to_bytes(8, "big") + body, "sha256")

    @contextmanager
    def _waiting(self, doing: str) -> Iterator[None]:
        patience = min(self.stall_s, self.until - time.monotonic())
        try:
            self._socket.settimeout(max(patience, 1e-3))
            yield
        except TimeoutError:
            raise LinkError(f"could not {doing} {self.peer}: nothing moved for {patience:.1f} s") from None
        except OSError as error:
            raise LinkError(f"could not {doing} {self.peer}: {error.strerror or error}") from None


def connect(address: Address, stall_s: float = STALL_S, until: float = math.inf) -> Channel:
    """Connect to a relay, without a greeting yet: until then the connection can already be aborted."""
    patience = min(CONNECT_S, stall_s, until - time.monotonic())
    try:
        connection = socket.create_connection(address, timeout=max(patience, 1e-3))
    except OSError as error:
        raise LinkError(f"could not connect to {address}: {error.strerror or error}") from None
    return Channel(connection, str(address), stall_s, until)


@contextmanager
def dial(address: Address, token: bytes, stall_s: float = STALL_S, until: float = math.inf) -> Iterator[Channel]:
    """Connect, greet, and close at the end."""
    with connect(address, stall_s, until) as channel:
        channel.greet(token, "caller")
        yield channel


# --------------------------------------------------------------------------------------------------- one version


class Source(Protocol):
    """A version to send. It may still be growing."""

    version: Version
    size: int

    def ready(self, position: int) -> memoryview:
        """What is there from `position` on; waits until that is something."""
        ...

    def checksum(self) -> str:
        """Of the whole; asked for when all of it has been handed out."""
        ...


class Sink(Protocol):
    """Where a version that arrives is written."""

    size: int

    @property
    def written(self) -> int: ...

    def claim(self, count: int) -> memoryview: ...

    def advance(self, count: int) -> None: ...


Write = Callable[[Place], Iterator[int]]  # fills the place, and yields how far it has come


def offer(channel: Channel, source: Source, chunk: int = CHUNK, fresh: bool = False) -> Have | Busy | Stored:
    """Offer a version and, if it is wanted, send it; returns when the other side has sealed it or does not need it."""
    channel.send(Offer(source.version, source.size, fresh))
    answer = channel.receive()
    if isinstance(answer, Want):
        send(channel, source, chunk)
        answer = channel.receive()
    if isinstance(answer, Have | Busy | Stored):
        return answer
    raise _unexpected(channel, source.version, answer)


def place(channel: Channel, version: Version, size: int, write: Write) -> Have | Busy | Stored:
    """Offer a version of the trainer's to a relay of the same host and, if it is wanted, write it there."""
    channel.send(Offer(version, size, fresh=True, here=True))
    answer = channel.receive()
    if isinstance(answer, Place):
        for position in write(answer):
            channel.send(Written(position))
        answer = channel.receive()
    if isinstance(answer, Have | Busy | Stored):
        return answer
    raise _unexpected(channel, version, answer)


def attend(channel: Channel, sink: Sink) -> None:
    """The other side of `place`: learn what is written, until all of it is."""
    while sink.written < sink.size:
        answer = channel.receive()
        if not isinstance(answer, Written) or not sink.written < answer.position <= sink.size:
            raise LinkError(f"{channel.peer} sent {answer} after {sink.written:,} of {sink.size:,} bytes")
        sink.advance(answer.position - sink.written)


def send(channel: Channel, source: Source, chunk: int = CHUNK) -> None:
    """Each piece goes out as soon as it is there, whether or not the next one is."""
    position = 0
    while position < source.size:
        piece = source.ready(position)[:chunk]
        channel.send_bytes(piece)
        position += len(piece)
    channel.send(Total(source.checksum()))


def receive(channel: Channel, sink: Sink, chunk: int = CHUNK) -> str:
    """Straight from the socket into the sink's memory. Returns the sender's checksum."""
    while sink.written < sink.size:
        room = sink.claim(chunk)
        channel.receive_bytes(room)
        sink.advance(len(room))
    answer = channel.receive()
    if not isinstance(answer, Total):
        raise LinkError(f"{channel.peer} sent {type(answer).__name__} where the checksum should be")
    return answer.checksum


def pull(channel: Channel, version: Version) -> int:
    """Ask a relay for a version; returns its size. Its bytes follow."""
    channel.send(Pull(version))
    answer = channel.receive()
    if isinstance(answer, Sending):
        return answer.size
    raise _unexpected(channel, version, answer)


def _unexpected(channel: Channel, version: Version, answer: AnyMessage) -> LinkError:
    if isinstance(answer, Refused):
        return LinkError(f"{channel.peer} refused {label('version', version)}: {answer.reason}")
    return LinkError(f"{channel.peer} answered {type(answer).__name__} about {label('version', version)}")
