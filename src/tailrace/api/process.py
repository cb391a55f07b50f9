"""The process of a run that this program has started: its output, its end, and how to ask for that."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from tailrace.errors import TailraceError

KEPT = 40  # lines of output, for the error of a run that failed
NAME = "tailrace: "  # before what is said to people
INTERRUPTED = 130


class RunFailedError(TailraceError):
    """The sentence that ended a run, or that refused it."""


class CommandProcess:
    """`tailrace WORDS`, until it ends or this program does."""

    def __init__(self, words: Sequence[str], show: bool) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tailrace.api.attached", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C comes to this program, which passes it on
        )
        self._reader = threading.Thread(target=self._read, args=(show,), daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended within that time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.alive

    def interrupt(self) -> None:
        """As Ctrl-C would. It takes a moment to write everything down."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def check(self) -> None:
        """RunFailedError if it has ended badly; being interrupted is no failure."""
        self._reader.join(1.0)
        if self._process.returncode not in (0, INTERRUPTED, None):
            raise RunFailedError(self._reason())

    def _reason(self) -> str:
        said = [line.removeprefix(NAME) for line in self._lines if line.startswith(NAME)]
        return said[-1] if said else "\n".join(self._lines) or f"it ended with status {self._process.returncode}"

    def _read(self, show: bool) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
            if show:
                sys.stdout.write(line)
