"""ASGI requests and responses of the page, and the limits on what a request may contain.

uvicorn (h11) reads and writes HTTP/1.1. A request head has at most `MAX_HEAD` bytes, a body at most `MAX_BODY`, and
only a form may have one. Whoever sends more gets one response and then the end of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

MAX_HEAD = 8 << 10
MAX_BODY = 1 << 10
LINGER_S = 1.0
AT_ONCE = 3  # responses that are worked out
LINGER_BYTES = 64 << 10  # read and dropped of a body that was refused

log = logging.getLogger(__name__)

Header = tuple[str, str]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class PageRequest(NamedTuple):
    method: str
    target: str  # as it was sent: an address of ours, or not
    headers: tuple[Header, ...]
    client: str = ""  # the address that it came from
    body: bytes = b""

    def header(self, name: str) -> str:
        """The value of a header that is there once; empty otherwise."""
        values = [value for each, value in self.headers if each == name]
        return values[0] if len(values) == 1 else ""


class PageResponse(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[Header, ...] = ()
    delay_s: float = 0.0  # before it is sent; the connection ends with it
    unread: bool = False  # the request was refused before its body was read
    authenticated: bool = False  # the client has shown the token
    work: Callable[[], PageResponse] | None = None  # gives the response, in a thread: it may take a while


def text_response(status: int, text: str, *headers: Header) -> PageResponse:
    """A response that says what is wrong."""
    return PageResponse(status, f"{text}\n".encode(), headers=headers)


class AsgiApplication:
    def __init__(
        self, respond: Callable[[PageRequest], PageResponse], headers: Callable[[PageResponse], list[Header]]
    ) -> None:
        self._respond = respond
        self._headers = headers
        self._working = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            response = await self._worked_out(await self._response(_request(scope), receive))
        except Exception:  # the border of a request
            log.exception("a request of the page cannot be answered")
            response = text_response(500, "The page cannot answer this; its log says why.")._replace(unread=True)
        if response is None:
            return
        scope["state"]["client"].authenticated |= response.authenticated
        await asyncio.sleep(response.delay_s)
        await send({"type": "http.response.start", "status": response.status, "headers": self.headers(response)})
        await send({"type": "http.response.body", "body": response.body, "more_body": response.unread})
        if response.unread:
            await _drain(receive)
            await send({"type": "http.response.body"})

    async def _worked_out(self, response: PageResponse | None) -> PageResponse | None:
        """Few at once: everybody else is answered meanwhile."""
        if response is None or response.work is None:
            return response
        async with self._working:
            done = await _in_thread(response.work)
        return done._replace(authenticated=response.authenticated)

    def headers(self, response: PageResponse) -> list[tuple[bytes, bytes]]:
        length = [("Content-Length", str(len(response.body)))] if response.status != 304 else []
        close = [("Connection", "close")] if response.unread or response.delay_s else []
        return [(name.encode(), value.encode()) for name, value in [*self._headers(response), *length, *close]]

    async def _response(self, request: PageRequest, receive: Receive) -> PageResponse | None:
        """None: the client has gone."""
        if (refused := _refuse(request)) is not None:
            return refused._replace(unread=True)
        if request.method != "POST":
            return self._respond(request)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body, more = body + message["body"], message["more_body"]
            if len(body) > MAX_BODY:
                return text_response(413, f"A form has at most {MAX_BODY} bytes.")._replace(unread=more)
        return self._respond(request._replace(body=body))


async def _in_thread(work: Callable[[], PageResponse]) -> PageResponse:
    """In a thread of its own that nobody waits for when the page ends: asyncio's own pool would be waited for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[PageResponse] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(_settle, done.set_result, work())
        except Exception as error:  # told to whoever asked
            settle = partial(_settle, done.set_exception, error)
        with suppress(RuntimeError):  # the page has ended meanwhile
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="answer", daemon=True).start()
    return await done


def _settle(settle: Callable[[Any], None], outcome: Any) -> None:
    with suppress(asyncio.InvalidStateError):  # whoever asked has gone
        settle(outcome)


def _request(scope: Any) -> PageRequest:
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in scope["headers"])
    client = scope["client"][0] if scope["client"] else ""
    return PageRequest(scope["method"], (scope["raw_path"] + query).decode("ascii"), headers, client)


def _refuse(request: PageRequest) -> PageResponse | None:
    if sum(len(name) + len(value) for name, value in request.headers) + len(request.target) > MAX_HEAD:
        return text_response(431, f"The head of a request has at most {MAX_HEAD} bytes.")
    names = {name for name, _ in request.headers}
    if "expect" in names:
        return text_response(417, "Send the request at once.")
    has_body = "transfer-encoding" in names or request.header("content-length").strip("0")
    if request.method != "POST" and has_body:
        return text_response(413, "This request has no body here.")
    return None


async def _drain(receive: Receive) -> None:
    """Closing a connection with unread bytes resets it, and the client may lose the response."""
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
