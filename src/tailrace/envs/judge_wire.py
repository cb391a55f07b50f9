"""The words between `judges.py` and a judge process, and how they lie on a pipe.

A frame is four bytes of length, at most `LONGEST`, and msgpack. Down go one `Setup`, then lists of `Question`; up come
`Ready` or `Refused`, then one `Judged` per question, in the order they were asked.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

from tailrace.config.tree import Config
from tailrace.envs.base import Faulted, Observed, Row, Scored, Turn
from tailrace.errors import TailraceError
from tailrace.types import MALFORMED, Struct

HEAD = 4
LONGEST = 64 << 20  # bytes of a frame; a transcript of a million tokens has a tenth of that


class FrameError(TailraceError):
    """What came is not in these words: the other side is broken, and nothing more of it can be read."""


class Setup(Struct):
    """The first frame: what to judge by, and perhaps a row to try the reward's parameters on."""

    config: Config
    timeout_s: float
    row: Row | None = None


class Question(Struct):
    id: int
    row: Row
    transcript: tuple[Turn, ...]


class Ready(Struct, tag=True):
    """The task is built and the reward imported."""


class Refused(Struct, tag=True):
    """The settings cannot work; the process ends."""

    reason: str


class Judged(Struct, tag=True):
    id: int
    answer: Scored | Observed | Faulted
    seconds: float  # that it took


Reply = Ready | Refused | Judged


_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


class Frames:
    """Bytes as they come in, whole frames out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        found: list[bytes] = []
        start = 0
        while (end := self._end(start)) <= len(self._bytes):
            found.append(bytes(self._bytes[start + HEAD : end]))
            start = end
        del self._bytes[:start]
        return found

    def _end(self, start: int) -> int:
        """Where the frame that begins here ends; not reached if even its length is not there yet."""
        head = self._bytes[start : start + HEAD]
        length = int.from_bytes(head, "little") if len(head) == HEAD else 0
        if length > LONGEST:
            raise FrameError(f"a frame of {length:,} bytes was announced, and {LONGEST:,} are the most")
        return start + HEAD + length


def reply_in(frame: bytes) -> Reply:
    try:
        reply = _replies.decode(frame)
    except MALFORMED as error:
        raise FrameError(f"a frame is not an answer: {error}") from None
    if isinstance(reply, Judged) and isinstance(reply.answer, Scored) and not isfinite(reply.answer.reward):
        raise FrameError(f"a frame has a reward of {reply.answer.reward}, which is not a finite number")
    return reply
