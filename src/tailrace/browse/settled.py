"""Samples that change no more, as a narrow table in search.db: what filters compare, with an index for each.

    settled(id, ...)         samples that have been trained on or dropped, as run.db has them
    unsettled(id)            all others up to the marks, also numbers that run.db does not have yet
    meta: training, evaluation    the marks: up to there every sample of this kind is in one of the two tables
          widest                  most versions that lie between the oldest and the newest token of a settled sample

What is unsettled or beyond the marks is read from run.db itself: a filter misses nothing, however far the index is
behind. A sample whose tokens were lost is generated anew under the same number, so it is never settled.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from tailrace.store.database import Values, has_table
from tailrace.store.trajectories import AMONG
from tailrace.types import EVALUATION

BATCH = 5000  # samples that are looked at in one transaction
MOST_UNSETTLED = 100_000  # more are not written down: a run has far fewer in flight
MOST_RECENT = 10_000  # unsettled or beyond the marks; with more, all of run.db is read
MARKS = {"training": (-1, EVALUATION), "evaluation": (EVALUATION - 1, 1 << 62)}  # the first, and where its kind ends
FIRST = {name: str(first) for name, (first, _) in MARKS.items()} | {"widest": "0"}
COLUMNS = "id, group_id, prompt_id, state, tokens, oldest, newest, finish, reward, step"
HAS_SETTLED = "payload <> 'live' AND state <> 'lost'"
MARK = "(SELECT CAST(value AS INTEGER) FROM search.meta WHERE key = '{}')"
RECENT = f"""
SELECT id FROM search.unsettled UNION ALL SELECT id FROM trajectories WHERE id > {MARK.format("training")} AND id < ?
UNION ALL SELECT id FROM trajectories WHERE id > {MARK.format("evaluation")} LIMIT ?
"""
STATEMENTS = (
    "CREATE TABLE settled (id INTEGER PRIMARY KEY, group_id INTEGER, prompt_id INTEGER, state TEXT, tokens INTEGER, "
    "oldest INTEGER, newest INTEGER, finish TEXT, reward REAL, step INTEGER)",
    "CREATE TABLE unsettled (id INTEGER PRIMARY KEY)",
    "CREATE INDEX settled_group ON settled (group_id)",
    "CREATE INDEX settled_step ON settled (step)",
    "CREATE INDEX settled_version ON settled (newest, oldest)",
    "CREATE INDEX settled_failed ON settled (id) WHERE state = 'failed'",
    "CREATE INDEX settled_best ON settled (reward)",
    "CREATE INDEX settled_worst ON settled (reward, id DESC)",
    "CREATE INDEX settled_longest ON settled (tokens)",
    "CREATE INDEX settled_shortest ON settled (tokens, id DESC)",
)


# ------------------------------------------------------------------------------------------------------------- writing


def settle(index: sqlite3.Connection, run: sqlite3.Connection) -> bool:
    """Take in one batch of a run; whether there may be more."""
    if not has_table(run, "trajectories"):
        return False
    _look_again(index, run)
    moved = [_advance(index, run, name, end) for name, (_, end) in MARKS.items()]
    return any(moved)


def _look_again(index: sqlite3.Connection, run: sqlite3.Connection) -> None:
    waiting = [id for (id,) in index.execute("SELECT id FROM unsettled")]
    query = f"SELECT {COLUMNS} FROM trajectories WHERE {HAS_SETTLED} AND id {AMONG}"
    rows = run.execute(query, (_list(waiting),)).fetchall()
    _add(index, rows)
    index.executemany("DELETE FROM unsettled WHERE id = ?", [row[:1] for row in rows])


def _advance(index: sqlite3.Connection, run: sqlite3.Connection, name: str, end: int) -> bool:
    """Move a mark. Numbers that are left out may come later: they are given out in order, but not begun in order."""
    query = f"SELECT {HAS_SETTLED}, {COLUMNS} FROM trajectories WHERE id > ? AND id < ? ORDER BY id LIMIT ?"
    mark = _number(index, name)
    rows = run.execute(query, (mark, end, BATCH)).fetchall()
    if not rows or rows[-1][1] - mark + _unsettled(index) > MOST_UNSETTLED:
        return False
    settled = {row[1]: row[1:] for row in rows if row[0]}
    _add(index, settled.values())
    others = [(id,) for id in range(mark + 1, rows[-1][1] + 1) if id not in settled]
    index.executemany("INSERT INTO unsettled VALUES (?)", others)
    index.execute("UPDATE meta SET value = ? WHERE key = ?", (str(rows[-1][1]), name))
    return len(rows) == BATCH


def _add(index: sqlite3.Connection, rows: Iterable[Values]) -> None:
    rows = list(rows)
    index.executemany(f"INSERT INTO settled ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    spans = [newest - oldest for *_, oldest, newest, _, _, _ in rows if newest is not None]
    widest = max([_number(index, "widest"), *spans])
    index.execute("UPDATE meta SET value = ? WHERE key = 'widest'", (str(widest),))


def _unsettled(index: sqlite3.Connection) -> int:
    return index.execute("SELECT count(*) FROM unsettled").fetchone()[0]


def _number(index: sqlite3.Connection, name: str) -> int:
    return int(index.execute("SELECT value FROM meta WHERE key = ?", (name,)).fetchone()[0])


# ------------------------------------------------------------------------------------------------------------- reading


def recent_samples(connection: sqlite3.Connection) -> list[int] | None:
    """All that are not settled, of a run to which its index is attached as `search`; None: too many."""
    found = [id for (id,) in connection.execute(RECENT, (EVALUATION, MOST_RECENT + 1))]
    return found if len(found) <= MOST_RECENT else None


def _list(ids: Iterable[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()
