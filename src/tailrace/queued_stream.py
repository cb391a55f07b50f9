"""Standard output and error for commands that keep a run alive: writing never waits for the reader.

What is written waits in a bounded queue, and a thread passes it on. While nobody reads (a pipe that is full, a terminal
that was stopped), the oldest lines give way to newer ones, and their number is shown once somebody reads again. After
the last reader is gone everything is dropped.
"""

from __future__ import annotations

import io
import os
import select
import signal
from collections import deque
from threading import Condition, Thread
from typing import TextIO

KEPT = 256 << 10  # characters that wait for a reader
DRAIN_S = 2.0  # that the end of a process waits for a reader who takes nothing


class QueuedStream(io.TextIOBase):
    """In place of a stream with a descriptor. A forked child has a queue and a thread of its own: what waits at that
    moment is written by the parent."""

    def __init__(self, stream: TextIO) -> None:
        self.replaced = stream
        self._file = stream.fileno()
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = Condition()  # guards the next five
        self._waiting: deque[str] = deque()
        self._size = 0  # of what waits
        self._lost = 0  # lines since the last one that was passed on
        self._writing = False
        self._writes = 0
        Thread(target=self._pass_on, name="output", daemon=True).start()

    # ------------------------------------------------------------------------------------------------- for who writes

    def write(self, text: str, /) -> int:
        if self._process != os.getpid():
            self._start()
        with self._changed:
            self._waiting.append(text)
            self._size += len(text)
            while self._size > KEPT and len(self._waiting) > 1:
                self._lost += self._next().count("\n")
            self._changed.notify_all()
        return len(text)

    def drain(self, seconds: float = DRAIN_S) -> None:
        """Wait until everything is passed on, for as long as somebody reads."""
        while self._process == os.getpid() and self._moves(seconds):
            pass

    def _moves(self, seconds: float) -> bool:
        """Something is left, and some of it goes out in time."""
        with self._changed:
            before = self._writes
            left = bool(self._waiting) or self._writing
            return left and self._changed.wait_for(lambda: self._writes > before, seconds)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.replaced.isatty()

    def fileno(self) -> int:
        return self._file

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.replaced.encoding

    # ------------------------------------------------------------------------------------------------------ the thread

    def _pass_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the command's own threads
        broken = False
        while True:
            text = self._take()
            try:
                if not broken:
                    self._put(text.encode(self.encoding, "backslashreplace"))
            except OSError:
                broken = True
            self._written(ended=True)

    def _take(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            self._writing = True
            lost, self._lost = self._lost, 0
            note = f"{lost:,} lines were not shown\n" if lost and not self.isatty() else ""  # a screen is drawn anew
            return note + self._next()

    def _next(self) -> str:
        text = self._waiting.popleft()
        self._size -= len(text)
        return text

    def _put(self, data: bytes) -> None:
        """In steps that a pipe takes whole, so that lines of several processes are not mixed up."""
        while data:
            data = data[os.write(self._file, data[: select.PIPE_BUF]) :]
            self._written()

    def _written(self, ended: bool = False) -> None:
        with self._changed:
            self._writes += 1
            self._writing = not ended
            self._changed.notify_all()
