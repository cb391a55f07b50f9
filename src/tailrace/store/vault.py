"""The vault: the tokens of every trajectory while it grows and until nobody needs them, and the prompts they answer.

    prompts(id, tokens, prompt, columns, crc)                           prompt and columns are JSON text
    trajectories(id, epoch, group_id, prompt_id, state, finish, reward, reason, step, payload, crc)
                                                                        crc is that of id, finish and reward
    segments(piece, trajectory_id, version, tokens, logprobs, crc)      version is NULL for what was not sampled

Tokens are int32 and log-probs float32, little-endian, so both come back exactly. The controller calls this as messages
arrive, and commits with the journal. Only the newest assignment of a trajectory may write: whatever an older one still
sends is ignored. Every row has a checksum: what a disk or a careless copy has damaged is refused, never trained on.
What is kept in memory is one number per running trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import msgspec
import numpy as np

from tailrace.protocol import Ending
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
from tailrace.types import GroupId, PromptId, Segment, Struct, Trajectory, TrajectoryId, Version

SCHEMA = """
CREATE TABLE prompts (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, prompt TEXT NOT NULL, columns TEXT NOT NULL,
    crc INTEGER NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, group_id INTEGER NOT NULL, prompt_id INTEGER NOT NULL,
    state TEXT NOT NULL, finish TEXT NOT NULL DEFAULT '', reward REAL, reason TEXT NOT NULL DEFAULT '', step INTEGER,
    payload TEXT NOT NULL DEFAULT 'live', crc INTEGER);
CREATE TABLE segments (
    piece INTEGER PRIMARY KEY, trajectory_id INTEGER NOT NULL, version INTEGER, tokens BLOB NOT NULL, logprobs BLOB,
    crc INTEGER NOT NULL);
CREATE INDEX segments_of ON segments (trajectory_id);
CREATE INDEX trajectories_of ON trajectories (prompt_id);
"""
ASSIGN = """
INSERT INTO trajectories (id, epoch, group_id, prompt_id, state) VALUES (?, ?, ?, ?, 'running')
ON CONFLICT (id) DO UPDATE SET epoch = excluded.epoch, state = 'running', finish = '', reward = NULL, reason = '',
    crc = NULL
"""
AMONG = "IN (SELECT value FROM json_each(?))"  # any number of ids as one value
HELD = """
SELECT id, group_id, prompt_id, state, finish, reward, reason, step, payload, coalesce(sum(length(tokens)) / 4, 0),
       min(version), max(version)
FROM trajectories LEFT JOIN segments ON trajectory_id = id WHERE {} = ? GROUP BY id ORDER BY id
"""
COLUMN_OF = {"trajectory": "id", "group": "group_id", "prompt": "prompt_id"}


class PromptRow(Protocol):
    """A prompt as the environments give it."""

    @property
    def id(self) -> PromptId: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def prompt(self) -> str | list[dict[str, Any]]: ...
    @property
    def columns(self) -> dict[str, Any]: ...


class StoredPrompt(Struct):
    """A prompt as it was added."""

    id: PromptId
    tokens: tuple[int, ...]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]


class Held(Struct):
    """What the vault knows of a trajectory, without its tokens."""

    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    state: str  # running, finished, failed, trained, stale, filtered
    finish: str
    reward: float | None
    reason: str  # why it failed
    step: int | None  # that trained it
    payload: str  # live, archived, deleted
    tokens: int  # that are kept, without the prompt
    oldest: Version | None
    newest: Version | None


class Vault:
    def __init__(self, database: Database) -> None:
        self._database = database
        rows = database.execute("SELECT id, epoch FROM trajectories WHERE state = 'running'")
        self._running: dict[TrajectoryId, int] = dict(rows)  # who may write

    # --------------------------------------------------------------------------------------------------- growing

    def assign(self, trajectory: TrajectoryId, epoch: int, group: GroupId, prompt: PromptId, resume: bool) -> None:
        """A new assignment begins: from now on nobody else may write. It goes on from what is there, or anew."""
        self._database.execute(ASSIGN, (trajectory, epoch, group, prompt))
        if epoch > 1 and not resume:
            self._database.execute("DELETE FROM segments WHERE trajectory_id = ?", (trajectory,))
        self._running[trajectory] = epoch

    def append(self, trajectory: TrajectoryId, epoch: int, segments: Iterable[Segment]) -> bool:
        """Add what has been generated since; False if this is not the newest assignment, or it has ended."""
        if self._running.get(trajectory) != epoch:
            return False
        rows = [(trajectory, one.version, _ints(one.tokens), _floats(one.logprobs)) for one in segments if one.tokens]
        statement = "INSERT INTO segments (trajectory_id, version, tokens, logprobs, crc) VALUES (?, ?, ?, ?, ?)"
        self._database.executemany(statement, [(*row, _crc(*row)) for row in rows])
        return True

    def finish(self, trajectory: TrajectoryId, epoch: int, finish: str, reward: float | None) -> bool:
        if reward is not None:
            if not isfinite(reward):
                raise JournalError(f"t{trajectory} cannot be stored with a reward of {reward}: it is not finite")
            reward = as_stored(reward)
        crc = _crc(trajectory, finish, reward)
        return self._end(trajectory, epoch, ("finished", finish, reward, "", crc, trajectory))

    def fail(self, trajectory: TrajectoryId, epoch: int, reason: str) -> bool:
        return self._end(trajectory, epoch, ("failed", "", None, reason, None, trajectory))

    def _end(self, trajectory: TrajectoryId, epoch: int, values: Values) -> bool:
        if self._running.get(trajectory) != epoch:
            return False
        del self._running[trajectory]
        statement = "UPDATE trajectories SET state = ?, finish = ?, reward = ?, reason = ?, crc = ? WHERE id = ?"
        self._database.execute(statement, values)
        return True

    # --------------------------------------------------------------------------------------------------- reading

    def prefix(self, trajectory: TrajectoryId) -> tuple[Segment, ...]:
        """All that there is after the prompt; neighbours with the same origin are one segment."""
        return self._segments([trajectory]).get(trajectory, ())

    def tokens(self, trajectory: TrajectoryId) -> int:
        """How many there are after the prompt."""
        query = "SELECT coalesce(sum(length(tokens)), 0) / 4 FROM segments WHERE trajectory_id = ?"
        return self._database.execute(query, (trajectory,))[0][0]

    def read(self, ids: Sequence[TrajectoryId]) -> list[Trajectory]:
        """Whole trajectories, in the order asked for: first the prompt, then what followed."""
        query = f"SELECT id, group_id, prompt_id, finish, reward, crc FROM trajectories WHERE id {AMONG}"
        found = {row[0]: row[:5] for row in self._database.execute(query, (_list(ids),)) if self._is_judged_so(row)}
        prompts = self._prompt_segments({row[2] for row in found.values()})
        missing = [f"t{id}" for id in ids if id not in found]
        missing += [f"p{row[2]}, which t{row[0]} answers," for row in found.values() if row[2] not in prompts]
        if missing:
            raise self._damaged(f"{missing[0]} is missing")
        segments = self._segments(ids)
        return [_trajectory(found[id], prompts, segments.get(id, ())) for id in ids]

    def _segments(self, ids: Sequence[TrajectoryId]) -> dict[TrajectoryId, tuple[Segment, ...]]:
        query = f"SELECT trajectory_id, version, tokens, logprobs, crc FROM segments WHERE trajectory_id {AMONG} "
        rows = self._database.execute(query + "ORDER BY trajectory_id, piece", (_list(ids),))
        whole = (self._whole(row, f"what t{row[0]} holds") for row in rows)
        return {id: tuple(_merged(pieces)) for id, pieces in groupby(whole, key=lambda row: row[0])}

    def _prompt_segments(self, ids: Iterable[PromptId]) -> dict[PromptId, Segment]:
        query = f"SELECT id, tokens, prompt, columns, crc FROM prompts WHERE id {AMONG}"
        rows = (self._whole(row, f"p{row[0]}") for row in self._database.execute(query, (_list(ids),)))
        return {id: Segment(None, _tokens(blob)) for id, blob, _, _ in rows}

    def _is_judged_so(self, row: Values) -> bool:
        id, _, _, finish, reward, crc = row
        if (finish, reward, crc) == ("", None, None):
            return True  # it is not finished yet
        self._refuse_infinite(id, finish, reward, crc)
        if (reward, crc) != (0.0, _crc(id, finish, -0.0)):  # the checksum that earlier releases gave to minus zero
            self._whole((id, finish, reward, crc), f"how t{id} ended")
        return True

    def _refuse_infinite(self, id: TrajectoryId, finish: str, reward: float | None, crc: int) -> None:
        """Earlier releases stored whatever a task scored; SQLite made NULL of a NaN."""
        if reward in (inf, -inf) or (reward is None and crc == _crc(id, finish, nan)):
            written = f"{self._database.path}: the reward of t{id} is not a finite number"
            raise JournalError(f"{written}, and it cannot be trained on; mend the reward, and begin a new run")

    def _damaged(self, how: str) -> JournalError:
        """Nobody asks for what was never written down: what is missing was lost with a part of the file."""
        return JournalError(f"{self._database.path} is damaged: {how}")

    def _whole(self, row: Values, what: str) -> Values:
        """A row without its checksum, if that is right."""
        *values, crc = row
        if _crc(*values) != crc:
            raise self._damaged(f"{what} is not as it was written")
        return tuple(values)

    # --------------------------------------------------------------------------------------------------- prompts

    def add_prompts(self, rows: Iterable[PromptRow]) -> None:
        """Remember prompts; one that is there already stays as it is."""
        encode = msgspec.json.encode
        values = [(r.id, _ints(r.tokens), encode(r.prompt).decode(), encode(r.columns).decode()) for r in rows]
        statement = "INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?)"
        self._database.executemany(statement, [(*row, _crc(*row)) for row in values])

    def row(self, id: PromptId) -> StoredPrompt:
        query = "SELECT id, tokens, prompt, columns, crc FROM prompts WHERE id = ?"
        found = self._database.execute(query, (id,))
        if not found:
            raise self._damaged(f"p{id} is missing")
        _, tokens, prompt, columns = self._whole(found[0], f"p{id}")
        return StoredPrompt(id, _tokens(tokens), msgspec.json.decode(prompt), msgspec.json.decode(columns))

    # --------------------------------------------------------------------------------------------------- endings

    def trained(self, ids: Iterable[TrajectoryId], step: int) -> None:
        statement = f"UPDATE trajectories SET state = 'trained', step = ? WHERE id {AMONG}"
        self._database.execute(statement, (step, _list(ids)))

    def forget(self, ids: Iterable[TrajectoryId], archive: bool, ending: Ending = "trained") -> None:
        """Nobody will train on these any more. Their tokens are kept for people, or deleted."""
        ids = list(ids)
        for id in ids:
            self._running.pop(id, None)
        among = _list(ids)
        if not archive:
            self._database.execute(f"DELETE FROM segments WHERE trajectory_id {AMONG}", (among,))
        payload = "archived" if archive else "deleted"
        self._database.execute(f"UPDATE trajectories SET payload = ? WHERE id {AMONG}", (payload, among))
        if ending != "trained":
            statement = f"UPDATE trajectories SET state = ? WHERE state != 'failed' AND id {AMONG}"
            self._database.execute(statement, (ending, among))


def held(run: Path, kind: str, number: int) -> list[Held]:
    """What a run's vault knows of a trajectory, or of all of a group or prompt; nothing where there is no vault."""
    if kind not in COLUMN_OF:
        return []
    path = file_of(run)
    try:
        with reading(path) as connection:
            if not has_table(connection, "trajectories"):
                return []
            rows = connection.execute(HELD.format(COLUMN_OF[kind]), (number,))
            return [Held(*row) for row in rows]
    except DAMAGE as error:
        raise JournalError(f"{path} is damaged: {reason(error)}") from error


# ------------------------------------------------------------------------------------------------- rows and values


def _merged(pieces: Iterable[tuple[TrajectoryId, Version | None, bytes, bytes | None]]) -> Iterator[Segment]:
    """Neighbours of one origin, joined before they are decoded."""
    for (version, has_logprobs), run in groupby(pieces, key=lambda piece: (piece[1], piece[3] is not None)):
        same = list(run)
        tokens = _tokens(b"".join([piece[2] for piece in same]))
        logprobs = b"".join([piece[3] or b"" for piece in same])
        yield Segment(version, tokens, tuple(np.frombuffer(logprobs, "<f4").tolist()) if has_logprobs else None)


def _trajectory(row: Values, prompts: dict[PromptId, Segment], after: tuple[Segment, ...]) -> Trajectory:
    id, group, prompt, finish, reward = row
    return Trajectory(id, group, prompt, (prompts[prompt], *after), finish, reward)


def _crc(*values: object) -> int:
    crc = 0
    for value in values:
        crc = crc32(value if isinstance(value, bytes) else repr(value).encode(), crc)
    return crc


def _list(ids: Iterable[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()


def _ints(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _tokens(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())


def _floats(logprobs: tuple[float, ...] | None) -> bytes | None:
    return None if logprobs is None else np.array(logprobs, "<f4").tobytes()
