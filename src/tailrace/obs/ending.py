"""Whether a run is running, and how it ended: in the same words on the page, in the summary and in a story."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tailrace.protocol import Command, ControllerRestarted, Event, Stop
from tailrace.store.folder import is_being_written
from tailrace.store.journal import Entry
from tailrace.store.run import FAILED

EndState = Literal["running", "complete", "failed", "interrupted"]
WORDS = {
    "running": "the run is running",
    "complete": "the run is complete",
    "failed": "the run failed",
    "interrupted": "the run was interrupted and can be resumed",
}


class RunEnding(msgspec.Struct, frozen=True):
    state: EndState
    reason: str = ""  # why it is over, in a sentence

    def __str__(self) -> str:
        return f"{WORDS[self.state]}: {self.reason}" if self.reason else WORDS[self.state]


class LastStop:
    """Whether control has ended the run, and why. A run that failed may have been resumed since."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.now = 0.0  # of the last event

    def see(self, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, ControllerRestarted):
            self.stop = None
        self.stop = next((command for command in commands if isinstance(command, Stop)), self.stop)

    def passing(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The same entries, seen on the way."""
        for entry in entries:
            self.see(entry.event, entry.commands)
            self.now = entry.now
            yield entry


def ending_of(meta: Mapping[str, str], folder: Path, stop: Stop | None) -> RunEnding:
    """From what the run has noted about itself, and from the last order of control."""
    reason = stop.reason if stop else ""
    if "complete" in meta:
        return RunEnding("failed" if stop and stop.failed else "complete", reason)
    if _is_open(folder):
        return RunEnding("running")
    reason = meta.get(FAILED) or (reason if stop and stop.failed else "")
    return RunEnding("failed", reason) if reason else RunEnding("interrupted")


def _is_open(folder: Path) -> bool:
    try:
        return is_being_written(folder)
    except OSError:
        return False
