"""Real runs under random faults: each comes to its end, and nothing is lost, doubled, too stale or left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import KINDS, NEEDS_JUDGES, RARE, Fault, can_mount, plan, small_disk
from proof import prove
from torment import by_kind, torment
from victim import victim

from runs import EMULATED

OPEN = ("--local.listen", "127.0.0.1")  # to machines that have the key
FLEET = (EMULATED, "--local.relays", "3", "--local.replicas", "4", "--costs.train_mini_batch", "0.1", *OPEN)
WITHOUT_JUDGES = [kind for kind in KINDS if kind not in NEEDS_JUDGES]
ON_ANY_DISK = [kind for kind in WITHOUT_JUDGES if not kind.startswith("disk")]


def test_a_plan_is_repeated_by_its_seed_and_has_every_kind():
    first, second = plan(3, 1.0), plan(3, 1.0)
    faults = [next(first) for _ in range(len(KINDS))]
    assert faults == [next(second) for _ in range(len(KINDS))]
    assert {fault.kind for fault in faults} == set(KINDS)


def test_a_fleet_survives_a_fault_of_every_kind(tmp_path):
    """One round of all kinds but those that need a start of everybody."""
    kinds = [kind for kind in ON_ANY_DISK if kind not in RARE]
    with victim(tmp_path, *FLEET, "--run.steps", "30") as run:
        struck = torment(run, plan(4, 0.4, kinds), most=len(kinds))
        proof = prove(run.folder)
    assert proof.trained == 30 * 4, by_kind(struck)
    assert len(struck) > 5


def test_everybody_is_killed_and_the_run_goes_on(tmp_path):
    with victim(tmp_path, *FLEET, "--run.steps", "10") as run:
        struck = torment(run, iter([Fault(0.3, "everybody killed", 1)]))
        proof = prove(run.folder)
    assert (proof.trained, run.resumed, len(struck)) == (10 * 4, 1, 1)


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount a small disk")
def test_a_disk_that_is_slow_and_then_full_costs_time_and_nothing_else(tmp_path):
    settings, trouble = (*FLEET, "--run.steps", "12"), tmp_path / "trouble"
    with small_disk(tmp_path / "disk", 64) as disk, victim(disk / "run", *settings, trouble=trouble) as run:
        struck = torment(run, iter([Fault(0.2, "disk slow", 1), Fault(0.2, "disk full", 2)]))
        proof = prove(run.folder)
    assert len(struck) == 2
    assert proof.trained == 12 * 4
    assert all(" full" in ending or "room" in ending for ending in run.endings), run.said()


def test_a_clock_that_jumps_is_not_noticed(tmp_path):
    """Whoever asks for the time of day gets nonsense; everything but the date of the run is measured otherwise."""
    with victim(tmp_path, *FLEET, "--run.steps", "4") as run:
        run.let_the_clock_jump()
        assert run.start().wait()[0] == 0, run.said()
        summary = json.loads((run.folder / "summary.json").read_text())
        proof = prove(run.folder)
    assert proof.trained == 4 * 4
    assert not proof.lost
    assert 0 < max(run.query("SELECT max(now) FROM journal"))[0] < 600, summary


def test_nothing_in_the_code_asks_for_the_time_of_day():
    """Deadlines and durations are of the monotonic clock; only the date on which a run was made is of the other."""
    found = {
        (path.name, line.strip())
        for path in (Path(__file__).parents[2] / "src").rglob("*.py")
        for line in path.read_text().splitlines()
        if any(word in line for word in ("time.time(", "time_ns(", "datetime.now", "utcnow", "gmtime", "localtime"))
    }
    dated = {"journal.py", "tls.py", "tensorboard_sink.py"}  # dates, and how long a certificate is good
    assert {name for name, _ in found} <= dated, found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_emulated_fleets_survive_many_faults_of_all_kinds(tmp_path, seed):
    kinds = WITHOUT_JUDGES if can_mount() else ON_ANY_DISK
    settings, trouble = (*FLEET, "--run.steps", "150"), tmp_path / "trouble"
    with small_disk(tmp_path / "disk") as disk, victim(disk / "run", *settings, trouble=trouble) as run:
        struck = torment(run, plan(seed, 1.5, kinds))
        proof = prove(run.folder)
    print(by_kind(struck), proof)
    assert proof.trained == 150 * 4
    assert len(struck) > 30
