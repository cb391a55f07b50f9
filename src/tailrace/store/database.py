"""The SQLite file of a run: how it is made, opened again and read, and what is said when that cannot be done.

`Database` is the one connection through which a run is written: `journal`, `vault` and `metrics` write rows through it
and `commit` makes them permanent together, so an event is never there without what it brought. The promise: what was
committed survives a killed process and a full disk; whatever goes wrong is a `JournalError` with one sentence.

Never open the file by other means in the process that writes it: POSIX drops the locks of a file with the first
descriptor that is closed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

FILE = "run.db"
MAGIC = b"SQLite format 3\0"
LONGEST_VALUE = 256 << 20  # bytes; SQLite's own limit is 1 GB, a snapshot of a large fleet has a few MB
WRITERS = "'tailrace train' or 'tailrace simulate --record'"

Values = tuple[Any, ...]
DAMAGE = (sqlite3.Error, UnicodeDecodeError)  # what reading a damaged file raises; its own complaint may be no text


class JournalError(ValueError):
    """Why a run cannot be read or written, for the person who named it."""


# --------------------------------------------------------------------------------------------------------- writing


def refuse_existing(folder: Path) -> None:
    """Nothing is ever written over a run, nor into something that is not a directory."""
    if (folder / FILE).exists():
        raise JournalError(f"{folder} already has a run; name another directory, or remove this one")
    if folder.exists() and not folder.is_dir():
        raise JournalError(f"{folder} is a file, so no run can be recorded in it; name a directory")


class Database:
    """The writing connection. Everything between two commits is one transaction; after an error nothing more is
    written, and what was committed stays as it was."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.broken = ""  # the sentence of the first error
        self._connection = connection

    @classmethod
    def create(cls, folder: Path, schema: str) -> Database:
        refuse_existing(folder)
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            connection = _connect_to_write(path)
            connection.executescript(schema)
        except (OSError, *DAMAGE) as error:
            raise JournalError(f"{path} cannot be written ({reason(error)}); name another directory") from error
        return cls(path, connection)

    @classmethod
    def reopen(cls, path: Path) -> Database:
        """To go on with it; nothing is written to a file that is not whole."""
        try:
            connection = _connect_to_write(path)
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except DAMAGE as error:
            raise JournalError(f"{path} cannot be opened to go on with it: {reason(error)}") from error
        if found != "ok":
            connection.close()
            raise JournalError(f"{path} is damaged, so nothing can go on from it: {' '.join(found.split())}")
        return cls(path, connection)

    def execute(self, statement: str, values: Values = ()) -> sqlite3.Cursor:
        self._refuse_broken()
        try:
            return self._connection.execute(statement, values)
        except DAMAGE as error:
            raise self._break(error) from error

    def executemany(self, statement: str, rows: Iterable[Values]) -> None:
        self._refuse_broken()
        try:
            self._connection.executemany(statement, rows)
        except DAMAGE as error:
            raise self._break(error) from error

    def commit(self) -> None:
        self._refuse_broken()
        try:
            self._connection.commit()
        except DAMAGE as error:
            raise self._break(error) from error

    def close(self) -> None:
        """What is not committed is lost."""
        self._connection.close()

    def _refuse_broken(self) -> None:
        if self.broken:
            raise JournalError(self.broken)

    def _break(self, error: Exception) -> JournalError:
        self.broken = f"{self.path} cannot be written any further: {_complaint(error)}"
        if self._connection.in_transaction:
            self._connection.rollback()
        return JournalError(self.broken)


def _connect_to_write(path: Path) -> sqlite3.Connection:
    """WAL with `NORMAL`: a killed process loses only what it had not committed, and a commit waits for no disk."""
    connection = _bounded(sqlite3.connect(path))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _complaint(error: Exception) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return "the disk is full; what was committed before is kept, so make room and go on from there"
    return str(error)


def as_stored(number: float) -> float:
    """A number as SQLite gives it back, for what has a checksum: REAL has no minus zero, and NULL for a NaN."""
    assert isfinite(number), f"{number} cannot be stored"
    return float(number) or 0.0


# --------------------------------------------------------------------------------------------------------- reading


def file_of(run: Path) -> Path:
    """The database of a run, which is named by its directory or by the file itself."""
    path = run / FILE if run.is_dir() else run
    if path.is_file():
        return path
    if run.is_dir():
        raise JournalError(f"{run} has no {FILE}; name a directory that {WRITERS} wrote")
    raise JournalError(f"there is no run {run}; name the directory that {WRITERS} wrote")


def refuse_cut(path: Path) -> None:
    """SQLite's own header says how long the file is; what it lacks can only be in a log that is not merged yet."""
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
    if len(header) < 100 or (size < whole and not _log_of(path).exists()):
        raise JournalError(f"{path} is cut in the middle: it has {size:,} of {max(whole, 512):,} bytes")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read; sqlite3's errors are left to who knows what was being read."""
    with closing(_connect_to_read(path)) as connection:
        yield connection


def refuse_foreign_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Only tables and indexes. Views, triggers and computed columns are programs: in a file from somebody else they
    would run, perhaps for ever, as soon as it is read or written."""
    query = """SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'
               OR sql LIKE '%GENERATED%' OR sql LIKE '% AS (%' OR (type = 'index' AND sql LIKE '%(%(%') LIMIT 1"""
    found = connection.execute(query).fetchone()
    if found is not None:
        raise JournalError(f"{path} is not the journal of a run: {found[0]!r} in it is more than a table")


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, and without a trace: SQLite needs files beside this one only while its log is not merged."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    return _bounded(sqlite3.connect(uri if _log_of(path).exists() else f"{uri}&immutable=1", uri=True))


def _bounded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """What a file may ask of us, whoever wrote it."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, sqlite3.Error) else (getattr(error, "strerror", None) or str(error))
