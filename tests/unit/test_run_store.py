"""A real run's store: one transaction for everything, reopened where it stopped, readable after a full disk."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import Config, load
from tailrace.launch.view import LiveView
from tailrace.protocol import RelayJoined, Request, TrajectoryMeta
from tailrace.store.database import Database, reading
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
        store.record(float(store.last_seq), RelayJoined(store.last_seq, 1), [])


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
    store.trajectories.assign([Request(0, 1, 0, 0, 1)])
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
        (end_complete, "is complete; to train it further, resume it with more steps"),
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


def test_whoever_finds_a_run_finds_a_whole_one_however_early(tmp_path: Path, config: Config) -> None:
    """Somebody reads from the first moment on, and holds what he reads for a while."""
    path, found = tmp_path / "run" / "run.db", []

    def read() -> None:
        while not path.exists():
            pass
        for _ in range(20):
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as reader:
                reader.execute("BEGIN")
                found.append(reader.execute("SELECT count(*) FROM meta").fetchone()[0])
                time.sleep(0.01)

    thread = threading.Thread(target=read)
    thread.start()
    with RunStore.create(path.parent, config):
        thread.join()
    assert found == [6] * 20


def test_a_run_that_cannot_be_made_leaves_nothing_and_can_be_made_later(tmp_path: Path, config: Config) -> None:
    with pytest.raises(JournalError, match="cannot be written"):
        Database.create(tmp_path, "CREATE TABLE half (a); CREATE TABLE", {})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".run.db.new").write_bytes(b"of somebody who was killed")
    (tmp_path / "run.db-wal").write_bytes(b"of a run that was deleted")
    RunStore.create(tmp_path, config).close(complete=False)
    assert [each.name for each in tmp_path.iterdir()] == ["run.db"]


def test_one_process_at_a_time(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config):
        with pytest.raises(JournalError, match="another process is writing"):
            RunStore.reopen(folder)
        with pytest.raises(JournalError, match="already has a run"):
            RunStore.create(folder, config)
    RunStore.reopen(folder).close(complete=False)


@pytest.fixture
def shell(folder: Path, config: Config) -> Iterator[sqlite3.Connection]:
    """Another program, with a transaction in the run's database."""
    RunStore.create(folder, config).close(complete=False)
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None, check_same_thread=False)) as shell:
        yield shell


def test_a_foreign_lock_is_waited_for_and_told(folder: Path, shell: sqlite3.Connection, caplog: Any) -> None:
    with RunStore.reopen(folder) as store:
        shell.execute("BEGIN IMMEDIATE")
        assert not store.begin()
        threading.Timer(1.5, lambda: shell.execute("ROLLBACK")).start()
        record(store, 3)
        store.commit()
    assert len(list(Journal(folder).entries())) == 3
    told = caplog.text
    assert f"run.db is locked by process {os.getpid()} (" in told
    assert "waits until it is free, for up to 10 min" in told
    assert "is free again after 1" in told


def test_a_lock_that_does_not_end_stops_the_run_in_a_sentence(folder: Path, shell: sqlite3.Connection) -> None:
    with RunStore.reopen(folder) as store:
        record(store, 1)
        store.commit()
        store._database.patience_s = 0.1
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match=r"has been locked by process \d+ .* for 0\.\d s; .* with --resume$"):
            record(store, 1)
    shell.execute("ROLLBACK")
    with RunStore.reopen(folder) as again:
        assert again.last_seq == 1


def test_what_waits_for_a_lock_holds_nobody_up_when_it_is_closed(folder: Path, shell: sqlite3.Connection) -> None:
    store = RunStore.reopen(folder)
    shell.execute("BEGIN IMMEDIATE")
    store.hear("replica-0/1", 3)
    store.close(complete=False)
    shell.execute("ROLLBACK")
    with RunStore.reopen(folder) as again:
        assert again.heard == {}


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_run_that_ends_leaves_one_file_though_somebody_reads_it(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    record(store, 2000)
    store.commit()
    with reading(folder / "run.db") as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM journal").fetchone() == (2000,)
        store.close(complete=False)
        assert files(folder) != ["run.db"], "this reader is in the way"
    assert files(folder) == ["run.db"]
    assert len(list(Journal(folder).entries())) == 2000


def test_who_stops_reading_in_the_middle_keeps_nothing_open(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    record(store, 10)
    store.metrics.measure(0.0, 0, "trainer", {"loss": 1.0, "kl": 0.0})
    store.commit()
    entries, numbers = Journal(folder).entries(), measurements(folder)
    assert (next(entries).seq, next(numbers).name) == (1, "loss")
    store.close(complete=False)
    assert files(folder) == ["run.db"]
    assert (len(list(entries)), len(list(numbers))) == (9, 1)


def test_so_does_a_run_that_ends_because_its_file_is_damaged(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    for trajectory in range(40):
        store.trajectories.assign([Request(trajectory, 1, 0, 0, 1)])
        store.trajectories.finish(TrajectoryMeta(trajectory, 1, 2, 0, 0, "stop", 1.0))
    store._database.execute("UPDATE trajectories SET crc = 0 WHERE id = 7")
    store.commit()
    with pytest.raises(JournalError, match="how t7 ended") as caught:
        store.trajectories.results(range(40))
    store.close(complete=False)
    assert files(folder) == ["run.db"], f"the error and all that it refers to are still there: {caught}"


def test_the_history_that_is_looked_through_keeps_no_log_from_being_merged(folder: Path, config: Config) -> None:
    with RunStore.create(folder, config) as store:
        record(store, 2500)
    store = RunStore.reopen(folder)
    view = LiveView(store, config)
    record(store, 10)  # by the controller of now
    store.commit()
    asyncio.run(view._look_back(lambda: None))
    assert store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)") == [(0, 0, 0)]
    store.close(complete=False)
    assert files(folder) == ["run.db"]


def test_a_full_disk_is_one_sentence_and_loses_nothing_committed(folder: Path, config: Config) -> None:
    store = RunStore.create(folder, config)
    pages = store._database.execute("PRAGMA page_count")[0][0]
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


def test_a_disk_that_refuses_to_write_is_one_sentence_and_loses_nothing_committed(folder: Path, config: Config) -> None:
    store, (limit, most) = RunStore.create(folder, config), resource.getrlimit(resource.RLIMIT_FSIZE)
    record(store, 10)
    store.commit()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(JournalError, match=r"disk I/O error \(a broken disk, or a quota\?\); what was committed"):
            record_without_end(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    store.close(complete=True)
    assert len(list(Journal(folder).entries())) == 10
