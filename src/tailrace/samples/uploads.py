"""What a client has appended and a store has not yet acknowledged, and what waits for that.

An `Uploads` belongs to one client and is used under its lock. Nothing here knows a socket: `take` gives the next frame
for a store, `settle` takes in the verdict on an assignment. What both return is called without the lock.

What is appended piece by piece leaves as one run per sample and version. While a store has not answered the last frame
(as with Nagle's algorithm), runs grow: the busier the store, the longer they are, and the less each token costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import NamedTuple

from tailrace.samples.messages import (
    COMPLETE,
    FAILED,
    FENCED,
    GAP,
    GROWING,
    MOST_RUNS,
    NOT_SAMPLED,
    STORED,
    TOKEN_BYTES,
    Append,
    Buffer,
    Piece,
    column,
)
from tailrace.types import Segment
from tailrace.wire.messages import Receipt

FRAME = 1 << 20  # bytes of tokens and log-probs of a frame, at most but for its last run
FIRST_CREDIT = 1 << 18  # bytes, until a store has said something else
RETRY_S = 0.2  # until an assignment that a store has not heard of is tried again

Key = tuple[int, int]  # trajectory and attempt
Ended = Callable[[bool], None]  # told whether all is durable; False: it was fenced off or withdrawn
Completed = Callable[[Receipt | None], None]  # told what the store has of it; None: it was fenced off or withdrawn
Action = Callable[[], None]


class Growth(NamedTuple):
    """What is appended to one assignment. `start`: how many tokens after the prompt come before it."""

    key: Key
    start: int
    pieces: Iterable[Piece | Segment]
    store: int = 0


class QueuedRun:
    """Consecutive tokens of one version, as they were appended; where they begin and end is in tokens after the
    prompt."""

    __slots__ = ("end", "logprobs", "size", "start", "tokens", "version")

    def __init__(self, version: int | None, start: int) -> None:
        self.version = version
        self.start = self.end = start
        self.size = 0  # bytes
        self.tokens: list[Buffer] = []
        self.logprobs: list[Buffer] = []


class Upload:
    """Of one assignment."""

    __slots__ = (
        *("actions", "bytes", "completed", "end", "failed", "key", "retry_at"),
        *("sent", "since", "store", "waiting"),
    )

    def __init__(self, key: Key, store: int, start: int) -> None:
        self.key = key
        self.store = store
        self.end = start  # of all that was appended
        self.bytes = 0  # not acknowledged
        self.waiting: deque[QueuedRun] = deque()
        self.sent: deque[QueuedRun] = deque()  # and not acknowledged
        self.since = 0  # the frame with which it was last sent anew: refusals of earlier ones say nothing
        self.retry_at = 0.0
        self.actions: deque[tuple[int, Ended]] = deque()  # each with the length that has to be durable
        self.completed: Completed | None = None  # nothing will be appended any more, and this waits for a receipt
        self.failed = False  # it has ended without a reward

    def add(self, piece: Piece | Segment) -> int:
        """Returns its bytes. Buffers that somebody might change are copied."""
        version, tokens, logprobs = piece.version, piece.tokens, piece.logprobs
        size = len(tokens)
        if not size:
            return 0
        run = self.waiting[-1] if self.waiting else None
        if run is None or run.version != version or run.size >= FRAME:
            self.waiting.append(run := QueuedRun(version, self.end))
        run.tokens.append(tokens if type(tokens) is bytes else bytes(tokens))
        self.end = run.end = self.end + size // TOKEN_BYTES
        if logprobs is not None:
            run.logprobs.append(logprobs if type(logprobs) is bytes else bytes(logprobs))
            size += len(logprobs)
        run.size += size
        self.bytes += size
        return size

    @property
    def is_waited_for(self) -> bool:
        return bool(self.actions) or self.completed is not None

    @property
    def first(self) -> int:
        """Where what is not acknowledged begins."""
        return (self.sent or self.waiting)[0].start

    def rewind(self) -> None:
        self.since = 0
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()

    @property
    def final(self) -> int:
        """Whether all of it is sent, and nothing will follow."""
        if self.completed is None or self.waiting:
            return GROWING
        return FAILED if self.failed else COMPLETE

    def acknowledge(self, length: int) -> tuple[int, int]:
        """Returns the bytes that need not be kept any more: of what was sent, and of what has to be sent no more. Of
        what is complete the last run is kept until there is a receipt: it may have to be asked for again."""
        freed, last = [0, 0], self.completed is not None
        for at, runs in enumerate((self.sent, self.waiting)):
            while runs and runs[0].end <= length and len(self.sent) + len(self.waiting) > last:
                freed[at] += runs.popleft().size
        self.bytes -= sum(freed)
        return freed[0], freed[1]


class StoreQueue:
    """What is to be sent to one store."""

    def __init__(self, credit: int) -> None:
        self.credit = credit  # bytes that may wait for an acknowledgement
        self.held_up = False  # they were used up, and more than half of them still are
        self.ready: dict[Key, Upload] = {}  # with something to send
        self.bytes = 0  # not acknowledged
        self.waiting_bytes = 0  # of these: not sent
        self.urgent = False  # something that is not sent is waited for

    @property
    def frame_bytes(self) -> int:
        """After which a frame is full. Two have to fit in the credit: one is stored while the next one grows."""
        return min(FRAME, self.credit // 2)


class Uploads:
    def __init__(self, credit: int = FIRST_CREDIT) -> None:
        self._first_credit = credit
        self._uploads: dict[Key, Upload] = {}
        self._queues: dict[int, StoreQueue] = {}

    def queue(self, store: int) -> StoreQueue:
        found = self._queues.get(store)
        if found is None:
            found = self._queues[store] = StoreQueue(self._first_credit)
        return found

    @property
    def bytes(self) -> int:
        """Not acknowledged, by all stores."""
        return sum([queue.bytes for queue in self._queues.values()])

    def slow_store(self) -> tuple[int, int]:
        """One that has to catch up before more may be appended, and its bytes; no bytes if none has to."""
        for store, queue in self._queues.items():
            queue.held_up = queue.bytes > (queue.credit // 2 if queue.held_up else queue.credit)
            if queue.held_up:
                return store, queue.bytes
        return 0, 0

    def append(self, growth: Growth) -> None:
        key, start, pieces, store = growth
        upload = self._uploads.get(key)
        if upload is None:
            upload = self._uploads[key] = Upload(key, store, start)
        assert start == upload.end, f"t{key[0]} was appended up to {upload.end}, and goes on at {start}"
        size = 0
        for piece in pieces:
            size += upload.add(piece)
        queue = self.queue(store)
        queue.bytes += size
        queue.waiting_bytes += size
        queue.ready[key] = upload

    def then(self, key: Key, ended: Ended) -> list[Action]:
        """Remember it, or give it back if nothing has to be waited for."""
        upload = self._uploads.get(key)
        if upload is None:
            return [partial(ended, True)]
        upload.actions.append((upload.end, ended))
        self.queue(upload.store).urgent = True
        return []

    def complete(self, key: Key, store: int, tokens: int, completed: Completed, failed: bool = False) -> None:
        """Nothing will be appended after so many tokens. The store has to be told even if it has them all. `failed`: it
        is kept for people alone."""
        upload = self._uploads.get(key)
        if upload is None:
            upload = self._uploads[key] = Upload(key, store, tokens)
        assert tokens == upload.end, f"t{key[0]} was appended up to {upload.end}, and is to end at {tokens}"
        upload.completed, upload.failed = completed, failed
        if not upload.waiting:
            upload.waiting.append(QueuedRun(None, tokens))
        queue = self.queue(store)
        queue.ready[key], queue.urgent = upload, True

    def withdraw(self, key: Key) -> list[Action]:
        upload = self._uploads.pop(key, None)
        if upload is None:
            return []
        self._forget(upload)
        due: list[Action] = [partial(ended, False) for _, ended in upload.actions]
        return due if upload.completed is None else [*due, partial(upload.completed, None)]

    def _forget(self, upload: Upload) -> None:
        queue = self.queue(upload.store)
        queue.ready.pop(upload.key, None)
        queue.bytes -= upload.bytes
        queue.waiting_bytes -= sum([run.size for run in upload.waiting])

    # -------------------------------------------------------------------------------------------------------- sending

    def begin_anew(self, store: int) -> None:
        """There is a new connection: whatever is not acknowledged has to be sent on it."""
        for upload in self._uploads.values():
            if upload.store == store:
                self._rewind(upload, 0.0)

    def _rewind(self, upload: Upload, retry_at: float) -> None:
        queue = self.queue(upload.store)
        queue.waiting_bytes += sum([run.size for run in upload.sent])
        queue.ready[upload.key] = upload
        queue.urgent |= upload.is_waited_for
        upload.rewind()
        upload.retry_at = retry_at

    def may_send(self, store: int, answered: bool) -> bool:
        """Whether there is a reason not to wait for more. `answered`: the last frame is."""
        queue = self.queue(store)
        return answered or queue.urgent or queue.waiting_bytes >= queue.frame_bytes

    def due_at(self, store: int, answered: bool) -> float:
        """When there is something to send; infinite if there is nothing."""
        if not self.may_send(store, answered):
            return inf
        return min([upload.retry_at for upload in self.queue(store).ready.values()], default=inf)

    def take(self, store: int, number: int, now: float, answered: bool = True) -> Append | None:
        """The next frame, which gets this number, if there is one to be sent now. It is urgent if something waits for
        it: an action, or whoever may append no more."""
        if self.due_at(store, answered) > now:
            return None
        queue, chosen = self.queue(store), list[tuple[Key, QueuedRun, int]]()
        room = most = queue.frame_bytes
        urgent = 2 * queue.bytes >= queue.credit
        for key, upload in list(queue.ready.items()):
            if upload.retry_at > now:
                continue
            upload.since = upload.since or number
            urgent |= upload.is_waited_for
            while upload.waiting and room > 0 and len(chosen) < MOST_RUNS:
                upload.sent.append(run := upload.waiting.popleft())
                chosen.append((key, run, upload.final))
                room -= run.size
            if not upload.waiting:
                del queue.ready[key]
            if room <= 0 or len(chosen) >= MOST_RUNS:
                break
        queue.waiting_bytes -= most - room
        queue.urgent &= bool(queue.ready)
        return _frame(chosen, urgent) if chosen else None

    # ------------------------------------------------------------------------------------------------------- verdicts

    def settle(
        self, key: Key, verdict: int, length: int, number: int, now: float, receipt: Receipt | None = None
    ) -> tuple[list[Action], str]:
        """Returns the actions that are due, and why the assignment is lost, if it is."""
        upload = self._uploads.get(key)
        if upload is None:
            return [], ""
        if verdict == STORED:
            return self._stored(upload, length, receipt), ""
        if verdict == FENCED:
            return self.withdraw(key), "there is a newer attempt, or nobody wants it any more"
        if verdict == GAP and length < upload.first:
            return self.withdraw(key), f"the store has {length:,} tokens of it, and had acknowledged {upload.first:,}"
        if number >= upload.since:
            self._rewind(upload, 0.0 if verdict == GAP else now + RETRY_S)
        return [], ""

    def _stored(self, upload: Upload, length: int, receipt: Receipt | None) -> list[Action]:
        queue, (sent, waiting) = self.queue(upload.store), upload.acknowledge(length)
        queue.bytes -= sent + waiting
        queue.waiting_bytes -= waiting
        due: list[Action] = []
        while upload.actions and upload.actions[0][0] <= length:
            due.append(partial(upload.actions.popleft()[1], True))
        if upload.completed is not None and receipt is not None:
            due.append(partial(upload.completed, receipt))
        elif upload.sent or upload.waiting:
            return due
        del self._uploads[upload.key]
        self._forget(upload)
        return due


def _frame(chosen: list[tuple[Key, QueuedRun, int]], urgent: bool) -> Append:
    runs = [run for _, run, _ in chosen]
    return Append(
        column([key[0] for key, _, _ in chosen]),
        column([key[1] for key, _, _ in chosen]),
        column([run.start for run in runs]),
        column([final for _, _, final in chosen]),
        column([NOT_SAMPLED if run.version is None else run.version for run in runs]),
        column([run.end - run.start for run in runs]),
        memoryview(b"".join([buffer for run in runs for buffer in run.tokens])),
        memoryview(b"".join([buffer for run in runs for buffer in run.logprobs])),
        urgent,
    )
