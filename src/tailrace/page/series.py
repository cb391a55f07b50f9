"""Every metric of a run as a curve: names to pick from, and the points of one, bounded however long the run is.

Read from the table `metrics` when somebody looks; nothing of it is kept. Replicas are many, so all of them together
are one source, `replicas`, whose values are averaged point by point; `r3` is one of them.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.obs.bounded_series import BoundedSeries
from tailrace.store.database import DAMAGE, JournalError, file_of, has_table, reading, reason

POINTS = 600
REPLICAS = "replicas"
ONE_REPLICA = "r[0-9]*"

Name = Annotated[str, Meta(max_length=200)]


class SeriesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    source: Name = ""
    name: Name = ""


class MetricName(msgspec.Struct, frozen=True):
    name: str
    sources: list[str]


class Point(msgspec.Struct, array_like=True):
    """Neighbouring measurements as one."""

    now: float
    step: int
    mean: float
    low: float
    high: float
    count: int

    def add(self, other: Point) -> None:
        total = self.count + other.count
        self.mean += (other.mean - self.mean) * other.count / total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.now, self.step, self.count = other.now, other.step, total


def metric_names(run: Path) -> list[MetricName]:
    rows = _query(run, "SELECT DISTINCT name, CASE WHEN source GLOB ? THEN ? ELSE source END FROM metrics", _MANY)
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for name, source in rows:
        sources[name].add(source)
    return [
        MetricName(name, sorted(found, key=lambda one: (one != "trainer", one)))
        for name, found in sorted(sources.items())
    ]


def series(run: Path, asked: SeriesQuery) -> list[Point]:
    many = asked.source == REPLICAS
    condition = "source GLOB ?" if many else "source = ?"
    query = f"SELECT now, step, value FROM metrics WHERE name = ? AND {condition} AND value IS NOT NULL ORDER BY rowid"
    found = BoundedSeries[Point](POINTS)
    for now, step, value in _query(run, query, (asked.name, ONE_REPLICA if many else asked.source)):
        found.add(Point(now, step, value, value, value, 1))
    return found.points


_MANY = (ONE_REPLICA, REPLICAS)


def _query(run: Path, query: str, values: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
    path = file_of(run)
    try:
        with reading(path) as connection:
            if has_table(connection, "metrics"):
                yield from _rows(connection, query, values)
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error


def _rows(connection: sqlite3.Connection, query: str, values: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
    cursor = connection.execute(query, values)
    while rows := cursor.fetchmany(5000):
        yield from rows
