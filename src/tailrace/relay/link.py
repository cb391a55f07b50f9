"""An authenticated connection between trainer, relays and replicas, over which signed messages and raw bytes go.

Both ends send a nonce; messages are signed with a key made from the run's token, both nonces and the certificate of the
relay, and are counted. So the token itself never travels, a recorded, repeated or foreign message is worthless, and
each side knows that the other belongs to the run before anything of value is sent. Within a host the connection is
plain; between hosts it is TLS (`tls.py`), and a relay that listens to other hosts refuses any of them that comes plain.

Every wait has a deadline that starts anew with every byte that moves, and every failure is a `LinkError` that names the
other side and what was waited for.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple, Self

import msgspec

from tailrace.errors import TailraceError
from tailrace.relay.messages import DECODER, AnyMessage
from tailrace.types import MALFORMED
from tailrace.wire.tls import Identity, caller_context, fingerprint

MAGIC = b"tailrace relay 3"
NONCE = TAG = 32
LONGEST_MESSAGE = 1 << 14
CONNECT_S = 5.0
GREET_S = 10.0  # for all of the greeting and the first request, so that a stranger holds a thread no longer than that
STALL_S = 10.0  # without a byte from the other side
RECORD = 64 << 10  # bytes handed to TLS at once: it counts the deadline for the whole of them
HELLO = 0x16  # the first byte of every TLS connection

Side = Literal["caller", "callee"]


class Address(NamedTuple):
    """Where a relay listens; with a fingerprint if other hosts may connect."""

    host: str
    port: int
    fingerprint: str = ""

    @classmethod
    def read(cls, text: str) -> Address:
        """The inverse of `str`."""
        place, _, fingerprint = text.partition("#")
        host, _, port = place.rpartition(":")
        return cls(host, int(port), fingerprint)

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.place}#{self.fingerprint}" if self.fingerprint else self.place


class LinkError(TailraceError):
    """The other side could not be reached, broke off, or is not what it should be."""


class TokenError(LinkError):
    """The other side belongs to another run; trying again will not help."""


class RefusedError(LinkError):
    """The other side is well and says no."""


class Channel:
    """One connection. `until` is a moment of the monotonic clock after which nothing is waited for."""

    def __init__(self, connection: socket.socket, peer: str, stall_s: float, until: float = math.inf) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self.until = until
        self.carried = 0  # bytes of weights that were sent
        self.moved = time.monotonic()  # when the last weights came
        self.known = False  # the other side has proven that it belongs to the run
        self._socket = connection
        self.aborted = False  # it is to end
        self._key = b""
        self._words = (b"", b"")  # what our messages and theirs are marked with, so that none can be sent back
        self._sent = self._received = 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a network that is cut takes small messages for a long time
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_s * 1000)))

    # ------------------------------------------------------------------------------------------------------ greeting

    def call(self, token: bytes, pinned: str = "") -> None:
        """Greet a relay; `pinned` is the fingerprint in its address."""
        with self._by(GREET_S):
            secure = bool(pinned) and not self.is_local()
            if secure:
                self._encrypt(caller_context(), "caller")
                assert isinstance(self._socket, ssl.SSLSocket)
                if fingerprint(self._socket.getpeercert(binary_form=True) or b"") != pinned:
                    raise TokenError(f"{self.peer} is not the relay it should be: its certificate is another one")
            self._agree(token, "caller", pinned if secure else "")

    def answer(self, token: bytes, identity: Identity | None = None) -> AnyMessage:
        """Greet whoever has connected, and hear what it wants. Raises `TokenError` if it is a stranger."""
        with self._by(GREET_S):
            secure = identity is not None and self._first_byte() == HELLO
            if identity is not None and secure:
                self._encrypt(identity.context, "callee")
            elif identity is not None and not self.is_local():
                raise LinkError(f"{self.peer} is on another host and does not encrypt")
            self._agree(token, "callee", identity.fingerprint if identity is not None and secure else "")
            return self.receive("a request")

    def _agree(self, token: bytes, side: Side, certificate: str) -> None:
        """Exchange nonces. Who has another token than we have is found out with the first message."""
        mine, theirs = os.urandom(NONCE), bytearray(len(MAGIC) + NONCE)
        self.send_bytes(memoryview(MAGIC + mine), "a greeting")
        self._fill(memoryview(theirs), "a greeting")
        if theirs[: len(MAGIC)] != MAGIC:
            raise LinkError(f"{self.peer} is not a relay of this version of Tailrace")
        other = bytes(theirs[len(MAGIC) :])
        nonces = (mine, other) if side == "caller" else (other, mine)
        self._key = hmac.digest(token, b"".join(nonces) + certificate.encode(), "sha256")
        self._words = (b"caller", b"callee") if side == "caller" else (b"callee", b"caller")

    def _encrypt(self, context: ssl.SSLContext, side: Side) -> None:
        with self._waiting("agree on keys with", "a handshake"):
            self._socket = context.wrap_socket(
                self._socket, server_side=side == "callee", do_handshake_on_connect=False
            )
            if self.aborted:
                raise OSError("it was broken off")
            self._socket.do_handshake()  # all of it within the timeout that `_waiting` has set, not each of its reads

    def _first_byte(self) -> int:
        with self._waiting("receive from", "a greeting"):
            first = self._socket.recv(1, socket.MSG_PEEK)  # by `until`, which every greeting has
        return first[0] if first else -1

    # ------------------------------------------------------------------------------------------------------ messages

    def send(self, message: AnyMessage) -> None:
        body = msgspec.msgpack.encode(message)
        tag = self._tag(self._words[0], self._sent, body)
        self._sent += 1
        self.send_bytes(memoryview(len(body).to_bytes(4, "big") + tag + body), type(message).__name__)

    def receive(self, what: str) -> AnyMessage:
        """The next message; `what` is expected, in words."""
        head = bytearray(4 + TAG)
        self._fill(memoryview(head), what)
        length = int.from_bytes(head[:4], "big")
        if length > LONGEST_MESSAGE:
            raise LinkError(f"{self.peer} sent a message of {length:,} bytes, which no relay does")
        body = bytearray(length)
        self._fill(memoryview(body), what)
        if not hmac.compare_digest(head[4:], self._tag(self._words[1], self._received, body)):
            raise TokenError(f"{self.peer} has another token: it belongs to another run")
        self._received += 1
        self.known = True
        try:
            return DECODER.decode(body)
        except MALFORMED as error:
            raise LinkError(f"{self.peer} sent a message that is not known here: {error}") from None

    def _tag(self, side: bytes, count: int, body: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, side + count.to_bytes(8, "big") + body, "sha256")

    # --------------------------------------------------------------------------------------------------------- bytes

    def send_bytes(self, data: memoryview, what: str) -> None:
        most = RECORD if isinstance(self._socket, ssl.SSLSocket) else len(data)
        place = 0
        with self._waiting("send to", what):
            while place < len(data):
                place += self._socket.send(data[place : place + most])
                self._check_time()

    def receive_bytes(self, room: memoryview, what: str) -> None:
        """Fill `room` with weights."""
        self._fill(room, what, weights=True)

    def _fill(self, room: memoryview, what: str, weights: bool = False) -> None:
        place = 0
        with self._waiting("receive from", what):
            while place < len(room):
                count = self._socket.recv_into(room[place:])
                if not count:
                    raise LinkError(f"{self.peer} closed the connection before {what} had come")
                place += count
                if weights:
                    self.moved = time.monotonic()
                self._check_time()

    @contextmanager
    def _waiting(self, doing: str, what: str) -> Iterator[None]:
        patience = max(min(self.stall_s, self.until - time.monotonic()), 1e-3)
        try:
            self._socket.settimeout(patience)
            yield
        except TimeoutError:
            raise LinkError(f"could not {doing} {self.peer}: nothing moved for {patience:.1f} s ({what})") from None
        except OSError as error:
            raise LinkError(f"could not {doing} {self.peer}: {error.strerror or error} ({what})") from None

    def _check_time(self) -> None:
        """Of the whole, where there is a limit: who sends a byte now and then is not waited for."""
        if self.until < math.inf and time.monotonic() > self.until:
            raise TimeoutError

    @contextmanager
    def _by(self, seconds: float) -> Iterator[None]:
        """Within so many seconds, whatever moves."""
        later, self.until = self.until, min(self.until, time.monotonic() + seconds)
        yield
        self.until = later

    # ----------------------------------------------------------------------------------------------------------- end

    def is_local(self) -> bool:
        """Whether both ends have the same address, and so are on one host."""
        try:
            return self._socket.getsockname()[0] == self._socket.getpeername()[0]
        except OSError:
            return False

    def abort(self) -> None:
        """Make every thread that waits on this connection give up."""
        self.aborted = True
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS would first wait for others

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(address: Address, stall_s: float = STALL_S, until: float = math.inf) -> Channel:
    """Connect to a relay, without a greeting yet: until then the connection can already be aborted."""
    patience = min(CONNECT_S, stall_s, until - time.monotonic())
    try:
        connection = socket.create_connection((address.host, address.port), timeout=max(patience, 1e-3))
    except OSError as error:
        raise LinkError(f"could not connect to {address.place}: {error.strerror or error}") from None
    return Channel(connection, address.place, stall_s, until)


@contextmanager
def dial(address: Address, token: bytes, stall_s: float = STALL_S, until: float = math.inf) -> Iterator[Channel]:
    """Connect, greet, and close at the end."""
    with connect(address, stall_s, until) as channel:
        channel.call(token, address.fingerprint)
        yield channel
