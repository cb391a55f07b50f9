"""Reads a store's file: beside its writer, or one that nobody writes any more. A sample is read by its whole chain of
segments: what was damaged or lost is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from tailrace.samples.file import SampleFile
from tailrace.samples.messages import TOKEN_BYTES, Piece, SampleLength, StoredSample
from tailrace.samples.schema import (
    ADDED_SINCE,
    CHAIN,
    HAS_FAILED,
    NOTED,
    ONE_HEAD,
    PromptGoneError,
    SampleGoneError,
    SampleHead,
    damaged,
    damaged_sample,
    extended_head,
    is_as_written,
    last_noted,
    read_head,
    refuse_foreign,
    row_crc,
)
from tailrace.store.database import DAMAGE, connect_to_read, reason
from tailrace.types import PromptId, Row, TrajectoryId

READ_CHAIN = f"""{CHAIN}
SELECT number, trajectory_id, start, version, previous, tokens, logprobs, crc FROM chain JOIN segments ON number = at
"""
READ_FAILED = """
SELECT number, trajectory_id, start, version, previous, tokens, logprobs, crc FROM failed_segments
WHERE trajectory_id = ? AND attempt = ? ORDER BY number DESC
"""
AMONG = "IN (SELECT value FROM json_each(?))"  # any number of ids as one value


class SampleReader:
    """One connection that reads; for one thread. Beside a writer of this process it looks up heads there."""

    def __init__(self, path: Path, writer: SampleFile | None = None) -> None:
        if writer is None:
            refuse_foreign(path)
        self._path = path
        self._merging = writer.merging if writer is not None else threading.Lock()
        self._connection = connect_to_read(path)
        self._head_of: Callable[[TrajectoryId], SampleHead | None] = (
            writer.heads.get if writer is not None else self._find_head
        )

    def close(self) -> None:
        self._connection.close()

    def row(self, prompt: PromptId) -> Row:
        query = "SELECT id, tokens, prompt, columns, crc FROM prompts WHERE id = ?"
        found = self._query(query, (prompt,))
        if not found:
            raise PromptGoneError(str(damaged(self._path, f"p{prompt} is missing")))
        *values, crc = found[0]
        if row_crc(*values) != crc:
            raise damaged(self._path, f"p{prompt} is not as it was written")
        id, tokens, text, columns = values
        return Row(id, tokens, msgspec.json.decode(text), msgspec.json.decode(columns))

    def prefix(self, trajectory: TrajectoryId) -> tuple[Piece, ...]:
        """All that there is after the prompt; neighbours of one version are one piece."""
        return self._pieces(trajectory, self._known(trajectory))

    def lengths(self, ids: Sequence[TrajectoryId]) -> list[SampleLength]:
        heads = [self._known(id) for id in ids]
        query = f"SELECT id, length(tokens) / {TOKEN_BYTES} FROM prompts WHERE id {AMONG}"
        prompts: dict[int, int] = dict(self._query(query, (_list({head.prompt for head in heads}),)))
        missing = next((head.prompt for head in heads if head.prompt not in prompts), None)
        if missing is not None:
            raise damaged(self._path, f"p{missing} is missing")
        return [_length(id, head, prompts[head.prompt]) for id, head in zip(ids, heads, strict=True)]

    def read(self, ids: Sequence[TrajectoryId], most_bytes: int = 1 << 62) -> list[StoredSample]:
        """The first of these samples, as many as have so many bytes in all; at least one."""
        found: list[StoredSample] = []
        prompts: dict[PromptId, Piece] = {}
        size = 0
        for id in ids:
            head = self._known(id)
            size += 2 * TOKEN_BYTES * head.tokens
            if found and size > most_bytes:
                break
            if head.prompt not in prompts:
                prompts[head.prompt] = Piece(None, self.row(head.prompt).tokens)
            found.append(StoredSample(id, head.group, head.prompt, (prompts[head.prompt], *self._pieces(id, head))))
        return found

    def failed(self, trajectory: TrajectoryId, attempt: int, prompt: PromptId) -> StoredSample | None:
        """What an attempt had generated that ended without a reward; None if nothing of it is kept."""
        rows = self._query(READ_FAILED, (trajectory, attempt)) if self._query(HAS_FAILED) else []
        if not rows:
            return None
        tokens = rows[0][2] + len(rows[0][5]) // TOKEN_BYTES
        pieces = self._checked(trajectory, rows, tokens)
        return StoredSample(trajectory, -1, prompt, (Piece(None, self.row(prompt).tokens), *pieces))

    def expect(self, ids: Sequence[TrajectoryId]) -> None:
        """From now on these are asked for, and no others: what is not noted yet of them is looked through once. In a
        file that nobody of this process writes."""
        among = _list(ids)
        rows = self._query(f"SELECT * FROM trajectories WHERE id {AMONG}", (among,))
        heads = {row[0]: read_head(self._path, row) for row in rows}
        noted = last_noted(self._path, self._query(NOTED))
        for id, number, *segment in self._query(f"{ADDED_SINCE} AND trajectory_id {AMONG}", (noted, among)):
            if number > heads[id].last:
                heads[id] = extended_head(self._path, id, heads[id], number, *segment)
        self._head_of = heads.get

    def is_forgotten(self, trajectory: TrajectoryId, attempt: int) -> bool:
        """By its row alone: the heads that are in memory are brought up to date a moment after a commit. An attempt
        that is newer than the one that was forgotten generates it anew, and is yet to be heard of."""
        query = "SELECT payload != 'live' AND attempt >= ? FROM trajectories WHERE id = ?"
        return self._query(query, (attempt, trajectory)) == [(1,)]

    def _known(self, trajectory: TrajectoryId) -> SampleHead:
        head = self._head_of(trajectory)
        if head is None:
            raise SampleGoneError(trajectory, f"{self._path} does not have t{trajectory}, or not any more")
        return head

    def _pieces(self, trajectory: TrajectoryId, head: SampleHead) -> tuple[Piece, ...]:
        rows = self._query(READ_CHAIN, (head.last,)) if head.last else []
        return self._checked(trajectory, rows, head.tokens)

    def _checked(self, trajectory: TrajectoryId, rows: list[Any], start: int) -> tuple[Piece, ...]:
        """Rows of one sample, the newest first; `start`: where they end."""
        for row in rows:
            start -= len(row[5]) // TOKEN_BYTES if isinstance(row[5], bytes) else 0
            if (row[1], row[2]) != (trajectory, start) or not is_as_written(row):
                raise damaged_sample(self._path, trajectory, f"what t{trajectory} holds is not as it was written")
        if start:
            self._known(trajectory)  # the writer may have deleted it in the meantime
            raise damaged_sample(self._path, trajectory, f"{start:,} tokens of t{trajectory} are missing")
        return tuple(_merged(reversed(rows)))

    def _find_head(self, trajectory: TrajectoryId) -> SampleHead | None:
        """In a file that nobody of this process writes. The newest segments may not be noted yet."""
        rows = self._query(ONE_HEAD, (trajectory,))
        if not rows:
            return None
        head = read_head(self._path, rows[0])
        noted = last_noted(self._path, self._query(NOTED))
        for _, number, *segment in self._query(f"{ADDED_SINCE} AND trajectory_id = ?", (noted, trajectory)):
            if number > head.last:
                head = extended_head(self._path, trajectory, head, number, *segment)
        return head

    def _query(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._merging:
                return self._connection.execute(query, values).fetchall()
        except DAMAGE as error:
            raise damaged(self._path, reason(error)) from error


def _length(id: TrajectoryId, head: SampleHead, prompt: int) -> SampleLength:
    return SampleLength(id, prompt, prompt + head.span if head.sampled else 0, head.sampled, head.tokens)


def _merged(rows: Iterable[tuple[Any, ...]]) -> Iterator[Piece]:
    for version, run in groupby(rows, key=lambda row: row[3]):
        same = list(run)
        tokens = same[0][5] if len(same) == 1 else b"".join([row[5] for row in same])
        yield Piece(version, tokens, None if version is None else b"".join([row[6] for row in same]))


def _list(ids: Iterable[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()
