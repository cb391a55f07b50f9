"""A component's connection to the controller: made, greeted and proven by the time that it exists.

It belongs to one thread, which polls it. Whatever ends it is an `OSError`, or a `StrangerError` if the other end is not
our controller.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

from tailrace.wire.liveness import BeatSender
from tailrace.wire.messages import AbsentError, WireError
from tailrace.wire.session import (
    HEAD,
    NAMELESS,
    PROOF,
    Opening,
    Session,
    StrangerError,
    read_nameless,
)
from tailrace.wire.tls import caller_context, fingerprint

GREET_S = 10.0  # until a new connection must be proven
SILENT_MS = 6000  # between hosts: without a sign that what was sent has arrived, the connection is given up
LONGEST_ORDER = 4 << 30  # bytes; a step's trajectories: 8,192 of 16,384 tokens take 2 GB
RETRY_S = 0.1  # before the next try to connect
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """`pinned` is the fingerprint of the controller's certificate; without one the connection is plain, within a
    host."""

    def __init__(self, endpoint: str, name: str, key: bytes, pinned: str = "", within_s: float = GREET_S) -> None:
        self._until = time.monotonic() + within_s
        self._unsent: deque[memoryview] = deque()
        self._room = bytearray(HEAD.size)  # for the head of a frame, or for its content
        self._filled = 0
        self._head: tuple[int, bytes] | None = None  # number and signature of the content that is on its way
        self._name = name
        self._socket: socket.socket = socket.create_connection(_host_and_port(endpoint), timeout=max(within_s, 1e-3))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if pinned:
                self._encrypt(pinned)
            self._session = self._greet(name, key, pinned)
            self._socket.setblocking(False)
        except ConnectionError:
            self._socket.close()
            raise StrangerError("it has hung up instead of greeting") from None
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def beat_sender(self) -> BeatSender:
        """For the heartbeats that go with this connection; whoever asks for it closes it."""
        return BeatSender(self._socket, self._name, self._session.beat_key)

    # --------------------------------------------------------------------------------------------------------- greeting

    def _encrypt(self, pinned: str) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a network that is cut takes small messages for a long time
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # and who sends none learns nothing
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_MS // 3000)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_MS // 3000)
        self._wait()
        secure = caller_context().wrap_socket(self._socket, do_handshake_on_connect=False)
        self._socket = secure
        secure.do_handshake()
        if fingerprint(secure.getpeercert(binary_form=True) or b"") != pinned:
            raise StrangerError("its certificate is another one")

    def _greet(self, name: str, key: bytes, pinned: str) -> Session:
        opening = Opening(name)
        self._socket.sendall(opening.named)
        nonces = opening.nonce, read_nameless(self._exactly(NAMELESS.size))
        session = Session("component", key, nonces, pinned)
        self._socket.sendall(session.proof)
        session.check_proof(self._exactly(PROOF))
        return session

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            self._wait()
            piece = self._socket.recv(size - len(found))
            if not piece:
                raise StrangerError("it has hung up instead of greeting")
            found += piece
        return found

    def _wait(self) -> None:
        """No longer than until the end of the time for all of the greeting."""
        self._socket.settimeout(max(self._until - time.monotonic(), 1e-3))

    # ----------------------------------------------------------------------------------------------------------- frames

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, number: int, content: bytes) -> None:
        """Hand it over; `flush` gets it out."""
        self._unsent.append(memoryview(self._session.head(number, content) + content))

    def flush(self) -> None:
        """As much as the other end takes now."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except NOT_NOW:
            return

    def receive(self) -> Iterator[bytearray]:
        """The contents that have arrived."""
        while self._fill():
            if self._head is None:
                size, number, signature = HEAD.unpack(self._room)
                if size > LONGEST_ORDER:
                    raise WireError(f"the controller sends {size:,} bytes at once")
                self._head, self._room, self._filled = (number, signature), bytearray(size), 0
            else:
                (number, signature), content = self._head, self._room
                self._session.check(number, signature, content)
                self._head, self._room, self._filled = None, bytearray(HEAD.size), 0
                yield content

    def _fill(self) -> bool:
        """Read until there is no more room (True) or nothing to read now."""
        try:
            while self._filled < len(self._room):
                count = self._socket.recv_into(memoryview(self._room)[self._filled :])
                if not count:
                    raise ConnectionError("the controller has hung up")
                self._filled += count
        except NOT_NOW:
            return False
        return True

    # -------------------------------------------------------------------------------------------------------------- end

    def close(self, within_s: float = 0.0) -> None:
        """`within_s`: how long to try to get out what was handed over, until the other end has taken it all."""
        try:
            if within_s:
                self._part(within_s)
        except OSError:
            pass
        finally:
            self._socket.close()

    def _part(self, within_s: float) -> None:
        self._until = time.monotonic() + within_s
        for piece in self._unsent:
            self._wait()
            self._socket.sendall(piece)
        self._socket.shutdown(socket.SHUT_WR)
        while time.monotonic() < self._until:
            self._wait()
            if not self._socket.recv(1 << 16):
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def check_join_key(endpoint: str, name: str, key: bytes, pinned: str, within_s: float) -> None:
    """Returns if the run at this address lets us in; else an `AbsentError` says why not."""
    where, until = endpoint.removeprefix("tcp://"), time.monotonic() + within_s
    while True:
        try:
            with Connection(endpoint, name, key, pinned, until - time.monotonic()):
                return
        except (StrangerError, ssl.SSLError):
            raise AbsentError(
                f"{where} refused this join key; it takes the one in join.key of a run that goes on there now"
            ) from None
        except OSError:
            if time.monotonic() + RETRY_S >= until:
                raise AbsentError(
                    f"nobody answered at {where} within {within_s:g} s; does the run go on, and is the address right?"
                ) from None
            time.sleep(RETRY_S)
