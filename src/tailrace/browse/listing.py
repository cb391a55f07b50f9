"""Samples of a run by what they are: a filter in, rows out, newest first unless asked otherwise.

One query over the table `trajectories` of run.db. A filter by text joins the index beside the run (`index`), which may
be behind a run that goes on. Every query has a deadline, so that nobody who asks for much holds up others.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tailrace.browse.index_file import ATTEMPT_BITS, BrowseError, attach_index
from tailrace.store.database import DAMAGE, JournalError, file_of, has_table, reading, reason
from tailrace.store.trajectories import KNOWN, KnownTrajectory

QUERY_S = 10.0  # that a query may take
COUNTED = 10_000  # matches; beyond that it is "more"

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Words = Annotated[str, Meta(max_length=400)]
Order = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]
ORDERS: dict[Order, str] = {
    "newest": "t.id DESC",
    "oldest": "t.id",
    "best": "t.reward IS NULL, t.reward DESC, t.id DESC",
    "worst": "t.reward IS NULL, t.reward, t.id DESC",
    "longest": "t.tokens DESC, t.id DESC",
    "shortest": "t.tokens IS NULL, t.tokens, t.id DESC",
}


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is set has to hold."""

    text: Words = ""  # words of the completion; "in quotes": a phrase; ending in *: a beginning
    asked: Words = ""  # words of the prompt
    prompt: Number | None = None
    row: Number | None = None  # of the data: all visits of one prompt
    group: Number | None = None
    step: Number | None = None  # that trained it
    version: Number | None = None  # that sampled some of its tokens
    state: Words = ""
    finish: Words = ""
    error: Words = ""  # part of the reason why it failed
    failed: bool = False
    min_reward: Finite | None = None
    max_reward: Finite | None = None
    min_tokens: Number | None = None
    max_tokens: Number | None = None
    order: Order = "newest"
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class FoundSamples(msgspec.Struct, frozen=True):
    samples: list[KnownTrajectory]
    count: int  # of all that match, up to `COUNTED`
    more_than_counted: bool


def find_samples(run: Path, asked: SampleFilter) -> FoundSamples:
    """Nothing where a run has no samples, as a simulated one has not."""
    path = file_of(run)
    with _connected(path, asked) as connection:
        if not has_table(connection, "trajectories"):
            return FoundSamples([], 0, False)
        source, values = _source(asked)
        rows = connection.execute(
            f"SELECT {_columns()} {source} ORDER BY {_order(asked)} LIMIT ? OFFSET ?",
            (*values, asked.limit, asked.offset),
        ).fetchall()
        counted = connection.execute(f"SELECT count(*) FROM (SELECT 1 {source} LIMIT {COUNTED + 1})", values)
        (count,) = counted.fetchone()
    return FoundSamples([KnownTrajectory(*row) for row in rows], min(count, COUNTED), count > COUNTED)


def in_words(text: str) -> str:
    """What a person typed as a query of FTS5, in which nothing of it is syntax: words and "phrases", all of them."""
    parts = [part for place, part in enumerate(text.split('"')) for part in ([part] if place % 2 else part.split())]
    found = [_quoted(part) for part in parts if any(letter.isalnum() for letter in part)]
    if not found:
        raise BrowseError(f"'{text[:80]}' has no letter or digit to look for")
    return " AND ".join(found)


def _quoted(part: str) -> str:
    return f'"{part}"' + ("*" if part.endswith("*") else "")


def is_by_text(asked: SampleFilter) -> bool:
    return bool(asked.text or asked.asked or asked.row is not None)


# ----------------------------------------------------------------------------------------------------------------- SQL


def _columns() -> str:
    return ", ".join(f"t.{name.strip()}" for name in KNOWN.split(","))


def _order(asked: SampleFilter) -> str:
    """By the number of the document, where there is one: then SQLite need not sort."""
    by_number = {"newest": "c.rowid DESC", "oldest": "c.rowid"}
    return by_number[asked.order] if asked.text and asked.order in by_number else ORDERS[asked.order]


def _source(asked: SampleFilter) -> tuple[str, tuple[Any, ...]]:
    """FROM and WHERE, and their values."""
    same = f"t.id = c.rowid >> {ATTEMPT_BITS} AND t.attempt % {1 << ATTEMPT_BITS} = c.rowid % {1 << ATTEMPT_BITS}"
    tables = f"search.completions AS c CROSS JOIN trajectories AS t ON {same}" if asked.text else "trajectories AS t"
    terms = list(_terms(asked))
    where = " AND ".join(term for term, _ in terms) or "true"
    return f"FROM {tables} WHERE {where}", tuple(value for _, value in terms if value is not None)


def _terms(asked: SampleFilter) -> Iterator[tuple[str, Any]]:
    """A condition, and its value if it has one."""
    if asked.text:
        yield "c.completions MATCH ?", in_words(asked.text)
    if asked.asked:
        yield "t.prompt_id IN (SELECT rowid FROM search.questions WHERE questions MATCH ?)", in_words(asked.asked)
    if asked.row is not None:
        yield "t.prompt_id IN (SELECT prompt FROM search.visits WHERE row = ?)", asked.row
    if asked.version is not None:
        yield "t.oldest <= ?", asked.version
        yield "t.newest >= ?", asked.version
    if asked.failed:
        yield "t.state = 'failed'", None
    if asked.error:
        yield "t.reason <> '' AND instr(lower(t.reason), lower(?)) > 0", asked.error
    yield from _comparisons(asked)


def _comparisons(asked: SampleFilter) -> Iterator[tuple[str, Any]]:
    pairs = (("prompt_id = ?", asked.prompt), ("group_id = ?", asked.group), ("step = ?", asked.step))
    texts = (("state = ?", asked.state or None), ("finish = ?", asked.finish or None))
    rewards = (("reward >= ?", asked.min_reward), ("reward <= ?", asked.max_reward))
    lengths = (("tokens >= ?", asked.min_tokens), ("tokens <= ?", asked.max_tokens))
    for condition, value in (*pairs, *texts, *rewards, *lengths):
        if value is not None:
            yield f"t.{condition}", value


@contextmanager
def _connected(path: Path, asked: SampleFilter) -> Iterator[sqlite3.Connection]:
    """To run.db, with the index beside it where that is needed."""
    try:
        with reading(path) as connection, deadline(connection):
            if is_by_text(asked):
                attach_index(connection, path.parent)
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
    connection.set_progress_handler(lambda: int(time.monotonic() > until), 100_000)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
