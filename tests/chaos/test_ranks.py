"""The ranks of one trainer on several machines: they come, die, hang and leave in every way, and training goes on.

Each test without a network of its own plays the machines on the loopback: `tailrace worker` twice or more.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from guests import Guest, at_work, ends_well, gone, left, on_hosts, waiting_run
from hosts import Network, missing
from proof import prove

from runs import EMULATED, Run

TWO = ("--trainer.ranks", "2", "--trainer.interface", "lo", "--run.steps", "100000")
needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def trained(run: Run, more: int = 3) -> None:
    """So many mini-batches from now on."""
    before = run.events("Trained")
    run.until(lambda: run.events("Trained") >= before + more, "training")


def came_back(run: Run, joined: int) -> None:
    run.until(lambda: run.events("TrainerJoined") > joined, "the trainer to be back")
    trained(run)


def test_ranks_of_workers_that_come_late_train_die_and_are_found_again_by_a_new_controller(tmp_path):
    with waiting_run(tmp_path, *TWO, "--local.ranks", "0") as (run, join):
        run.until(lambda: run.events("TrainerWaits"), "the sentence")
        first = join("--ranks", "1")
        run.until(lambda: run.events("TrainerWaits") == 2, "one of two")
        second = join("--replicas", "1", "--ranks", "1")
        trained(run)
        assert (first.components().keys(), second.components().keys()) == (
            {"relay1", "trainer0"},
            {"relay2", "replica1", "trainer0.1"},
        )
        at_work(run, 0, 1)

        before = first.components() | second.components()
        os.kill(run.controller(), signal.SIGKILL)
        came_back(run, run.events("TrainerJoined"))
        assert first.components() | second.components() == before
        assert run.events("TrainerLost") == 0

        joined = run.events("TrainerJoined")
        os.kill(second.components()["trainer0.1"], signal.SIGKILL)
        came_back(run, joined)
        assert not left(run)
        proof = ends_well(run)
        assert proof.lost["Trainer"] == 1
        assert [guest.wait()[0] for guest in (first, second)] == [0, 0]
        waits = "the trainer waits for 2 more ranks: tailrace worker --join 127.0.0.1:"
        assert waits in (run.folder / "logs" / "controller.log").read_text()
