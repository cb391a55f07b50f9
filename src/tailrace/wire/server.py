"""The controller's end of the wire: it hears the components that have proven their names (`listener`), and answers.

A name has one connection, the newest that proved it. Each begins with an introduction: who goes on without one, because
it knew an earlier controller or was cut off, is asked for it, and for all reports that are not known here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from tailrace.types import MALFORMED
from tailrace.wire import descriptors
from tailrace.wire.keys import HOST, Keyring, host_key, worker_of
from tailrace.wire.listener import Listener, OversizedFrameError, SignedChannel
from tailrace.wire.liveness import Liveness
from tailrace.wire.messages import (
    LOOPBACK,
    UNNUMBERED,
    Beat,
    FromComponent,
    FromController,
    Garbled,
    Hello,
    Introduce,
    WireError,
    decode_from_component,
    encode,
)
from tailrace.wire.session import StrangerError
from tailrace.wire.tls import Identity

BATCH = 256  # messages that are handled, and committed, together
WAITING, WAITING_BYTES = 4096, 256 << 20  # what waits to be handled; then nobody is read from until there is less
LONGEST_REPORT = 64 << 20  # bytes of one frame; a thousand samples streamed at once take 1 MB
LONGEST_OFFER = 4 << 20
LONGEST_OF_STRANGER = 1 << 20  # of either; it hands in one sample at a time
UNREAD_BY_HOST = 64 << 20  # bytes that a machine has not taken yet; then it is hung up on
UNREAD_BY_COMPONENT = 8 << 30
MACHINES = 256  # whoever has the run's token can call as many as it likes
SILENT_S = 30.0  # they offer themselves twice a second
LINGER_S = 2.0  # how long a closing server tries to get its last words out


class ReceivedMessage(NamedTuple):
    """A message as the server hands it over."""

    sender: str
    number: int
    message: FromComponent | Garbled


class Peer:
    """Somebody who has proven its name."""

    def __init__(self, channel: SignedChannel) -> None:
        self.channel = channel
        self.name = channel.name
        self.introduced = False  # on this very connection
        self.asked = False  # to introduce itself
        self.is_host = self.name.startswith(HOST)
        self._most = UNREAD_BY_HOST if self.is_host else UNREAD_BY_COMPONENT

    @property
    def beat_key(self) -> bytes:
        """Of its datagrams; a machine sends none, it offers itself."""
        return b"" if self.is_host else self.channel.beat_key

    def send(self, message: FromController) -> None:
        if self.channel.unsent_bytes > self._most:
            self.channel.hang_up()
        else:
            self.channel.send(encode(message))


class ControlServer:
    """`heard`: how far an earlier controller has written down what each component had reported. Machines may join if
    there is an `identity`; without one it listens on the loopback and nowhere else. `worker_token`: that of a stranger,
    by its name; empty: it has none, or has it no more."""

    def __init__(
        self,
        keys: Keyring,
        port: int = 0,
        heard: Mapping[str, int] | None = None,
        identity: Identity | None = None,
        listen: str = LOOPBACK,
        worker_token: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._keys = keys
        self._worker_token = worker_token
        self._heard = dict(heard or {})
        self._most_peers = descriptors.shares().known
        self._peers: dict[str, Peer] = {}
        self._received: deque[ReceivedMessage] = deque()
        self._sizes: deque[int] = deque()  # of these, in bytes
        self._waiting_bytes = 0
        self._arrived, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._listener = Listener(self._key_of, self._serve, port, identity, listen)
        self._listener.accepting.add_done_callback(lambda _: self._arrived.set())
        self.port = self._listener.port
        self.endpoint = f"tcp://{self._listener.address}"
        self.liveness = Liveness(self._listener.socket)
        self._machines = 0  # among the peers

    @property
    def fingerprint(self) -> str:
        """By which machines that join know this controller; empty: none may."""
        return self._listener.fingerprint

    @property
    def reads(self) -> bool:
        """Frames are taken in; else there is no room for more until some are received."""
        return self._has_room.is_set()

    # ----------------------------------------------------------------------------------------------------- the contract

    async def receive(self) -> list[ReceivedMessage]:
        """What components of ours have sent: waits for the first message, takes what has arrived with it."""
        while not self._received:
            if self._listener.accepting.done():
                await self._listener.accepting  # nobody would ever be heard again: better to end with the error
            self._arrived.clear()
            await self._arrived.wait()
        count = min(BATCH, len(self._received))
        self._waiting_bytes -= sum([self._sizes.popleft() for _ in range(count)])
        if len(self._received) - count < WAITING // 2 and self._waiting_bytes < WAITING_BYTES // 2:
            self._has_room.set()
        return [self._received.popleft() for _ in range(count)]

    async def send(self, name: str, message: FromController) -> None:
        """Hand a message over; one for a component that is gone is dropped."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.send(message)

    def hang_up(self, name: str) -> None:
        """On somebody who is not to be heard any more."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._machines -= peer.is_host
            self.liveness.leave(name)
            peer.channel.hang_up()

    async def close(self) -> None:
        """Get everything out that was sent, as far as anybody takes it, then hang up."""
        await self._listener.stop()
        self.liveness.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await asyncio.gather(*[peer.channel.drain() for peer in self._peers.values()])
        self._has_room.set()
        await self._listener.disconnect()

    # -------------------------------------------------------------------------------------------------------- admitting

    def _key_of(self, name: str) -> bytes:
        if name.startswith(HOST) and not self.fingerprint:
            raise StrangerError("no machine may join this run")
        worker = worker_of(name)
        token = self._worker_token(worker) if worker else ""
        if worker and not token:
            raise StrangerError("it has no key, or has it no more")
        return host_key(token, name) if worker and name.startswith(HOST) else self._keys.of(name)

    async def _serve(self, channel: SignedChannel) -> None:
        peer = Peer(channel)
        self._admit(peer)
        try:
            await self._read(peer)
        finally:
            if self._peers.get(peer.name) is peer:
                self.hang_up(peer.name)

    def _admit(self, peer: Peer) -> None:
        """Who has proven a name has it from now on: whoever else had it was cut off, or it would not come again."""
        self.hang_up(peer.name)
        crowded = peer.is_host and self._machines >= min(MACHINES, self._most_peers // 4)
        if crowded or len(self._peers) >= self._most_peers:
            raise WireError("there is no room for more connections")
        self._peers[peer.name] = peer
        self._machines += peer.is_host
        self.liveness.admit(peer.name, peer.beat_key)

    # ---------------------------------------------------------------------------------------------------------- hearing

    async def _read(self, peer: Peer) -> None:
        patience, longest = (SILENT_S, LONGEST_OFFER) if peer.is_host else (None, LONGEST_REPORT)
        if worker_of(peer.name):
            longest = LONGEST_OF_STRANGER
        while self._peers.get(peer.name) is peer:  # what was read before it was hung up on may still be here
            try:
                async with asyncio.timeout(patience):
                    number, content = await peer.channel.receive(longest)
            except OversizedFrameError as error:
                self._deliver(ReceivedMessage(peer.name, UNNUMBERED, Garbled(str(error))), 0)
                return
            self.liveness.frame(peer.name)
            self._hear(peer, number, content)
            if len(self._received) >= WAITING or self._waiting_bytes >= WAITING_BYTES:
                self._has_room.clear()
                await self._has_room.wait()

    def _hear(self, peer: Peer, number: int, content: bytes) -> None:
        try:
            message = decode_from_component(content)
        except MALFORMED as error:
            message = Garbled(f"a message that nobody knows ({error})")
        if isinstance(message, Hello):
            peer.introduced, peer.asked = True, False
        if peer.is_host:
            number = UNNUMBERED  # of machines nothing is remembered: they may call themselves anything
        heard = self._heard.get(peer.name, 0)
        if not peer.introduced or number > heard + 1:
            self._ask(peer, heard)
        elif isinstance(message, Beat):
            self.liveness.waits(peer.name, message.waiting_for)
        elif number == UNNUMBERED or number > heard:
            if number:
                self._heard[peer.name] = number
            self._deliver(ReceivedMessage(peer.name, number, message), len(content))
            return
        if worker_of(peer.name):  # how much a stranger says is counted, whether or not anybody listens
            self._deliver(ReceivedMessage(peer.name, UNNUMBERED, Beat()), 0)

    def _ask(self, peer: Peer, heard: int) -> None:
        """It knew an earlier controller, or something of it was lost on the way: it has to begin anew."""
        peer.introduced = False
        if not peer.asked:
            peer.asked = True
            peer.send(Introduce(heard))

    def _deliver(self, message: ReceivedMessage, size: int) -> None:
        self._received.append(message)
        self._sizes.append(size)
        self._waiting_bytes += size
        self._arrived.set()
