"""The controller's end of the wire: it listens, lets in who proves to be one of the run's, and drops the others.

A caller is a stranger until it has proven its name (`session`), for at most `GREET_S`. There are only so many
strangers, and so many connections in all (`descriptors`); one stranger more takes the place of one that has said
nothing yet, or else of the one that has been there longest. So nobody can fill the controller's descriptors or keep
parts out by being silent, slow or many.

A name has one connection, the newest that proved it. Each begins with an introduction: who goes on without one, because
it knew an earlier controller or was cut off, is asked for it, and for all reports that are not known here.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from tailrace.types import MALFORMED
from tailrace.wire import descriptors
from tailrace.wire.connection import GREET_S
from tailrace.wire.keys import HOST, Keyring
from tailrace.wire.messages import (
    LOOPBACK,
    UNNUMBERED,
    FromController,
    FromPart,
    Garbled,
    Hello,
    Introduce,
    WireError,
    decode_from_part,
    encode,
)
from tailrace.wire.session import HEAD, NAMED, PROOF, Opening, Session, StrangerError, read_named
from tailrace.wire.tls import Identity

BATCH = 256  # messages that are handled, and committed, together
WAITING, WAITING_BYTES = 4096, 256 << 20  # what waits to be handled; then nobody is read from until there is less
LONGEST_REPORT = 64 << 20  # bytes of one frame; a thousand samples streamed at once take 1 MB
LONGEST_OFFER = 4 << 20
UNREAD_BY_HOST = 64 << 20  # bytes that a machine has not taken yet; then it is hung up on
UNREAD_BY_PART = 8 << 30
MACHINES = 256  # whoever has the run's token can call as many as it likes
SILENT_S = 30.0  # they offer themselves twice a second
LINGER_S = 2.0  # how long a closing hub tries to get its last words out
BACKLOG = 512
AT_ONCE, PAUSE_S = 8, 0.01  # so many callers are taken in a row: a crowd must not take the time of the controller
TROUBLE_S = 0.2  # before the next try to accept, when that failed
ENCRYPTED = 0x16  # the first byte of every TLS connection


class Letter(NamedTuple):
    """A message as the hub hands it over."""

    sender: str
    number: int
    message: FromPart | Garbled


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


class Peer:
    """Somebody who has proven its name."""

    def __init__(self, name: str, session: Session, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.introduced = False  # on this very connection
        self.asked = False  # to introduce itself
        self.is_host = name.startswith(HOST)
        self._session = session
        self._writer = writer
        self._most = UNREAD_BY_HOST if self.is_host else UNREAD_BY_PART

    def check(self, number: int, signature: bytes, content: bytes) -> None:
        self._session.check(number, signature, content)

    def send(self, message: FromController) -> None:
        if self._writer.transport.get_write_buffer_size() > self._most:
            self.hang_up()
        elif not self._writer.transport.is_closing():
            content = encode(message)
            self._writer.write(self._session.head(UNNUMBERED, content))
            self._writer.write(content)

    async def drain(self) -> None:
        with suppress(OSError):
            while self._writer.transport.get_write_buffer_size() and not self._writer.transport.is_closing():
                await asyncio.sleep(0.005)

    def hang_up(self) -> None:
        self._writer.transport.abort()


class Hub:
    """`heard`: how far an earlier controller has written down what each part had reported. Machines may join if there
    is an `identity`; without one it listens on the loopback and nowhere else."""

    def __init__(
        self,
        keys: Keyring,
        port: int = 0,
        heard: Mapping[str, int] | None = None,
        identity: Identity | None = None,
        listen: str = LOOPBACK,
    ) -> None:
        assert identity is not None or listen == LOOPBACK, "a hub for other hosts encrypts"
        self._keys = keys
        self._identity = identity
        self._heard = dict(heard or {})
        self._room = descriptors.shares()
        self._strangers: set[Caller] = set()
        self._callers: set[Caller] = set()  # all
        self._peers: dict[str, Peer] = {}
        self._letters: deque[Letter] = deque()
        self._sizes: deque[int] = deque()  # of these, in bytes
        self._waiting_bytes = 0
        self._arrived, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._listening = _listen(listen, port)
        host, self.port = self._listening.getsockname()[:2]
        self.endpoint = f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}"
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        self._accepting.add_done_callback(lambda _: self._arrived.set())

    @property
    def fingerprint(self) -> str:
        """By which machines that join know this controller; empty: none may."""
        return self._identity.fingerprint if self._identity is not None else ""

    # ----------------------------------------------------------------------------------------------------- the contract

    async def receive(self) -> list[Letter]:
        """What parts of ours have sent: waits for the first message, takes what has arrived with it."""
        while not self._letters:
            if self._accepting.done():
                await self._accepting  # nobody would ever be heard again: better to end with the error
            self._arrived.clear()
            await self._arrived.wait()
        count = min(BATCH, len(self._letters))
        self._waiting_bytes -= sum([self._sizes.popleft() for _ in range(count)])
        if len(self._letters) - count < WAITING // 2 and self._waiting_bytes < WAITING_BYTES // 2:
            self._has_room.set()
        return [self._letters.popleft() for _ in range(count)]

    async def send(self, name: str, message: FromController) -> None:
        """Hand a message over; one for a part that is gone is dropped."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.send(message)

    def hang_up(self, name: str) -> None:
        """On somebody who is not to be heard any more."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.hang_up()

    async def close(self) -> None:
        """Get everything out that was sent, as far as anybody takes it, then hang up."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listening.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await asyncio.gather(*[peer.drain() for peer in self._peers.values()])
        self._has_room.set()
        for caller in self._callers:
            caller.send_away()
        tasks = [caller.task for caller in self._callers if caller.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LINGER_S)

    # -------------------------------------------------------------------------------------------------------- accepting

    async def _accept(self) -> None:
        loop, taken = asyncio.get_running_loop(), 0
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(TROUBLE_S)
                continue
            self._take_in(accepted)
            taken += 1
            if taken % AT_ONCE == 0:
                await asyncio.sleep(PAUSE_S)

    def _take_in(self, accepted: socket.socket) -> None:
        if len(self._strangers) >= self._room.strangers:
            self._send_one_away()
        caller = Caller(accepted)
        self._strangers.add(caller)
        self._callers.add(caller)
        caller.task = asyncio.create_task(self._attend(caller))
        caller.task.add_done_callback(lambda task: self._leave(caller, task))

    def _send_one_away(self) -> None:
        caller = min(self._strangers, key=lambda each: (each.spoke, each.since))
        self._strangers.discard(caller)
        caller.send_away()

    def _leave(self, caller: Caller, task: asyncio.Task[None]) -> None:
        self._strangers.discard(caller)
        self._callers.discard(caller)
        caller.socket.close()
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a bug: it must not end the run, because whoever calls may have caused it
            traceback.print_exception(error)

    async def _attend(self, caller: Caller) -> None:
        """One connection, from beginning to end."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(GREET_S):
                reader, writer, certificate = await self._open(caller)
                peer = await self._greet(caller, reader, writer, certificate)
            self._strangers.discard(caller)
            self._admit(peer)
            try:
                await self._read(peer, reader)
            finally:
                if self._peers.get(peer.name) is peer:
                    del self._peers[peer.name]
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
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = {"ssl": tls, "ssl_handshake_timeout": GREET_S} if tls else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, caller.socket, **patience)
        certificate = self.fingerprint if tls else ""
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop), certificate

    async def _greet(
        self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, certificate: str
    ) -> Peer:
        theirs, length = read_named(await reader.readexactly(NAMED.size))
        name = _readable(await reader.readexactly(length))
        if name.startswith(HOST) and self._identity is None:
            raise StrangerError("no machine may join this run")
        caller.spoke = True
        opening = Opening()
        writer.write(opening.nameless)
        session = Session("controller", self._keys.of(name), (theirs, opening.nonce), certificate)
        session.check_proof(await reader.readexactly(PROOF))
        writer.write(session.proof)
        return Peer(name, session, writer)

    def _admit(self, peer: Peer) -> None:
        """Who has proven a name has it from now on: whoever else had it was cut off, or it would not come again."""
        self.hang_up(peer.name)
        machines = sum(name.startswith(HOST) for name in self._peers)
        crowded = peer.is_host and machines >= min(MACHINES, self._room.known // 4)
        if crowded or len(self._peers) >= self._room.known:
            raise WireError("there is no room for more connections")
        self._peers[peer.name] = peer

    # ---------------------------------------------------------------------------------------------------------- hearing

    async def _read(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        patience = SILENT_S if peer.is_host else None
        while self._peers.get(peer.name) is peer:  # what was read before it was hung up on may still be here
            async with asyncio.timeout(patience):
                size, number, signature = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > (LONGEST_OFFER if peer.is_host else LONGEST_REPORT):
                    self._deliver(Letter(peer.name, UNNUMBERED, Garbled(f"a message of {size:,} bytes")), 0)
                    return
                content = await reader.readexactly(size)
            peer.check(number, signature, content)
            self._hear(peer, number, content)
            if len(self._letters) >= WAITING or self._waiting_bytes >= WAITING_BYTES:
                self._has_room.clear()
                await self._has_room.wait()

    def _hear(self, peer: Peer, number: int, content: bytes) -> None:
        try:
            message = decode_from_part(content)
        except MALFORMED as error:
            message = Garbled(f"a message that nobody knows ({error})")
        if isinstance(message, Hello):
            peer.introduced, peer.asked = True, False
        if peer.is_host:
            number = UNNUMBERED  # of machines nothing is remembered: they may call themselves anything
        heard = self._heard.get(peer.name, 0)
        if not peer.introduced or number > heard + 1:
            self._ask(peer, heard)
        elif number == UNNUMBERED or number > heard:
            if number:
                self._heard[peer.name] = number
            self._deliver(Letter(peer.name, number, message), len(content))

    def _ask(self, peer: Peer, heard: int) -> None:
        """It knew an earlier controller, or something of it was lost on the way: it has to begin anew."""
        peer.introduced = False
        if not peer.asked:
            peer.asked = True
            peer.send(Introduce(heard))

    def _deliver(self, letter: Letter, size: int) -> None:
        self._letters.append(letter)
        self._sizes.append(size)
        self._waiting_bytes += size
        self._arrived.set()


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
    """Names are those of parts and machines: letters, digits and a few signs."""
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise StrangerError("its name is none that we give")
    return name.decode("ascii")
