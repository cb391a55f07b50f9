"""The tables of a store's file, and the checksums of their rows.

    prompts(id, tokens, prompt, columns, crc)                prompt and columns are JSON text
    trajectories(id, attempt, replica, group_id, prompt_id, last, tokens, sampled, span, oldest, newest, payload, crc)
                                                             last: its newest segment; span: tokens up to the last
                                                             sampled one; oldest, newest: versions, -1 if there are
                                                             none; payload: live, archived, deleting, deleted
    segments(number, trajectory_id, start, version, previous, tokens, logprobs, crc)
                                                             version is NULL for what was not sampled; previous: the
                                                             segment before it of the same sample
    failed_segments(attempt, ...)                            segments of attempts that ended without a reward, as they
                                                             were: the sample begins anew, and people read what failed

Tokens are int32 and log-probs float32, little-endian. A commit writes one row per sample and version, however many
frames it came in. Rows are written in the order of their numbers and nothing points to them but the next row of the
same sample: an index by sample would dirty one page per sample and commit, several times what is written now. The table
`trajectories` is brought up to date when an assignment changes, and every `HEADS_EVERY` bytes; what was added since is
found again from the segments after `heads` (in `meta`).

Only the replica with the newest attempt may append. What is there already is skipped, so sending again does no harm.
Every row has a checksum, and a sample is read by its whole chain: what was damaged or lost is refused.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, NamedTuple
from zlib import crc32

from tailrace.samples.messages import NOT_SAMPLED, TOKEN_BYTES
from tailrace.store.database import DAMAGE, connect_to_read, reason, refuse_cut, refuse_foreign_schema
from tailrace.store.errors import JournalError
from tailrace.types import TrajectoryId

PAGE = 16384  # bytes
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
FAILED_SEGMENTS = """
CREATE TABLE IF NOT EXISTS failed_segments (
    attempt INTEGER NOT NULL, number INTEGER NOT NULL, trajectory_id INTEGER NOT NULL, start INTEGER NOT NULL,
    version INTEGER, previous INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB, crc INTEGER NOT NULL,
    PRIMARY KEY (trajectory_id, attempt, number))
"""  # made when it is needed
HAS_FAILED = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'failed_segments'"
PUT_HEAD = "INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
ONE_HEAD = "SELECT * FROM trajectories WHERE id = ?"
ADDED_SINCE = "SELECT trajectory_id, number, start, version, coalesce(length(tokens), 0) FROM segments WHERE number > ?"
NOTED = "SELECT value FROM meta WHERE key = 'heads'"
CHAIN = """
WITH RECURSIVE chain (at) AS (
    VALUES (?)
    UNION ALL SELECT previous FROM segments JOIN chain ON number = at WHERE previous BETWEEN 1 AND number - 1)
"""  # it ends, whatever a damaged row says
SEGMENT = Struct("<qqqqq")  # for its checksum: number, trajectory, start, version and previous
HEAD = Struct("<qqqqqqqqqqq")  # for its checksum: trajectory and `SampleHead`
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


def sample_file(folder: Path, store: int) -> Path:
    return folder / f"samples-{store}.db"


def refuse_foreign(path: Path, run: str = "") -> None:
    """`JournalError` if this is no file of samples, or one of another release, or not of this run."""
    refuse_cut(path)
    try:
        with closing(connect_to_read(path)) as connection:
            refuse_foreign_schema(path, connection)
            found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            owner = connection.execute("SELECT value FROM meta WHERE key = ?", (RUN,)).fetchone()
    except DAMAGE as error:
        raise damaged(path, reason(error)) from error
    if found != (FORMAT,):
        raise JournalError(f"{path} is not of this release: its format is {found and found[0]}, not {FORMAT}")
    if run and owner != (run,):
        raise JournalError(
            f"{path} is of another run; move it away, and the samples that are missing are generated again"
        )


def read_head(path: Path, row: tuple[Any, ...]) -> SampleHead:
    trajectory, *values, payload, crc = row
    head = SampleHead(*values)
    with suppress(*WRONG_TYPES):
        if head_row(trajectory, head, payload)[-1] == crc:
            return head
    raise damaged(path, f"what is noted of t{trajectory} is not as it was written")


def head_row(trajectory: TrajectoryId, head: SampleHead, payload: str) -> tuple[Any, ...]:
    return (trajectory, *head, payload, crc32(payload.encode(), crc32(HEAD.pack(trajectory, *head))))


def last_noted(path: Path, rows: list[Any]) -> int:
    """The last segment that the heads have."""
    with suppress(IndexError, TypeError, ValueError):
        return int(rows[0][0])
    raise damaged(path, "it does not say which segments are noted")


def extended_head(
    path: Path, trajectory: TrajectoryId, head: SampleHead, number: int, start: int, version: int | None, size: int
) -> SampleHead:
    if start != head.tokens:
        raise damaged(path, f"tokens of t{trajectory} are missing")
    return head.grown(number, size // TOKEN_BYTES, version)


def is_as_written(row: tuple[Any, ...]) -> bool:
    with suppress(*WRONG_TYPES):
        return segment_crc(row) == row[7]
    return False


def segment_crc(row: tuple[Any, ...]) -> int:
    number, trajectory, start, version, previous, tokens, logprobs = row[:7]
    head = SEGMENT.pack(number, trajectory, start, -1 if version is None else version, previous)
    return crc32(logprobs or b"", crc32(tokens, crc32(head)))


def row_crc(*values: object) -> int:
    crc = 0
    for value in values:
        crc = crc32(value if isinstance(value, bytes) else repr(value).encode(), crc)
    return crc


def damaged(path: Path, how: str) -> JournalError:
    return JournalError(f"{path} is damaged: {how}")


def damaged_sample(path: Path, trajectory: TrajectoryId, how: str) -> SampleDamagedError:
    return SampleDamagedError(trajectory, str(damaged(path, how)))
