"""`tailrace log`: tells a tracker of a run, while it goes on or afterwards.

`tailrace train` with `log.to` starts this command beside the run, one process for each tracker. What becomes of it does
not matter to the run; what it could not tell can be told afterwards, by the same command.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from tailrace.config.tree import Config
from tailrace.errors import TailraceError, UsageError
from tailrace.launch.arguments import path as to_path
from tailrace.logs import output
from tailrace.sinks.base import SinkName
from tailrace.sinks.follow import feed
from tailrace.sinks.packages import NAMES, check_packages, open_sink
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.store.journal import Journal
from tailrace.wording import counted

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
ENDING_S = 30.0  # for what a tracker still has to send when the run is over
POLITE = 10  # how nice such a process is: the run comes first


def log_run(run: Path, to: Sequence[str], follow: bool, again: bool) -> int:
    """Each of these trackers in turn; with `follow`, one alone, until the run is over."""
    names = _known(to)
    check_packages(names)
    if follow and len(names) > 1:
        raise UsageError("--follow feeds one tracker until the run is over; start the command once for each")
    if not follow or not run.exists():
        Journal(to_path(str(run)))  # what is no run is refused here
    if follow:
        _stay_beside()
    for name in names:
        try:
            rows = feed(to_path(str(run)), name, partial(open_sink, name), follow, again)
        except (TailraceError, KeyboardInterrupt):
            raise
        except Exception as error:  # the border to somebody else's package
            raise UsageError(f"{name} failed: {type(error).__name__}: {error}") from error
        output(f"{name}: {counted(rows, 'row')} of {run}")
    return 0


def _known(names: Sequence[str]) -> tuple[SinkName, ...]:
    for name in names or [""]:
        if name not in NAMES:
            raise UsageError(f"--to has '{name}', which is no tracker; there are {', '.join(NAMES)}")
    return cast("tuple[SinkName, ...]", tuple(names))


class Tracker(NamedTuple):
    name: SinkName
    child: subprocess.Popen[bytes]
    written: Path  # what it said


class Trackers:
    """Those of a run that goes on. `close` waits for what they still have to send, but not for long."""

    def __init__(self, run: Path, config: Config) -> None:
        self._run = run
        self._trackers = [_start(run, name) for name in dict.fromkeys(config.log.to)]

    def close(self) -> None:
        until = time.monotonic() + ENDING_S
        for tracker in self._trackers:
            try:
                status = tracker.child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                tracker.child.kill()
                status = tracker.child.wait()
            if status:
                self._complain(tracker)

    def _complain(self, tracker: Tracker) -> None:
        last = tracker.written.read_text(errors="replace").strip().splitlines()[-1:] or ["it was too slow"]
        log.warning(
            "not all of the run is in %s (%s); tailrace log %s --to %s tells it the rest",
            tracker.name,
            last[0][:300],
            self._run,
            tracker.name,
        )


def _start(run: Path, name: SinkName) -> Tracker:
    folder = run / "logs"
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    written = folder / f"log-{name}.log"
    written.touch(PRIVATE)
    command = [sys.executable, "-m", "tailrace", "log", str(run), "--to", name, "--follow"]
    with written.open("ab") as stream:
        return Tracker(name, _spawn(command, stream), written)


def _spawn(command: list[str], stream: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for the run, and this one ends when that has."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)


def _stay_beside() -> None:
    """It ends with the controller that started it, as whoever resumes the run starts another; and the run comes
    first."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.nice(POLITE)
