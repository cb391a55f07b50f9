"""A real run's store: one transaction for everything, reopened where it stopped, readable after a full disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.config import Config, load
from tailrace.protocol import Alive
from tailrace.store.journal import Journal, JournalError, JournalWriter
from tailrace.store.metrics import Measurement, measurements
from tailrace.store.run import RunStore


@pytest.fixture
def config() -> Config:
    return load([], ["--model.preset", "qwen2.5-7b", "--run.name", "a run"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def record(store: RunStore, count: int) -> None:
    for _ in range(count):
        store.record(float(store.last_seq), Alive("relay", store.last_seq, 1), [])


def record_without_end(store: RunStore) -> None:
    while True:
        record(store, 1)
        store.commit()


def test_reopening_goes_on_where_it_stopped(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config) as store:
        record(store, 3)
    with RunStore.reopen(folder) as store:
        assert (store.last_seq, store.last_now, store.config) == (3, 2.0, config)
        assert [entry.seq for entry in store.entries(after=1)] == [2, 3]
        record(store, 2)
    assert [entry.seq for entry in Journal(folder).entries()] == [1, 2, 3, 4, 5]
    assert not Journal(folder).complete


def test_what_is_not_committed_is_not_there(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    store.vault.assign(0, 1, 0, 0, resume=False)
    store.metrics.measure(0.0, 0, "trainer", {"loss": 1.0})
    record(store, 1)
    assert list(Journal(folder).entries()) == []
    assert list(measurements(folder)) == []
    store.commit()
    assert len(list(Journal(folder).entries())) == 1
    assert list(measurements(folder)) == [Measurement(0.0, 0, "trainer", "loss", 1.0)]
    store.close(complete=False)


def test_only_the_newest_two_snapshots_are_kept(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config) as store:
        assert store.newest_snapshot() is None
        for seq in range(1, 5):
            record(store, 1)
            store.snapshot(seq, bytes([seq]))
        assert store.newest_snapshot() == (4, b"\4")
    with closing(sqlite3.connect(folder / "run.db")) as database:
        assert database.execute("SELECT seq FROM snapshots").fetchall() == [(3,), (4,)]


def test_values_of_the_run_are_remembered(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config) as store:
        assert store.meta.get("accuracy_before") is None
        store.meta.set("accuracy_before", "0.3")
        store.meta.set("accuracy_before", "0.4")
    assert Journal(folder).meta["accuracy_before"] == "0.4"


def end_complete(folder: Path, config: Config) -> None:
    RunStore.create(folder, config).close(complete=True)


def simulate(folder: Path, config: Config) -> None:
    with JournalWriter(folder, config):
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (end_complete, "is complete, so there is nothing to resume; to train it further"),
        (simulate, "is a simulation, which cannot be resumed"),
        (lambda folder, _: folder.mkdir(), "has no run.db"),
        (lambda *_: None, "there is no run"),
    ],
)
def test_what_cannot_be_resumed_says_so(
    folder: Path, config: Config, make: Callable[[Path, Config], None], words: str
) -> None:
    make(folder, config)
    with pytest.raises(JournalError, match=words):
        RunStore.reopen(folder)


def test_one_process_at_a_time(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config):
        with pytest.raises(JournalError, match="another process is writing"):
            RunStore.reopen(folder)
        with pytest.raises(JournalError, match="already has a run"):
            RunStore.create(folder, config)
    RunStore.reopen(folder).close(complete=False)


def test_a_full_disk_is_one_sentence_and_loses_nothing_committed(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(JournalError, match=r"^\S+ cannot be written any further: the disk is full; [^\n]+$"):
        record_without_end(store)
    store.close(complete=True)
    committed = store.last_seq - 1
    assert committed > 10
    assert len(list(Journal(folder).entries())) == committed
    with RunStore.reopen(folder) as again:  # there is room now
        record(again, 100)
    assert len(list(Journal(folder).entries())) == committed + 100
