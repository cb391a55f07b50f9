"""The end of the wire that listens: it lets in who proves its name, and drops the others.

A caller is a stranger until it has proven its name (`session`), for at most `GREET_S`. There are only so many
strangers (`descriptors`); one more takes the place of one that has said nothing yet, or else of the one that has been
there longest. So nobody can fill the descriptors of who listens, or keep the run's own components out, by being silent,
slow or many. From this host callers may come plain; from others they come encrypted, where there is an identity.

`server` (the controller) and the sample store's server listen with it, each on the loop of its own process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tailrace.wire import descriptors
from tailrace.wire.connection import GREET_S
from tailrace.wire.messages import LOOPBACK, UNNUMBERED, WireError
from tailrace.wire.session import HEAD, NAMED, PROOF, Opening, Session, StrangerError, read_named
from tailrace.wire.tls import Identity

log = logging.getLogger(__name__)

LINGER_S = 2.0  # how long a closing listener waits for its connections to end
BACKLOG = 512
BUFFERED = 1 << 18  # bytes that are read ahead of a connection, at most twice
AT_ONCE, PAUSE_S = 8, 0.01  # so many callers are taken in a row: a crowd must not take the time of who listens
TROUBLE_S = 0.2  # before the next try to accept, when that failed
ENCRYPTED = 0x16  # the first byte of every TLS connection


class OversizedFrameError(WireError):
    """A frame that is longer than its sender may send."""


class Caller:
    """Somebody who has connected."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.since = time.monotonic()
        self.spoke = False  # it has said who it claims to be
        self.task: asyncio.Task[None] | None = None

    def send_away(self) -> None:
        """What is read next is the end. Cancelling the task could leave a half-made transport to asyncio."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class SignedChannel:
    """A connection whose other end has proven its name: signed frames in both directions."""

    def __init__(self, name: str, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._session = session
        self._reader = reader
        self._writer = writer

    async def receive(self, longest: int) -> tuple[int, bytes]:
        """The number and the content of the next frame."""
        size, number, signature = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        if size > longest:
            raise OversizedFrameError(f"a message of {size:,} bytes")
        content = await self._reader.readexactly(size)
        self._session.check(number, signature, content)
        return number, content

    def send(self, content: bytes) -> None:
        if not self._writer.transport.is_closing():
            self._writer.write(self._session.head(UNNUMBERED, content))
            self._writer.write(content)

    @property
    def beat_key(self) -> bytes:
        """Of the heartbeats that its other end sends as datagrams."""
        return self._session.beat_key

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def room(self) -> None:
        """Wait until the other end has taken most of what was sent."""
        with suppress(ConnectionError):
            await self._writer.drain()

    async def drain(self) -> None:
        """Wait until all of it is out."""
        with suppress(OSError):
            while self.unsent_bytes and not self._writer.transport.is_closing():
                await asyncio.sleep(0.005)

    def hang_up(self) -> None:
        self._writer.transport.abort()


class Listener:
    """`key_of` gives the key of a name, or raises; `serve` has a channel from its greeting to its end."""

    def __init__(
        self,
        key_of: Callable[[str], bytes],
        serve: Callable[[SignedChannel], Awaitable[None]],
        port: int = 0,
        identity: Identity | None = None,
        listen: str = LOOPBACK,
    ) -> None:
        assert identity is not None or listen == LOOPBACK, "who listens to other hosts encrypts"
        self._key_of = key_of
        self._serve = serve
        self._identity = identity
        self._most_strangers = descriptors.shares().strangers
        self.strangers: set[Caller] = set()
        self.callers: set[Caller] = set()  # all
        self.socket = _listen(listen, port)
        host, self.port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def fingerprint(self) -> str:
        """By which other hosts know who listens here; empty: none may call."""
        return self._identity.fingerprint if self._identity is not None else ""

    async def stop(self) -> None:
        """Take nobody in any more."""
        self.accepting.cancel()
        await asyncio.gather(self.accepting, return_exceptions=True)
        self.socket.close()

    async def disconnect(self) -> None:
        """End all connections."""
        for caller in self.callers:
            caller.send_away()
        tasks = [caller.task for caller in self.callers if caller.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LINGER_S)

    # -------------------------------------------------------------------------------------------------------- accepting

    async def _accept(self) -> None:
        loop, taken = asyncio.get_running_loop(), 0
        while True:
            try:
                accepted, _ = await loop.sock_accept(self.socket)
            except OSError:
                await asyncio.sleep(TROUBLE_S)
                continue
            self._take_in(accepted)
            taken += 1
            if taken % AT_ONCE == 0:
                await asyncio.sleep(PAUSE_S)

    def _take_in(self, accepted: socket.socket) -> None:
        if len(self.strangers) >= self._most_strangers:
            self._send_one_away()
        caller = Caller(accepted)
        self.strangers.add(caller)
        self.callers.add(caller)
        caller.task = asyncio.create_task(self._attend(caller))
        caller.task.add_done_callback(lambda task: self._leave(caller, task))

    def _send_one_away(self) -> None:
        caller = min(self.strangers, key=lambda each: (each.spoke, each.since))
        self.strangers.discard(caller)
        caller.send_away()

    def _leave(self, caller: Caller, task: asyncio.Task[None]) -> None:
        self.strangers.discard(caller)
        self.callers.discard(caller)
        caller.socket.close()
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a bug: it must not end the run, because whoever calls may have caused it
            log.error("a connection ended with an error of ours", exc_info=error)

    async def _attend(self, caller: Caller) -> None:
        """One connection, from beginning to end."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(GREET_S):
                reader, writer, certificate = await self._open(caller)
                channel = await self._greet(caller, reader, writer, certificate)
            self.strangers.discard(caller)
            await self._serve(channel)
        except (OSError, TimeoutError, WireError, asyncio.IncompleteReadError):
            pass  # gone, too slow, or not one of ours
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _open(self, caller: Caller) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Plain from this host, encrypted from others."""
        loop, tls = asyncio.get_running_loop(), None
        _notice_silence(caller.socket)
        if self._identity is not None:
            tls = self._identity.context if await _first_byte(caller.socket) == ENCRYPTED else None
            if tls is None and not _is_local(caller.socket):
                raise StrangerError("it is on another host and does not encrypt")
        reader = asyncio.StreamReader(BUFFERED)
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = {"ssl": tls, "ssl_handshake_timeout": GREET_S} if tls else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, caller.socket, **patience)
        certificate = self.fingerprint if tls else ""
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop), certificate

    async def _greet(
        self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, certificate: str
    ) -> SignedChannel:
        theirs, length = read_named(await reader.readexactly(NAMED.size))
        name = _readable(await reader.readexactly(length))
        key = self._key_of(name)
        caller.spoke = True
        opening = Opening()
        writer.write(opening.nameless)
        session = Session("controller", key, (theirs, opening.nonce), certificate)
        session.check_proof(await reader.readexactly(PROOF))
        writer.write(session.proof)
        return SignedChannel(name, session, reader, writer)


def _listen(listen: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a controller that has just died
        listening.bind((listen, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise WireError(f"local.listen {listen} is not an address of this host; write one that is") from None
        raise WireError(
            f"local.port {port} cannot be used ({error.strerror}); write another one, or 0 for any"
        ) from None
    return listening


def _is_local(connection: socket.socket) -> bool:
    """Whether both ends have the same address, and so are on one host."""
    return connection.getsockname()[0] == connection.getpeername()[0]


def _notice_silence(connection: socket.socket) -> None:
    """A connection may be cut without a word; here nothing depends on when that is found out."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _first_byte(connection: socket.socket) -> int:
    """Without taking it away; -1 if the other end has hung up."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    first = connection.recv(1, socket.MSG_PEEK)
    return first[0] if first else -1


def _readable(name: bytes) -> str:
    """Names are those of components and machines: letters, digits and a few signs."""
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise StrangerError("its name is none that we give")
    return name.decode("ascii")
