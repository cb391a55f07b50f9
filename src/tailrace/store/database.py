"""The SQLite file of a run: how it is made, opened again and read, and what is said when that cannot be done.

`Database` is the one connection through which a file is written: `journal`, `trajectories` and `metrics` write rows
through it and `commit` makes them permanent together, so an event is never there without what it brought. The promise:
what was committed survives a killed process and a full disk; whatever goes wrong is a `JournalError` with one sentence.
Another program that has the file locked is waited for (`waiting`): here by standing still, or by a loop that asks
`begin`.

Whoever closes a run last, its writer or a reader, leaves one file.

Never open the file by other means in the process that writes it: POSIX drops the locks of a file with the first
descriptor that is closed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from tailrace.store.errors import JournalError
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER, is_being_written
from tailrace.store.waiting import LOCKED_S, PAUSE_S, Locked

FILE = "run.db"
MAGIC = b"SQLite format 3\0"
LONGEST_VALUE = 256 << 20  # bytes; SQLite's own limit is 1 GB, a snapshot of a large fleet has a few MB
LONGEST_LOG = 64 << 20  # bytes that the log keeps on disk once it has been merged
SLICE = 5000  # rows that are read at once
READERS_S = 3.0  # that a closing writer waits for those who read at this moment
WRITERS = "'tailrace train' or 'tailrace simulate --record'"

Values = tuple[Any, ...]
T = TypeVar("T")
DAMAGE = (sqlite3.Error, UnicodeDecodeError)  # what reading a damaged file raises; its own complaint may be no text


# --------------------------------------------------------------------------------------------------------- writing


def refuse_existing(folder: Path, name: str = FILE) -> None:
    """Nothing is ever written over a run, nor into something that is not a directory."""
    if (folder / name).exists():
        raise JournalError(f"{folder} already has a run; name another directory, or remove this one")
    if folder.exists() and not folder.is_dir():
        raise JournalError(f"{folder} is a file, so no run can be recorded in it; name a directory")


class Database:
    """The writing connection. Everything between two commits is one transaction; after an error nothing more is
    written, and what was committed stays as it was."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.broken = ""  # the sentence of the first error
        self.patience_s = LOCKED_S
        self._connection = connection

    @classmethod
    def create(cls, folder: Path, schema: str, meta: Mapping[str, str], name: str = FILE) -> Database:
        """Made under another name first: whoever finds the file finds a whole one, whenever its maker is killed."""
        refuse_existing(folder, name)
        path, draft = folder / name, folder / f".{name}.new"
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            _remove(draft, *_logs(path))  # what somebody has left who was killed, or who has deleted the run
            _make(draft, schema, meta)
            draft.rename(path)
            return cls(path, _patiently(path, lambda: _connect_to_write(path)))
        except (OSError, *DAMAGE) as error:
            with suppress(OSError):
                _remove(draft)
            raise JournalError(f"{path} cannot be written ({reason(error)}); name another directory") from error

    @classmethod
    def reopen(cls, path: Path, check: bool = True) -> Database:
        """To go on with it; nothing is written to a file that is not whole. `check` reads all of it: a file that can be
        very large and whose rows are checked when they are read goes without."""
        try:
            connection = _patiently(path, lambda: _connect_to_write(path))
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if check else "ok"
        except DAMAGE as error:
            raise JournalError(f"{path} cannot be opened to go on with it: {reason(error)}") from error
        if found != "ok":
            connection.close()
            raise JournalError(f"{path} is damaged, so nothing can go on from it: {' '.join(found.split())}")
        return cls(path, connection)

    def execute(self, statement: str, values: Values = ()) -> list[Any]:
        """Returns all rows at once: one that is not fetched would keep the file open, whoever closes it."""
        return self._try(lambda: self._connection.execute(statement, values).fetchall())

    def executemany(self, statement: str, rows: Iterable[Values]) -> None:
        rows = list(rows)
        self._try(lambda: self._connection.executemany(statement, rows))

    def begin(self) -> bool:
        """Begin a transaction without waiting: from here on nobody else can write. False while somebody else does."""
        self._refuse_broken()
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
        except DAMAGE as error:
            if not is_locked(error):
                raise self._break(error) from error
            return False
        return True

    def commit(self) -> None:
        self._try(self._connection.commit)

    def rollback(self) -> None:
        """Give up what was not committed."""
        self._try(self._connection.rollback)

    def close(self) -> None:
        """What is not committed is lost. One file is left, unless somebody goes on reading it."""
        with suppress(*DAMAGE):
            self._connection.rollback()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # then it has everything, whoever reads it
        self._connection.close()
        until = time.monotonic() + (0.0 if self.broken else READERS_S)
        while has_log(self.path) and time.monotonic() < until:
            time.sleep(PAUSE_S)
            merge_log(self.path)

    def _try(self, action: Callable[[], T]) -> T:
        """Wait for whoever has the file locked. Nobody can once a transaction is begun, so nothing is done twice."""
        self._refuse_broken()
        try:
            return _patiently(self.path, action, self.patience_s)
        except JournalError as error:
            self.broken = str(error)
            raise
        except DAMAGE as error:
            raise self._break(error) from error

    def _refuse_broken(self) -> None:
        if self.broken:
            raise JournalError(self.broken)

    def _break(self, error: Exception) -> JournalError:
        self.broken = f"{self.path} cannot be written any further: {_complaint(error)}"
        if self._connection.in_transaction:
            self._connection.rollback()
        return JournalError(self.broken)


def _make(path: Path, schema: str, meta: Mapping[str, str]) -> None:
    path.touch(PRIVATE)  # SQLite's other files are made alike
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(schema)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.commit()


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _connect_to_write(path: Path) -> sqlite3.Connection:
    """WAL with `NORMAL`: a killed process loses only what it had not committed, and a commit waits for no disk. Locks
    are met at the first write of a transaction or not at all, and SQLite does not wait for them: we do. One thread uses
    it at a time; which one, is for its owner to see to."""
    connection = _bounded(sqlite3.connect(path, timeout=0.0, isolation_level="IMMEDIATE", check_same_thread=False))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {LONGEST_LOG}")
    return connection


def _patiently(path: Path, action: Callable[[], T], patience_s: float = LOCKED_S) -> T:
    """Again and again while another program has the file locked; JournalError after so long."""
    locked: Locked | None = None
    while True:
        try:
            done = action()
        except DAMAGE as error:
            if not is_locked(error):
                raise
            locked = locked or Locked(path, patience_s=patience_s)
        else:
            if locked is not None:
                locked.over()
            return done
        locked.still()
        time.sleep(PAUSE_S)


def is_locked(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _complaint(error: Exception) -> str:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return "the disk is full; what was committed before is kept, so make room and go on from there"
        case sqlite3.SQLITE_IOERR:
            return f"{error} (a broken disk, or a quota?); what was committed before is kept, so go on once it can be"
        case _:
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
    if len(header) < 100 or (size < whole and not has_log(path)):
        raise JournalError(f"{path} is cut in the middle: it has {size:,} of {max(whole, 512):,} bytes")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read; sqlite3's errors are left to who knows what was being read. A run that has ended
    in the meantime could not merge its log, because of this very reader: then that is done here."""
    try:
        with closing(connect_to_read(path)) as connection:
            yield connection
    finally:
        with suppress(OSError):
            if has_log(path) and not is_being_written(path.parent):
                merge_log(path)


def merge_log(path: Path) -> None:
    """SQLite does it when the last connection is closed, unless that one can only read."""
    with suppress(*DAMAGE), closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as last:
        last.execute("PRAGMA schema_version")


def slices(path: Path, query: str, after: int, most: int | None = None) -> Iterator[list[Values]]:
    """The rows of a query that has the two parameters "after this number" and "at most so many", and a number first.
    Between two slices nothing is open: a reader that is slow, or leaves in the middle, holds nobody up."""
    while most is None or most > 0:
        limit = SLICE if most is None else min(SLICE, most)
        with reading(path) as connection:
            rows: list[Values] = connection.execute(query, (after, limit)).fetchall()
        yield rows
        if len(rows) < limit:
            return
        after, most = rows[-1][0], None if most is None else most - len(rows)


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


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, and without a trace: SQLite needs files beside this one only while its log is not merged."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    source = uri if has_log(path) else f"{uri}&immutable=1"
    return _bounded(sqlite3.connect(source, uri=True, check_same_thread=False))


def _bounded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """What a file may ask of us, whoever wrote it."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def has_log(path: Path) -> bool:
    """Somebody has it open, or it was not closed: beside the file lies what is not merged into it."""
    return _logs(path)[0].exists()


def _logs(path: Path) -> tuple[Path, Path]:
    """They lie beside the file itself, which may be elsewhere than its name."""
    file = path.resolve()
    return file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, sqlite3.Error) else (getattr(error, "strerror", None) or str(error))
