"""A run as a job of a real Slurm cluster, each node a host of its own: it is handed in as somebody would, a node is
lost, the job is queued again, and nothing is lost by it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from guests import at_work, joined
from launched import RECIPE, learned
from proof import prove
from slurm_nodes import SlurmNodes, missing, slurm_nodes

from runs import EMULATED, Run, nothing_is_left

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[SlurmNodes]:
    with slurm_nodes(tmp_path_factory.mktemp("slurm"), 3) as made:
        yield made


class Job(Run):
    """Handed in with `tailrace launch slurm --submit`."""

    def __init__(self, folder: Path, nodes: SlurmNodes, settings: str, *options: str) -> None:
        super().__init__(folder, settings)
        self._nodes = nodes
        command = [sys.executable, "-m", "tailrace", "launch", "slurm", str(self.file), "--submit", *self.options]
        told = nodes.run(*command, "--nodes", "3", "--local.replicas", "1", *options, folder=folder)
        self.number = int(told.split()[-1])

    @property
    def state(self) -> str:
        return self._nodes.job(self.number)

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.folder.parents[1].glob("tailrace-run-*.log"))


@contextmanager
def submitted(folder: Path, nodes: SlurmNodes, *options: str, settings: str = EMULATED) -> Iterator[Job]:
    job = Job(folder, nodes, settings, *options)
    try:
        yield job
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.said()}\n{nodes.logs()}") from error
    finally:
        with suppress(AssertionError):  # it is over already
            nodes.run("scancel", "--batch", "--signal=TERM", str(job.number))
        nodes.until(lambda: job.state in ("CANCELLED", "COMPLETED", "FAILED"), "the job to be over")


def working(job: Job, hosts: int) -> None:
    job.until(lambda: job.events("HostJoined") >= hosts, f"{hosts} agents to join")
    at_work(job, 0, *[id for one in joined(job)[-2:] for id in one.replicas])


def test_a_job_runs_to_its_end_and_leaves_nothing(tmp_path, nodes):
    with submitted(tmp_path, nodes, "--run.steps", "300", "--replicas-per-node", "2") as job:
        nodes.until(lambda: job.state == "COMPLETED", "the job to be complete")
        assert [len(one.replicas) for one in joined(job)] == [2, 2]
        assert prove(job.folder).steps == 300
        nodes.until(lambda: nothing_is_left(job), "nothing to be left")


def test_the_controller_s_node_has_a_rank_too_where_the_others_have_one_each(tmp_path, nodes):
    ranks = ("--trainer.ranks", "3", "--ranks-per-node", "1", "--replicas-per-node", "1", "--run.steps", "20")
    with submitted(tmp_path, nodes, *ranks, "--trainer.interface", "eth0") as job:
        nodes.until(lambda: job.state == "COMPLETED", "the job to be complete")
        assert [(one.ranks, len(one.replicas)) for one in joined(job)] == [(1, 1), (1, 1)]
        assert prove(job.folder).steps == 20


def test_a_lost_node_does_not_stop_the_job_and_the_loss_of_the_first_one_queues_it_again(tmp_path, nodes):
    with submitted(tmp_path, nodes, "--run.steps", "100000") as job:
        working(job, 2)
        first = int(nodes.job(job.number, "BatchHost").removeprefix("n"))
        others = [number for number in (1, 2, 3) if number != first]

        nodes.kill(others[0])
        job.until(lambda: job.events("HostLeft"), "the loss of an agent")
        at_work(job, 0)
        nodes.until(lambda: any(state.startswith("down") for state in nodes.states()), "Slurm to notice")
        at_work(job, 0)
        assert job.state == "RUNNING"
        nodes.start(others[0])

        nodes.kill(first)
        nodes.until(lambda: nodes.job(job.number, "Restarts") == "1", "the job to be queued again")
        nodes.start(first)
        nodes.until(lambda: job.events("ControllerRestarted"), "the run to be resumed")
        before = job.events("HostJoined")
        job.until(lambda: job.events("HostJoined") >= before + 1, "agents to join again")
        at_work(job, 0)
    nodes.until(lambda: nothing_is_left(job), "nothing to be left")
    assert prove(job.folder).trained


def test_before_its_time_is_over_the_job_is_queued_again(tmp_path, nodes):
    with submitted(tmp_path, nodes, "--run.steps", "100000") as job:
        working(job, 2)
        nodes.run("scancel", "--batch", "--signal=USR1", str(job.number))  # as Slurm sends it before the time limit
        nodes.until(lambda: nodes.job(job.number, "Restarts") == "1", "the job to be queued again")
        nodes.until(lambda: job.events("ControllerRestarted"), "the run to be resumed")
        working(job, 4)
    assert "ended with status 130" in job.said()
    nodes.until(lambda: nothing_is_left(job), "nothing to be left")
    assert prove(job.folder).trained


def test_the_default_recipe_learns_as_on_one_box(tmp_path, nodes):
    with submitted(tmp_path, nodes, settings=f'extends = "{RECIPE}"\n') as job:
        nodes.until(lambda: job.state not in ("PENDING", "RUNNING"), "the end of the job", 1800.0)
        assert job.state == "COMPLETED"
        before, after = learned(job)
        assert (before < 0.5, after > 0.85) == (True, True), (before, after)
        assert len(joined(job)) == 2
