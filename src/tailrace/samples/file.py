"""The one writer of a store's file. `schema` says what is in it.

Only the replica with the newest attempt may append. What is there already is skipped, so sending again does no harm.
The table `trajectories` is brought up to date when an assignment changes, and every `HEADS_EVERY` bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tailrace.samples.messages import (
    FENCED,
    GAP,
    STORED,
    TOKEN_BYTES,
    UNKNOWN,
    Append,
    AppendedRun,
    Buffer,
    appended_in,
)
from tailrace.samples.schema import (
    ADDED_SINCE,
    CHAIN,
    FAILED_SEGMENTS,
    FORMAT,
    HAS_FAILED,
    NOTED,
    ONE_HEAD,
    PUT_HEAD,
    RUN,
    SCHEMA,
    SampleHead,
    extended_head,
    head_row,
    last_noted,
    read_head,
    refuse_foreign,
    row_crc,
    segment_crc,
)
from tailrace.store.database import Database
from tailrace.store.errors import JournalError
from tailrace.types import PromptId, Row, TrajectoryId
from tailrace.wire.messages import Grant

CACHE = 64 << 20  # bytes of SQLite's pages in memory: a commit fits in
ROWS_AT_ONCE = 64  # of one statement: it is carried out beside Python, and each return to it may have to wait
HEADS_EVERY = 128 << 20  # bytes of segments between two updates of the table `trajectories`
LOG = 32 << 20  # bytes in SQLite's log before it is merged into the file
DELETED_AT_ONCE = 32  # samples per commit: deleting a step's worth at once would keep every replica waiting
ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"
ADD_SEGMENT = f"INSERT INTO segments VALUES {ROW}"
ADD_SEGMENTS = f"INSERT INTO segments VALUES {', '.join([ROW] * ROWS_AT_ONCE)}"
SEGMENT_COLUMNS = "number, trajectory_id, start, version, previous, tokens, logprobs, crc"
KEEP_FAILED = f"""
INSERT OR IGNORE INTO failed_segments (attempt, {SEGMENT_COLUMNS})
SELECT ?, {SEGMENT_COLUMNS} FROM segments WHERE number IN ({CHAIN} SELECT at FROM chain)
"""
ALL_HEADS = "SELECT * FROM trajectories WHERE payload = 'live' OR payload = 'deleting'"

Heads = dict[TrajectoryId, SampleHead]
Verdicts = dict[tuple[TrajectoryId, int], int]  # by trajectory and attempt


class UncommittedGrowth:
    """What is added to a sample with the next commit: runs of one version each."""

    __slots__ = ("is_complete", "owner", "runs", "tokens")

    def __init__(self, replica: int, attempt: int, tokens: int, is_complete: bool) -> None:
        self.owner = (replica, attempt)
        self.is_complete = is_complete  # it must not grow
        self.tokens = tokens  # that there will be then
        self.runs: list[tuple[int | None, list[Buffer], list[Buffer]]] = []

    def add(self, start: int, run: AppendedRun) -> int:
        """A verdict."""
        if start != self.tokens:
            if start > self.tokens:
                return GAP
            run = _after(run, self.tokens - start)
        version, tokens, logprobs = run
        if tokens:
            if self.is_complete:
                return FENCED
            if not self.runs or self.runs[-1][0] != version:
                self.runs.append((version, [], []))
            self.runs[-1][1].append(tokens)
            if logprobs is not None:
                self.runs[-1][2].append(logprobs)
            self.tokens += len(tokens) // TOKEN_BYTES
        return STORED


class SampleFile:
    """The one writer. `heads` is what is committed, without what the next commit deletes: other threads may look there.
    They hold `merging` for each read, so that SQLite's log can be merged now and then, and stays small."""

    def __init__(self, database: Database) -> None:
        self.path = database.path
        self.merging = threading.Lock()
        self._database = database
        database.execute("PRAGMA synchronous = FULL")  # a commit is on the disk before anybody is told of it
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.execute(f"PRAGMA cache_size = {-CACHE // 1024}")
        self.prompts: set[PromptId] = {id for (id,) in database.execute("SELECT id FROM prompts")}
        self.heads: Heads = {}
        self._deleting: deque[tuple[TrajectoryId, SampleHead]] = deque()
        self._unnoted: set[TrajectoryId] = set()  # whose row in `trajectories` is older than its head
        self._number = self._load()
        self._growing: dict[TrajectoryId, UncommittedGrowth] = {}
        self._complete: dict[TrajectoryId, int] = {}  # attempts that will not grow any more
        self._changed: dict[TrajectoryId, SampleHead | None] = {}  # since the last commit; None: forgotten
        self._bytes_unnoted = self._bytes_unmerged = 0

    @classmethod
    def create(cls, path: Path, meta: Mapping[str, str] | None = None) -> SampleFile:
        values = {"format": FORMAT, "heads": "0"} | dict(meta or {})
        return cls(Database.create(path.parent, SCHEMA, values, path.name))

    @classmethod
    def open(cls, path: Path, run: str = "") -> SampleFile:
        refuse_foreign(path, run)
        database = Database.reopen(path, check=False)
        try:
            return cls(database)
        except JournalError:
            database.close()
            raise

    @classmethod
    def at(cls, path: Path, run: str = "") -> SampleFile:
        """The file of this run that is there, or a new one."""
        return cls.open(path, run) if path.exists() else cls.create(path, {RUN: run})

    def _load(self) -> int:
        """Read the heads, and what was added to them since they were noted. Returns the last number in use."""
        execute = self._database.execute
        for row in execute(ALL_HEADS):
            id, head = row[0], read_head(self.path, row)
            if row[-2] == "live":
                self.heads[id] = head
            else:
                self._deleting.append((id, head))
        noted = last_noted(self.path, execute(NOTED))
        for id, number, *segment in execute(ADDED_SINCE, (noted,)):
            if id in self.heads and number > self.heads[id].last:
                self.heads[id] = extended_head(self.path, id, self.heads[id], number, *segment)
                self._unnoted.add(id)
        newest = execute("SELECT coalesce(max(number), 0) FROM segments")[0][0]
        return max([newest, noted, *[head.last for head in self.heads.values()]])

    # ------------------------------------------------------------------------------------------------ assignments

    def assign(self, grants: Iterable[Grant]) -> None:
        """From now on only these may append. An attempt that is not newer than the known one changes nothing."""
        for grant in grants:
            head = self._head(grant.trajectory)
            if head is None or grant.attempt > head.attempt:
                self._assign(grant)

    def _assign(self, grant: Grant) -> None:
        self._flush(grant.trajectory)
        head, fresh = self._head(grant.trajectory), SampleHead(grant.attempt, grant.replica, grant.group, grant.prompt)
        if head is None:
            head = self._forgotten(grant.trajectory)
        if head is not None and (not grant.resume or head.attempt < grant.began):
            self.heads.pop(grant.trajectory, None)
            self._delete_chain(head)
            head = None
        self._put(grant.trajectory, fresh if head is None else SampleHead(*fresh[:4], *head[4:]), "live")

    def forget(self, ids: Iterable[TrajectoryId], archive: bool) -> None:
        """Nobody will train on these any more. Their tokens are kept for people, or deleted little by little."""
        for id in ids:
            self._flush(id)
            head = self._head(id)
            if head is not None:
                self._put(id, head, "archived" if archive else "deleting")
                if not archive:
                    self._deleting.append((id, head))

    def reconcile(
        self,
        grants: Sequence[Grant],
        keep: Iterable[TrajectoryId],
        archive: bool,
        finished: Mapping[TrajectoryId, tuple[int, int]] | None = None,
        prefixes: Iterable[TrajectoryId] = (),
    ) -> list[TrajectoryId]:
        """Forget what is neither assigned nor to be kept. Returns what of `keep` is not here, or not as it was
        `finished`: by that attempt, with so many tokens. So an older copy of the file is found out."""
        keep, as_finished = set(keep), finished or {}
        wanted = {*keep, *prefixes, *[grant.trajectory for grant in grants]}
        self.forget([id for id in {**self.heads, **self._changed} if id not in wanted], archive)
        missing = sorted(id for id in keep if not self._has(id, as_finished.get(id)))
        self.assign(grants)
        self._complete |= {id: attempt for id, (attempt, _) in as_finished.items() if self._head(id) is not None}
        return missing

    def _has(self, trajectory: TrajectoryId, finished: tuple[int, int] | None) -> bool:
        head = self._head(trajectory)
        return head is not None and finished in (None, (head.attempt, head.tokens))

    def _head(self, trajectory: TrajectoryId) -> SampleHead | None:
        """As the next commit will leave it, but for what grows."""
        return self._changed[trajectory] if trajectory in self._changed else self.heads.get(trajectory)

    def _forgotten(self, trajectory: TrajectoryId) -> SampleHead | None:
        """Of a sample that was forgotten. Archived, it still has its tokens."""
        rows = self._database.execute(ONE_HEAD, (trajectory,))
        return read_head(self.path, rows[0]) if rows else None

    def _put(self, trajectory: TrajectoryId, head: SampleHead, payload: str) -> None:
        self._database.execute(PUT_HEAD, head_row(trajectory, head, payload))
        self._unnoted.discard(trajectory)
        self._changed[trajectory] = head if payload == "live" else None
        if payload != "live":
            self.heads.pop(trajectory, None)
            self._complete.pop(trajectory, None)

    # ----------------------------------------------------------------------------------------------------- growing

    def append(self, replica: int, frame: Append, verdicts: Verdicts) -> None:
        """Notes a verdict on each sample. What is there already is skipped; what would leave a gap is refused.
        `PermissionError`: this replica was never given the assignment that it writes to."""
        growing = self._growing
        for trajectory, attempt, start, run in appended_in(frame):
            growth = growing.get(trajectory)
            if growth is None or growth.owner != (replica, attempt):
                growth = self._growth(replica, trajectory, attempt)
            verdicts[trajectory, attempt] = growth if isinstance(growth, int) else growth.add(start, run)

    def complete(self, trajectory: TrajectoryId, attempt: int, failed: bool = False) -> None:
        """What was stored of it last is the end of this attempt: it will not grow any more. If it has `failed`, a copy
        is kept for people, whatever becomes of the sample."""
        self._complete[trajectory] = attempt
        growth = self._growing.get(trajectory)
        if growth is not None and growth.owner[1] == attempt:
            growth.is_complete = True
        if failed:
            self._flush(trajectory)
            head = self._head(trajectory)
            if head is not None and head.last:
                self._database.execute(FAILED_SEGMENTS)
                self._database.execute(KEEP_FAILED, (attempt, head.last))

    def _growth(self, replica: int, trajectory: TrajectoryId, attempt: int) -> UncommittedGrowth | int:
        """Of a sample that this replica may append to, or a verdict."""
        head = self._head(trajectory)
        if head is None:
            gone = self._forgotten(trajectory)
            return FENCED if gone is not None and attempt <= gone.attempt else UNKNOWN
        if attempt != head.attempt:
            return FENCED if attempt < head.attempt else UNKNOWN
        if replica != head.replica:
            raise PermissionError(f"tokens of t{trajectory}, which it was not given")
        growth = self._growing[trajectory] = UncommittedGrowth(
            replica, attempt, head.tokens, self._complete.get(trajectory) == attempt
        )
        return growth

    def length(self, trajectory: TrajectoryId) -> int:
        """How many tokens there are after the prompt, with those that the next commit adds."""
        growth, head = self._growing.get(trajectory), self._head(trajectory)
        return growth.tokens if growth is not None else head.tokens if head is not None else 0

    def _flush(self, trajectory: TrajectoryId) -> None:
        """Write what is waiting of one sample, because its head is about to change."""
        growth = self._growing.pop(trajectory, None)
        if growth is not None:
            self._write({trajectory: growth})

    def _write(self, growing: Mapping[TrajectoryId, UncommittedGrowth]) -> None:
        rows = [row for id, growth in growing.items() for row in self._rows(id, growth)]
        whole = len(rows) // ROWS_AT_ONCE * ROWS_AT_ONCE
        for at in range(0, whole, ROWS_AT_ONCE):
            self._database.execute(ADD_SEGMENTS, tuple(chain.from_iterable(rows[at : at + ROWS_AT_ONCE])))
        self._database.executemany(ADD_SEGMENT, rows[whole:])
        size = sum([len(row[5]) + len(row[6] or b"") for row in rows])
        self._bytes_unnoted += size
        self._bytes_unmerged += size
        self._unnoted.update(growing)

    def _rows(self, trajectory: TrajectoryId, growth: UncommittedGrowth) -> Iterator[tuple[Any, ...]]:
        head = self._head(trajectory)
        assert head is not None, f"t{trajectory} grows and is not known"
        for version, tokens, logprobs in growth.runs:
            self._number += 1
            joined = tokens[0] if len(tokens) == 1 else b"".join(tokens)
            values = None if version is None else logprobs[0] if len(logprobs) == 1 else b"".join(logprobs)
            row = (self._number, trajectory, head.tokens, version, head.last, joined, values)
            yield (*row, segment_crc(row))
            head = head.grown(self._number, len(joined) // TOKEN_BYTES, version)
        self._changed[trajectory] = head

    # ----------------------------------------------------------------------------------------------------- prompts

    def add_prompts(self, rows: Iterable[Row]) -> None:
        """Remember prompts; one that is there already stays as it is."""
        rows = list(rows)
        self.prompts |= {row.id for row in rows}
        to_json = msgspec.json.encode
        values = [(r.id, r.tokens, to_json(r.prompt).decode(), to_json(r.columns).decode()) for r in rows]
        statement = "INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?)"
        self._database.executemany(statement, [(*row, row_crc(*row)) for row in values])

    # -------------------------------------------------------------------------------------------------- committing

    @property
    def is_deleting(self) -> bool:
        """There is more to delete with the next commits."""
        return bool(self._deleting)

    def commit(self) -> None:
        """Everything since the last one, at once, on the disk."""
        growing, self._growing = self._growing, {}
        if growing:
            self._write(growing)
        self._delete_some()
        if self._bytes_unnoted >= HEADS_EVERY:
            self._note_heads()
        self._database.commit()
        changed, self._changed = self._changed, {}
        for id, head in changed.items():
            if head is not None:
                self.heads[id] = head
        if self._bytes_unmerged >= LOG:
            self._merge()

    def _note_heads(self) -> None:
        heads = [(id, self._head(id)) for id in self._unnoted]
        self._database.executemany(PUT_HEAD, [head_row(id, head, "live") for id, head in heads if head is not None])
        self._database.execute("UPDATE meta SET value = ? WHERE key = 'heads'", (str(self._number),))
        self._unnoted.clear()
        self._bytes_unnoted = 0

    def _delete_some(self) -> None:
        for _ in range(min(DELETED_AT_ONCE, len(self._deleting))):
            id, head = self._deleting.popleft()
            if self._head(id) is None:  # else it was assigned again, and what was there is deleted already
                self._delete_chain(head)
                self._delete_failed(id)
                self._put(id, SampleHead(*head[:4]), "deleted")

    def _delete_chain(self, head: SampleHead) -> None:
        self._database.execute(f"DELETE FROM segments WHERE number IN ({CHAIN} SELECT at FROM chain)", (head.last,))

    def _delete_failed(self, trajectory: TrajectoryId) -> None:
        if self._database.execute(HAS_FAILED):
            self._database.execute("DELETE FROM failed_segments WHERE trajectory_id = ?", (trajectory,))

    def _merge(self) -> None:
        with self.merging:
            self._database.execute("PRAGMA wal_checkpoint(RESTART)")
        self._bytes_unmerged = 0

    def close(self) -> None:
        """What is not committed is lost, as if the process had been killed."""
        try:
            if not (self._database.broken or self._changed or self._growing):
                self._note_heads()
                self._database.commit()
        finally:
            self._database.close()


def _after(run: AppendedRun, skipped: int) -> AppendedRun:
    """Without what is known already."""
    version, tokens, logprobs = run
    at = skipped * TOKEN_BYTES
    return version, tokens[at:], None if logprobs is None else logprobs[at:]
