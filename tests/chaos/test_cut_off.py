"""Machines that are cut off for a while, for real: they go on, hand in what is fresh, and nobody counts it twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from guests import Guest, a_run, on_hosts
from hosts import missing

from runs import EMULATED, Run, replayed
from tailrace.launch.workers import workers
from tailrace.protocol import CutOff, Finished, Generate, HandedIn, HostLeft, ReplicaJoined, Train
from tailrace.store.journal import Journal

CUT_S = 8.0  # more than `strikes` heartbeats
SLOW = (  # so that what is in flight when the network is cut is still fresh when it is back
    *("--costs.decode_step", "0.03", "--costs.train_mini_batch", "1.5", "--schedule.max_staleness", "8"),
    *("--schedule.kind", "trajectory", "--run.steps", "8"),
)


def cut_off(run: Run) -> list[CutOff]:
    return [one for entry in Journal(run.folder).entries() for one in entry.commands if isinstance(one, CutOff)]


def under_way(run: Run, replica: int) -> set[int]:
    """Samples that were given to a replica and that it has not reported yet."""
    given = set[int]()
    for entry in Journal(run.folder).entries():
        event = entry.event
        given -= {one.id for one in event.samples} if isinstance(event, HandedIn) else set()
        given -= {event.meta.id} if isinstance(event, Finished) else set()
        for command in entry.commands:
            if isinstance(command, Generate) and command.replica == replica:
                given |= {one.trajectory for one in command.requests}
    return given


def made_while_away(run: Run, replica: int) -> set[int]:
    """Samples that were given to a replica before it was cut off, and that count as it reported them afterwards."""
    given, away, counted = dict[int, int](), False, set[int]()
    for entry in Journal(run.folder).entries():
        event = entry.event
        metas = event.samples if isinstance(event, HandedIn) else (event.meta,) if isinstance(event, Finished) else ()
        if away and getattr(event, "replica", -1) == replica:
            counted |= {meta.id for meta in metas if given.get(meta.id) == meta.attempt}
        for command in entry.commands:
            if isinstance(command, CutOff) and (command.role, command.id) == ("replica", replica):
                away = True
            if isinstance(command, Generate) and not (away and command.replica == replica):
                given |= {one.trajectory: one.attempt for one in command.requests}
    return counted


def trained_once(run: Run) -> None:
    groups = [
        group.group
        for entry in Journal(run.folder).entries()
        for command in entry.commands
        if isinstance(command, Train)
        for group in command.groups
    ]
    assert len(groups) == len(set(groups))


def came_back(run: Run, replica: int) -> bool:
    joined = [e.event for e in Journal(run.folder).entries() if isinstance(e.event, ReplicaJoined)]
    return max([one.incarnation for one in joined if one.replica == replica], default=0) > 1


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("stranger", [False, True], ids=["ours", "a stranger"])
def test_a_site_that_is_cut_off_hands_in_what_it_made_when_it_is_back(tmp_path: Path, stranger: bool):
    checked = ("--strangers.checkers", "1", "--local.replicas", "2") if stranger else ("--local.replicas", "1")
    with on_hosts(2, tmp_path, EMULATED, *SLOW, *checked, "--health.lease_s", "60") as (network, run, join):
        run.until((run.folder / "join.key").exists, "its key")
        if stranger:
            workers(run.folder, "alice", None, "")
        site = join(1, *(("--key", str(run.folder / "workers" / "alice.key")) if stranger else ()))
        run.until(lambda: run.events("ReplicaJoined") > (2 if stranger else 1), "its replica")
        run.until(lambda: run.events("HandedIn" if stranger else "Trained"), "work")
        run.until(lambda: len(under_way(run, 2 if stranger else 1)) > 1, "samples under way there")
        network.isolate(1)
        time.sleep(CUT_S)
        network.heal()
        status, out, err = run.wait()
        assert status == 0, f"{out}\n{err}\n{run.logs()}"
        site.child.wait(60)
    replayed(run)
    trained_once(run)
    (replica,) = {one.id for one in cut_off(run) if one.role == "replica"}
    assert came_back(run, replica)
    assert made_while_away(run, replica)
    left = [e.event for e in Journal(run.folder).entries() if isinstance(e.event, HostLeft)]
    assert not left, "it was the same machine all the time"


def test_a_machine_that_is_stopped_for_longer_than_its_lease_is_replaced_and_its_late_reports_are_refused(
    tmp_path: Path,
):
    with a_run(tmp_path, *SLOW, "--health.lease_s", "5") as (run, join):
        guest = join()
        run.until(lambda: run.events("HostJoined"), "the machine")
        run.until(lambda: run.events("ReplicaJoined") > 1, "its replica")
        everybody = [guest.child.pid, *guest.components().values()]
        for id in everybody:
            os.kill(id, signal.SIGSTOP)
        run.until(lambda: run.events("HostLeft"), "the end of its lease")
        for id in everybody:
            os.kill(id, signal.SIGCONT)
        status, out, err = run.wait()
        assert status == 0, f"{out}\n{err}\n{run.logs()}"
    replayed(run)
    trained_once(run)
    assert isinstance(guest, Guest)
