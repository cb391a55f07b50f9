"""What `run.db` knows of every trajectory: its newest attempt, how it ended, and which store has its tokens.

    trajectories(id, attempt, group_id, prompt_id, store, state, tokens, oldest, newest, finish, reward, reason, step,
                 payload, crc)

    reward_parts(trajectory_id, name, value)    what rewards are made of, where they tell
    failures(id, attempt, store, tokens, oldest, newest, finish, reason)
                                                attempts that ended without a reward, also of samples that were
                                                generated anew since

The tokens themselves are in the files of the sample stores (see `samples`). The controller writes this table as events
are handled, and commits it with the journal. What the trainer is told of a sample has a checksum (crc: of id, tokens,
oldest, newest, finish and reward): what a disk or a careless copy has damaged is refused, never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from tailrace.protocol import Ending, Request, TrajectoryMeta
from tailrace.store.database import (
    DAMAGE,
    Database,
    JournalError,
    Values,
    as_stored,
    file_of,
    has_table,
    reading,
    reason,
)
from tailrace.types import GroupId, PromptId, StoreId, Struct, TrajectoryId, Version

SCHEMA = """
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, group_id INTEGER NOT NULL, prompt_id INTEGER NOT NULL,
    store INTEGER NOT NULL, state TEXT NOT NULL, tokens INTEGER, oldest INTEGER, newest INTEGER,
    finish TEXT NOT NULL DEFAULT '', reward REAL, reason TEXT NOT NULL DEFAULT '', step INTEGER,
    payload TEXT NOT NULL DEFAULT 'live', crc INTEGER);
CREATE INDEX trajectories_of ON trajectories (prompt_id);
"""
REWARD_PARTS = """
CREATE TABLE IF NOT EXISTS reward_parts
    (trajectory_id INTEGER, name TEXT, value REAL, PRIMARY KEY (trajectory_id, name))
"""
FAILURES = """
CREATE TABLE IF NOT EXISTS failures (
    id INTEGER, attempt INTEGER, store INTEGER, tokens INTEGER, oldest INTEGER, newest INTEGER, finish TEXT,
    reason TEXT, PRIMARY KEY (id, attempt))
"""
NOTE_FAILURE = """
INSERT OR REPLACE INTO failures
SELECT id, attempt, store, tokens, oldest, newest, finish, reason FROM trajectories WHERE id = ?
"""
FAILED = """
(SELECT f.id, known.group_id, known.prompt_id, f.store, 'failed' AS state, f.tokens, f.oldest, f.newest, f.finish,
    NULL AS reward, f.reason, NULL AS step, known.payload, f.attempt
FROM failures AS f JOIN trajectories AS known ON known.id = f.id)
"""  # with the columns of `trajectories`
ASSIGN = """
INSERT INTO trajectories (id, attempt, group_id, prompt_id, store, state) VALUES (?, ?, ?, ?, ?, 'running')
ON CONFLICT (id) DO UPDATE SET attempt = excluded.attempt, store = excluded.store, state = 'running', tokens = NULL,
    oldest = NULL, newest = NULL, finish = '', reward = NULL, reason = '', payload = 'live', crc = NULL
"""
AMONG = "IN (SELECT value FROM json_each(?))"  # any number of ids as one value
KNOWN = "id, group_id, prompt_id, store, state, tokens, oldest, newest, finish, reward, reason, step, payload, attempt"
GONE = ("lost", "regenerate")  # a store has lost the tokens
COLUMN_OF = {"trajectory": "id", "group": "group_id", "prompt": "prompt_id"}


class KnownTrajectory(Struct):
    """A row, for people."""

    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    store: StoreId
    state: str  # running, finished, failed, trained, stale, filtered, lost
    tokens: int | None  # once it has ended: without the prompt, and the versions that they are of
    oldest: Version | None
    newest: Version | None
    finish: str
    reward: float | None
    reason: str  # why it failed
    step: int | None  # that trained it
    payload: str  # live, archived, deleted
    attempt: int


class SampleResult(NamedTuple):
    """What the trainer is told of a sample; nothing of one that is not finished."""

    reward: float | None = None
    versions: tuple[Version, Version] | None = None  # the oldest and the newest that its tokens are of
    tokens: int | None = None  # after the prompt


class TrajectoryTable:
    def __init__(self, database: Database) -> None:
        self._database = database
        rows = database.execute("SELECT id, attempt FROM trajectories WHERE state = 'running'")
        self._running: dict[TrajectoryId, int] = dict(rows)  # one number per running trajectory

    def assign(self, requests: Iterable[Request]) -> None:
        """New attempts begin: whatever earlier ones still report is late."""
        rows = [(one.trajectory, one.attempt, one.group, one.prompt, one.store) for one in requests]
        self._database.executemany(ASSIGN, rows)
        self._running |= {row[0]: row[1] for row in rows}

    def finish(self, meta: TrajectoryMeta) -> bool:
        reward = meta.reward
        if reward is not None:
            if not isfinite(reward):
                raise JournalError(f"t{meta.id} cannot be stored with a reward of {reward}: it is not finite")
            reward = as_stored(reward)
        values = (meta.tokens, meta.oldest, meta.newest, meta.finish, reward)
        return self._end(meta.id, meta.attempt, ("finished", *values, "", _crc(meta.id, *values), meta.id))

    def explain(self, trajectory: TrajectoryId, parts: Mapping[str, float]) -> None:
        """What a reward is made of. The table is there once a run has any."""
        if parts:
            self._database.execute(REWARD_PARTS)
            rows = [(trajectory, name, value) for name, value in parts.items()]
            self._database.executemany("INSERT OR REPLACE INTO reward_parts VALUES (?, ?, ?)", rows)

    def fail(self, trajectory: TrajectoryId, attempt: int, reason: str, meta: TrajectoryMeta | None = None) -> bool:
        """`meta`: of what it failed on, if its store has that."""
        extent = (meta.tokens, meta.oldest, meta.newest, meta.finish) if meta else (None, None, None, "")
        noted = self._end(trajectory, attempt, ("failed", *extent, None, reason, None, trajectory))
        if noted:
            self._database.execute(FAILURES)
            self._database.execute(NOTE_FAILURE, (trajectory,))
        return noted

    def _end(self, trajectory: TrajectoryId, attempt: int, values: Values) -> bool:
        if self._running.get(trajectory) != attempt:
            return False
        del self._running[trajectory]
        assignment = "state = ?, tokens = ?, oldest = ?, newest = ?, finish = ?, reward = ?, reason = ?, crc = ?"
        self._database.execute(f"UPDATE trajectories SET {assignment} WHERE id = ?", values)
        return True

    def trained(self, ids: Iterable[TrajectoryId], step: int) -> None:
        statement = f"UPDATE trajectories SET state = 'trained', step = ? WHERE id {AMONG}"
        self._database.execute(statement, (step, _list(ids)))

    def forget(self, ids: Sequence[TrajectoryId], archived: bool, ending: Ending = "trained") -> None:
        """Nobody will train on these any more."""
        for id in ids:
            self._running.pop(id, None)
        among, payload = _list(ids), "archived" if archived and ending not in GONE else "deleted"
        self._database.execute(f"UPDATE trajectories SET payload = ? WHERE id {AMONG}", (payload, among))
        if ending != "trained":
            state = "lost" if ending in GONE else ending
            statement = f"UPDATE trajectories SET state = ? WHERE state != 'failed' AND id {AMONG}"
            self._database.execute(statement, (state, among))
        if ending in GONE:  # the step that trained it is repeated without it
            self._database.execute(f"UPDATE trajectories SET step = NULL WHERE id {AMONG}", (among,))

    def finished(self, ids: Sequence[TrajectoryId]) -> dict[TrajectoryId, tuple[int, int]]:
        """Of those of these that are: the attempt that finished them, and their tokens."""
        query = f"SELECT id, attempt, tokens FROM trajectories WHERE state IN ('finished', 'trained') AND id {AMONG}"
        return {id: (attempt, tokens) for id, attempt, tokens in self._database.execute(query, (_list(ids),))}

    def results(self, ids: Sequence[TrajectoryId]) -> dict[TrajectoryId, SampleResult]:
        """Of all of these, each checked against its checksum."""
        query = f"SELECT id, tokens, oldest, newest, finish, reward, crc FROM trajectories WHERE id {AMONG}"
        found = {row[0]: self._result(row) for row in self._database.execute(query, (_list(ids),))}
        missing = next((id for id in ids if id not in found), None)
        if missing is not None:
            raise self._damaged(f"t{missing} is missing")
        return found

    def _result(self, row: Values) -> SampleResult:
        id, tokens, oldest, newest, _, reward, crc = row
        if reward is None and crc is None:
            return SampleResult()
        if reward in (inf, -inf) or (reward is None and crc == _crc(*row[:-2], nan)):
            written = f"{self._database.path}: the reward of t{id} is not a finite number"
            raise JournalError(f"{written}, and it cannot be trained on; mend the reward, and begin a new run")
        if _crc(*row[:-1]) != crc:
            raise self._damaged(f"how t{id} ended is not as it was written")
        return SampleResult(reward, (oldest, newest), tokens)

    def _damaged(self, how: str) -> JournalError:
        """Nobody asks for what was never written down: what is missing was lost with a part of the file."""
        return JournalError(f"{self._database.path} is damaged: {how}")


def known_trajectories(run: Path, kind: str, number: int) -> list[KnownTrajectory]:
    """What a run knows of a trajectory, or of all of a group or prompt; nothing where there is no such table."""
    if kind not in COLUMN_OF:
        return []
    return _known(run, f"WHERE {COLUMN_OF[kind]} = ? ORDER BY id", (number,))


def trajectories_among(run: Path, ids: Sequence[TrajectoryId]) -> list[KnownTrajectory]:
    """What a run knows of these, in the order of their numbers."""
    return _known(run, f"WHERE id {AMONG} ORDER BY id", (_list(ids),))


def failed_attempts(run: Path, ids: Sequence[TrajectoryId] | None = None) -> list[KnownTrajectory]:
    """All attempts, of these or of all, that ended without a reward, the oldest first."""
    which, values = ("", ()) if ids is None else (f"WHERE id {AMONG}", (_list(ids),))
    return _known(run, f"{which} ORDER BY id, attempt", values, "failures")


def trajectories_after(run: Path, id: TrajectoryId, most: int) -> list[KnownTrajectory]:
    """The next so many after this one."""
    return _known(run, "WHERE id > ? ORDER BY id LIMIT ?", (id, most))


def _known(run: Path, which: str, values: Values, table: str = "trajectories") -> list[KnownTrajectory]:
    path = file_of(run)
    try:
        with reading(path) as connection:
            if not has_table(connection, table):
                return []
            source = FAILED if table == "failures" else table
            query = f"SELECT {KNOWN} FROM {source} {which}"
            return [KnownTrajectory(*row) for row in connection.execute(query, values)]
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error


def reward_parts(run: Path, ids: Iterable[TrajectoryId]) -> dict[TrajectoryId, dict[str, float]]:
    """What the rewards of these are made of, as far as that is told."""
    path = file_of(run)
    found: dict[TrajectoryId, dict[str, float]] = {}
    try:
        with reading(path) as connection:
            if has_table(connection, "reward_parts"):
                query = f"SELECT trajectory_id, name, value FROM reward_parts WHERE trajectory_id {AMONG}"
                for id, name, value in connection.execute(query, (_list(ids),)):
                    found.setdefault(id, {})[name] = value
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error
    return found


def _crc(*values: object) -> int:
    crc = 0
    for value in values:
        crc = crc32(repr(value).encode(), crc)
    return crc


def _list(ids: Iterable[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()
