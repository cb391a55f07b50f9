"""A recorded simulation, replayed, gives the same commands; any change to it is found."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.config import Config, load
from tailrace.config.tree import SCHEDULES
from tailrace.sim.replay import Replayed, render_difference, replay
from tailrace.sim.simulation import Simulation
from tailrace.store.journal import Journal, JournalWriter

ROOT = Path(__file__).parents[2]
OWN_BOX = ROOT / "examples/clusters/own_box.toml"
SMALL = ["--workload.prompts_per_step", "16", "--workload.group_size", "4", "--run.steps", "3"]
FAULTS = [
    *("--faults.controller_per_hour", "300", "--faults.replica_per_hour", "300", "--faults.restart_s", "3"),
    *("--faults.sample_failure", "0.05", "--faults.delay_s", "0.2", "--faults.duplicate", "0.1"),
]


def record(folder: Path, words: list[str]) -> Config:
    config = load([OWN_BOX], SMALL + words)
    with JournalWriter(folder, config) as journal:
        Simulation(config, journal.record).run()
    return config


def replayed(folder: Path) -> Replayed:
    journal = Journal(folder)
    return replay(journal.entries(), journal.begun)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_same_commands(tmp_path: Path, kind: str) -> None:
    config = record(tmp_path, ["--schedule.kind", kind])
    assert Journal(tmp_path).config == config
    outcome = replayed(tmp_path)
    assert outcome.difference is None
    assert outcome.events == int(Journal(tmp_path).meta["complete"])


def test_a_controller_that_died_replays_too(tmp_path: Path) -> None:
    record(tmp_path, FAULTS)
    kinds = {type(entry.event).__name__ for entry in Journal(tmp_path).entries()}
    assert {"ControllerRestarted", "ReplicaLost", "SampleFailed"} <= kinds
    assert replayed(tmp_path).difference is None


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "UPDATE journal SET event = json_set(event, '$.meta.attempt', 9) WHERE seq = "
            "(SELECT min(seq) FROM journal WHERE kind = 'Finished' AND commands != '[]')",
            "now      (no command)",
        ),
        (
            "UPDATE journal SET commands = json_set(commands, '$[0].at', 77.0) WHERE seq = "
            "(SELECT max(seq) FROM journal WHERE json_extract(commands, '$[0].kind') = 'SetTimer')",
            '"at":77.0',
        ),
        (
            "UPDATE journal SET commands = '[]' WHERE seq = "
            "(SELECT min(seq) FROM journal WHERE kind = 'Trained' AND commands != '[]')",
            "journal  (no command)",
        ),
    ],
)
def test_a_changed_journal_differs(tmp_path: Path, statement: str, words: str) -> None:
    record(tmp_path, [])
    with closing(sqlite3.connect(tmp_path / "run.db")) as database, database:
        assert database.execute(statement).rowcount == 1
    difference = replayed(tmp_path).difference
    assert difference is not None
    text = render_difference(difference)
    assert len(text) < 10_000
    assert text.startswith(f"event {difference.seq} at ")
    assert words in text


def test_an_event_that_control_cannot_handle_is_a_difference(tmp_path: Path) -> None:
    record(tmp_path, [])
    entries = [entry for entry in Journal(tmp_path).entries() if entry.seq > 1]
    difference = replay(entries, Journal(tmp_path).config).difference
    assert difference is not None


def test_two_processes_with_different_hash_seeds_write_the_same_journal(tmp_path: Path) -> None:
    processes = [_recorder(tmp_path / seed, seed) for seed in ("1", "2")]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    first, second = (_dump(tmp_path / seed) for seed in ("1", "2"))
    assert first == second
    assert len(first) > 200


def _recorder(folder: Path, hash_seed: str) -> subprocess.Popen[bytes]:
    words = ["simulate", str(OWN_BOX), *SMALL, *FAULTS, "--schedule.kind", "trajectory", "--record", str(folder)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.Popen([sys.executable, "-m", "tailrace", *words], env=environment, stdout=subprocess.DEVNULL)


def _dump(folder: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "run.db")) as database:
        return list(database.execute("SELECT * FROM journal ORDER BY seq"))
