"""The tokens of a run's samples, from the files of its stores that lie beside run.db; also while they grow.

Files are opened for each look and closed again, so that a run can end without waiting for us. What is not here, or not
any more, is said in a sentence in the place of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tailrace.samples.messages import StoredSample
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import SampleGoneError, sample_file
from tailrace.store.database import file_of, has_log, merge_log
from tailrace.store.errors import JournalError
from tailrace.store.folder import is_being_written
from tailrace.store.trajectories import KnownTrajectory
from tailrace.types import Row, TrajectoryId


class SampleTokens(NamedTuple):
    """Of one sample; `missing` says why there are none."""

    row: Row | None = None
    stored: StoredSample | None = None
    missing: str = ""


def read_tokens(run: Path, samples: Sequence[KnownTrajectory]) -> list[SampleTokens]:
    """Of all of these, in their order."""
    folder = file_of(run).parent
    found: dict[tuple[TrajectoryId, int], SampleTokens] = {}
    by_store = sorted(samples, key=lambda one: one.store)
    for store, group in groupby(by_store, key=lambda one: one.store):
        wanted = list(group)
        found |= zip(map(_key, wanted), _of_store(folder, store, wanted), strict=True)
    return [found[_key(one)] for one in samples]


def _key(one: KnownTrajectory) -> tuple[TrajectoryId, int]:
    return one.id, one.attempt


def _of_store(folder: Path, store: int, samples: list[KnownTrajectory]) -> list[SampleTokens]:
    path = sample_file(folder, store)
    if not path.is_file():
        return [SampleTokens(missing=f"its tokens are in {path.name}, which is not in {folder}")] * len(samples)
    try:
        return list(_read(path, samples))
    except JournalError as error:
        return [SampleTokens(missing=str(error))] * len(samples)
    finally:
        _leave_one_file(path)


def _read(path: Path, samples: Sequence[KnownTrajectory]) -> Iterator[SampleTokens]:
    with closing(SampleReader(path)) as reader:
        reader.expect([one.id for one in samples])
        rows: dict[int, Row] = {}
        for one in samples:
            if one.payload == "deleted":
                yield SampleTokens(missing="its tokens were deleted (run.archive = false)")
            else:
                yield _one(reader, one, rows)


def _one(reader: SampleReader, one: KnownTrajectory, rows: dict[int, Row]) -> SampleTokens:
    try:
        if one.prompt not in rows:
            rows[one.prompt] = reader.row(one.prompt)
        if one.state != "failed":
            return SampleTokens(rows[one.prompt], reader.read([one.id])[0])
        stored = reader.failed(one.id, one.attempt, one.prompt)
        return SampleTokens(rows[one.prompt], stored, "" if stored else "nothing of it was stored")
    except SampleGoneError:
        return SampleTokens(rows.get(one.prompt), missing="nothing of it has been stored yet, or not any more")
    except JournalError as error:
        return SampleTokens(rows.get(one.prompt), missing=str(error))


def _leave_one_file(path: Path) -> None:
    """A run that has ended in the meantime could not merge its log, because of this reader."""
    if has_log(path) and not is_being_written(path.parent):
        merge_log(path)
