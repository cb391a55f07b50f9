"""The one thread that writes a store's file: it commits in groups, and answers after each commit.

Whatever has arrived within a few milliseconds, or some megabytes of it, is one transaction; the longer the disk takes,
the larger the next one. What nobody waits for, as most that is streamed, waits longer: a run with few replicas would
else commit, and sync the disk, for every frame. What waits is bounded by those who put it there: they look at
`queued_bytes`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tailrace.samples.file import SampleFile
from tailrace.samples.messages import Append, Receipt, column, pieces_in, read_column

URGENT_S = 0.005  # that a commit waits for company
QUIET_S = 0.05  # the same while nobody waits for it
ENOUGH = 4 << 20  # bytes that are worth a commit at once
MOST = 16 << 20  # bytes of one commit

Key = tuple[int, int]  # trajectory and attempt
Verdicts = dict[Key, int]


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

    def committed(self, receipts: list[tuple[Any, Receipt]]) -> None: ...

    def accuse(self, client: Any, reason: str) -> None:
        """It has written to what was never its own."""
        ...

    def taken(self) -> None:
        """There is more room than before."""
        ...

    def broken(self, error: BaseException) -> None:
        """Nothing can be written any more."""
        ...


class GroupWriter:
    def __init__(self, file: SampleFile, answers: Answers) -> None:
        self._file = file
        self._answers = answers
        self._queue: deque[ReceivedFrame | Action] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._urgent = False  # somebody waits for the next commit
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
                self._commit(work)
        except BaseException as error:
            self._answers.broken(error)

    def _collect(self) -> list[ReceivedFrame | Action]:
        """Wait for the first, then a little for others; nothing when it is time to close."""
        with self._changed:
            while not self._queue and not self._closing:
                if self._file.is_deleting:
                    return [_nothing]
                self._changed.wait()
            if not self._changed.wait_for(self._is_urgent, QUIET_S):
                return self._take()
            self._changed.wait_for(self._is_full, URGENT_S)
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
        verdicts: dict[Any, tuple[int, Verdicts]] = {}
        done: list[Callable[[], None]] = []
        for one in work:
            if isinstance(one, ReceivedFrame):
                _, found = verdicts.get(one.client, (0, {}))
                verdicts[one.client] = (one.number, found)
                self._append(one, found)
            elif (action := one(self._file)) is not None:
                done.append(action)
        self._file.commit()
        self._answers.committed([(client, self._receipt(*found)) for client, found in verdicts.items()])
        for action in done:
            action()

    def _append(self, upload: ReceivedFrame, verdicts: Verdicts) -> None:
        frame, append, replica = upload.frame, self._file.append, upload.replica
        columns = [read_column(view).tolist() for view in (frame.trajectories, frame.attempts, frame.starts)]
        try:
            for trajectory, attempt, start, piece in zip(*columns, pieces_in(frame), strict=True):
                verdicts[trajectory, attempt] = append(replica, trajectory, attempt, start, piece)
        except PermissionError as error:
            self._answers.accuse(upload.client, str(error))

    def _receipt(self, number: int, verdicts: Verdicts) -> Receipt:
        trajectories = [trajectory for trajectory, _ in verdicts]
        return Receipt(
            number,
            column(trajectories),
            column([attempt for _, attempt in verdicts]),
            column([self._file.length(trajectory) for trajectory in trajectories]),
            column(verdicts.values()),
        )


def _nothing(file: SampleFile) -> None:
    """A commit without news goes on with what is being deleted."""
