"""Samples of a run by what they are: a filter in, rows out, newest first unless asked otherwise.

By words of completions the text index beside the run gives the samples, by words of prompts the prompts; it may be
behind. By all else, `settled` in the same index gives those that change no more, and recent ones are compared in
run.db; without an index, or if it is far behind, all of run.db is read. Attempts that failed have a table of their own
in run.db.

Rows are always those of run.db. Every query has a deadline, so that nobody who asks for much holds up others.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tailrace.browse.conditions import (
    SampleFilter,
    Term,
    in_words,
    is_by_text,
    is_of_failures,
    order_of,
    place,
    purpose_terms,
    reads_all,
    run_terms,
    settled_index,
    settled_terms,
)
from tailrace.browse.index_file import ATTEMPT_BITS, BrowseError, attach_index
from tailrace.browse.settled import recent_samples
from tailrace.store.database import DAMAGE, JournalError, file_of, has_table, reading, reason
from tailrace.store.trajectories import AMONG, FAILED, KNOWN, KnownTrajectory

QUERY_S = 10.0  # that a query may take
CHECK_EVERY = 1_000_000  # instructions of SQLite: each check of the deadline waits for Python's lock
COUNTED = 10_000  # matches; beyond that it is "more"
FEW_PROMPTS = 2000  # samples of so many are looked up one prompt after the other, instead of reading all
ROWS = ", ".join(f"t.{name.strip()}" for name in KNOWN.split(","))
SAME = f"t.id = c.rowid >> {ATTEMPT_BITS} AND t.attempt % {1 << ATTEMPT_BITS} = c.rowid % {1 << ATTEMPT_BITS}"


class FoundSamples(msgspec.Struct, frozen=True):
    samples: list[KnownTrajectory]
    count: int  # of all that match, up to `COUNTED`
    more_than_counted: bool


class Query(NamedTuple):
    """FROM, WHERE, and the values of both."""

    source: str
    values: tuple[Any, ...]
    order: str

    def rows(self, connection: sqlite3.Connection, limit: int, offset: int) -> list[KnownTrajectory]:
        query = f"SELECT {ROWS} {self.source} ORDER BY {self.order} LIMIT ? OFFSET ?"
        return [KnownTrajectory(*row) for row in connection.execute(query, (*self.values, limit, offset))]

    def count(self, connection: sqlite3.Connection) -> int:
        """Of all; no further than beyond what is told."""
        query = f"SELECT count(*) FROM (SELECT 1 {self.source} LIMIT {COUNTED + 1})"
        return connection.execute(query, self.values).fetchone()[0]


def find_samples(run: Path, asked: SampleFilter) -> FoundSamples:
    """Nothing where a run has no samples, as a simulated one has not."""
    with _connected(file_of(run), asked) as connection:
        if not has_table(connection, "trajectories"):
            return FoundSamples([], 0, False)
        if is_of_failures(asked) and has_table(connection, "failures"):
            query = _of_failures(asked)
            return _found(query.rows(connection, asked.limit, asked.offset), query.count(connection))
        asked = _without_unfinished(connection, asked)
        recent = recent_samples(connection) if _is_of_many(connection, asked) else None
        if recent is not None:
            return _settled_and_recent(connection, asked, recent)
        query = _by_words(asked) if asked.text else _of_run(asked)
        return _found(query.rows(connection, asked.limit, asked.offset), query.count(connection))


def _is_of_many(connection: sqlite3.Connection, asked: SampleFilter) -> bool:
    """Nearly all samples may have to be compared, and there is an index to do it with."""
    if not reads_all(asked) or not _has_index(connection):
        return False
    if not asked.asked:
        return True
    prompts = f"SELECT count(*) FROM (SELECT 1 FROM search.questions WHERE questions MATCH ? LIMIT {FEW_PROMPTS + 1})"
    return connection.execute(prompts, (in_words(asked.asked),)).fetchone()[0] > FEW_PROMPTS


def _without_unfinished(connection: sqlite3.Connection, asked: SampleFilter) -> SampleFilter:
    """What was under way when a run came to its end is nothing that anybody looks for first, and would come first."""
    named = asked.state or asked.prompt is not None or asked.group is not None
    complete = connection.execute("SELECT 1 FROM meta WHERE key = 'complete'").fetchone()
    return asked if named or not complete else msgspec.structs.replace(asked, state="ended")


def _settled_and_recent(connection: sqlite3.Connection, asked: SampleFilter, recent: list[int]) -> FoundSamples:
    """Recent samples are few: all that match are put in their places among the settled ones, of which as many are left
    out at the beginning as cannot be on this page, wherever the recent ones are."""
    known = _of_recent(asked, recent).rows(connection, len(recent), 0)
    query = _of_settled(asked)
    offset = max(0, asked.offset - len(known))
    settled = query.rows(connection, asked.offset - offset + asked.limit, offset)
    both = sorted([*known, *settled], key=lambda one: place(asked, one))[asked.offset - offset :]
    return _found(both[: asked.limit], len(known) + query.count(connection))


def _found(samples: list[KnownTrajectory], count: int) -> FoundSamples:
    return FoundSamples(samples, min(count, COUNTED), count > COUNTED)


# -------------------------------------------------------------------------------------------------------------- queries


def _of_run(asked: SampleFilter) -> Query:
    return _query("trajectories AS t", run_terms(asked), order_of(asked, "t"))


def _of_recent(asked: SampleFilter, recent: list[int]) -> Query:
    among = (f"t.id {AMONG}", msgspec.json.encode(recent).decode())
    return _query("trajectories AS t", [among, *run_terms(asked)], order_of(asked, "t"))


def _of_settled(asked: SampleFilter) -> Query:
    """run.db has the last word: whatever the index says, what is found is like that."""
    tables = f"search.settled AS s {settled_index(asked)} CROSS JOIN trajectories AS t ON t.id = s.id"
    return _query(tables, [*settled_terms(asked), *run_terms(asked)], order_of(asked, "s"))


def _of_failures(asked: SampleFilter) -> Query:
    """Each attempt is a row: they are few, and need no index."""
    order = f"{order_of(asked, 't')}, t.attempt DESC"
    if not asked.text:
        return _query(f"{FAILED} AS t", run_terms(asked), order)
    words = ("c.completions MATCH ?", in_words(asked.text))
    return _query(f"search.completions AS c CROSS JOIN {FAILED} AS t ON {SAME}", [words, *run_terms(asked)], order)


def _by_words(asked: SampleFilter) -> Query:
    """In the order of the documents' numbers SQLite need not sort. In another order, those of the newest are shown: as
    many as are counted."""
    words = ("c.completions MATCH ?", in_words(asked.text))
    numbers = purpose_terms(asked, "c.rowid", ATTEMPT_BITS)
    by_number = {"newest": "c.rowid DESC", "oldest": "c.rowid"}
    tables = f"search.completions AS c CROSS JOIN trajectories AS t ON {SAME}"
    query = _query(tables, [words, *numbers, *run_terms(asked)], by_number.get(asked.order, by_number["newest"]))
    if asked.order in by_number:
        return query
    newest = f"FROM (SELECT t.* {query.source} ORDER BY {query.order} LIMIT {COUNTED + 1}) AS t"
    return Query(newest, query.values, order_of(asked, "t"))


def _query(tables: str, terms: Iterable[Term], order: str) -> Query:
    given = list(terms)
    where = " AND ".join(term for term, _ in given) or "true"
    return Query(f"FROM {tables} WHERE {where}", tuple(value for _, value in given if value is not None), order)


# ----------------------------------------------------------------------------------------------------------- connecting


def _has_index(connection: sqlite3.Connection) -> bool:
    return any(name == "search" for _, name, _ in connection.execute("PRAGMA database_list"))


@contextmanager
def _connected(path: Path, asked: SampleFilter) -> Iterator[sqlite3.Connection]:
    """To run.db, with the index beside it where that is needed."""
    try:
        with reading(path) as connection, deadline(connection):
            if is_by_text(asked):
                attach_index(connection, path.parent)
            elif reads_all(asked):
                with suppress(BrowseError):
                    attach_index(connection, path.parent)
            connection.execute("BEGIN")  # what is settled now, run.db has when it is looked at next
            yield connection
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
            raise BrowseError(f"this takes longer than {QUERY_S:.0f} s; ask for less") from None
        raise JournalError(f"{path} cannot be searched: {reason(error)}") from error
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error


@contextmanager
def deadline(connection: sqlite3.Connection) -> Iterator[None]:
    """SQLite asks now and then whether to go on."""
    until = time.monotonic() + QUERY_S
    connection.set_progress_handler(lambda: int(time.monotonic() > until), CHECK_EVERY)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
