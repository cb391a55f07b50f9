"""The journal gives back what was written, or says in one sentence why it cannot."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.config import Config, load
from tailrace.protocol import (
    Command,
    Event,
    Finished,
    Generate,
    RelayJoined,
    Request,
    SetTimer,
    TimerFired,
    TrajectoryMeta,
)
from tailrace.store.journal import Entry, Journal, JournalError, JournalWriter

EVENTS: list[tuple[float, Event, list[Command]]] = [
    (0.1, TimerFired("health"), [SetTimer("health", 1.1)]),
    (0.30000000000000004, RelayJoined(3, 1), []),
    (2.5, Finished(0, TrajectoryMeta(7, 1, 812, 2, 3, "stop", 0.5)), [Generate(0, 1, (Request(9, 1, 2, 2, 64),))]),
]


@pytest.fixture
def config() -> Config:
    return load([], ["--model.preset", "qwen2.5-7b", "--run.name", 'a "name"'])


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    folder = tmp_path / "run"
    write(folder, config)
    return folder


def write(folder: Path, config: Config, repeat: int = 1) -> None:
    with JournalWriter(folder, config, batch=2) as journal:
        for now, event, commands in EVENTS * repeat:
            journal.record(now, event, commands)


def change(run: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(run / "run.db")) as database, database:
        database.execute(statement, values)


def refusal(run: Path) -> str:
    with pytest.raises(JournalError) as caught:
        list(Journal(run).entries())
    return str(caught.value)


def test_what_is_read_is_what_was_written(run: Path, config: Config) -> None:
    journal = Journal(run)
    assert list(journal.entries()) == [Entry(seq, *each) for seq, each in enumerate(EVENTS, start=1)]
    assert journal.config == config
    assert journal.complete
    assert journal.meta["driver"] == "simulation"
    assert list(Journal(run / "run.db").entries())  # the file itself will do


def test_plain_sql_reads_it(run: Path) -> None:
    with closing(sqlite3.connect(run / "run.db")) as database:
        query = "SELECT kind, json_extract(event, '$.meta.tokens'), json_extract(commands, '$[0].kind') FROM journal"
        assert list(database.execute(query))[2] == ("Finished", 812, "Generate")
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_figures_of_a_config_json_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    shape = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    file.write_text(json.dumps(shape | {"intermediate_size": 512, "vocab_size": 1000}))
    config = load([], ["--model.hf_config", str(file)])
    write(tmp_path / "run", config)
    file.unlink()
    assert Journal(tmp_path / "run").config.model.parameters == config.model.parameters


def test_a_crash_leaves_a_shorter_journal(tmp_path: Path, config: Config) -> None:
    writer = JournalWriter(tmp_path, config)
    writer.record(*EVENTS[0])
    writer.__exit__(RuntimeError, RuntimeError(), None)
    journal = Journal(tmp_path)
    assert not journal.complete
    assert len(list(journal.entries())) == 1


def test_it_can_be_read_while_it_is_written(tmp_path: Path, config: Config) -> None:
    with JournalWriter(tmp_path, config, batch=1) as journal:
        journal.record(*EVENTS[0])
        assert len(list(Journal(tmp_path).entries())) == 1


def test_reading_leaves_no_trace(run: Path) -> None:
    list(Journal(run).entries())
    assert [file.name for file in run.iterdir()] == ["run.db"]


def test_it_can_be_read_where_nothing_can_be_written(run: Path) -> None:
    run.chmod(0o555)
    (run / "run.db").chmod(0o444)
    try:
        assert len(list(Journal(run).entries())) == len(EVENTS)
    finally:
        run.chmod(0o755)


def test_a_run_is_never_written_over(run: Path, config: Config) -> None:
    before = (run / "run.db").read_bytes()
    with pytest.raises(JournalError, match="already has a run"):
        JournalWriter(run, config)
    assert (run / "run.db").read_bytes() == before


def test_a_file_is_no_directory(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="is a file"):
        JournalWriter(tmp_path / "file", config)
    with pytest.raises(JournalError, match="cannot be written"):
        JournalWriter(tmp_path / "file" / "run", config)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("gone", shutil.rmtree, "there is no run"),
    ("no journal", lambda run: (run / "run.db").unlink(), "has no run.db"),
    ("text", lambda run: (run / "run.db").write_text("hello, I am a text"), "not a SQLite file"),
    ("empty", lambda run: (run / "run.db").write_bytes(b""), "cut in the middle"),
    ("other database", lambda run: change(run, "DROP TABLE meta"), "not the journal of a run"),
    ("format", lambda run: change(run, "UPDATE meta SET value = 9 WHERE key = 'format'"), "in journal format 9"),
    ("no table", lambda run: change(run, "DROP TABLE journal"), "is damaged"),
    ("gap", lambda run: change(run, "DELETE FROM journal WHERE seq = 2"), "after event 1 comes event 3"),
    ("no beginning", lambda run: change(run, "DELETE FROM journal WHERE seq = 1"), "after event 0 comes event 2"),
    ("no end", lambda run: change(run, "DELETE FROM journal WHERE seq = 3"), "has 2 of its 3 events"),
    ("event", lambda run: change(run, "UPDATE journal SET event = substr(event, 1, 20) WHERE seq = 3"), "cut short"),
    ("commands", lambda run: change(run, "UPDATE journal SET commands = '[' WHERE seq = 1"), "cut short"),
    ("null", lambda run: change(run, "UPDATE journal SET event = NULL WHERE seq = 1"), "cut short"),
    ("kind", lambda run: change(run, 'UPDATE journal SET event = \'{"kind":"Moved"}\''), "does not know event 1"),
    (
        "field",
        lambda run: change(run, 'UPDATE journal SET event = \'{"kind":"Parked"}\''),
        "written by tailrace 0.1.0",
    ),
]


@pytest.mark.parametrize(("harm", "words"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_damage_is_one_sentence(run: Path, harm: Callable[[Path], object], words: str) -> None:
    harm(run)
    sentence = refusal(run)
    assert words in sentence
    assert "\n" not in sentence


def test_settings_of_another_version(run: Path) -> None:
    change(run, "UPDATE meta SET value = '[schedule]' || char(10) || 'magic = 1' WHERE key = 'config'")
    with pytest.raises(JournalError, match="settings that tailrace"):
        _ = Journal(run).config


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_file_cut_anywhere(tmp_path: Path, config: Config, share: float) -> None:
    write(tmp_path, config, repeat=200)
    file = tmp_path / "run.db"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert "cut in the middle" in refusal(tmp_path)


def test_a_page_of_zeros(tmp_path: Path, config: Config) -> None:
    write(tmp_path, config, repeat=200)
    file = tmp_path / "run.db"
    content = bytearray(file.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = bytes(4096)
    file.write_bytes(content)
    assert "is damaged" in refusal(tmp_path)
