"""The sockets of the page, and every limit of time and number: nobody can keep others out by being slow or many.

A request has to be complete `REQUEST_S` after its first byte, a connection may be silent for `IDLE_S`, and whoever does
not read an answer within `WRITE_S` is cut off. There are at most `MOST` connections, those in the middle of a TLS
handshake included; one more takes the place of the one that has waited longest without asking anything, or else of
the one that has been silent for longest; who has shown the token stays while there are others.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from tailrace.page.door import DoorError, Place
from tailrace.page.http import Conversation
from tailrace.page.site import Site

T = TypeVar("T")

MOST = 64
REQUEST_S = 10.0
IDLE_S = 60.0
WRITE_S = 10.0
LINGER_S = 1.0
PIECE = 8 << 10  # bytes that are read at once
LINGERING = 64 << 10  # bytes that are read of what nobody wants any more
QUEUE = 128
TROUBLE_S = 0.2  # before the next try to accept, when there are no more descriptors


class Limits:
    """As above; tests make them shorter."""

    most = MOST
    request_s = REQUEST_S
    idle_s = IDLE_S
    write_s = WRITE_S
    linger_s = LINGER_S


class Visitor:
    """A connection, from the moment that it was accepted."""

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket = accepted
        self.address = address
        self.opened = False  # it has a transport, which its task closes
        self.known = False  # it has shown the token
        self.has_asked = False
        self.heard = time.monotonic()
        self.task: asyncio.Task[None] | None = None


def open_socket(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((place.host, place.port))
        listening.listen(QUEUE)
        listening.setblocking(False)
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or error
        advice = "write another --listen; port 0 takes a free one"
        raise DoorError(f"the page cannot listen on {place} ({why}); {advice}") from None
    return listening


class Server:
    def __init__(
        self, site: Site, listening: socket.socket, tls: ssl.SSLContext | None = None, limits: Limits | None = None
    ) -> None:
        self._site = site
        self._listening = listening
        self._tls = tls
        self._limits = limits or Limits()
        self._visitors: set[Visitor] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(self._listening)
                except OSError:
                    await asyncio.sleep(TROUBLE_S)
                    continue
                self._welcome(accepted, str(address[0]))
        finally:
            await self._close()

    def _welcome(self, accepted: socket.socket, address: str) -> None:
        if len(self._visitors) >= self._limits.most:
            self._send_away()
        visitor = Visitor(accepted, address)
        self._visitors.add(visitor)
        visitor.task = asyncio.create_task(self._serve(visitor))
        visitor.task.add_done_callback(lambda _: self._part(visitor))

    def _part(self, visitor: Visitor) -> None:
        """Here, because a task that is cancelled before its first step never gets to close anything."""
        self._visitors.discard(visitor)
        visitor.socket.close()

    def _send_away(self) -> None:
        longest = min(self._visitors, key=lambda each: (each.known, each.has_asked, each.heard))
        self._visitors.discard(longest)
        if longest.opened and longest.task is not None:
            longest.task.cancel()
        else:  # cancelling could leave a half-made transport to asyncio; so it reads the end
            with suppress(OSError):
                longest.socket.shutdown(socket.SHUT_RDWR)

    async def _close(self) -> None:
        self._listening.close()
        tasks = [each.task for each in self._visitors if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- one connection

    async def _serve(self, visitor: Visitor) -> None:
        try:
            reader, writer = await self._open(visitor.socket)
        except (TimeoutError, OSError, ssl.SSLError):
            return
        visitor.opened = True
        try:
            await self._converse(reader, writer, visitor)
        except (OSError, TimeoutError, ssl.SSLError):
            pass  # gone, or too slow
        finally:
            writer.transport.abort()

    async def _open(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = {"ssl": self._tls, "ssl_handshake_timeout": self._limits.request_s} if self._tls else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, **patience)
        transport.set_write_buffer_limits(high=0)  # written is what the kernel has taken
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, visitor: Visitor) -> None:
        conversation = Conversation(visitor.address, self._site.respond, self._site.dress)
        deadline = visitor.heard + self._limits.request_s  # for the first request
        while not conversation.over:
            data = await _within(deadline - time.monotonic(), reader.read(PIECE))
            begins = conversation.between_requests
            for sending in conversation.receive(data):
                visitor.has_asked, visitor.heard, begins = True, time.monotonic(), True
                visitor.known = conversation.known
                if sending.after_s:
                    await asyncio.sleep(sending.after_s)
                writer.write(sending.data)
                await _within(self._limits.write_s, writer.drain())
            if conversation.between_requests:
                deadline = time.monotonic() + self._limits.idle_s
            elif begins:
                deadline = time.monotonic() + self._limits.request_s
        await self._linger(reader, writer)

    async def _linger(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hanging up on unread bytes would take the answer back: read some of them first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_s):
                if writer.can_write_eof():
                    writer.write_eof()
                left = LINGERING
                while left > 0 and (data := await reader.read(PIECE)):
                    left -= len(data)
                if not writer.can_write_eof():
                    writer.close()  # TLS says goodbye
                    await writer.wait_closed()


async def _within(seconds: float, action: Awaitable[T]) -> T:
    async with asyncio.timeout(max(0.0, seconds)):
        return await action
