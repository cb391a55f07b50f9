"""Waiting for a database that another program has locked: a SQL shell with an open transaction, a backup.

Whoever cannot write asks `Locked.still` again and again. It says once that the run waits and for whom, and gives up
after `LOCKED_S`; `over` says that it goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tailrace.store.errors import JournalError

log = logging.getLogger(__name__)

LOCKED_S = 600.0  # that a lock is waited for: long enough for a backup, and a forgotten shell is noticed
QUIET_S = 1.0  # a lock that is over sooner is not worth a word
PAUSE_S = 0.02  # between two tries
WRITE_LOCK = 120  # the byte of the -shm file that a writer locks

Say = Callable[[str], None]


def to_terminal(sentence: str) -> None:
    log.warning("%s", sentence)


class Locked:
    """One wait, from its first failure on."""

    def __init__(self, path: Path, say: Say = to_terminal, patience_s: float = LOCKED_S) -> None:
        self._path = path
        self._say = say
        self._patience_s = patience_s
        self._since = time.monotonic()
        self._told = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def still(self) -> None:
        """It is locked still; JournalError if that has gone on for too long."""
        if self.seconds >= self._patience_s:
            raise JournalError(
                f"{self._path} has been locked by {holder(self._path)} for {_spell(self.seconds)}; end that program or "
                "its transaction, then go on with --resume"
            )
        if self.seconds >= QUIET_S and not self._told:
            self._told = True
            self._say(
                f"{self._path} is locked by {holder(self._path)}; the run waits until it is free, for up to "
                f"{_spell(self._patience_s)}"
            )

    def over(self) -> None:
        if self._told:
            self._say(f"{self._path} is free again after {self.seconds:.1f} s; the run goes on")


def holder(path: Path) -> str:
    """Who has the database locked, as far as the kernel tells."""
    process = next(_writers(path), None)
    if process is None:
        return "another program"
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        name = "of another user or container"
    return f"process {process} ({name})"


def _writers(path: Path) -> Iterator[int]:
    """From the kernel's list: opening the files to ask would drop the locks that this process has on them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        database, shared = (file.stat().st_ino for file in (path, path.with_name(f"{path.name}-shm")))
    except OSError:
        return
    for line in lines:
        *_, access, process, location, first, last = line.split()  # 1: POSIX ADVISORY WRITE 4242 fd:01:5246 120 120
        inode = int(location.rpartition(":")[2])
        covers = int(first) <= WRITE_LOCK and (last == "EOF" or int(last) >= WRITE_LOCK)
        if access == "WRITE" and int(process) > 0 and (inode == database or (inode == shared and covers)):
            yield int(process)


def _spell(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.1f} s"
