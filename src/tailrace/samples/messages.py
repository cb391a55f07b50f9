"""The frames between a store and its clients, and the checks on what a client sends.

A frame is columnar: a few integer columns with one entry per segment, one buffer with the tokens of all segments and
one with the log-probs of those that were sampled. So a frame of a hundred segments is decoded and checked by a handful
of numpy calls, and sliced without a copy.

    client  Append, Fetch, Withdraw                        of a replica
            ReadLengths, ReadSamples                       of a trainer rank
            ReadPrompts                                    of another store
    store   Credit, Acknowledgement, Prefix, Refusal       to a replica
            LengthTable, SampleSlice, PromptRows, RequestFailed

Integers are little-endian int64 in columns, tokens int32, log-probs float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.types import Natural, Row, Segment, Struct
from tailrace.wire.messages import Receipt, WireError

LONGEST_FRAME = 64 << 20  # bytes
MOST_RUNS = 2048  # of a frame: each takes the writer some time, however short it is
NOT_SAMPLED = -1  # in a column of versions: a prompt, or what a tool has answered
TOKEN_BYTES = 4  # of an int32, and of its float32 log-prob
MOST_LOGPROB, LEAST_LOGPROB = 0.1, -1e6  # 0 and what arithmetic makes of it; what float32 holds
STORED, GAP, UNKNOWN, FENCED = range(4)  # verdicts on an append
GROWING, COMPLETE, FAILED = range(3)  # in a column of finals
VERSIONS = 1 << 31

Buffer = bytes | bytearray | memoryview
AppendedRun = tuple[int | None, memoryview, memoryview | None]  # version, tokens, log-probs


class Piece(Struct):
    """A run of tokens with one origin, as buffers. `version` is None for what the policy did not sample."""

    version: int | None
    tokens: Buffer
    logprobs: Buffer | None = None

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def segment_of(piece: Piece) -> Segment:
    """With buffers of its own: the frame that it came in can go."""
    return Segment(piece.version, bytes(piece.tokens), None if piece.logprobs is None else bytes(piece.logprobs))


class Fetched(NamedTuple):
    """What a replica needs to begin or to continue a sample."""

    trajectory: int
    attempt: int
    row: Row
    prefix: tuple[Segment, ...]


class AssignmentLost(NamedTuple):
    """An assignment that this replica no longer has: there is a newer attempt, or nobody wants the sample."""

    trajectory: int
    attempt: int
    reason: str


class SampleLength(NamedTuple):
    """What a trainer plans its packs by. `length`: from the prompt to the last sampled token."""

    id: int
    prompt: int
    length: int
    sampled: int
    tokens: int  # after the prompt, with what was not sampled


class StoredSample(NamedTuple):
    """A whole sample. Its first segment is the prompt."""

    id: int
    group: int
    prompt: int
    pieces: tuple[Piece, ...]


# -------------------------------------------------------------------------------------------------------- the frames


class Frame(Struct, tag_field="kind", tag=True):
    """Base of all frames."""


class Append(Frame):
    """More of some samples. `starts`: how many tokens after the prompt come before each run. `finals`: COMPLETE or
    FAILED where nothing will follow, and a receipt is wanted; such a run may be empty. Tokens of what has FAILED are
    kept for people, whatever follows. `urgent`: something waits until they are durable."""

    trajectories: memoryview
    attempts: memoryview
    starts: memoryview
    finals: memoryview
    versions: memoryview
    counts: memoryview
    tokens: memoryview
    logprobs: memoryview
    urgent: bool = False


class Fetch(Frame):
    """-> Prefix or Refusal, once the store has heard of the assignment."""

    trajectory: Natural
    attempt: Natural


class Withdraw(Frame):
    """The fetch is not waited for any more. No answer."""

    trajectory: Natural
    attempt: Natural


class ReadLengths(Frame):
    """-> LengthTable or RequestFailed."""

    request: Natural
    ids: memoryview


class ReadSamples(Frame):
    """-> SampleSlices in the order of `ids`, or RequestFailed."""

    request: Natural
    ids: memoryview


class ReadPrompts(Frame):
    """-> PromptRows."""

    request: Natural
    ids: memoryview


class Credit(Frame):
    """A replica may have so many bytes that are not acknowledged; said at first, and whenever it changes."""

    bytes: Natural


class Acknowledgement(Frame):
    """Frames up to `number` are durable, or refused: a verdict and the known length of each sample in them. Those that
    were said to be complete, and are, have a receipt."""

    number: Natural
    trajectories: memoryview
    attempts: memoryview
    lengths: memoryview
    verdicts: memoryview
    receipts: tuple[Receipt, ...] = ()


class Prefix(Frame):
    """Answer to `Fetch`."""

    trajectory: Natural
    attempt: Natural
    row: Row
    versions: memoryview
    counts: memoryview
    tokens: memoryview
    logprobs: memoryview


class Refusal(Frame):
    """The other answer to `Fetch`."""

    trajectory: Natural
    attempt: Natural
    reason: str


class LengthTable(Frame):
    """Answer to `ReadLengths`: a row (prompt, length, sampled, tokens) for each id, in the order asked for."""

    request: Natural
    values: memoryview


class SampleSlice(Frame):
    """Some of the samples of a `ReadSamples`: id, group, prompt and number of pieces of each; then all pieces."""

    request: Natural
    samples: memoryview
    versions: memoryview
    counts: memoryview
    tokens: memoryview
    logprobs: memoryview


class PromptRows(Frame):
    """Answer to `ReadPrompts`, in the order asked for."""

    request: Natural
    rows: tuple[Row, ...]


class RequestFailed(Frame):
    """The store cannot answer a request of a trainer, because of this."""

    request: Natural
    reason: str


FromClient = Append | Fetch | Withdraw | ReadLengths | ReadSamples | ReadPrompts
FromStore = Credit | Acknowledgement | Prefix | Refusal | LengthTable | SampleSlice | PromptRows | RequestFailed

encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_store = msgspec.msgpack.Decoder(FromStore).decode


# ------------------------------------------------------------------------------------------------ columns and buffers


def column(values: Iterable[int]) -> memoryview:
    return np.fromiter(values, "<i8").data.cast("B")


def read_column(view: memoryview) -> np.ndarray[Any, np.dtype[np.int64]]:
    if len(view) % 8:
        raise WireError(f"a column of {len(view)} bytes")
    return np.frombuffer(view, "<i8")


class PieceColumns(NamedTuple):
    """Pieces as four fields of a frame."""

    versions: memoryview
    counts: memoryview
    tokens: memoryview
    logprobs: memoryview

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> PieceColumns:
        return cls(
            column([NOT_SAMPLED if piece.version is None else piece.version for piece in pieces]),
            column([len(piece) for piece in pieces]),
            memoryview(b"".join([piece.tokens for piece in pieces])),
            memoryview(b"".join([piece.logprobs for piece in pieces if piece.logprobs is not None])),
        )


def pieces_in(frame: Prefix | SampleSlice) -> Iterator[Piece]:
    """The pieces of a frame, as views of its buffers. The columns have to agree."""
    return (Piece(*run) for run in _runs(frame))


def appended_in(frame: Append) -> Iterator[tuple[int, int, int, AppendedRun]]:
    """Trajectory, attempt, start and content of every run (as in a `Piece`), as views of the frame's buffers. The
    columns have to agree (`complaint_about`)."""
    columns = [read_column(view).tolist() for view in (frame.trajectories, frame.attempts, frame.starts)]
    return zip(*columns, _runs(frame), strict=True)  # pyright: ignore[reportReturnType]


def _runs(frame: Append | Prefix | SampleSlice) -> Iterator[AppendedRun]:
    versions, counts = read_column(frame.versions), read_column(frame.counts)
    token_ends, logprob_ends = _ends(counts), _ends(np.where(versions == NOT_SAMPLED, 0, counts))
    tokens, logprobs = frame.tokens, frame.logprobs
    at = logprobs_at = 0
    for version, end, logprobs_end in zip(versions.tolist(), token_ends, logprob_ends, strict=True):
        if version == NOT_SAMPLED:
            yield None, tokens[at:end], None
        else:
            yield version, tokens[at:end], logprobs[logprobs_at:logprobs_end]
        at, logprobs_at = end, logprobs_end


def _ends(counts: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    """Where each piece ends in its buffer, in bytes."""
    return (np.cumsum(counts) * TOKEN_BYTES).tolist()


def samples_of(frame: SampleSlice) -> int:
    """How many there are."""
    return len(frame.samples) // 32


def samples_in(frame: SampleSlice) -> Iterator[StoredSample]:
    table = read_column(frame.samples).reshape(-1, 4).tolist()
    pieces = list(pieces_in(frame))
    ends = accumulate(row[3] for row in table)
    for (id, group, prompt, count), end in zip(table, ends, strict=True):
        yield StoredSample(id, group, prompt, tuple(pieces[end - count : end]))


def slice_of(request: int, samples: Sequence[StoredSample]) -> SampleSlice:
    pieces = [piece for sample in samples for piece in sample.pieces]
    table = column([value for one in samples for value in (one.id, one.group, one.prompt, len(one.pieces))])
    return SampleSlice(request, table, *PieceColumns.of(pieces))


# -------------------------------------------------------------------------------------------------------- the checks


class CompletionLimits(NamedTuple):
    """What can be true of a completion."""

    vocabulary: int = 1 << 31
    completion_tokens: int = 1 << 31


def complaint_about(frame: Append, limits: CompletionLimits) -> str:
    """What is wrong with the content of a frame, whoever sent it; nothing if it can be true."""
    columns = [read_column(view) for view in frame_columns(frame)]
    trajectories, attempts, starts, finals, versions, counts = columns
    if len({len(each) for each in columns}) > 1:
        return "columns of different lengths"
    if not len(counts):
        return "an empty frame"
    if len(counts) > MOST_RUNS:
        return f"{len(counts):,} runs in a frame"
    if (counts < (finals == 0)).any():
        return "an empty run"
    wrong = _bad_columns(trajectories, attempts, starts, versions, counts, limits)
    return wrong or _bad_buffers(frame, versions, counts, limits)


def frame_columns(frame: Append) -> tuple[memoryview, ...]:
    return frame.trajectories, frame.attempts, frame.starts, frame.finals, frame.versions, frame.counts


def _bad_columns(
    trajectories: Any, attempts: Any, starts: Any, versions: Any, counts: Any, limits: CompletionLimits
) -> str:
    most = limits.completion_tokens
    if min(trajectories.min(), attempts.min(), starts.min(), counts.min()) < 0:
        return "a negative number"
    if versions.min() < NOT_SAMPLED or versions.max() >= VERSIONS:
        return f"a version from {versions.min()} to {versions.max()}"
    if max(starts.max(), counts.max()) > most or (starts + counts).max() > most:
        worst = int(np.argmax(np.maximum(starts, counts)))
        return f"t{trajectories[worst]} with more tokens than {most:,}, the most that a completion may have"
    return ""


def _bad_buffers(frame: Append, versions: Any, counts: Any, limits: CompletionLimits) -> str:
    tokens, sampled = int(counts.sum()), int(counts[versions != NOT_SAMPLED].sum())
    if (tokens * TOKEN_BYTES, sampled * TOKEN_BYTES) != (len(frame.tokens), len(frame.logprobs)):
        found = f"{len(frame.tokens) / TOKEN_BYTES:g} tokens and {len(frame.logprobs) / TOKEN_BYTES:g} log-probs"
        return f"{found}, where its counts say {tokens} and {sampled}"
    ids = np.frombuffer(frame.tokens, "<i4")
    if tokens and (ids.min() < 0 or ids.max() >= limits.vocabulary):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        return f"token {wrong}, where {limits.vocabulary} is the size of the vocabulary"
    logprobs = np.frombuffer(frame.logprobs, "<f4")
    if sampled and not (logprobs.min() >= LEAST_LOGPROB and logprobs.max() <= MOST_LOGPROB):  # a NaN is neither
        return "log-probs that are not finite, or not logarithms of probabilities"
    return ""
