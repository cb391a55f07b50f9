"""One HTTP/1.1 connection, without a socket or a clock: bytes that came in, answers that go out.

h11 reads and writes the protocol; here is what we allow of it. A request head has at most `LONGEST_HEAD` bytes, a body
at most `LONGEST_BODY`, and only a form may have one. Answers are made one at a time, when the one before is sent, so
that many requests at once take no more memory than one. Whatever is not HTTP is answered once and then hung up on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import h11

LONGEST_HEAD = 8 << 10
LONGEST_BODY = 1 << 10

Header = tuple[str, str]


class Request(NamedTuple):
    method: str
    target: str  # as it was sent: an address of ours, or not
    headers: tuple[Header, ...]
    visitor: str = ""  # the address that it came from
    body: bytes = b""

    def header(self, name: str) -> str:
        """The value of a header that is there once; empty otherwise."""
        values = [value for each, value in self.headers if each == name]
        return values[0] if len(values) == 1 else ""


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[Header, ...] = ()
    after_s: float = 0.0  # to be sent only then, and nothing after it: who guesses waits, and has to come again
    known: bool = False  # the visitor has shown the token


def sentence(status: int, text: str, *headers: Header) -> Answer:
    """An answer that says what is wrong."""
    return Answer(status, f"{text}\n".encode(), headers=headers)


class Sending(NamedTuple):
    data: bytes
    after_s: float


class Conversation:
    """`receive` takes what came and gives what to send; when `over`, hang up."""

    def __init__(
        self, visitor: str, respond: Callable[[Request], Answer], dress: Callable[[Answer], list[Header]]
    ) -> None:
        self.over = False
        self.asked = 0  # requests so far
        self.known = False  # the token came with one of them
        self._visitor = visitor
        self._respond = respond
        self._dress = dress  # gives an answer its headers
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEAD)
        self._form: tuple[Request, bytearray] | None = None  # whose body is on its way
        self._only_head = False  # of the present answer is wanted

    @property
    def between_requests(self) -> bool:
        """Nothing of a request has come yet."""
        return self._wire.their_state is h11.IDLE and not self._wire.trailing_data[0]

    def receive(self, data: bytes) -> Iterator[Sending]:
        """`data` is empty when the other side has hung up. The next answer is made when it is asked for."""
        self._wire.receive_data(data)
        more = True
        while more and not self.over:
            answer, more = self._next()
            if answer is not None:
                yield self._send(answer)

    def _next(self) -> tuple[Answer | None, bool]:
        """The answer to what came next, if it is time for one; and whether there may be more."""
        try:
            event = self._wire.next_event()
            return self._hear(event), event not in (h11.NEED_DATA, h11.PAUSED)
        except h11.RemoteProtocolError as error:
            self.over = True
            return sentence(error.error_status_hint, "This is not a request that can be understood."), False

    def _hear(self, event: object) -> Answer | None:
        """The answer, if it is time for one."""
        if isinstance(event, h11.Request):
            return self._begin(_read(event, self._visitor))
        if isinstance(event, h11.Data):
            return self._grow(event.data)
        if isinstance(event, h11.EndOfMessage) and self._form is not None:
            request, body = self._form
            self._form = None
            return self._respond(request._replace(body=bytes(body)))
        if isinstance(event, h11.ConnectionClosed):
            self.over = True
        return None

    def _begin(self, request: Request) -> Answer | None:
        """A form has a body to wait for; whatever else comes with one is answered without reading it."""
        self.asked += 1
        self._only_head = request.method == "HEAD"
        if sum(len(name) + len(value) for name, value in request.headers) + len(request.target) > LONGEST_HEAD:
            self.over = True
            return sentence(431, f"The head of a request has at most {LONGEST_HEAD} bytes.")
        if self._wire.they_are_waiting_for_100_continue:
            self.over = True
            return sentence(417, "Send the request at once.")
        if request.method == "POST":
            self._form = (request, bytearray())
            return None
        if self._wire.their_state is h11.SEND_BODY and not isinstance(self._wire.next_event(), h11.EndOfMessage):
            self.over = True
            return sentence(413, "This request has no body here.")
        return self._respond(request)

    def _grow(self, data: bytes) -> Answer | None:
        assert self._form is not None, "only forms have a body"
        self._form[1].extend(data)
        if len(self._form[1]) <= LONGEST_BODY:
            return None
        self._form, self.over = None, True
        return sentence(413, f"A form has at most {LONGEST_BODY} bytes.")

    def _send(self, answer: Answer) -> Sending:
        wire = self._wire
        self.known = self.known or answer.known
        self.over = self.over or answer.after_s > 0
        if wire.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.over = True
            return Sending(b"", 0.0)
        close = [("connection", "close")] if self.over else []
        length = [("content-length", str(len(answer.body)))] if answer.status != 304 else []
        headers = [*self._dress(answer), *length, *close]
        data = wire.send(h11.Response(status_code=answer.status, headers=headers))
        if answer.body and not self._only_head:
            data += wire.send(h11.Data(data=answer.body))
        data += wire.send(h11.EndOfMessage())
        self._only_head = False
        if not self.over and wire.our_state is h11.DONE and wire.their_state is h11.DONE:
            wire.start_next_cycle()
        else:
            self.over = True
        return Sending(data, answer.after_s)


def _read(event: h11.Request, visitor: str) -> Request:
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers]
    return Request(event.method.decode("ascii"), event.target.decode("ascii"), tuple(headers), visitor)
