"""Progress on standard error, for work that takes longer than two seconds; quick work stays silent.

A terminal gets a bar, anything else a plain line every few seconds. `Progress` is told how far the work is and shows it
from a thread of its own, because the first two seconds may pass before the work says anything.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

from tailrace.logs import output

QUIET_S = 2.0
LINE_EVERY_S = 10.0


class Progress:
    """`with Progress("simulating") as progress: progress(done, total, text)`."""

    def __init__(self, title: str, stream: TextIO | None = None, quiet_s: float = QUIET_S) -> None:
        self.title = title
        self.stream = stream or sys.stderr
        self.quiet_s = quiet_s
        self._state = (0, 0, "")
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, done: int, total: int, text: str) -> None:
        self._state = (done, total, text)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(LINE_EVERY_S)  # a terminal that takes nothing (Ctrl-S) must not keep the work from going on

    def _show(self) -> None:
        if self._ended.wait(self.quiet_s):
            return
        if self.stream.isatty():
            self._show_bar()
        else:
            self._show_lines()

    def _show_lines(self) -> None:
        while True:
            done, total, text = self._state
            of = f" of {total:,}" if total else ""
            far = f"{done:,}{of}, {text}" if text else "begun"
            seconds = time.monotonic() - self._begin
            output(f"{self.title}: {far} ({seconds:.0f} s)", self.stream)
            if self._ended.wait(LINE_EVERY_S):
                return

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Bars(*columns, console=Console(file=self.stream), transient=True) as bars:
            task = bars.add_task(self.title)
            while True:
                done, total, text = self._state
                bars.update(task, completed=done, total=total or None, description=f"{self.title}: {text}")
                if self._ended.wait(0.2):
                    return
