"""Killed again before it was up, and a checkpoint that is of no use: the run goes on all the same."""

from __future__ import annotations

import os
import signal
import time

from runs import EMULATED, Run, nothing_is_left, replayed
from tailrace.protocol import RelayLost, ReplicaLost, TrainerJoined, TrainerLost
from tailrace.store.journal import Journal
from tailrace.trainer.emulated import FILE

PARTS = ("replica0", "relay1", "trainer0")


def ended_well(run: Run, steps: int) -> None:
    status, out, err = run.wait()
    assert status == 0, f"{out}\n{err}\n{run.logs()}"
    assert replayed(run).state.ledger.tally.trained == steps * 4
    run.until(lambda: nothing_is_left(run), "its processes to be gone")


def kill_successors(run: Run, gone: dict[str, int]) -> dict[str, int]:
    """Each as soon as it is there: long before it has imported anything."""
    killed: dict[str, int] = {}
    limit = time.monotonic() + 60.0
    while len(killed) < len(gone) and time.monotonic() < limit:
        for name, id in run.components().items():
            if name in gone and name not in killed and id != gone[name]:
                os.kill(id, signal.SIGKILL)
                killed[name] = id
    return killed


def test_components_that_are_killed_while_they_restart_are_started_again(tmp_path):
    run = Run(tmp_path, EMULATED, "--local.relays", "2", "--run.steps", "30").start()
    run.until(lambda: run.events("Trained") >= 2, "a step")
    killed = {name: id for name, id in run.components().items() if name in PARTS}
    for id in killed.values():
        os.kill(id, signal.SIGKILL)
    assert set(kill_successors(run, killed)) == set(PARTS)
    ended_well(run, 30)
    lost = [entry.event for entry in Journal(run.folder).entries()]
    early = {
        type(event)
        for event in lost
        if isinstance(event, ReplicaLost | RelayLost | TrainerLost) and "before it was up" in event.reason
    }
    assert early == {ReplicaLost, RelayLost, TrainerLost}


def test_a_run_goes_on_from_the_checkpoint_before_the_newest(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "40").start()
    newest = run.folder / "checkpoints" / FILE
    for harm in (lambda: os.truncate(newest, newest.stat().st_size // 2), newest.unlink):
        saved, joined = run.events("Checkpointed"), run.events("TrainerJoined")
        run.until(lambda saved=saved: run.events("Checkpointed") >= saved + 4, "some checkpoints")
        trainer = run.components()["trainer0"]
        os.kill(trainer, signal.SIGSTOP)
        harm()
        os.kill(trainer, signal.SIGKILL)
        run.until(lambda joined=joined: run.events("TrainerJoined") > max(joined, 1), "another trainer")
    ended_well(run, 40)
    events = [entry.event for entry in Journal(run.folder).entries()]
    steps = [event.step for event in events if isinstance(event, TrainerJoined) and event.incarnation > 1]
    assert len(steps) == 2
    assert min(steps) > 0
