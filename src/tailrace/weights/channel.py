"""An authenticated connection between trainer, relays and replicas, for signed messages and raw weight bytes.

Both ends send a nonce. Every message carries an HMAC with a key derived from the run's token, both nonces and the
relay's certificate, over the message and its sequence number. So the token is never sent, replayed, altered and
reflected messages are refused, and each side is authenticated before weights are sent. Connections within a host are
plain TCP; between hosts they are TLS (`wire/tls.py`), and a relay that listens to other hosts refuses plain ones.

Every wait has a deadline that restarts with every byte that moves. Every failure is a `ChannelError` that names the
peer and what was waited for. Between two requests a connection stays open without one: the system asks from time to
time whether the peer is still there.
"""

from __future__ import annotations

import hmac
import math
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple, Self

import msgspec

from tailrace.errors import TailraceError
from tailrace.types import MALFORMED
from tailrace.weights.messages import DECODER, LONGEST_RANGES, AnyMessage
from tailrace.wire.keys import stranger_token
from tailrace.wire.tls import Identity, caller_context, fingerprint

MAGIC = b"tailrace relay 7"
NONCE = TAG = 32
LONGEST_MESSAGE = LONGEST_RANGES + 4096  # an offer names every range of its part
CONNECT_S = 5.0
HANDSHAKE_S = 10.0  # for the handshake and the first request, so that an unauthenticated caller holds no thread longer
STALL_S = 10.0  # without a byte from the peer
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # seconds, seconds, and how often
RECORD = 64 << 10  # bytes handed to TLS at once, because its timeout is for the whole call
TLS_HANDSHAKE = 0x16  # the first byte of every TLS connection

Side = Literal["caller", "callee"]


class Address(NamedTuple):
    """Where a relay listens; with the fingerprint of its certificate if other hosts may connect. `worker`: it is the
    relay of the stranger of this name, who has a token of its own."""

    host: str
    port: int
    fingerprint: str = ""
    worker: str = ""

    @classmethod
    def read(cls, text: str) -> Address:
        """The inverse of `str`."""
        rest, _, worker = text.partition("@")
        host_port, _, fingerprint = rest.partition("#")
        host, _, port = host_port.rpartition(":")
        return cls(host, int(port), fingerprint, worker)

    def token(self, run: bytes) -> bytes:
        """By which that relay is known, and knows its callers; `run`: the run's own."""
        return stranger_token(run.decode(), self.worker).encode() if self.worker else run

    @property
    def host_port(self) -> str:
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        secure = f"{self.host_port}#{self.fingerprint}" if self.fingerprint else self.host_port
        return f"{secure}@{self.worker}" if self.worker else secure


class ChannelError(TailraceError):
    """The peer could not be reached, closed the connection, or broke the protocol."""


class UnreachableError(ChannelError):
    """Nobody answers there."""


class NobodyListensError(UnreachableError):
    """The host is there, but the process is not."""


class TokenError(ChannelError):
    """The peer belongs to another run; a retry will not help."""


class VersionRefusedError(ChannelError):
    """The peer is alive and refuses the version."""


class Channel:
    """One connection. `until`: the deadline of everything on it, on the monotonic clock."""

    def __init__(self, connection: socket.socket, peer: str, stall_s: float, until: float = math.inf) -> None:
        self.peer = peer
        self.round_trip_s = 0.0  # what it took to connect
        self.stall_s = stall_s
        self.until = until
        self.weight_bytes_sent = 0
        self.bytes_sent = 0  # of all messages, differences as they are encoded
        self.weights_received_at = time.monotonic()
        self.authenticated = False  # the peer has proven that it belongs to the run
        self.aborted = False
        self._socket = connection
        self._key = b""
        self._sides = (b"", b"")  # ours and the peer's, signed with every message: a reflected message is refused
        self._sent = self._received = 0  # messages: their sequence numbers
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a cut network accepts small messages for a long time
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_s * 1000)))

    # ------------------------------------------------------------------------------------------------------ handshake

    def call(self, token: bytes, pinned: str = "") -> None:
        """Handshake with a relay; `pinned` is the fingerprint in its address."""
        with self._within(HANDSHAKE_S):
            secure = bool(pinned) and not self.is_local()
            if secure:
                self._encrypt(caller_context(), "caller")
                assert isinstance(self._socket, ssl.SSLSocket)
                if fingerprint(self._socket.getpeercert(binary_form=True) or b"") != pinned:
                    raise TokenError(f"{self.peer} is not the expected relay: its certificate is another one")
            self._exchange_nonces(token, "caller", pinned if secure else "")

    def answer(self, token: bytes, identity: Identity | None = None) -> AnyMessage:
        """Handshake with a caller and return its request. Raises `TokenError` if it is not of this run."""
        with self._within(HANDSHAKE_S):
            secure = identity is not None and self._first_byte() == TLS_HANDSHAKE
            if identity is not None and secure:
                self._encrypt(identity.context, "callee")
            elif identity is not None and not self.is_local():
                raise ChannelError(f"{self.peer} is on another host and does not encrypt")
            self._exchange_nonces(token, "callee", identity.fingerprint if identity is not None and secure else "")
            return self.receive("a request")

    def _exchange_nonces(self, token: bytes, side: Side, certificate: str) -> None:
        """Derive the key. A peer with another token is detected by its first message."""
        mine, theirs = os.urandom(NONCE), bytearray(len(MAGIC) + NONCE)
        self.send_bytes(memoryview(MAGIC + mine), "the handshake")
        self._receive_into(memoryview(theirs), "the handshake")
        if theirs[: len(MAGIC)] != MAGIC:
            raise ChannelError(f"{self.peer} is not a relay of this version of Tailrace")
        other = bytes(theirs[len(MAGIC) :])
        nonces = (mine, other) if side == "caller" else (other, mine)
        self._key = hmac.digest(token, b"".join(nonces) + certificate.encode(), "sha256")
        self._sides = (b"caller", b"callee") if side == "caller" else (b"callee", b"caller")

    def _encrypt(self, context: ssl.SSLContext, side: Side) -> None:
        with self._waiting("agree on keys with", "the TLS handshake"):
            self._socket = context.wrap_socket(
                self._socket, server_side=side == "callee", do_handshake_on_connect=False
            )
            if self.aborted:
                raise OSError("the connection was aborted")
            self._socket.do_handshake()  # the timeout set by `_waiting` is for the whole of it

    def _first_byte(self) -> int:
        with self._waiting("receive from", "the handshake"):
            first = self._socket.recv(1, socket.MSG_PEEK)  # `until` is set during a handshake
        return first[0] if first else -1

    # ------------------------------------------------------------------------------------------------------ messages

    def send(self, message: AnyMessage) -> None:
        body = msgspec.msgpack.encode(message)
        tag = self._tag(self._sides[0], self._sent, body)
        self._sent += 1
        self.send_bytes(memoryview(len(body).to_bytes(4, "big") + tag + body), type(message).__name__)

    def receive(self, what: str) -> AnyMessage:
        """The next message; `what` names it in errors."""
        head = bytearray(4 + TAG)
        self._receive_into(memoryview(head), what)
        length = int.from_bytes(head[:4], "big")
        if length > LONGEST_MESSAGE:
            raise ChannelError(f"{self.peer} sent a message of {length:,} bytes, which no relay does")
        body = bytearray(length)
        self._receive_into(memoryview(body), what)
        if not hmac.compare_digest(head[4:], self._tag(self._sides[1], self._received, body)):
            raise TokenError(f"{self.peer} has another token: it belongs to another run")
        self._received += 1
        self.authenticated = True
        try:
            return DECODER.decode(body)
        except MALFORMED as error:
            raise ChannelError(f"{self.peer} sent a message that is not known here: {error}") from None

    def wait(self, meanwhile: Callable[[], None], pause_s: float, what: str) -> None:
        """Until something has come, do this again and again."""
        with self._waiting("receive from", what):
            until = time.monotonic() + (self._socket.gettimeout() or 0.0)
            arriving = _arriving(self._socket)
            while not (self._is_buffered() or arriving.poll(0)):
                meanwhile()
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(pause_s)

    def wait_for_request(self) -> None:
        """However long it takes."""
        if not self._is_buffered():
            _arriving(self._socket).poll()

    def is_quiet(self) -> bool:
        """Between two requests: the peer has neither closed the connection nor said something unasked."""
        return not self.aborted and not self._is_buffered() and not _arriving(self._socket).poll(0)

    def _is_buffered(self) -> bool:
        """TLS has decrypted more than was asked for."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _tag(self, side: bytes, count: int, body: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, side + count.to_bytes(8, "big") + body, "sha256")

    # --------------------------------------------------------------------------------------------------------- bytes

    def send_bytes(self, data: memoryview, what: str) -> None:
        most = RECORD if isinstance(self._socket, ssl.SSLSocket) else len(data)
        sent = 0
        with self._waiting("send to", what):
            while sent < len(data):
                sent += self._socket.send(data[sent : sent + most])
                self._check_deadline()
        self.bytes_sent += sent

    def receive_weights(self, targets: Iterable[memoryview], what: str) -> None:
        """Into these places, one after the other."""
        for target in targets:
            self._receive_into(target, what, weights=True)

    def _receive_into(self, target: memoryview, what: str, weights: bool = False) -> None:
        received = 0
        with self._waiting("receive from", what):
            while received < len(target):
                count = self._socket.recv_into(target[received:])
                if not count:
                    raise ChannelError(f"{self.peer} closed the connection before {what} arrived")
                received += count
                if weights:
                    self.weights_received_at = time.monotonic()
                self._check_deadline()

    @contextmanager
    def _waiting(self, doing: str, what: str) -> Iterator[None]:
        timeout_s = max(min(self.stall_s, self.until - time.monotonic()), 1e-3)
        try:
            self._socket.settimeout(timeout_s)
            yield
        except TimeoutError:
            raise ChannelError(f"could not {doing} {self.peer}: no data for {timeout_s:.1f} s ({what})") from None
        except OSError as error:
            raise ChannelError(f"could not {doing} {self.peer}: {error.strerror or error} ({what})") from None

    def _check_deadline(self) -> None:
        """A peer that sends a byte now and then does not extend it."""
        if self.until < math.inf and time.monotonic() > self.until:
            raise TimeoutError

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """A deadline for everything in this block."""
        previous, self.until = self.until, min(self.until, time.monotonic() + seconds)
        yield
        self.until = previous

    # ----------------------------------------------------------------------------------------------------------- end

    def set_congestion(self, algorithm: str) -> None:
        """Of what is sent to another host from here, where the system has that algorithm and allows it."""
        if algorithm and hasattr(socket, "TCP_CONGESTION") and not self.is_local():
            with suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())

    def is_local(self) -> bool:
        """Whether both ends have the same IP address, and so are on one host."""
        try:
            return self._socket.getsockname()[0] == self._socket.getpeername()[0]
        except OSError:
            return False

    def abort(self) -> None:
        """Wake every thread that waits on this connection with an error."""
        self.aborted = True
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS' own shutdown would wait for other threads

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arriving(connection: socket.socket) -> select.poll:
    """To be polled; not `select`: a relay may have more descriptors than that takes."""
    arriving = select.poll()
    arriving.register(connection, select.POLLIN)
    return arriving


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: Address, stall_s: float = STALL_S, until: float = math.inf) -> Channel:
    """Connect to a relay, without the handshake, so that the caller can abort the channel from then on."""
    timeout_s = min(CONNECT_S, stall_s, until - time.monotonic())
    began = time.monotonic()
    try:
        connection = socket.create_connection((address.host, address.port), timeout=max(timeout_s, 1e-3))
    except OSError as error:
        kind = NobodyListensError if isinstance(error, ConnectionRefusedError) else UnreachableError
        raise kind(f"could not connect to {address.host_port}: {error.strerror or error}") from None
    channel = Channel(connection, address.host_port, stall_s, until)
    channel.round_trip_s = time.monotonic() - began
    return channel


@contextmanager
def dial(address: Address, token: bytes, stall_s: float = STALL_S, until: float = math.inf) -> Iterator[Channel]:
    """Connect, do the handshake, and close at the end."""
    with connect(address, stall_s, until) as channel:
        channel.call(token, address.fingerprint)
        yield channel
