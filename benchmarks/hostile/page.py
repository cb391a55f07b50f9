"""The page of a run, and what is sent to it: requests, whole and damaged, in pieces of any size, several at once.

Beyond not crashing, the page keeps promises about what it sends, and breaking one is a crash here: every answer is HTTP
with all the headers that protect the reader, no answer has figures for bytes in which the token is nowhere, and nobody
who was hung up on is talked to again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from zlib import crc32

from hostile.inputs import Decode
from tailrace.page.door import Door, Place
from tailrace.page.follow import Newest
from tailrace.page.http import LONGEST_BODY, LONGEST_HEAD, Conversation
from tailrace.page.site import ALWAYS, Site

TOKEN = "correct-horse-battery-staple"
FIGURES = b'{"secret": "figures"}'
HOST = b"Host: localhost:8080\r\n"
PIECES = (64, 400, 8192)  # bytes that come at once


def stranger(_: Path) -> tuple[list[bytes], Decode]:
    """Off the loopback, from somebody who does not know the token."""
    seeds = list(_requests(b"not-the-token-of-this-page"))
    return seeds, _decoder(seeds, Place("192.0.2.1", 443), TOKEN, sees_figures=False)


def on_loopback(_: Path) -> tuple[list[bytes], Decode]:
    """From this machine, where everybody sees everything."""
    seeds = list(_requests(TOKEN.encode()))
    return seeds, _decoder(seeds, Place("127.0.0.1", 8080), None, sees_figures=True)


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
    yield form + b"Content-Length: %d\r\n\r\n" % (2 * LONGEST_BODY) + b"x" * 2 * LONGEST_BODY
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 2 * LONGEST_HEAD + b"\r\n\r\n"
    yield b"GET / HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 1000 + b"\r\n"
    yield b"GET /data HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\nframes"
    yield b"GET /data HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\nbody"
    yield (b"GET /data HTTP/1.1\r\n" + HOST + cookie + b"\r\n") * 20
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)  # TLS, where there is none


def _decoder(seeds: list[bytes], place: Place, token: str | None, sees_figures: bool) -> Decode:
    ticks = count(step=3600.0)  # who guessed wrong may soon guess again
    site = Site(Door(place, token, clock=lambda: next(ticks)), lambda: Newest('"tag"', FIGURES))

    def decode(data: bytes) -> bool | None:
        conversation = Conversation("203.0.113.7", site.respond, site.dress)
        answers = b"".join(_converse(conversation, data))
        assert sees_figures or FIGURES not in answers or TOKEN.encode() in data, "figures for a stranger"
        return conversation.asked > 0 or data in seeds  # some of which are wrong on purpose

    return decode


def _converse(conversation: Conversation, data: bytes) -> Iterator[bytes]:
    size = PIECES[crc32(data) % len(PIECES)] if len(data) > 400 else 1 + crc32(data) % 200
    pieces = [data[start : start + size] for start in range(0, len(data), size)] + [b""]
    for piece in pieces:
        for sending in conversation.receive(piece):
            _check(sending.data)
            yield sending.data
        if conversation.over:
            return
    raise AssertionError("the other side has hung up, and the conversation goes on")


def _check(answer: bytes) -> None:
    if not answer:
        return
    head, blank, _ = answer.partition(b"\r\n\r\n")
    assert blank, "an answer without an end of its head"
    assert head.startswith(b"HTTP/1.1 "), "an answer that is not HTTP"
    lower = head.lower()
    for name, value in ALWAYS:
        assert f"\r\n{name}: {value}".lower().encode() in lower, f"an answer without {name}"
