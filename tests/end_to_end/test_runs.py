"""Whole runs with real processes, sockets, relays and store; engine and trainer are emulated, so that they are fast."""

import json
import os
import random
import re
import signal
import socket
import sqlite3
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runs import EMULATED, Run, replayed
from tailrace.page.follow import Follower
from tailrace.protocol import ScoringStarted
from tailrace.store.journal import Journal


def test_output_that_nobody_reads_does_not_hold_up_a_run_nor_its_supervisor(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    os.set_blocking(writer, True)
    run = Run(tmp_path)
    run.output = writer
    run.start().until(lambda: run.events("Trained"), "training")
    os.kill(run.controller(), signal.SIGKILL)  # of which its supervisor has something to say
    assert run.wait() == (0, None, None)
    replayed(run)
    os.set_blocking(reader, False)
    assert set(os.read(reader, 1 << 20)) == set(b".")
    os.close(reader)
    os.close(writer)


def test_groups_that_teach_nothing_are_filtered_and_accounted_for(tmp_path):
    run = Run(tmp_path, EMULATED, "--groups.filter", "zero_advantage", "--run.steps", "6")
    run.finish()
    tally = replayed(run).state.ledger.tally
    assert (tally.trained, tally.failed) == (24, 0)
    assert tally.filtered > 5
    ledger = json.loads((run.folder / "summary.json").read_text())["ledger"]
    assert ledger["filtered"] == tally.filtered
    assert ledger["started"] == sum(ledger.values()) - ledger["started"]


def test_a_slow_judge_is_seen_in_the_journal_the_terminal_the_summary_and_on_the_page(tmp_path):
    """A second for each sample, while no more than a step's worth may be begun."""
    run = Run(tmp_path, EMULATED, "--workload.reward_s", "1", "--run.steps", "4", "--schedule.max_staleness", "0")
    out = run.finish()
    replayed(run)
    scored = [
        one
        for entry in Journal(run.folder).entries()
        if isinstance(entry.event, ScoringStarted)
        for one in entry.event.samples
    ]
    assert scored
    assert all(one.final for one in scored)
    assert re.search(r"step 4/4 .* replicas \d+ % \(judging \d+ %\)", out)
    assert re.search(r"^idle .* replicas \d+ % \(judging \d+ %\)", out, re.MULTILINE), "in the table at the end"
    summary = json.loads((run.folder / "summary.json").read_text())
    assert 0 < summary["rollout_scoring"] <= summary["rollout_idle"]
    page = Follower(run.folder)
    while page.poll():
        pass
    assert any("c" in lane["states"] for lane in json.loads(page.latest.content)["charts"]["lanes"])


FILTERED = ("--groups.filter", "all", "--workload.difficulty.rows", "24", "--workload.group_size", "4")
FILTERED += ("--filters.first_samples", "2")


@pytest.mark.parametrize("filters", [(), FILTERED], ids=["unfiltered", "filtered"])
def test_killed_and_interrupted_at_random_moments_it_trains_the_same_prompts_once(tmp_path, filters):
    options = ("--schedule.kind", "sync", "--run.steps", "10", *filters)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed, disturbed = Run(tmp_path / "a", EMULATED, *options), Run(tmp_path / "b", EMULATED, *options)
    undisturbed.finish()
    moments = random.Random(4)
    disturbed.start()
    for ending in ("kill", "interrupt"):
        goal = disturbed.events() + moments.randrange(20, 120)
        disturbed.until(lambda goal=goal: disturbed.events() >= goal, f"event {goal}")
        if ending == "kill":
            disturbed.kill()
        else:
            assert disturbed.interrupt()[0] == 130
            assert not list(disturbed.folder.glob("run.db-*"))
        disturbed.start("--resume")
    status, _, err = disturbed.wait()
    assert status == 0, err
    assert not list(disturbed.folder.glob("run.db-*"))
    assert bool(replayed(disturbed).state.ledger.skipped) == bool(filters)
    assert disturbed.trained_prompts() == undisturbed.trained_prompts()
    prompts = Counter(prompt for part in disturbed.trained_prompts() for prompt in part)
    assert set(prompts.values()) == {1}


def test_the_death_of_a_component_does_not_stop_the_run(tmp_path):
    run = Run(tmp_path, EMULATED, "--local.relays", "2", "--trainer.ranks", "2", "--run.steps", "30").start()
    for count, component in enumerate(("replica0", "relay0", "trainer0")):
        goal = run.events("Trained") + 4
        run.until(lambda goal=goal: run.events("Trained") >= goal and component in run.components(), "two steps")  # noqa: B023
        os.kill(run.components()[component], signal.SIGKILL)
        run.until(lambda count=count: run.events("%Lost") > count, f"the death of {component} to be noticed")
    status, out, err = run.wait()
    assert status == 0, f"{out}\n{err}"
    assert replayed(run).state.ledger.tally.trained == 30 * 4


def test_a_foreign_write_lock_is_waited_for_and_nobody_is_lost(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "20").start()
    run.until(lambda: run.events("Trained") >= 2, "a step")
    with closing(sqlite3.connect(run.folder / "run.db", isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        before = run.events()
        time.sleep(8)  # silence counts after 3
        assert run.events() == before
        shell.execute("ROLLBACK")
        run.until(lambda: run.events("Trained") >= 8, "more steps")
        assert run.events("%Lost") == 0
        shell.execute("BEGIN IMMEDIATE")
        status, _, err = run.interrupt()  # while it waits again
    assert status == 130
    assert f"run.db is locked by process {os.getpid()} (" in err
    assert "run.db is free again after" in err
    assert "is locked by process" in (run.folder / "logs" / "controller.log").read_text()
    run.finish("--resume")
    replayed(run)
    assert not list(run.folder.glob("run.db-*"))


def test_a_folder_that_is_renamed_stops_the_run_and_is_resumed_where_it_is(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "30", "--local.listen", "127.0.0.1").start()
    run.until(lambda: run.events("Checkpointed"), "a checkpoint")
    first, second = run.folder, run.folder.with_name("renamed")
    first.rename(second)
    first.mkdir()  # another run, perhaps
    status, out, err = run.wait()
    assert status == 2, f"{out}\n{err}"
    assert f"{first} is no longer the directory of this run" in err
    assert f"it is at {second}, and --resume goes on" in err
    assert not list(first.iterdir())
    assert {file.name.partition("-")[0] for file in second.iterdir()} == {"run.db", "samples", "logs", "checkpoints"}
    run.folder = second
    run.finish("--resume", "--run.name", "renamed")
    replayed(run)
    modes = {file: file.stat().st_mode & 0o777 for file in (second, *second.rglob("*"))}
    assert {file.name for file in modes} >= {"run.db", "summary.json", "summary.png", "trainer0.log", "state.json"}
    assert modes == {file: 0o700 if file.is_dir() else 0o600 for file in modes}


def test_the_level_of_the_log_reaches_every_process_of_a_run(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "1", "--local.listen", "127.0.0.1")
    status, _, err = run.start("--log-level", "warning").wait()
    assert (status, err) == (0, "")
    assert " INFO " not in run.logs()
    run.folder = run.folder.with_name("louder")
    status, _, err = run.start("--run.name", "louder").wait()
    assert (status, "tailrace: other machines may join: " in err) == (0, True), err
    logs = {log.stem: log.read_text() for log in run.folder.glob("logs/*.log")}
    assert logs.keys() == {"controller", "trainer0", "store0", "relay0", "replica0", "replica1"}
    for name, text in logs.items():
        assert re.search(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ", text) or name == "controller", (name, text)
    assert "INFO trainer-0/" in logs["trainer0"]


def test_a_port_in_use_and_a_name_in_use_are_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = Run(tmp_path, EMULATED, "--local.port", port).start().wait()
    assert (status, port in err) == (2, True)
    run = Run(tmp_path, EMULATED, "--run.name", "mine", "--run.steps", "1")
    run.folder = tmp_path / "runs" / "mine"
    run.finish()
    status, _, err = run.start().wait()
    assert (status, "has a complete run; look at it with tailrace page" in err, "--resume" in err) == (2, True, False)
    status, _, err = run.start("--resume").wait()
    assert (status, "is complete; to train it further" in err) == (2, True)


def test_resume_refuses_other_settings_and_a_run_that_is_not_there(tmp_path):
    run = Run(tmp_path, EMULATED)
    status, _, err = run.start("--resume").wait()
    assert (status, "there is no run" in err) == (2, True)
    run.start()
    run.until(lambda: run.events("Trained"), "a step")
    run.interrupt()
    status, _, err = run.start("--resume", "--schedule.kind", "sync").wait()
    assert (status, "schedule.kind" in err) == (2, True)
    assert Path(run.folder / "run.db").exists()
