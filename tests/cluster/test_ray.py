"""A run on a Ray cluster: nodes come, go and die; nothing is lost by it, and nothing is left over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests import at_work, finished, joined
from launched import RECIPE, Launched, learned
from proof import prove
from ray_nodes import Nodes, missing, ray_nodes, redis

from runs import EMULATED

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


@contextmanager
def launched(folder: Path, nodes: Nodes, *options: str) -> Iterator[Launched]:
    run = Launched(folder, nodes.address, EMULATED, *options).start()
    try:
        yield run
    finally:
        run.end()


def test_a_node_dies_another_one_comes_and_the_run_is_interrupted(tmp_path):
    with ray_nodes(1) as nodes, launched(tmp_path, nodes, "--run.steps", "100000") as run:
        run.until(lambda: run.events("HostJoined"), "a node to join")
        assert [one.replicas for one in joined(run)] == [(1, 2)]  # one for each of its cards
        at_work(run, 0, 1, 2)

        nodes.kill(nodes.others[0])
        run.until(lambda: run.events("HostLeft"), "the loss to be noticed")
        at_work(run, 0)
        run.until(lambda: not run.agents(), "its agent to be gone")

        nodes.add(cards=1)
        run.until(lambda: run.events("HostJoined") == 2, "another node to join")
        at_work(run, 0, 3)

        assert run.stop() == 130
        run.gone()
        assert prove(run.folder).trained
        assert "is lost; the run goes on without it" in run.said
        assert "Traceback" not in run.said


def words(*options: str, ray: bool = True) -> tuple[int, str]:
    """What `tailrace launch` answers at once."""
    hidden = "" if ray else "import sys; sys.modules['ray'] = None; "
    program = f"{hidden}from tailrace.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "launch", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


HEAVY = str(Path(__file__).parents[2] / "examples" / "heavy_tail.toml")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "required: PLACER"),
        (("ray",), "required: FILE"),
        (("rai", HEAVY), "invalid choice: 'rai'"),
        (("ray", "nowhere.toml"), "nowhere.toml does not exist"),
        (("ray", HEAVY, "--nodes", "none"), "not a number of machines"),
        (("ray", HEAVY, "--replicas-per-node", "0"), "no rank is asked for"),
        (("ray", HEAVY, "--replica-per-node", "1"), "did you mean --replicas-per-node?"),
        (("ray", HEAVY, "--address", "here"), "write HOST:PORT"),
        (("ray", HEAVY, "--address", "ray://127.0.0.1:10001"), "ray job submit"),
        (("ray", HEAVY, "--address", "127.0.0.1:1"), "no Ray cluster is running at 127.0.0.1:1; start one with 'ray"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence):
    status, said = words(*options)
    assert (status, len(said.strip().splitlines())) == (2, 1), said
    assert sentence in said


def test_without_ray_it_says_how_to_get_it():
    status, said = words("ray", HEAVY, ray=False)
    assert (status, "pip install 'tailrace[ray]'" in said) == (2, True), said


# -------------------------------------------------------------------------------------------------------------- longer


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


def working(run: Launched, hosts: int) -> None:
    run.until(lambda: run.events("HostJoined") == hosts, f"{hosts} nodes to join")
    at_work(run, 0, *[id for one in joined(run) for id in one.replicas])


@pytest.mark.soak
def test_more_nodes_than_there_are_is_one_sentence(two_nodes):
    status, said = words("ray", HEAVY, "--address", two_nodes.address, "--nodes", "3")
    assert (status, len(said.strip().splitlines())) == (2, 1), said
    assert "--nodes is 3, and beside this node the cluster has 2; write --nodes 2" in said


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path, two_nodes, number):
    steps = ("--run.steps", "400")
    with launched(tmp_path, two_nodes, *steps) as run:
        working(run, 2)
        assert run.stop(number) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
        run.gone()
        assert 0 < prove(run.folder).steps < 400
    run = Launched(tmp_path, two_nodes.address, EMULATED, *steps).start("--resume")
    assert run.wait()[0] == 0, run.said
    run.gone()
    assert prove(run.folder).steps == 400


@pytest.mark.soak
def test_a_run_ends_by_itself_with_its_own_exit_code(tmp_path, two_nodes):
    with launched(tmp_path, two_nodes, "--run.steps", "60", "--nodes", "1", "--replicas-per-node", "3") as run:
        assert run.wait()[0] == 0, run.said
        assert [len(one.replicas) for one in joined(run)] == [3]
        run.gone()
    with launched(tmp_path, two_nodes) as run:  # the folder is taken
        assert run.wait()[0] == 2
        assert "has a complete run" in run.said
        run.gone()


@pytest.mark.soak
def test_nodes_have_the_ranks_of_the_trainer_and_replicas_beside_them(tmp_path, two_nodes):
    """Raylets of one machine meet on its loopback; the controller's machine computes nothing."""
    ranks = ("--ranks-per-node", "1", "--replicas-per-node", "1", "--trainer.ranks", "2", "--trainer.interface", "lo")
    here = ("--local.listen", "127.0.0.1", "--local.replicas", "0", "--run.steps", "60")
    with launched(tmp_path, two_nodes, *ranks, *here) as run:
        assert run.wait()[0] == 0, run.said
        assert [(one.ranks, len(one.replicas)) for one in joined(run)] == [(1, 1), (1, 1)]
        assert "and 1 trainer rank on" in run.said
        run.gone()
        assert prove(run.folder).steps == 60


@pytest.mark.soak
def test_an_agent_that_is_killed_is_placed_again(tmp_path, two_nodes):
    with launched(tmp_path, two_nodes, "--run.steps", "100000") as run:
        working(run, 2)
        os.kill(run.agents()[0], signal.SIGKILL)
        run.until(lambda: run.events("HostJoined") == 3, "another agent")
        at_work(run, 0)
        assert run.stop() == 130
        assert "ended with status -9" in run.said
        run.gone()
        assert prove(run.folder).trained


@pytest.mark.soak
def test_a_lost_head_does_not_stop_the_run(tmp_path):
    """Ray's library ends the process that uses it after a minute without a head; the run is in another one."""
    with ray_nodes(1) as nodes, launched(tmp_path, nodes, "--run.steps", "100000") as run:
        working(run, 1)
        nodes.lose_head()
        run.until(lambda: "the connection to Ray is lost" in run.said, "the loss of the head")
        at_work(run, 0)
        assert run.stop() == 130
        run.gone()
        assert prove(run.folder).trained


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")
def test_with_redis_a_head_that_comes_back_finds_everything_as_it_was(tmp_path, monkeypatch):
    with redis(tmp_path / "redis") as address:
        monkeypatch.setenv("RAY_REDIS_ADDRESS", address)
        with ray_nodes(1) as nodes, launched(tmp_path, nodes, "--run.steps", "100000") as run:
            working(run, 1)
            before = run.agents()
            nodes.lose_head()
            at_work(run, 0, 1, 2)
            nodes.bring_head_back()
            nodes.add()
            working(run, 2)
            assert set(before) <= set(run.agents())
            assert not run.events("%Lost")
            assert run.stop() == 130
            run.gone()
            assert prove(run.folder).trained


@pytest.mark.soak
def test_the_default_recipe_learns_as_on_one_box(tmp_path):
    """Two replicas, as in the recipe: one here, and one on a node of the cluster."""
    settings = f'extends = "{RECIPE}"\n'
    with ray_nodes(1) as nodes:
        run = Launched(tmp_path, nodes.address, settings, "--replicas-per-node", "1").start()
        try:
            assert run.child is not None
            assert run.child.wait(1800) == 0, run.said
            before, after = learned(run)
            assert (before < 0.5, after > 0.85) == (True, True), (before, after)
            assert [one.replicas for one in joined(run)] == [(1,)]
            assert finished(run, 1) > 500
            run.gone()
        finally:
            run.end()
