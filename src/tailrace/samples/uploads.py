"""What a client has appended and a store has not yet acknowledged, and what waits for that.

An `Uploads` belongs to one client and is used under its lock. Nothing here knows a socket: `take` gives the next frame
for a store, `settle` takes in the verdict on an assignment. What both return is called without the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import NamedTuple

from tailrace.samples.messages import FENCED, GAP, STORED, TOKEN_BYTES, Append, Piece, PieceColumns, column
from tailrace.types import Segment

FRAME = 1 << 20  # bytes of tokens and log-probs after which a frame is full
RETRY_S = 0.2  # until an assignment that a store has not heard of is tried again

Key = tuple[int, int]  # trajectory and attempt
Ended = Callable[[bool], None]  # told whether all is durable; False: it was fenced off or withdrawn
Action = Callable[[], None]


class QueuedPiece(NamedTuple):
    """A piece, where it begins and ends in its sample (in tokens after the prompt), and its bytes."""

    start: int
    end: int
    size: int
    piece: Piece


class Upload:
    """Of one assignment."""

    def __init__(self, key: Key, store: int, start: int) -> None:
        self.key = key
        self.store = store
        self.end = start  # of all that was appended
        self.bytes = 0  # not acknowledged
        self.waiting: deque[QueuedPiece] = deque()
        self.sent: deque[QueuedPiece] = deque()  # and not acknowledged
        self.since = 0  # the frame with which it was last sent anew: refusals of earlier ones say nothing
        self.retry_at = 0.0
        self.actions: deque[tuple[int, Ended]] = deque()  # each with the length that has to be durable

    def add(self, piece: Piece) -> None:
        tokens = len(piece.tokens)
        if tokens:
            size = tokens if piece.logprobs is None else 2 * tokens
            start, self.end = self.end, self.end + tokens // TOKEN_BYTES
            self.waiting.append(QueuedPiece(start, self.end, size, piece))
            self.bytes += size

    @property
    def first(self) -> int:
        """Where what is not acknowledged begins."""
        return (self.sent or self.waiting)[0].start

    def rewind(self) -> None:
        self.since = 0
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()

    def acknowledge(self, length: int) -> int:
        """Returns the bytes that need not be kept any more."""
        before = self.bytes
        for queue in (self.sent, self.waiting):
            while queue and queue[0].end <= length:
                self.bytes -= queue.popleft().size
        return before - self.bytes


class Uploads:
    def __init__(self) -> None:
        self._uploads: dict[Key, Upload] = {}
        self._ready: dict[int, dict[Key, Upload]] = {}  # by store: those with something to send
        self.bytes: dict[int, int] = {}  # by store: not acknowledged

    def append(self, key: Key, store: int, start: int, pieces: Iterable[Piece | Segment]) -> None:
        upload = self._uploads.get(key)
        if upload is None:
            upload = self._uploads[key] = Upload(key, store, start)
        assert start == upload.end, f"t{key[0]} was appended up to {upload.end}, and goes on at {start}"
        before = upload.bytes
        for piece in pieces:
            upload.add(_kept(piece))
        self.bytes[store] = self.bytes.get(store, 0) + upload.bytes - before
        self._ready.setdefault(store, {})[key] = upload

    def then(self, key: Key, ended: Ended) -> list[Action]:
        """Remember it, or give it back if nothing has to be waited for."""
        upload = self._uploads.get(key)
        if upload is None:
            return [partial(ended, True)]
        upload.actions.append((upload.end, ended))
        return []

    def withdraw(self, key: Key) -> list[Action]:
        upload = self._uploads.pop(key, None)
        if upload is None:
            return []
        self._ready.get(upload.store, {}).pop(key, None)
        self.bytes[upload.store] -= upload.bytes
        return [partial(ended, False) for _, ended in upload.actions]

    # -------------------------------------------------------------------------------------------------------- sending

    def begin_anew(self, store: int) -> None:
        """There is a new connection: whatever is not acknowledged has to be sent on it."""
        for upload in self._uploads.values():
            if upload.store == store:
                self._rewind(upload, 0.0)

    def _rewind(self, upload: Upload, retry_at: float) -> None:
        upload.rewind()
        upload.retry_at = retry_at
        self._ready.setdefault(upload.store, {})[upload.key] = upload

    def due_at(self, store: int) -> float:
        """When there is something to send; infinite if there is nothing."""
        return min([upload.retry_at for upload in self._ready.get(store, {}).values()], default=inf)

    def take(self, store: int, number: int, now: float) -> Append | None:
        """The next frame, which gets this number."""
        ready, chosen, room, urgent = self._ready.get(store, {}), list[tuple[Key, QueuedPiece]](), FRAME, False
        for key, upload in list(ready.items()):
            if upload.retry_at > now:
                continue
            upload.since = upload.since or number
            urgent |= bool(upload.actions)
            while upload.waiting and room > 0:
                upload.sent.append(placed := upload.waiting.popleft())
                chosen.append((key, placed))
                room -= placed.size
            if not upload.waiting:
                del ready[key]
            if room <= 0:
                break
        return _frame(chosen, urgent) if chosen else None

    # ------------------------------------------------------------------------------------------------------- verdicts

    def settle(self, key: Key, verdict: int, length: int, number: int, now: float) -> tuple[list[Action], str]:
        """Returns the actions that are due, and why the assignment is lost, if it is."""
        upload = self._uploads.get(key)
        if upload is None:
            return [], ""
        if verdict == STORED:
            return self._stored(upload, length), ""
        if verdict == FENCED:
            return self.withdraw(key), "there is a newer attempt, or nobody wants it any more"
        if verdict == GAP and length < upload.first:
            return self.withdraw(key), f"the store has {length:,} tokens of it, and had acknowledged {upload.first:,}"
        if number >= upload.since:
            self._rewind(upload, 0.0 if verdict == GAP else now + RETRY_S)
        return [], ""

    def _stored(self, upload: Upload, length: int) -> list[Action]:
        self.bytes[upload.store] -= upload.acknowledge(length)
        due: list[Action] = []
        while upload.actions and upload.actions[0][0] <= length:
            due.append(partial(upload.actions.popleft()[1], True))
        if not upload.sent and not upload.waiting:
            del self._uploads[upload.key]
            self._ready.get(upload.store, {}).pop(upload.key, None)
        return due


def _kept(piece: Piece | Segment) -> Piece:
    """With buffers that nobody changes."""
    if isinstance(piece.tokens, bytes) and isinstance(piece.logprobs, bytes | None):
        return Piece(piece.version, piece.tokens, piece.logprobs)
    logprobs = None if piece.logprobs is None else bytes(piece.logprobs)
    return Piece(piece.version, bytes(piece.tokens), logprobs)


def _frame(chosen: list[tuple[Key, QueuedPiece]], urgent: bool) -> Append:
    return Append(
        column([key[0] for key, _ in chosen]),
        column([key[1] for key, _ in chosen]),
        column([placed.start for _, placed in chosen]),
        *PieceColumns.of([placed.piece for _, placed in chosen]),
        urgent,
    )
