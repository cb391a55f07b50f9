"""Feeds a tracker from a run, to its present end or until the run is over.

How far a tracker is, is in RUN/log/NAME.json: a process that is started again goes on from there. Only one at a time
feeds a tracker of a run.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from tailrace.config.fields import fields, read
from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.sinks.base import Sink, SinkName, TrackedRun
from tailrace.sinks.feed import Feed
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER, is_being_written
from tailrace.store.journal import RUN, Journal

FOLDER = "log"
POLL_S = 1.0
PATIENCE_S = 10.0  # with another process that feeds the same tracker
FLUSH_ROWS = 200  # between two notes of the position, while there is much to read


class SinkError(TailraceError):
    """Why a tracker cannot be told of a run."""


class Position(msgspec.Struct):
    """How far a tracker is: rows that it has, and what it said of where they end."""

    rows: int = 0
    sink: int = 0
    takes: int = 0  # how often it was begun from the start


Open = Callable[[TrackedRun, int], Sink]


def feed(run: Path, name: SinkName, open_sink: Open, follow: bool = False, again: bool = False) -> int:
    """Returns how many rows it was told. `follow`: until the run is over. `again`: from the beginning, as a new run of
    the tracker's."""
    folder = run / FOLDER
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    with _alone(folder / f"{name}.lock", name):
        file = folder / f"{name}.json"
        position = _read(file)
        if again:
            position = Position(takes=position.takes + 1)
        journal = Journal(run)
        sink = open_sink(_tracked(run, journal, position.takes), position.sink)
        return _Feeding(run, file, position, sink, journal.config.log.samples).run(follow)


class _Feeding:
    def __init__(self, run: Path, file: Path, position: Position, sink: Sink, samples: int) -> None:
        self._run, self._file, self._position, self._sink = run, file, position, sink
        self._feed = Feed(run, position.rows, samples)
        self._told = 0

    def run(self, follow: bool) -> int:
        ended = False
        try:
            while not ended:
                ended = not follow or _is_over(self._run)  # looked at first: what came before it is read below
                self._poll()
                if not ended:
                    time.sleep(POLL_S)
        finally:
            self._feed.close()
            self._sink.close(ended and self._feed.journal.complete)
        return self._told

    def _poll(self) -> None:
        unsaved = 0
        for row in self._feed.poll():
            self._sink.log(row)
            self._position.rows += 1
            self._told += 1
            unsaved += 1
            if unsaved % FLUSH_ROWS == 0:
                self._save()
        if unsaved:
            self._save()

    def _save(self) -> None:
        self._position.sink = self._sink.flush()
        draft = self._file.with_suffix(".new")
        draft.touch(PRIVATE)
        draft.write_bytes(msgspec.json.encode(self._position))
        draft.rename(self._file)


def _is_over(run: Path) -> bool:
    return not is_being_written(run)


def _read(file: Path) -> Position:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Position)
    return Position()


def _tracked(run: Path, journal: Journal, takes: int) -> TrackedRun:
    config, id = journal.config, journal.meta.get(RUN, "")
    name = config.run.name or run.resolve().name
    again = f"-{takes}" if takes else ""
    return TrackedRun(id + again, name + again, config.log.project, run / FOLDER, _settings(config))


def _settings(config: Config) -> dict[str, object]:
    """Plain values: lists as text, tables left out where they are empty."""
    values = {key: read(config, key) for key in fields()}
    plain = {key: value if isinstance(value, str | int | float | bool) else str(value) for key, value in values.items()}
    return {key: value for key, value in plain.items() if value not in ("{}", "()", "None", "")}


@contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """The one of a controller that was replaced ends a moment after its successor's has begun."""
    path.touch(PRIVATE)
    until = time.monotonic() + PATIENCE_S
    with path.open("r+b") as file:
        while not _locked(file):
            if time.monotonic() > until:
                raise SinkError(f"another process is telling {name} of this run; wait until it has ended")
            time.sleep(PATIENCE_S / 50)
        yield


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
