"""uvicorn, with the limits that it lacks: nobody can keep others out by being slow or many.

A request has to be complete `request_s` after its first byte, a connection may be idle for `idle_s`, and a client that
does not read a response within `write_s` is disconnected. There are at most `connections` of them, TLS handshakes
included; one more takes the place of the one that has waited longest without asking anything, or else of the one that
has been silent for longest; authenticated clients stay while there are others.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tailrace.page.access import ListenAddress, PageError
from tailrace.page.http import LINGER_S, MAX_HEAD, AsgiApplication, text_response

BACKLOG = 128


class Limits(NamedTuple):
    connections: int = 64
    request_s: float = 10.0
    idle_s: float = 60.0
    write_s: float = 10.0


class AcceptedConnection:
    """A connection, from the moment that it was accepted."""

    def __init__(self, accepted: socket.socket, read_by: float) -> None:
        self.socket = accepted
        self.transport: asyncio.Transport | None = None  # none yet while TLS shakes hands
        self.read_by = read_by
        self.write_by = math.inf
        self.authenticated = False
        self.served = False
        self.leaving = False
        self.heard = time.monotonic()

    def disconnect(self) -> None:
        self.leaving = True
        if self.transport is not None:
            self.transport.abort()
        else:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class PageListener(socket.socket):
    """Bounds the number of connections at accept, where those in a TLS handshake count too."""

    def __init__(self, address: ListenAddress, limits: Limits | None = None) -> None:
        super().__init__(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        self.limits = limits or Limits()
        self.clients: dict[int, AcceptedConnection] = {}  # by descriptor
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind((address.host, address.port))
            self.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            self.close()
            why = getattr(error, "strerror", None) or error
            advice = "write another --listen; port 0 takes a free one"
            raise PageError(f"the page cannot listen on {address} ({why}); {advice}") from None

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        self.admit(accepted)
        return accepted, address

    def admit(self, accepted: socket.socket) -> None:
        if len(self.connected()) >= self.limits.connections:
            longest = min(self.connected(), key=lambda each: (each.authenticated, each.served, each.heard))
            longest.disconnect()
        self.clients[accepted.fileno()] = AcceptedConnection(accepted, time.monotonic() + self.limits.request_s)

    def connected(self) -> list[AcceptedConnection]:
        """Without those that are being disconnected."""
        return [each for each in self.clients.values() if each.socket.fileno() >= 0 and not each.leaving]

    def disconnect_late(self) -> None:
        now = time.monotonic()
        for client in self.connected():
            if min(client.read_by, client.write_by) < now:
                client.disconnect()


class PageConnection(H11Protocol):
    """uvicorn's HTTP/1.1, with deadlines for requests and for the reading of responses."""

    def __init__(self, listener: PageListener, **options: Any) -> None:
        super().__init__(**options)
        self._listener = listener

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._client = self._listener.clients[transport.get_extra_info("socket").fileno()]
        self._client.transport = transport
        self.app_state = {"client": self._client}
        transport.set_write_buffer_limits(high=1)  # written is what the kernel has taken
        if self._client.leaving:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.ERROR:
            return  # refused before
        if not self._within_request:
            self._client.read_by = time.monotonic() + self._listener.limits.request_s
        super().data_received(data)
        if not self._within_request:
            self._client.read_by = math.inf

    @property
    def _within_request(self) -> bool:
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    @property
    def _answers_head(self) -> bool:
        return self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"

    def on_response_complete(self) -> None:
        self._client.served, self._client.heard = True, time.monotonic()
        super().on_response_complete()
        if self._within_request:  # the beginning of the next one has come already
            self._client.read_by = time.monotonic() + self._listener.limits.request_s

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A request that came as a whole is answered, also to a client that sends no more."""
        waiting = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if waiting:
            self.cycle.keep_alive = False
        return waiting and self.scheme == "http"

    def pause_writing(self) -> None:
        self._client.write_by = time.monotonic() + self._listener.limits.write_s
        super().pause_writing()

    def resume_writing(self) -> None:
        self._client.write_by = math.inf
        super().resume_writing()

    def shutdown(self) -> None:
        self._client.disconnect()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it where h11 has refused the bytes, with the error at hand."""
        error = sys.exc_info()[1]
        if not isinstance(error, h11.RemoteProtocolError) or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.transport.abort()
        response = text_response(error.error_status_hint, "This is not a request that can be understood.")
        headers = cast(AsgiApplication, self.config.app).headers(response._replace(unread=True))
        head = h11.Response(status_code=response.status, headers=headers)
        body = b"" if self._answers_head else response.body
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)  # closed with unread bytes, it would be reset
        return None


class PageServer(uvicorn.Server):
    def __init__(
        self,
        app: AsgiApplication,
        listener: PageListener,
        tls: ssl.SSLContext | None = None,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self._listener = listener
        self._ready = ready
        config = uvicorn.Config(
            app,
            http=partial(PageConnection, listener),  # pyright: ignore[reportArgumentType]
            loop="asyncio",  # another loop would accept without asking the listener
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # what strangers send is not worth a line
            access_log=False,
            proxy_headers=False,  # a header does not say who the client is
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=listener.limits.idle_s,  # pyright: ignore[reportArgumentType]
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal ends the server, and not by an exception afterwards."""
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self._listener.disconnect_late()
        return await super().on_tick(counter)
