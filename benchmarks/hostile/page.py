"""The page of a run, and what is sent to it: requests, whole and damaged, in pieces of any size, several at once.

Beyond not crashing, the page keeps promises about what it sends, and breaking one is a crash here: every answer is HTTP
with all the headers that protect the reader, no answer has figures for bytes in which the token is nowhere, and nobody
who was hung up on is talked to again.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from zlib import crc32

import tailrace.page.app
import tailrace.page.http
from hostile.inputs import Decode
from tailrace.page.access import AccessControl, ListenAddress
from tailrace.page.app import SECURITY_HEADERS, PageApp
from tailrace.page.follow import PageContent
from tailrace.page.http import MAX_BODY, MAX_HEAD, AsgiApplication, PageRequest, PageResponse
from tailrace.page.server import PageConnection, PageListener, PageServer

TOKEN = "correct-horse-battery-staple"
FIGURES = b'{"secret": "figures"}'
HOST = b"Host: localhost:8080\r\n"
PIECES = (64, 400, 8192)  # bytes that come at once
HANGS_S = 5.0  # without an end of the connection


def stranger(_: Path) -> tuple[list[bytes], Decode]:
    """Off the loopback, from somebody who does not know the token."""
    seeds = list(_requests(b"not-the-token-of-this-page"))
    return seeds, _decoder(seeds, ListenAddress("192.0.2.1", 443), TOKEN, sees_figures=False)


def on_loopback(_: Path) -> tuple[list[bytes], Decode]:
    """From this machine, where everybody sees everything."""
    seeds = list(_requests(TOKEN.encode()))
    return seeds, _decoder(seeds, ListenAddress("127.0.0.1", 8080), None, sees_figures=True)


def _requests(token: bytes) -> Iterator[bytes]:
    bearer, cookie = b"Authorization: Bearer " + token + b"\r\n", b"Cookie: a=b; __Host-tailrace-443=" + token + b"\r\n"
    for target in (b"/", b"/data", b"/login", b"/page.js", b"/page.css", b"/icon.svg", b"/nowhere", b"/../run.db"):
        yield b"GET " + target + b" HTTP/1.1\r\n" + HOST + bearer + b"\r\n"
    yield b"HEAD /data HTTP/1.1\r\n" + HOST + cookie + b'If-None-Match: "tag"\r\n\r\n'
    yield b"GET /data HTTP/1.0\r\n" + HOST + bearer + b"\r\n"
    yield b"GET http://localhost/data HTTP/1.1\r\n" + HOST + b"\r\n"
    yield from (verb + b" /login HTTP/1.1\r\n" + HOST + b"\r\n" for verb in (b"PUT", b"CONNECT", b"OPTIONS", b"TRACE"))
    form = b"POST /login HTTP/1.1\r\n" + HOST + b"Content-Type: application/x-www-form-urlencoded\r\n"
    body = b"token=" + token
    yield form + b"Content-Length: %d\r\n\r\n" % len(body) + body
    yield form + b"Content-Length: 99999999999999999999\r\n\r\n" + body
    yield form + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n" + body
    yield form + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n" + body
    yield form + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    yield form + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx\r\n0\r\nTrailer: x\r\n\r\n"
    yield form + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    yield form + b"Content-Length: %d\r\n\r\n" % (2 * MAX_BODY) + b"x" * 2 * MAX_BODY
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 2 * MAX_HEAD + b"\r\n\r\n"
    yield b"GET / HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 1000 + b"\r\n"
    yield b"GET /data HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\nframes"
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\nbody"
    yield (b"GET /data HTTP/1.1\r\n" + HOST + cookie + b"\r\n") * 20
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)  # TLS, where there is none


def _decoder(seeds: list[bytes], address: ListenAddress, token: str | None, sees_figures: bool) -> Decode:
    ticks = count(step=3600.0)  # who guessed wrong may soon guess again
    answers = {"/data": lambda _: PageContent('"tag"', FIGURES)}
    app = PageApp(AccessControl(address, token, clock=lambda: next(ticks)), answers)
    server = _Server(app)

    def decode(data: bytes) -> bool | None:
        before = server.requests
        answers = server.loop.run_until_complete(server.answers(data))
        assert not server.errors, repr(server.errors.pop())
        _check(answers)
        assert sees_figures or FIGURES not in answers or TOKEN.encode() in data, "figures for a stranger"
        return server.requests > before or data in seeds  # some of which are wrong on purpose

    return decode


class _Server:
    """The page's own connections, over a socket pair: no listening, everything else as in `tailrace page`."""

    def __init__(self, app: PageApp) -> None:
        tailrace.page.app.WRONG_TOKEN_DELAY_S = 1e-9
        tailrace.page.http.LINGER_S = 0.02
        self.requests = 0
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.errors: list[object] = []  # that the loop caught
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context.get("exception", context)))
        self._respond = app.respond
        self._listener = PageListener(ListenAddress("127.0.0.1", 0))
        self._server = PageServer(AsgiApplication(self._counted, app.headers), self._listener)

    def _counted(self, request: PageRequest) -> PageResponse:
        self.requests += 1
        return self._respond(request)

    async def answers(self, data: bytes) -> bytes:
        """All that is sent until the page, or we, hang up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._listener.admit(theirs)
        await self.loop.connect_accepted_socket(self._connection, theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        with suppress(ConnectionError):
            for piece in _pieces(data):
                writer.write(piece)
                await asyncio.sleep(0)
            for _ in range(8):  # turns of the loop, in which the page answers
                await asyncio.sleep(0)
            writer.write_eof()
        found = b""
        with suppress(ConnectionError):  # hung up on while we were still writing
            async with asyncio.timeout(HANGS_S):
                while piece := await reader.read(1 << 16):
                    found += piece
        writer.close()
        return found

    def _connection(self) -> PageConnection:
        state = self._server.server_state
        return PageConnection(self._listener, config=self._server.config, server_state=state, app_state={})


def _pieces(data: bytes) -> list[bytes]:
    size = PIECES[crc32(data) % len(PIECES)] if len(data) > 400 else 1 + crc32(data) % 200
    return [data[start : start + size] for start in range(0, len(data), size)]


def _check(answers: bytes) -> None:
    """Each one, by its own length; one that was cut off is the last."""
    while answers:
        head, blank, rest = answers.partition(b"\r\n\r\n")
        assert blank, "an answer without an end of its head"
        assert head.startswith(b"HTTP/1.1 "), "an answer that is not HTTP"
        assert not head.startswith(b"HTTP/1.1 500"), "an error of ours"
        for name, value in SECURITY_HEADERS:
            assert f"\r\n{name}: {value}".encode() in head, f"an answer without {name}"
        length = re.search(rb"Content-Length: (\d+)", head)
        bodies = (int(length[1]) if length else 0, 0)  # of GET and of HEAD
        answers = next((rest[size:] for size in bodies if rest[size:].startswith(b"HTTP/1.1 ")), b"")
