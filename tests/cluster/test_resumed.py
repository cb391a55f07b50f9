"""A run whose keys are known beforehand stops and is started again, and its agents wait for it: as in a Kubernetes
Job."""

from __future__ import annotations

import socket

from guests import Guest, at_work, joined, left
from proof import prove

from runs import EMULATED, Run
from tailrace.launch.placers.keys import make_keys


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_agent_is_there_before_the_run_and_stays_when_it_is_started_again(tmp_path):
    keys, where = make_keys(), f"127.0.0.1:{free_port()}"
    (tmp_path / "run.secret").write_text(keys.secret)
    listen = ("--local.listen", "127.0.0.1", "--local.port", where.rpartition(":")[2], "--local.replicas", "1")
    again = ("--auto-resume", "--secret", str(tmp_path / "run.secret"))
    run = Run(tmp_path, EMULATED, *listen, *again, "--run.steps", "150")
    guest = Guest(tmp_path / "guest", "--join", where, "--wait", "120", "--stay", key=keys.join)
    try:
        run.start().until(lambda: run.events("HostJoined"), "the agent that was there first")
        at_work(run, 1)
        assert run.interrupt()[0] == 130
        assert guest.child.poll() is None

        assert run.start().wait()[0] == 0  # it was begun, so it goes on
        status, err = guest.wait()
        assert (status, "the run has stopped" in err, "the run is complete" in err) == (0, True, True), err
    finally:
        guest.child.kill()
    run.child = None
    assert [one.replicas for one in joined(run)] == [(1,), (2,)]
    assert [one.host for one in left(run)] == [1]
    assert prove(run.folder).steps == 150
    assert run.start().wait()[0] == 0  # nothing is left to do
