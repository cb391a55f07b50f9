"""The journal of a run: every event that control handled, and the commands that came of it, in `run.db`.

    meta(key, value)                         format, tailrace, driver, created, config (TOML); complete (last seq)
    journal(seq, now, kind, event, commands) seq counts from 1 without gaps; event and commands are JSON text

`JournalWriter` is an observer of a driver, `Journal` reads; a real run writes the same tables, beside others, through
`run.py`. The promise: what is read is exactly what was written, or there is a `JournalError` that says in one sentence
why not. A run that ended in a crash leaves a shorter but consistent journal, which reads like any other; only
`complete` tells them apart.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from tailrace import __version__
from tailrace.config import Config, ConfigError, render, with_values
from tailrace.config.sources import flat
from tailrace.protocol import AnyCommand, AnyEvent, Command, Event
from tailrace.store.database import FILE, Database, JournalError, file_of, reading, reason, refuse_cut, refuse_existing

__all__ = ["FILE", "FORMAT", "Entry", "Journal", "JournalError", "JournalWriter", "refuse_existing"]

FORMAT = 1
BATCH = 2000  # events per transaction
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE journal (seq INTEGER PRIMARY KEY, now REAL, kind TEXT, event TEXT, commands TEXT);
"""

Row = tuple[int, float, str, str, str]


class Entry(NamedTuple):
    """One event as control handled it."""

    seq: int
    now: float
    event: Event
    commands: Sequence[Command]


# --------------------------------------------------------------------------------------------------------- writing


class Meta:
    """What is known of a run as a whole, as text."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, key: str) -> str | None:
        row = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def set(self, key: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def configure(self, config: Config) -> None:
        self.set("config", _frozen(config))

    def begin(self, config: Config, driver: str) -> None:
        """What every run says of itself."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        values = {"format": str(FORMAT), "tailrace": __version__, "driver": driver, "created": created}
        for key, value in (values | {"config": _frozen(config)}).items():
            self.set(key, value)


class JournalTable:
    """Adds to the journal of an open database; somebody else commits."""

    def __init__(self, database: Database, last: int = 0) -> None:
        self.last = last  # seq
        self._database = database
        self._encode = msgspec.json.Encoder().encode

    def record(self, now: float, event: Event, commands: Sequence[Command]) -> int:
        self.last += 1
        encode = self._encode
        text = encode(commands).decode() if commands else "[]"
        row = (self.last, now, type(event).__name__, encode(event).decode(), text)
        self._database.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", row)
        return self.last


class JournalWriter:
    """Writes a new run that has nothing but a journal. Leaving the `with` block normally marks it complete; leaving by
    an error does not.

    Events are committed `batch` at a time: a crash loses at most the last batch, never part of an event. A driver that
    must not lose any before it acts calls `flush`.
    """

    def __init__(self, folder: Path, config: Config, driver: str = "simulation", batch: int = BATCH) -> None:
        self._database = Database.create(folder, SCHEMA)
        self.path = self._database.path
        self._batch = batch
        self._journal = JournalTable(self._database)
        self._meta = Meta(self._database)
        self._meta.begin(config, driver)
        self.flush()

    def record(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self._journal.record(now, event, commands) % self._batch == 0:
            self.flush()

    def flush(self) -> None:
        """Commit what has been recorded."""
        self._database.commit()

    def close(self, complete: bool) -> None:
        try:
            if complete:
                self._meta.set("complete", str(self._journal.last))
            self.flush()
        finally:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._database.broken:
            self._database.close()  # it has been said why
        else:
            self.close(complete=kind is None)


def _frozen(config: Config) -> str:
    """The settings as TOML that needs no other file: the figures of a config.json are written out."""
    model = msgspec.structs.replace(config.model, hf_config="")
    return render(msgspec.structs.replace(config, model=model))


# --------------------------------------------------------------------------------------------------------- reading


class Journal:
    """A recorded run: `Journal(path)` for its directory or its file, then `config`, `complete` and `entries()`."""

    def __init__(self, run: Path) -> None:
        self.path = file_of(run)
        refuse_cut(self.path)
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

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Everything that follows event `after`, in order. JournalError at the first thing that is not as it was
        written."""
        decode = msgspec.json.Decoder(AnyEvent).decode
        decode_commands = msgspec.json.Decoder(list[AnyCommand]).decode
        last = after
        for seq, now, kind, event, commands in self._rows(after):
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

    def _rows(self, after: int) -> Iterator[Row]:
        query = "SELECT seq, now, kind, event, commands FROM journal WHERE seq > ? ORDER BY seq"
        try:
            with reading(self.path) as database:
                yield from database.execute(query, (after,))
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} is damaged: {reason(error)}") from error

    def _read_meta(self) -> dict[str, str]:
        try:
            with reading(self.path) as database:
                return dict(database.execute("SELECT key, value FROM meta"))
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} is not the journal of a run, or is damaged: {reason(error)}") from error

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
