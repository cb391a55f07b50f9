"""The file of samples: what is appended is there once, for the newest attempt alone, and damage is refused."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sample_stores import PROMPT, grant, ids_in, piece, put, tokens_of
from tailrace.samples import file as file_module
from tailrace.samples.file import SampleFile
from tailrace.samples.messages import (
    FENCED,
    GAP,
    STORED,
    UNKNOWN,
    SampleLength,
)
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import SampleGoneError, sample_file
from tailrace.store.errors import JournalError
from tailrace.types import Row, id_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_file(tmp_path, 0)


def begun(path: Path, *trajectories: int) -> SampleFile:
    file = SampleFile.create(path)
    file.add_prompts([PROMPT])
    file.assign([grant(id) for id in trajectories])
    return file


def add(file: SampleFile, trajectory: int, start: int, end: int, attempt: int = 1, version: int | None = 1) -> int:
    return put(file, 0, trajectory, attempt, start, piece(trajectory, start, end, version))


def ids(path: Path, trajectory: int, writer: SampleFile | None = None) -> list[int]:
    reader = SampleReader(path, writer)
    try:
        return ids_in(reader.read([trajectory])[0])
    finally:
        reader.close()


def test_what_is_sent_again_is_there_once_however_it_is_cut(path: Path) -> None:
    file = begun(path, 7)
    assert [add(file, 7, *cut) for cut in ((0, 10), (0, 10), (5, 20), (0, 20), (20, 21))] == [STORED] * 5
    file.commit()
    assert [add(file, 7, *cut) for cut in ((15, 30), (0, 30))] == [STORED] * 2
    file.commit()
    assert add(file, 7, 0, 30) == STORED
    file.commit()
    assert ids(path, 7, file) == tokens_of(7, 0, 30).tolist()
    assert file._database.execute("SELECT count(*) FROM segments") == [(2,)]
    file.close()


def test_a_gap_is_refused_and_leaves_nothing(path: Path) -> None:
    file = begun(path, 7)
    add(file, 7, 0, 10)
    assert add(file, 7, 11, 20) == GAP
    assert file.length(7) == 10
    file.commit()
    assert ids(path, 7, file) == tokens_of(7, 0, 10).tolist()
    file.close()


def test_a_newer_attempt_fences_the_older_one_off(path: Path) -> None:
    file = begun(path, 7)
    add(file, 7, 0, 10)
    file.assign([grant(7, attempt=2, replica=1, resume=True)])
    assert add(file, 7, 10, 20) == FENCED
    assert put(file, 1, 7, 2, 10, piece(7, 10, 15)) == STORED
    assert put(file, 1, 7, 3, 15, piece(7, 15, 16)) == UNKNOWN
    with pytest.raises(PermissionError, match="t7, which it was not given"):
        put(file, 0, 7, 2, 15, piece(7, 15, 16))
    file.assign([grant(7, attempt=1), grant(7, attempt=2, replica=0)])  # late, and doubled
    assert put(file, 1, 7, 2, 15, piece(7, 15, 16)) == STORED
    file.commit()
    assert ids(path, 7, file) == tokens_of(7, 0, 16).tolist()
    file.close()


def test_an_attempt_that_does_not_resume_begins_with_nothing(path: Path) -> None:
    file = begun(path, 7)
    add(file, 7, 0, 10)
    file.commit()
    add(file, 7, 10, 20)
    file.assign([grant(7, attempt=2)])
    assert add(file, 7, 20, 30, attempt=2) == GAP
    assert add(file, 7, 0, 5, attempt=2) == STORED
    file.commit()
    assert ids(path, 7, file) == tokens_of(7, 0, 5).tolist()
    assert file._database.execute("SELECT count(*) FROM segments") == [(1,)]
    file.close()


@pytest.mark.parametrize("archive", [True, False])
def test_what_an_attempt_failed_on_is_kept_for_people_whatever_follows(path: Path, archive: bool) -> None:
    file = begun(path, 7)
    add(file, 7, 0, 10, version=1)
    file.commit()
    add(file, 7, 10, 15, version=2)
    for _ in range(2):  # the acknowledgement was lost
        file.complete(7, 1, failed=True)
        file.commit()
    file.assign([grant(7, attempt=2)])
    add(file, 7, 0, 3, attempt=2)
    file.commit()
    file.close()
    file = SampleFile.open(path)

    def failed(attempt: int) -> list[int] | None:
        with closing(SampleReader(path)) as reader:
            found = reader.failed(7, attempt, PROMPT.id)
            return None if found is None else ids_in(found)

    assert (failed(1), failed(2)) == (tokens_of(7, 0, 15).tolist(), None)
    assert ids(path, 7, file) == tokens_of(7, 0, 3).tolist()
    file.forget([7], archive)
    for _ in range(2):
        file.commit()
    assert failed(1) == (tokens_of(7, 0, 15).tolist() if archive else None)
    file.close()


def test_a_commit_writes_one_row_for_each_sample_and_version(path: Path) -> None:
    file = begun(path, 7, 8)
    for start in range(0, 100, 10):
        add(file, 7, start, start + 10, version=1 if start < 50 else 2)
        add(file, 8, start, start + 10)
    file.commit()
    rows = file._database.execute(
        "SELECT trajectory_id, start, version, length(tokens) / 4 FROM segments ORDER BY 1, 2"
    )
    assert rows == [(7, 0, 1, 50), (7, 50, 2, 50), (8, 0, 1, 100)]
    file.close()


def test_lengths_end_with_the_last_sampled_token(path: Path) -> None:
    file = begun(path, 7, 8, 9)
    add(file, 7, 0, 10)
    add(file, 7, 10, 14, version=None)
    add(file, 7, 14, 20, version=2)
    add(file, 7, 20, 25, version=None)
    add(file, 8, 0, 4, version=None)
    file.commit()
    reader = SampleReader(path, file)
    found = [SampleLength(8, 3, 0, 0, 4), SampleLength(7, 3, 23, 16, 25), SampleLength(9, 3, 0, 0, 0)]
    assert reader.lengths([8, 7, 9]) == found
    reader.close()
    file.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_reopened_file_goes_on_where_its_commits_ended(path: Path, clean: bool, monkeypatch) -> None:
    monkeypatch.setattr(file_module, "HEADS_EVERY", 1000)  # some rows are noted in the heads, some are not
    file = begun(path, 7, 8)
    for start in range(0, 300, 10):
        add(file, 7, start, start + 10)
        add(file, 8, start, start + 10, version=None if start % 30 else 2)
        file.commit()
    before = dict(file.heads)
    add(file, 7, 300, 310)  # never committed
    file.close() if clean else file._database.close()  # a killed process notes no heads
    again = SampleFile.open(path)
    assert again.heads == before
    assert add(again, 7, 300, 305) == STORED
    again.commit()
    assert ids(path, 7, again) == tokens_of(7, 0, 305).tolist()
    assert ids(path, 8, again) == tokens_of(8, 0, 300).tolist()
    again.close()
    assert ids(path, 7) == tokens_of(7, 0, 305).tolist()  # by somebody who reads a finished run
    assert ids(path, 8) == tokens_of(8, 0, 300).tolist()  # which has not grown since
    assert not path.with_name(f"{path.name}-wal").exists()


def test_what_was_not_committed_takes_nothing_along(path: Path) -> None:
    file = begun(path, 7)
    add(file, 7, 0, 10)
    file.commit()
    file.assign([grant(7, attempt=2, resume=True)])
    file.close()
    assert ids(path, 7) == tokens_of(7, 0, 10).tolist()


@pytest.mark.parametrize("archive", [True, False])
def test_what_is_forgotten_is_archived_or_deleted_little_by_little(path: Path, archive: bool) -> None:
    file = begun(path, *range(100))
    for id in range(100):
        add(file, id, 0, 10)
    file.commit()
    file.forget(range(90), archive)
    file.commit()
    assert sorted(file.heads) == list(range(90, 100))
    assert add(file, 5, 10, 20) == FENCED
    file.close()
    again = SampleFile.open(path)
    while again.is_deleting:
        again.commit()
    assert again._database.execute("SELECT count(*) FROM segments") == [(100 if archive else 10,)]
    assert add(again, 5, 10, 20) == FENCED
    again.close()
    if archive:
        assert ids(path, 5) == tokens_of(5, 0, 10).tolist()


def test_reconciling_drops_what_is_not_named_and_says_what_is_missing(path: Path) -> None:
    file = begun(path, 1, 2, 3)
    for id in (1, 2, 3):
        add(file, id, 0, 10)
    file.commit()
    assert file.reconcile([grant(1), grant(4, attempt=2)], keep=[2, 50], archive=False) == [50]
    file.commit()
    assert {id: head.attempt for id, head in file.heads.items()} == {1: 1, 2: 1, 4: 2}
    assert add(file, 1, 10, 20) == STORED
    file.close()


def test_prompts_come_back_as_they_were_added_first(path: Path) -> None:
    file = begun(path)
    file.add_prompts(
        [Row(3, id_bytes((9,)), "another"), Row(4, id_bytes((1,)), [{"role": "user", "content": "é"}], {"n": [1]})]
    )
    file.commit()
    reader = SampleReader(path, file)
    assert reader.row(3) == PROMPT
    assert reader.row(4).prompt == [{"role": "user", "content": "é"}]
    with pytest.raises(JournalError, match="p5 is missing"):
        reader.row(5)
    reader.close()
    file.close()


DAMAGE = {
    "a token": "UPDATE segments SET tokens = zeroblob(length(tokens)) WHERE number = 2",
    "a log-prob": "UPDATE segments SET logprobs = zeroblob(length(logprobs)) WHERE number = 2",
    "a version": "UPDATE segments SET version = 5 WHERE number = 2",
    "a lost row": "DELETE FROM segments WHERE number = 2",
    "a value of another type": "UPDATE segments SET version = 'one' WHERE number = 2",
    "tokens that are none": "UPDATE segments SET tokens = 5 WHERE number = 2",
    "a chain that leads back to itself": "UPDATE segments SET previous = 3 WHERE number = 2",
    "a row of another sample": "UPDATE segments SET trajectory_id = 8 WHERE number = 2",
    "a prompt": "UPDATE prompts SET tokens = zeroblob(12)",
    "a head without its payload": "UPDATE trajectories SET payload = x'00' WHERE id = 7",
    "which segments are noted": "UPDATE meta SET value = 'none' WHERE key = 'heads'",
    "a head": "UPDATE trajectories SET tokens = tokens - 10 WHERE id = 7",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused(path: Path, statement: str) -> None:
    file = begun(path, 7)
    for start in (0, 10, 20):
        add(file, 7, start, start + 10)
        file.commit()
    file.close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(JournalError, match=r"samples-0\.db is damaged: "):
        ids(path, 7)


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    path.write_text("not a database, but long enough to be read as one" * 10)
    with pytest.raises(JournalError, match="it is not a SQLite file"):
        SampleFile.open(path)


def test_half_a_file_is_refused(path: Path) -> None:
    begun(path, 7).close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(JournalError, match="is cut in the middle"):
        SampleFile.open(path)


def test_a_sample_that_is_not_there_is_named(path: Path) -> None:
    file = begun(path, 7)
    file.commit()
    reader = SampleReader(path, file)
    with pytest.raises(SampleGoneError, match="does not have t8"):
        reader.read([7, 8])
    reader.close()
    file.close()
