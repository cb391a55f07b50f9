"""Numbers that the components of a run measure of themselves, over time: metrics(now, step, source, name, value).

`source` is who measured (`trainer`, `r0`), `name` has a slash where there are many of a kind (`publish/stall_s`). The
controller writes them as they come and commits them with the journal; `measurements` reads those of any run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tailrace.store.database import DAMAGE, Database, JournalError, file_of, has_table, reading, reason, slices

SCHEMA = "CREATE TABLE metrics (now REAL, step INTEGER, source TEXT, name TEXT, value REAL);"


class Measurement(NamedTuple):
    now: float
    step: int
    source: str
    name: str
    value: float | None  # None: it was not a number


class Metrics:
    def __init__(self, database: Database) -> None:
        self._database = database

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None:
        rows = [(now, step, source, name, value) for name, value in values.items()]
        self._database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", rows)


def measurements(run: Path, after: int = 0) -> Iterator[Measurement]:
    """What was measured after the first so many, in order: nothing is ever taken out, so rows are numbered as they are
    counted. Nothing where a run has no such table, as a simulated one has not."""
    path = file_of(run)
    try:
        with reading(path) as connection:
            if not has_table(connection, "metrics"):
                return
        query = "SELECT rowid, now, step, source, name, value FROM metrics WHERE rowid > ? ORDER BY rowid LIMIT ?"
        for rows in slices(path, query, after):
            yield from [Measurement(*row[1:]) for row in rows]
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error
