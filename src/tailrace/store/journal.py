"""The journal of a run: every event that control handled, and the commands that came of it, in `run.db`.

    meta(key, value)           format, tailrace, driver, created, config, begun (TOML); complete (last seq); failed
    journal(seq, now, kind, event, commands, crc)
                               seq counts from 1 without gaps; event and commands are JSON text; crc is that of the row
                               and of all rows before it

`JournalWriter` is an observer of a driver, `Journal` reads; a real run writes the same tables, beside others, through
`run.py`. The promise: what a run is resumed from is exactly what was written, or there is a `JournalError` that says in
one sentence why not. Reading for people (`story`, `replay`) takes a journal that somebody has changed by hand as it is,
as long as it is whole: what the change would have done is just what a replay shows. A run that ended in a crash leaves
a shorter but consistent journal, which reads like any other; only `complete` tells them apart.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from tailrace.config import Config, render, with_values
from tailrace.config.files import flat, read_toml
from tailrace.protocol import AnyCommand, AnyEvent, Command, Event
from tailrace.release import __version__
from tailrace.store.database import (
    DAMAGE,
    FILE,
    Database,
    JournalError,
    as_stored,
    file_of,
    reading,
    reason,
    refuse_cut,
    refuse_existing,
    refuse_foreign_schema,
    slices,
)
from tailrace.types import MALFORMED

__all__ = ["FILE", "FORMAT", "Entry", "Journal", "JournalError", "JournalWriter", "refuse_existing"]

FORMAT = 3
BEGUN = "begun"  # in `meta`: the settings that its journal begins with; unset: those that it has
CARDS = "cards"  # in `meta`: the GPUs of the machine, as JSON; none where nothing would use them
RUN = "run"  # in `meta`: by which the files of its sample stores are known
BATCH = 2000  # events per transaction
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE journal (seq INTEGER PRIMARY KEY, now REAL, kind TEXT, event TEXT, commands TEXT, crc INTEGER);
"""

Row = tuple[int, float, str, str, str, int]


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
        found = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,))
        return found[0][0] if found else None

    def set(self, key: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def remove(self, key: str) -> None:
        self._database.execute("DELETE FROM meta WHERE key = ?", (key,))

    def configure(self, config: Config) -> None:
        """What it goes on with. What it was begun with is kept: the journal is replayed from there."""
        if self.get(BEGUN) is None:
            self.set(BEGUN, self.get("config") or "")
        self.set("config", _frozen(config))


def beginning(config: Config, driver: str) -> dict[str, str]:
    """What every run says of itself, in `meta`."""
    values = {"format": str(FORMAT), "tailrace": __version__, "driver": driver, "created": date()}
    return values | {RUN: secrets.token_hex(8), "config": _frozen(config)}


class JournalTable:
    """Adds to the journal of an open database; somebody else commits."""

    def __init__(self, database: Database) -> None:
        newest = database.execute("SELECT seq, now, crc FROM journal ORDER BY seq DESC LIMIT 1")
        self.last, self.now, self._crc = newest[0] if newest else (0, 0.0, 0)  # seq and time of the last event
        self._database = database
        self._encode = msgspec.json.Encoder().encode

    def record(self, now: float, event: Event, commands: Sequence[Command]) -> int:
        self.last, self.now = self.last + 1, as_stored(now)
        encode = self._encode
        text = encode(commands).decode() if commands else "[]"
        row = (self.last, self.now, type(event).__name__, encode(event).decode(), text)
        self._crc = chained(self._crc, *row)
        self._database.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", (*row, self._crc))
        return self.last


class JournalWriter:
    """Writes a new run that has nothing but a journal. Leaving the `with` block normally marks it complete; leaving by
    an error does not.

    Events are committed `batch` at a time: a crash loses at most the last batch, never part of an event. A driver that
    must not lose any before it acts calls `flush`.
    """

    def __init__(self, folder: Path, config: Config, driver: str = "simulation", batch: int = BATCH) -> None:
        self._database = Database.create(folder, SCHEMA, beginning(config, driver))
        self.path = self._database.path
        self._batch = batch
        self._journal = JournalTable(self._database)
        self._meta = Meta(self._database)

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


def date() -> str:
    """For people to read; nothing is ever decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def chained(crc: int, seq: int, now: float, kind: str, event: str, commands: str) -> int:
    """The checksum of a row that follows another: no row can change, vanish or come from elsewhere unnoticed."""
    return zlib.crc32(f"{seq} {now!r} {kind} {event} {commands}".encode(), crc)


def _frozen(config: Config) -> str:
    """The settings as TOML that needs no other file: the figures of a config.json are written out."""
    model = msgspec.structs.replace(config.model, hf_config="")
    return render(msgspec.structs.replace(config, model=model), alone=True)


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
        """As the run has them now."""
        return self._settings("config")

    @property
    def begun(self) -> Config:
        """The settings that it was begun with: those that have changed since are in the journal."""
        return self._settings(BEGUN if self.meta.get(BEGUN) else "config")

    def _settings(self, key: str) -> Config:
        try:
            return with_values(Config(), dict(flat(read_toml(self.meta[key]))))
        except (KeyError, ValueError) as error:
            raise JournalError(f"{self.path} has settings that {self._readers} cannot read: {error}") from error

    @property
    def complete(self) -> bool:
        """The run came to its end; False after a crash, or while it is still running."""
        return "complete" in self.meta

    def check(self) -> None:
        """JournalError unless every event is there and as it was written: two seconds for a million of them."""
        last = crc = 0
        for seq, now, kind, event, commands, sum in self._rows(0):
            crc = chained(crc, seq, now, kind, event, commands)
            if (seq, sum) != (last + 1, crc):
                raise JournalError(f"{self.path} is damaged: event {last + 1} is missing or not as it was written")
            last = seq

    def entries(self, after: int = 0, most: int | None = None) -> Iterator[Entry]:
        """What follows event `after`, in order: everything, or at most so many. JournalError at the first thing that is
        not whole."""
        decode = msgspec.json.Decoder(AnyEvent).decode
        decode_commands = msgspec.json.Decoder(list[AnyCommand]).decode
        last = after
        for seq, now, kind, event, commands, _ in self._rows(after, most):
            if seq != last + 1:
                raise JournalError(f"{self.path} is damaged: after event {last} comes event {seq}")
            last = seq
            try:
                yield Entry(seq, _time(now), decode(event), decode_commands(commands))
            except msgspec.ValidationError as error:
                raise JournalError(self._foreign(seq, kind, error)) from error
            except (*MALFORMED, TypeError) as error:
                raise JournalError(f"{self.path} is damaged: event {seq} ({kind}) is cut short") from error
        whole = most is None or last - after < most
        if whole and self.complete and str(last) != self.meta["complete"]:
            raise JournalError(f"{self.path} is damaged: it has {last} of its {self.meta['complete']} events")

    def events(self, *kinds: str) -> Iterator[Event]:
        """Those of these kinds alone, in order."""
        decode = msgspec.json.Decoder(AnyEvent).decode
        query = f"SELECT event FROM journal WHERE kind IN ({', '.join('?' * len(kinds))}) ORDER BY seq"
        try:
            with reading(self.path) as database:
                yield from [decode(event) for (event,) in database.execute(query, kinds)]
        except (*DAMAGE, *MALFORMED, TypeError) as error:
            raise JournalError(f"{self.path} is damaged: {reason(error)}") from error

    @property
    def _readers(self) -> str:
        return f"tailrace {__version__}"

    def _rows(self, after: int, most: int | None = None) -> Iterator[Row]:
        query = "SELECT seq, now, kind, event, commands, crc FROM journal WHERE seq > ? ORDER BY seq LIMIT ?"
        try:
            for rows in slices(self.path, query, after, most):
                yield from rows  # type: ignore[misc]
        except DAMAGE as error:
            raise JournalError(f"{self.path} is damaged: {reason(error)}") from error

    def _read_meta(self) -> dict[str, str]:
        try:
            with reading(self.path) as database:
                refuse_foreign_schema(self.path, database)
                found = dict(database.execute("SELECT key, value FROM meta"))
        except DAMAGE as error:
            raise JournalError(f"{self.path} is not the journal of a run, or is damaged: {reason(error)}") from error

        if not all(isinstance(word, str) for pair in found.items() for word in pair):
            raise JournalError(f"{self.path} is not the journal of a run, or is damaged: it has facts that are no text")
        return found

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


def _time(now: object) -> float:
    if not isinstance(now, int | float):
        raise TypeError("the time of an event is a number")
    return now
