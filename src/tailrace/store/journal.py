"""The journal of a run: every event that control handled, and the commands that came of it, in `run.db`.

    meta(key, value)                         format, tailrace, driver, created, config (TOML); complete (last seq)
    journal(seq, now, kind, event, commands) seq counts from 1 without gaps; event and commands are JSON text

`JournalWriter` is an observer of a driver, `Journal` reads. The promise: what is read is exactly what was written, or
there is a `JournalError` that says in one sentence why not. A run that ended in a crash leaves a shorter but consistent
journal, which reads like any other; only `complete` tells them apart.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from tailrace import __version__
from tailrace.config import Config, ConfigError, render, with_values
from tailrace.config.sources import flat
from tailrace.protocol import AnyCommand, AnyEvent, Command, Event

FORMAT = 1
FILE = "run.db"
MAGIC = b"SQLite format 3\0"
BATCH = 2000  # events per transaction
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE journal (seq INTEGER PRIMARY KEY, now REAL, kind TEXT, event TEXT, commands TEXT);
"""

Row = tuple[int, float, str, str, str]


class JournalError(ValueError):
    """Why a journal cannot be read or written, for the person who named it."""


class Entry(NamedTuple):
    """One event as control handled it."""

    seq: int
    now: float
    event: Event
    commands: Sequence[Command]


# --------------------------------------------------------------------------------------------------------- writing


def refuse_existing(folder: Path) -> None:
    """Nothing is ever written over a run, nor into something that is not a directory."""
    if (folder / FILE).exists():
        raise JournalError(f"{folder} already has a run; name another directory, or remove this one")
    if folder.exists() and not folder.is_dir():
        raise JournalError(f"{folder} is a file, so no run can be recorded in it; name a directory")


class JournalWriter:
    """Writes a new run. Leaving the `with` block normally marks the journal complete; leaving by an error does not.

    Events are committed `batch` at a time: a crash loses at most the last batch, never part of an event. A driver that
    must not lose any before it acts calls `flush`.
    """

    def __init__(self, folder: Path, config: Config, driver: str = "simulation", batch: int = BATCH) -> None:
        refuse_existing(folder)
        self.path = folder / FILE
        self._database = _create(self.path)
        self._batch = batch
        self._rows: list[Row] = []
        self._seq = 0
        self._encode = msgspec.json.Encoder().encode
        created = datetime.now(UTC).isoformat(timespec="seconds")
        self._note(format=str(FORMAT), tailrace=__version__, driver=driver, created=created, config=_frozen(config))

    def record(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._seq += 1
        encode = self._encode
        text = encode(commands).decode() if commands else "[]"
        self._rows.append((self._seq, now, type(event).__name__, encode(event).decode(), text))
        if len(self._rows) >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Commit what has been recorded."""
        self._write("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", self._rows)
        self._rows.clear()

    def close(self, complete: bool) -> None:
        with closing(self._database):
            self.flush()
            if complete:
                self._note(complete=str(self._seq))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=kind is None)

    def _note(self, **values: str) -> None:
        self._write("INSERT INTO meta VALUES (?, ?)", values.items())

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        try:
            with self._database:
                self._database.executemany(statement, rows)
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be written any further: {error}") from error


def _create(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(SCHEMA)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(f"{path} cannot be written ({_reason(error)}); name another directory") from error
    return database


def _frozen(config: Config) -> str:
    """The settings as TOML that needs no other file: the figures of a config.json are written out."""
    model = msgspec.structs.replace(config.model, hf_config="")
    return render(msgspec.structs.replace(config, model=model))


# --------------------------------------------------------------------------------------------------------- reading


class Journal:
    """A recorded run: `Journal(path)` for its directory or its file, then `config`, `complete` and `entries()`."""

    def __init__(self, run: Path) -> None:
        self.path = _file_of(run)
        _refuse_cut(self.path)
        self.meta = self._read_meta()
        self._refuse_other_format()

    @property
    def config(self) -> Config:
        try:
            return with_values(Config(), dict(flat(tomllib.loads(self.meta["config"]))))
        except (KeyError, tomllib.TOMLDecodeError, ConfigError) as error:
            raise JournalError(f"{self.path} has settings that {self._readers} cannot read: {error}") from error

    @property
    def complete(self) -> bool:
        """The run came to its end; False after a crash, or while it is still running."""
        return "complete" in self.meta

    def entries(self) -> Iterator[Entry]:
        """Everything in order. Raises JournalError at the first thing that is not as it was written."""
        decode = msgspec.json.Decoder(AnyEvent).decode
        decode_commands = msgspec.json.Decoder(list[AnyCommand]).decode
        last = 0
        for seq, now, kind, event, commands in self._rows():
            if seq != last + 1:
                raise JournalError(f"{self.path} is damaged: after event {last} comes event {seq}")
            last = seq
            try:
                yield Entry(seq, now, decode(event), decode_commands(commands))
            except msgspec.ValidationError as error:
                raise JournalError(self._foreign(seq, kind, error)) from error
            except (msgspec.DecodeError, TypeError) as error:
                raise JournalError(f"{self.path} is damaged: event {seq} ({kind}) is cut short") from error
        if self.complete and last != int(self.meta["complete"]):
            raise JournalError(f"{self.path} is damaged: it has {last} of its {self.meta['complete']} events")

    @property
    def _readers(self) -> str:
        return f"tailrace {__version__}"

    def _rows(self) -> Iterator[Row]:
        query = "SELECT seq, now, kind, event, commands FROM journal ORDER BY seq"
        try:
            with closing(_connect(self.path)) as database:
                yield from database.execute(query)
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} is damaged: {_reason(error)}") from error

    def _read_meta(self) -> dict[str, str]:
        try:
            with closing(_connect(self.path)) as database:
                return dict(database.execute("SELECT key, value FROM meta"))
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} is not the journal of a run, or is damaged: {_reason(error)}") from error

    def _refuse_other_format(self) -> None:
        found = self.meta.get("format", "none")
        if found != str(FORMAT):
            raise JournalError(
                f"{self.path} was written by tailrace {self.meta.get('tailrace', '?')} in journal format {found}; "
                f"{self._readers} reads format {FORMAT}"
            )

    def _foreign(self, seq: int, kind: str, error: Exception) -> str:
        writer = self.meta.get("tailrace", "?")
        return (
            f"{self.path} was written by tailrace {writer}: {self._readers} does not know event {seq} ({kind}; {error})"
        )


def _file_of(run: Path) -> Path:
    path = run / FILE if run.is_dir() else run
    if path.is_file():
        return path
    if run.is_dir():
        raise JournalError(f"{run} has no {FILE}; name a directory that 'tailrace simulate --record' wrote")
    raise JournalError(f"there is no run {run}; name the directory that 'tailrace simulate --record' wrote")


def _refuse_cut(path: Path) -> None:
    """SQLite's own header says how long the file is; beyond what it has, pages can only be in an unmerged log."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise JournalError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not MAGIC.startswith(header[:16]) and not header.startswith(MAGIC):
        raise JournalError(f"{path} is not the journal of a run: it is not a SQLite file")
    page = int.from_bytes(header[16:18], "big")
    whole = int.from_bytes(header[28:32], "big") * (65536 if page == 1 else page)
    if len(header) < 100 or size < whole:
        raise JournalError(f"{path} is cut in the middle: it has {size:,} of {max(whole, 512):,} bytes")


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only, and without a trace: SQLite needs files beside this one only while its log is not merged."""
    has_log = path.with_name(f"{path.name}-wal").exists()
    uri = f"{path.resolve().as_uri()}?mode=ro"
    return sqlite3.connect(uri if has_log else f"{uri}&immutable=1", uri=True)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, sqlite3.Error) else (getattr(error, "strerror", None) or str(error))
