"""The controller is killed; it comes back by itself, and whoever outlived it goes on with what it has in hand."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runs import EMULATED, Run, nothing_is_left, replayed
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file
from tailrace.store.journal import Journal

SYNC = ("--schedule.kind", "sync", "--run.archive", "true")
LONG = ("--workload.lengths.median", "80", "--costs.decode_step", "0.003")  # so that most kills hit running samples


def query(run: Run, statement: str) -> list[tuple]:
    """Of both files as one."""
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        database.execute("ATTACH ? AS store", (f"file:{run.folder / 'samples-0.db'}?mode=ro",))
        return database.execute(statement).fetchall()


def running(run: Run) -> dict[int, int]:
    """The assignments of which the store has some tokens already."""
    begun = "id IN (SELECT trajectory_id FROM store.segments)"
    return dict(query(run, f"SELECT id, attempt FROM main.trajectories WHERE state = 'running' AND {begun}"))


def tokens(run: Run) -> dict[int, bytes]:
    """Of every sample that was trained."""
    ids = [id for (id,) in query(run, "SELECT id FROM main.trajectories WHERE step IS NOT NULL")]
    with closing(SampleReader(sample_file(run.folder, 0))) as reader:
        return {one.id: b"".join([piece.tokens for piece in one.pieces]) for one in reader.read(ids)}


def joined(run: Run) -> int:
    return run.events("%Joined")


def kill_controller(run: Run) -> float:
    """Seconds from its death until everybody is back."""
    parts, before = len(run.components()), joined(run)
    began = time.monotonic()
    os.kill(run.controller(), signal.SIGKILL)
    run.until(lambda: joined(run) >= before + parts, "all components to be back")
    return time.monotonic() - began


def after(run: Run, events: int) -> None:
    goal = run.events() + events
    run.until(lambda: run.events() >= goal, f"event {goal}")


def ended_well(run: Run) -> None:
    status, out, err = run.wait()
    assert status == 0, f"{out}\n{err}\n{run.logs()}"


def pair(folder: Path, *options: str) -> tuple[Run, Run]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    return Run(folder / "a", EMULATED, *options), Run(folder / "b", EMULATED, *options)


def test_killed_again_and_again_it_makes_the_same_run(tmp_path):
    undisturbed, disturbed = pair(tmp_path, *SYNC, *LONG, "--run.steps", "10", "--local.relays", "2")
    undisturbed.finish()
    disturbed.start()
    disturbed.until(lambda: disturbed.events("Trained"), "a step")
    parts, moments, times, kept = disturbed.components(), random.Random(5), [], 0
    for _ in range(3):
        after(disturbed, moments.randrange(3, 30))
        at_death = running(disturbed)
        times.append(kill_controller(disturbed))
        assert disturbed.components() == parts, "the same processes"
        for id, attempt in at_death.items():
            (now,) = query(disturbed, f"SELECT attempt FROM main.trajectories WHERE id = {id}")
            assert now[0] == attempt, f"t{id} was given out again"
        kept += len(at_death)
    ended_well(disturbed)
    assert kept, "no kill found a running trajectory"
    print(f"back after {', '.join(f'{seconds:.2f}' for seconds in times)} s; {kept} running trajectories kept")
    replayed(disturbed)
    assert disturbed.events("ControllerRestarted") == 3
    assert disturbed.events("%Lost") == 0
    assert disturbed.trained_prompts() == undisturbed.trained_prompts()
    assert tokens(disturbed) == tokens(undisturbed)
    rewards = "SELECT id, finish, reward, step FROM main.trajectories WHERE step IS NOT NULL ORDER BY id"
    assert query(disturbed, rewards) == query(undisturbed, rewards)
    measured = "SELECT step, count(*) FROM metrics WHERE name = 'reward' GROUP BY step ORDER BY step"
    assert query(disturbed, measured) == query(undisturbed, measured)


@pytest.mark.parametrize("kind", [pytest.param("partial", marks=pytest.mark.soak), "trajectory"])
def test_without_a_barrier_nothing_is_lost_or_doubled(tmp_path, kind):
    options = ("--schedule.kind", kind, "--local.relays", "2", "--local.replicas", "3", "--run.steps", "40")
    run = Run(tmp_path, EMULATED, *options).start()
    run.until(lambda: run.events("Trained"), "a step")
    parts, moments = run.components(), random.Random(kind)
    for _ in range(4):
        after(run, moments.randrange(5, 80))
        kill_controller(run)
    assert run.components() == parts
    ended_well(run)
    assert replayed(run).state.ledger.tally.trained == 40 * 4
    run.until(lambda: nothing_is_left(run), "its processes to be gone")


def test_a_component_that_dies_with_the_controller_is_started_again(tmp_path):
    run = Run(tmp_path, EMULATED, "--local.relays", "2", "--run.steps", "30").start()
    run.until(lambda: run.events("Trained") >= 2, "a step")
    before = run.components()
    os.kill(run.controller(), signal.SIGKILL)
    for name in ("replica0", "trainer0", "relay1"):
        os.kill(before[name], signal.SIGKILL)
    new: dict[str, int] = {}
    run.until(lambda: new.update(run.components().items() - before.items()) or len(new) == 3, "the three that died")
    assert new.keys() == {"replica0", "trainer0", "relay1"}
    ended_well(run)
    assert replayed(run).state.ledger.tally.trained == 30 * 4


def test_killed_while_everybody_starts_it_starts_them_once(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "6").start()
    run.until(lambda: run.events("RunStarted"), "its beginning")
    for _ in range(3):
        os.kill(run.controller(), signal.SIGKILL)
        after(run, 1)
    ended_well(run)
    assert replayed(run).state.ledger.tally.trained == 6 * 4
    run.until(lambda: nothing_is_left(run), "its processes to be gone")


def test_without_its_keeper_everybody_leaves_and_the_run_is_resumed(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "12").start()
    run.until(lambda: run.events("Trained") >= 3, "a step")
    kill_controller(run)
    controller = run.controller()
    run.kill()  # the process that was started: the supervisor
    run.child = None
    run.until(lambda: nothing_is_left(run) and not Path(f"/proc/{controller}").exists(), "everybody to leave")
    run.finish("--resume")
    assert replayed(run).state.ledger.tally.trained == 12 * 4
    assert Journal(run.folder).complete


def test_asked_to_stop_and_then_killed_it_stays_down(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "1000").start()
    run.until(lambda: run.events("Trained"), "a step")
    assert run.child is not None
    supervisor, controller, parts = run.child.pid, run.controller(), run.components()
    os.kill(parts["trainer0"], signal.SIGSTOP)  # so that the end takes long enough to be disturbed
    os.kill(supervisor, signal.SIGINT)
    run.until(lambda: "replica0" not in run.components(), "the replicas to leave")
    os.kill(controller, signal.SIGKILL)
    status, _, err = run.wait()
    with suppress(ProcessLookupError):
        os.kill(parts["trainer0"], signal.SIGCONT)
    assert (status, "--resume goes on" in err) == (130, True)


@pytest.mark.soak
def test_a_controller_that_is_stuck_is_replaced(tmp_path):
    run = Run(tmp_path, EMULATED, "--run.steps", "2000").start()
    run.until(lambda: run.events("Trained"), "a step")
    parts, before = run.components(), joined(run)
    os.kill(run.controller(), signal.SIGSTOP)
    run.until(lambda: joined(run) >= before + len(parts), "another controller")
    assert run.components() == parts
    assert run.interrupt()[0] == 130
    replayed(run)
