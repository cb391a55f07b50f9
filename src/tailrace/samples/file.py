"""The SQLite file of a store: prompts, and the tokens of every sample while it grows and until nobody needs them.

    prompts(id, tokens, prompt, columns, crc)                prompt and columns are JSON text
    trajectories(id, attempt, replica, group_id, prompt_id, last, tokens, sampled, span, oldest, newest, payload, crc)
                                                             last: its newest segment; span: tokens up to the last
                                                             sampled one; oldest, newest: versions, -1 if there are
                                                             none; payload: live, archived, deleting, deleted
    segments(number, trajectory_id, start, version, previous, tokens, logprobs, crc)
                                                             version is NULL for what was not sampled; previous: the
                                                             segment before it of the same sample

Tokens are int32 and log-probs float32, little-endian. A commit writes one row per sample and version, however many
frames it came in. Rows are written in the order of their numbers and nothing points to them but the next row of the
same sample: an index by sample would dirty one page per sample and commit, several times what is written now. The table
`trajectories` is brought up to date when an assignment changes, and every `HEADS_EVERY` bytes; what was added since is
found again from the segments after `heads` (in `meta`).

Only the replica with the newest attempt may append. What is there already is skipped, so sending again does no harm.
Every row has a checksum, and a sample is read by its whole chain: what was damaged or lost is refused.

`SampleFile` is the one writer; `SampleReader` reads beside it, or a file that nobody writes any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain, groupby
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from tailrace.samples.messages import (
    FENCED,
    GAP,
    NOT_SAMPLED,
    STORED,
    TOKEN_BYTES,
    UNKNOWN,
    Append,
    AppendedRun,
    Buffer,
    Piece,
    SampleLength,
    StoredSample,
    appended_in,
)
from tailrace.store.database import DAMAGE, Database, connect_to_read, reason, refuse_cut, refuse_foreign_schema
from tailrace.store.errors import JournalError
from tailrace.types import PromptId, Row, TrajectoryId
from tailrace.wire.messages import Grant

PAGE = 16384  # bytes
CACHE = 64 << 20  # bytes of SQLite's pages in memory: a commit fits in
ROWS_AT_ONCE = 64  # of one statement: it is carried out beside Python, and each return to it may have to wait
HEADS_EVERY = 128 << 20  # bytes of segments between two updates of the table `trajectories`
LOG = 32 << 20  # bytes in SQLite's log before it is merged into the file
DELETED_AT_ONCE = 32  # samples per commit: deleting a step's worth at once would keep every replica waiting
FORMAT = "1"
RUN = "run"  # in `meta`: whose samples these are
SCHEMA = f"""
PRAGMA page_size = {PAGE};
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, prompt TEXT NOT NULL, columns TEXT NOT NULL,
    crc INTEGER NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, replica INTEGER NOT NULL, group_id INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL, last INTEGER NOT NULL, tokens INTEGER NOT NULL, sampled INTEGER NOT NULL,
    span INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL, payload TEXT NOT NULL,
    crc INTEGER NOT NULL);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, trajectory_id INTEGER NOT NULL, start INTEGER NOT NULL, version INTEGER,
    previous INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB, crc INTEGER NOT NULL);
CREATE INDEX trajectories_at_hand ON trajectories (payload) WHERE payload = 'live' OR payload = 'deleting';
"""
ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"
ADD_SEGMENT = f"INSERT INTO segments VALUES {ROW}"
ADD_SEGMENTS = f"INSERT INTO segments VALUES {', '.join([ROW] * ROWS_AT_ONCE)}"
PUT_HEAD = "INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
ALL_HEADS = "SELECT * FROM trajectories WHERE payload = 'live' OR payload = 'deleting'"
ONE_HEAD = "SELECT * FROM trajectories WHERE id = ?"
ADDED_SINCE = "SELECT trajectory_id, number, start, version, coalesce(length(tokens), 0) FROM segments WHERE number > ?"
NOTED = "SELECT value FROM meta WHERE key = 'heads'"
CHAIN = """
WITH RECURSIVE chain (at) AS (
    VALUES (?)
    UNION ALL SELECT previous FROM segments JOIN chain ON number = at WHERE previous BETWEEN 1 AND number - 1)
"""  # it ends, whatever a damaged row says
READ_CHAIN = f"""{CHAIN}
SELECT number, trajectory_id, start, version, previous, tokens, logprobs, crc FROM chain JOIN segments ON number = at
"""
SEGMENT = Struct("<qqqqq")  # for its checksum: number, trajectory, start, version and previous
HEAD = Struct("<qqqqqqqqqqq")  # for its checksum: trajectory and `SampleHead`
AMONG = "IN (SELECT value FROM json_each(?))"  # any number of ids as one value
WRONG_TYPES = (StructError, AttributeError, TypeError)  # what a checksum of other values than were written may raise


class PromptGoneError(JournalError):
    """A prompt is asked for that is not here."""


class SampleGoneError(JournalError):
    """A sample is asked for that is not here, or was forgotten."""

    def __init__(self, trajectory: TrajectoryId, sentence: str) -> None:
        super().__init__(sentence)
        self.trajectory = trajectory


class SampleDamagedError(SampleGoneError):
    """What is here of a sample is not what was written."""


class SampleHead(NamedTuple):
    """What is known of a sample without its tokens."""

    attempt: int
    replica: int
    group: int
    prompt: int
    last: int = 0  # number of its newest segment; 0: none
    tokens: int = 0  # after the prompt
    sampled: int = 0
    span: int = 0  # tokens up to the last sampled one
    oldest: int = NOT_SAMPLED  # version of what was sampled
    newest: int = NOT_SAMPLED

    def grown(self, number: int, count: int, version: int | None) -> SampleHead:
        """With a segment more. Spelled out, because this is done for every row: `_replace` takes ten times as long."""
        attempt, replica, group, prompt, _, tokens, sampled, span, oldest, newest = self
        tokens += count
        if version is None:
            return SampleHead(attempt, replica, group, prompt, number, tokens, sampled, span, oldest, newest)
        if version < oldest or newest == NOT_SAMPLED:
            oldest = version
        if version > newest:
            newest = version
        return SampleHead(attempt, replica, group, prompt, number, tokens, sampled + count, tokens, oldest, newest)


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


def sample_file(folder: Path, store: int) -> Path:
    return folder / f"samples-{store}.db"


# --------------------------------------------------------------------------------------------------------- writing


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
            id, head = row[0], _head(self.path, row)
            if row[-2] == "live":
                self.heads[id] = head
            else:
                self._deleting.append((id, head))
        noted = _noted(self.path, execute(NOTED))
        for id, number, *segment in execute(ADDED_SINCE, (noted,)):
            if id in self.heads and number > self.heads[id].last:
                self.heads[id] = _extended(self.path, id, self.heads[id], number, *segment)
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
        return _head(self.path, rows[0]) if rows else None

    def _put(self, trajectory: TrajectoryId, head: SampleHead, payload: str) -> None:
        self._database.execute(PUT_HEAD, _head_row(trajectory, head, payload))
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

    def complete(self, trajectory: TrajectoryId, attempt: int) -> None:
        """What was stored of it last is the end of this attempt: it will not grow any more."""
        self._complete[trajectory] = attempt
        growth = self._growing.get(trajectory)
        if growth is not None and growth.owner[1] == attempt:
            growth.is_complete = True

    def _growth(self, replica: int, trajectory: TrajectoryId, attempt: int) -> UncommittedGrowth | int:
        """Of a sample that this replica may append to, or a verdict."""
        head = self._head(trajectory)
        if head is None:
            return FENCED if self._forgotten(trajectory) else UNKNOWN
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
            yield (*row, _segment_crc(row))
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
        self._database.executemany(statement, [(*row, _crc(*row)) for row in values])

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
        self._database.executemany(PUT_HEAD, [_head_row(id, head, "live") for id, head in heads if head is not None])
        self._database.execute("UPDATE meta SET value = ? WHERE key = 'heads'", (str(self._number),))
        self._unnoted.clear()
        self._bytes_unnoted = 0

    def _delete_some(self) -> None:
        for _ in range(min(DELETED_AT_ONCE, len(self._deleting))):
            id, head = self._deleting.popleft()
            if self._head(id) is None:  # else it was assigned again, and what was there is deleted already
                self._delete_chain(head)
                self._put(id, SampleHead(*head[:4]), "deleted")

    def _delete_chain(self, head: SampleHead) -> None:
        self._database.execute(f"DELETE FROM segments WHERE number IN ({CHAIN} SELECT at FROM chain)", (head.last,))

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


# --------------------------------------------------------------------------------------------------------- reading


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
            raise PromptGoneError(str(_damaged(self._path, f"p{prompt} is missing")))
        *values, crc = found[0]
        if _crc(*values) != crc:
            raise _damaged(self._path, f"p{prompt} is not as it was written")
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
            raise _damaged(self._path, f"p{missing} is missing")
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

    def is_forgotten(self, trajectory: TrajectoryId) -> bool:
        """By its row alone: the heads that are in memory are brought up to date a moment after a commit."""
        return self._query("SELECT payload != 'live' FROM trajectories WHERE id = ?", (trajectory,)) == [(1,)]

    def _known(self, trajectory: TrajectoryId) -> SampleHead:
        head = self._head_of(trajectory)
        if head is None:
            raise SampleGoneError(trajectory, f"{self._path} does not have t{trajectory}, or not any more")
        return head

    def _pieces(self, trajectory: TrajectoryId, head: SampleHead) -> tuple[Piece, ...]:
        rows = self._query(READ_CHAIN, (head.last,)) if head.last else []
        start = head.tokens
        for row in rows:  # the newest first
            start -= len(row[5]) // TOKEN_BYTES if isinstance(row[5], bytes) else 0
            if (row[1], row[2]) != (trajectory, start) or not _is_as_written(row):
                raise _damaged_sample(self._path, trajectory, f"what t{trajectory} holds is not as it was written")
        if start:
            self._known(trajectory)  # the writer may have deleted it in the meantime
            raise _damaged_sample(self._path, trajectory, f"{start:,} tokens of t{trajectory} are missing")
        return tuple(_merged(reversed(rows)))

    def _find_head(self, trajectory: TrajectoryId) -> SampleHead | None:
        """In a file that nobody of this process writes. The newest segments may not be noted yet."""
        rows = self._query(ONE_HEAD, (trajectory,))
        if not rows:
            return None
        head = _head(self._path, rows[0])
        noted = _noted(self._path, self._query(NOTED))
        for _, number, *segment in self._query(f"{ADDED_SINCE} AND trajectory_id = ?", (noted, trajectory)):
            if number > head.last:
                head = _extended(self._path, trajectory, head, number, *segment)
        return head

    def _query(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._merging:
                return self._connection.execute(query, values).fetchall()
        except DAMAGE as error:
            raise _damaged(self._path, reason(error)) from error


def refuse_foreign(path: Path, run: str = "") -> None:
    """`JournalError` if this is no file of samples, or one of another release, or not of this run."""
    refuse_cut(path)
    try:
        with closing(connect_to_read(path)) as connection:
            refuse_foreign_schema(path, connection)
            found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            owner = connection.execute("SELECT value FROM meta WHERE key = ?", (RUN,)).fetchone()
    except DAMAGE as error:
        raise _damaged(path, reason(error)) from error
    if found != (FORMAT,):
        raise JournalError(f"{path} is not of this release: its format is {found and found[0]}, not {FORMAT}")
    if run and owner != (run,):
        raise JournalError(
            f"{path} is of another run; move it away, and the samples that are missing are generated again"
        )


# ------------------------------------------------------------------------------------------------- rows and values


def _head(path: Path, row: tuple[Any, ...]) -> SampleHead:
    trajectory, *values, payload, crc = row
    head = SampleHead(*values)
    with suppress(*WRONG_TYPES):
        if _head_row(trajectory, head, payload)[-1] == crc:
            return head
    raise _damaged(path, f"what is noted of t{trajectory} is not as it was written")


def _noted(path: Path, rows: list[Any]) -> int:
    """The last segment that the heads have."""
    with suppress(IndexError, TypeError, ValueError):
        return int(rows[0][0])
    raise _damaged(path, "it does not say which segments are noted")


def _head_row(trajectory: TrajectoryId, head: SampleHead, payload: str) -> tuple[Any, ...]:
    return (trajectory, *head, payload, crc32(payload.encode(), crc32(HEAD.pack(trajectory, *head))))


def _extended(
    path: Path, trajectory: TrajectoryId, head: SampleHead, number: int, start: int, version: int | None, size: int
) -> SampleHead:
    if start != head.tokens:
        raise _damaged(path, f"tokens of t{trajectory} are missing")
    return head.grown(number, size // TOKEN_BYTES, version)


def _length(id: TrajectoryId, head: SampleHead, prompt: int) -> SampleLength:
    return SampleLength(id, prompt, prompt + head.span if head.sampled else 0, head.sampled)


def _after(run: AppendedRun, skipped: int) -> AppendedRun:
    """Without what is known already."""
    version, tokens, logprobs = run
    at = skipped * TOKEN_BYTES
    return version, tokens[at:], None if logprobs is None else logprobs[at:]


def _merged(rows: Iterable[tuple[Any, ...]]) -> Iterator[Piece]:
    for version, run in groupby(rows, key=lambda row: row[3]):
        same = list(run)
        tokens = same[0][5] if len(same) == 1 else b"".join([row[5] for row in same])
        yield Piece(version, tokens, None if version is None else b"".join([row[6] for row in same]))


def _is_as_written(row: tuple[Any, ...]) -> bool:
    with suppress(*WRONG_TYPES):
        return _segment_crc(row) == row[7]
    return False


def _segment_crc(row: tuple[Any, ...]) -> int:
    number, trajectory, start, version, previous, tokens, logprobs = row[:7]
    head = SEGMENT.pack(number, trajectory, start, -1 if version is None else version, previous)
    return crc32(logprobs or b"", crc32(tokens, crc32(head)))


def _crc(*values: object) -> int:
    crc = 0
    for value in values:
        crc = crc32(value if isinstance(value, bytes) else repr(value).encode(), crc)
    return crc


def _damaged(path: Path, how: str) -> JournalError:
    return JournalError(f"{path} is damaged: {how}")


def _damaged_sample(path: Path, trajectory: TrajectoryId, how: str) -> SampleDamagedError:
    return SampleDamagedError(trajectory, str(_damaged(path, how)))


def _list(ids: Iterable[int]) -> str:
    return msgspec.json.encode(list(ids)).decode()
