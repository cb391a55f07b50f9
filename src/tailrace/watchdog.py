"""Turns silence into a diagnosis: for a loop that is stuck, from inside; for a process that says nothing, from outside.

A component's heart beats in a thread, so a component whose loop hangs would look alive for ever. The loop therefore
tells its `Watchdog` what it begins to do and how long that may take (`expect`). When that time is over, it is `stuck`
and heartbeats stop, the stacks of all threads go to the component's log, and `on_stuck` gets one sentence: what it was
at, since when, where in the code, what to do. A process that cannot speak for itself (stopped, or in the kernel) is
looked at with `look_at`.

Knows nothing of runs: whoever has a loop may use it. Costs a loop less than a microsecond a turn.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self, TextIO

from tailrace.logs import to_stream

LOOK_S = 0.25  # how often the loop is looked at
ASLEEP = 4  # looks missed in a row: then this whole process was stopped, and the loop is not to blame
REMEMBERED = 8  # things that a loop did before it got stuck
STACKS = signal.SIGUSR1  # asks a process for the stacks of its threads
IDLE = "nothing yet"


class WatchedTask(NamedTuple):
    """What a loop is at: since when, how long it may take, and what helps if it takes longer."""

    what: str
    since: float
    within_s: float
    advice: str = ""


class Watchdog:
    """Watches the thread that made it. `on_stuck` is called in another thread, once each time the loop gets stuck."""

    def __init__(self, name: str, on_stuck: Callable[[str], None], log: TextIO | None = None) -> None:
        self.name = name
        self.stuck = ""  # the sentence, while it is
        self._on_stuck = on_stuck
        self._log = log or sys.stderr
        self._thread_id = threading.get_ident()
        self._task = WatchedTask(IDLE, time.monotonic(), float("inf"))
        self._before: deque[WatchedTask] = deque(maxlen=REMEMBERED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._thread.join(4 * LOOK_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, what: str, within_s: float, advice: str = "") -> None:
        """From now on the loop is at this, for at most so long; `advice` is what helps if it takes longer."""
        if what != self._task.what:
            self._before.append(self._task)
        self._task = WatchedTask(what, time.monotonic(), within_s, advice)

    # --------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(LOOK_S):
            now = time.monotonic()
            if now - looked > ASLEEP * LOOK_S:
                self._task = self._task._replace(since=self._task.since + now - looked)
            looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        task = self._task
        if now - task.since <= task.within_s:
            self.stuck = ""
        elif not self.stuck:
            self.stuck = self._sentence(task, now)
            self._on_stuck(self.stuck)  # first: the disk of the log may be what it waits for
            self._write(now)

    def _sentence(self, task: WatchedTask, now: float) -> str:
        where = _innermost(sys._current_frames().get(self._thread_id))
        advice = f"; {task.advice}" if task.advice else ""
        return f"stuck for {now - task.since:.1f} s ({task.within_s:g} s are allowed) at: {task.what}{where}{advice}"

    def _write(self, now: float) -> None:
        """Everything that might help, to the log."""
        lines = [f"{self.name} (process {os.getpid()}) is {self.stuck}", "before that:"]
        lines += [f"  {now - task.since:.1f} s ago: {task.what}" for task in self._before]
        with suppress(OSError, ValueError):  # a full disk or a closed log must not silence the report
            to_stream(self._log).error("\n".join([*lines, "where every thread is:"]))
            faulthandler.dump_traceback(self._log, all_threads=True)


def _innermost(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


# --------------------------------------------------------------------------------------------------------- from outside


def show_stacks_when_asked(log: TextIO | None = None) -> None:
    """This process writes where all its threads are when it gets `STACKS`, even while it computes in C."""
    faulthandler.register(STACKS, log or sys.stderr, all_threads=True)


def ask_for_stacks(process: int) -> bool:
    """Have a process write its stacks to its log. False if it cannot: gone, stopped, or it would die of being asked."""
    status = _status(process)
    caught = int(status.get("SigCgt", "0"), 16) >> (STACKS - 1) & 1
    if not caught or status.get("State", "T")[:1] in "TtZX":
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, STACKS)
        return True
    return False


def look_at(process: int) -> str:
    """What a process that says nothing is doing, as far as the kernel knows, and what helps."""
    status = _status(process)
    name = f"process {process}"
    match status.get("State", "gone")[:1]:
        case "g" | "X":
            return f"{name} is gone"
        case "Z":
            return f"{name} has ended, but nobody has taken note of it"
        case "T" | "t":
            return f"{name} is stopped (SIGSTOP, Ctrl-Z or a debugger); kill -CONT {process} lets it go on"
        case "D":
            return f"{name} waits in the kernel{_waits_in(process)}: look at the disk or the network file system"
        case "R":
            return f"{name} computes and says nothing: it is overloaded, or caught in a loop"
        case _:
            return f"{name} sleeps{_waits_in(process)} and says nothing: it waits for something that does not come"


def is_stopped(process: int) -> bool:
    return _status(process).get("State", "")[:1] in ("T", "t")


def _status(process: int) -> dict[str, str]:
    """/proc/N/status; empty where there is none."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _waits_in(process: int) -> str:
    try:
        function = Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return ""
    return f" in {function}" if function not in ("", "0") else ""
