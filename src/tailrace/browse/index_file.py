"""The file of the index beside a run: its tables, and how it is made, recognised and opened. `index` fills it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from tailrace.browse import settled
from tailrace.errors import TailraceError
from tailrace.store.database import DAMAGE, connect_to_read, file_of, has_log, reason
from tailrace.store.folder import PRIVATE
from tailrace.store.journal import RUN

INDEX = "search.db"
FORMAT = "2"
ATTEMPT_BITS = 16  # of a document's number: the rest is the trajectory
STATEMENTS = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)",
    "CREATE VIRTUAL TABLE completions USING fts5(text, content='', columnsize=0)",
    "CREATE VIRTUAL TABLE questions USING fts5(text, content='', columnsize=0)",
    "CREATE TABLE visits (prompt INTEGER PRIMARY KEY, row INTEGER, version INTEGER, samples INTEGER, passed INTEGER, "
    "failed INTEGER, rewards REAL)",
    "CREATE INDEX visits_of ON visits (row, prompt)",
    *settled.STATEMENTS,
)


class BrowseError(TailraceError):
    """What a filter asks for cannot be answered."""


def run_id(meta: Mapping[str, str]) -> str:
    """Whose samples these are: another run may be made in the same folder."""
    return meta.get(RUN, meta.get("created", ""))


def document(trajectory: int, attempt: int) -> int:
    """The number of a sample's text in the index: a newer attempt is another document."""
    return trajectory << ATTEMPT_BITS | attempt % (1 << ATTEMPT_BITS)


def make_index(path: Path, run: str) -> None:
    """Under another name first: whoever finds it finds a whole one."""
    draft = path.with_name(f".{INDEX}.new")
    draft.unlink(missing_ok=True)
    draft.touch(PRIVATE)
    with closing(sqlite3.connect(draft)) as connection, connection:
        for statement in STATEMENTS:
            connection.execute(statement)
        values = {"format": FORMAT, "run": run, "read": "0", **settled.FIRST}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
    draft.rename(path)


def attach_index(connection: sqlite3.Connection, folder: Path) -> None:
    """To a connection to run.db, as `search`; BrowseError if there is none of this run."""
    index = folder / INDEX
    refuse_unknown_index(index, run_id(dict(connection.execute("SELECT key, value FROM meta"))))
    uri = f"{index.resolve().as_uri()}?mode=ro"
    connection.execute("ATTACH ? AS search", (uri if has_log(index) else f"{uri}&immutable=1",))


@contextmanager
def opened_index(run: Path) -> Iterator[sqlite3.Connection]:
    """To read; BrowseError if there is none."""
    path = file_of(run).parent / INDEX
    refuse_unknown_index(path)
    try:
        with closing(connect_to_read(path)) as connection:
            yield connection
    except DAMAGE as error:
        raise BrowseError(f"{path} cannot be read ({reason(error)}); delete it, and it is made anew") from None


def refuse_unknown_index(path: Path, run: str = "") -> None:
    """BrowseError unless this has exactly our tables: a folder from somebody else may contain anything."""
    try:
        with closing(connect_to_read(path)) as connection:
            known = _schema(connection) == _own_schema()
            meta = dict(connection.execute("SELECT key, value FROM meta")) if known else {}
    except DAMAGE as error:
        raise BrowseError(f"there is no text index beside the run yet ({reason(error)})") from None
    if not known or meta.get("format") != FORMAT or (run and meta.get("run") != run):
        raise BrowseError(f"{path} is not the text index of this run; delete it, and it is made anew")


@cache
def _own_schema() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in STATEMENTS:
            connection.execute(statement)
        return _schema(connection)


def _schema(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT name, coalesce(sql, '') FROM sqlite_master ORDER BY name").fetchall()
