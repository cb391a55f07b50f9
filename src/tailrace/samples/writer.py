"""The one thread that writes a store's file: it commits in groups, and answers after each commit.

Whatever arrives within a while, or some megabytes of it, is one transaction. The while is a few milliseconds if
somebody waits for it, and longer the longer the last commit took: a busy store commits less often and writes longer
rows, each of which costs as much as a short one. What nobody waits for, as most that is streamed, waits longer still: a
run with few replicas would else sync the disk for every frame. What waits is bounded by those who put it there: they
look at `queued_bytes`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tailrace.samples.file import SampleFile, Verdicts
from tailrace.samples.messages import FAILED, FENCED, STORED, Acknowledgement, Append, column, read_column
from tailrace.wire.messages import Receipt

URGENT_S, BUSY_S = 0.005, 2.0  # that a commit waits for company, at least and at most
BUSY = 3.0  # times what the last commit took: in between
QUIET_S = 0.5  # the same while nobody waits for it
ENOUGH = 32 << 20  # bytes that are worth a commit at once
MOST = 48 << 20  # bytes of one commit

Key = tuple[int, int]  # trajectory and attempt
Sign = Callable[[int, int, int, int, int], Receipt]  # trajectory, attempt, tokens, oldest and newest version


class ReceivedFrame(NamedTuple):
    """A frame of a replica, checked as far as it can be without the file."""

    client: Any
    replica: int
    number: int
    frame: Append

    @property
    def size(self) -> int:
        return len(self.frame.tokens) + len(self.frame.logprobs) + 5 * len(self.frame.counts)


Action = Callable[[SampleFile], Callable[[], None] | None]  # in a transaction; what it returns is called after it


class Answers(Protocol):
    """Who is told, in the writer's thread."""

    def committed(self, acknowledgements: list[tuple[Any, int, Acknowledgement]]) -> None:
        """To each client, with the bytes of its frames."""
        ...

    def accuse(self, client: Any, reason: str) -> None:
        """It has written to what was never its own."""
        ...

    def taken(self) -> None:
        """There is more room than before."""
        ...

    def broken(self, error: BaseException) -> None:
        """Nothing can be written any more."""
        ...


class ClientBatch:
    """Of one client, in one commit."""

    def __init__(self) -> None:
        self.number = 0  # of its last frame
        self.size = 0  # bytes
        self.verdicts: Verdicts = {}
        self.complete: list[Key] = []  # assignments that are said to end here


class GroupWriter:
    def __init__(self, file: SampleFile, answers: Answers, sign: Sign) -> None:
        self._file = file
        self._sign = sign
        self._answers = answers
        self._queue: deque[ReceivedFrame | Action] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._urgent = False  # somebody waits for the next commit
        self._pause_s = URGENT_S  # that such a one waits for company
        self.queued_bytes = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, upload: ReceivedFrame) -> None:
        with self._changed:
            self._queue.append(upload)
            self.queued_bytes += upload.size
            self._urgent |= upload.frame.urgent
            self._changed.notify()

    def do(self, action: Action) -> None:
        """Something of the controller's, in its place between the frames."""
        with self._changed:
            self._queue.append(action)
            self._urgent = True
            self._changed.notify()

    def close(self) -> None:
        """Commit what is there, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # ---------------------------------------------------------------------------------------------- the writer's thread

    def _run(self) -> None:
        try:
            while work := self._collect():
                self._answers.taken()
                began = time.monotonic()
                self._commit(work)
                self._pause_s = min(max(URGENT_S, BUSY * (time.monotonic() - began)), BUSY_S)
        except BaseException as error:  # the border of the thread: a store that cannot write ends
            self._answers.broken(error)

    def _collect(self) -> list[ReceivedFrame | Action]:
        """Wait for the first, then a little for others; nothing when it is time to close."""
        with self._changed:
            while not self._queue and not self._closing:
                if self._file.is_deleting:
                    return [_nothing]
                self._changed.wait()
            if self._changed.wait_for(self._is_urgent, QUIET_S):
                self._changed.wait_for(self._is_full, self._pause_s)
            return self._take()

    def _is_full(self) -> bool:
        return self._closing or self.queued_bytes >= ENOUGH

    def _is_urgent(self) -> bool:
        return self._urgent or self._is_full()

    def _take(self) -> list[ReceivedFrame | Action]:
        work: list[ReceivedFrame | Action] = []
        size = 0
        while self._queue and size < MOST:
            work.append(self._queue.popleft())
            size += work[-1].size if isinstance(work[-1], ReceivedFrame) else 0
        self.queued_bytes -= size
        self._urgent = bool(self._queue)
        return work

    def _commit(self, work: list[ReceivedFrame | Action]) -> None:
        batches: dict[Any, ClientBatch] = {}
        done: list[Callable[[], None]] = []
        for one in work:
            if isinstance(one, ReceivedFrame):
                batch = batches.setdefault(one.client, ClientBatch())
                batch.number, batch.size = one.number, batch.size + one.size
                self._append(one, batch)
            elif (action := one(self._file)) is not None:
                done.append(action)
        self._file.commit()
        self._answers.committed(
            [(client, batch.size, self._acknowledgement(batch)) for client, batch in batches.items()]
        )
        for action in done:
            action()

    def _append(self, upload: ReceivedFrame, batch: ClientBatch) -> None:
        frame = upload.frame
        try:
            self._file.append(upload.replica, frame, batch.verdicts)
        except PermissionError as error:
            self._answers.accuse(upload.client, str(error))
            return
        finals = read_column(frame.finals)
        for at in finals.nonzero()[0].tolist():
            key = int(read_column(frame.trajectories)[at]), int(read_column(frame.attempts)[at])
            if batch.verdicts[key] == STORED:
                self._file.complete(*key, failed=finals[at] == FAILED)
                batch.complete.append(key)

    def _acknowledgement(self, batch: ClientBatch) -> Acknowledgement:
        receipts = self._receipts(batch)
        trajectories = [trajectory for trajectory, _ in batch.verdicts]
        return Acknowledgement(
            batch.number,
            column(trajectories),
            column([attempt for _, attempt in batch.verdicts]),
            column([self._file.length(trajectory) for trajectory in trajectories]),
            column(batch.verdicts.values()),
            receipts,
        )

    def _receipts(self, batch: ClientBatch) -> tuple[Receipt, ...]:
        """After the commit. An attempt that has ended with the same commit gets none."""
        receipts: list[Receipt] = []
        for key in batch.complete:
            head = self._file.heads.get(key[0])
            if head is not None and head.attempt == key[1]:
                receipts.append(self._sign(*key, head.tokens, head.oldest, head.newest))
            else:
                batch.verdicts[key] = FENCED
        return tuple(receipts)


def _nothing(file: SampleFile) -> None:
    """A commit without news goes on with what is being deleted."""
