"""Machines join a run that goes on, work for it, and leave it in every way there is; nothing is lost by it."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

import pytest
from guests import Guest, a_run, address, at_work, ends_well, gone, joined, left, on_two_hosts
from hosts import missing
from proof import prove

from runs import EMULATED, Run


def test_a_machine_joins_works_leaves_and_another_one_stays_to_the_end(tmp_path):
    with a_run(tmp_path, "--run.steps", "1000") as (run, join):
        assert (run.folder / "join.key").stat().st_mode & 0o777 == 0o600
        first = join("--replicas", "2")
        at_work(run, 1, 2)
        assert first.components().keys() == {"relay1", "replica1", "replica2"}
        status, err = first.interrupt()
        assert (status, "left" in err) == (130, True), err
        gone(run, first)
        run.until(partial(left, run), "its leaving")
        assert left(run)[0].reason == "its host left"

        second = join()
        at_work(run, 3)
        assert [(one.host, one.replicas) for one in joined(run)] == [(1, (1, 2)), (2, (3,))]
        ends_well(run)
        status, err = second.wait()
        assert (status, "the run has stopped" in err) == (0, True), err
        assert not second.components()
        assert not (run.folder / "join.key").exists()


def test_a_machine_that_dies_takes_its_components_along_and_comes_back_as_a_new_one(tmp_path):
    with a_run(tmp_path, "--run.steps", "1000") as (run, join):
        guest = join()
        at_work(run, 1)
        guest.child.kill()
        guest.wait()
        gone(run, guest)
        run.until(partial(left, run), "its loss")
        assert "nothing was heard of its host" in left(run)[0].reason
        join()
        at_work(run, 2)
        assert len(joined(run)) == 2
        ends_well(run)


@pytest.mark.parametrize("kind", ["partial", pytest.param("sync", marks=pytest.mark.soak)])
def test_under_other_schedules_machines_come_and_go_too(tmp_path, kind):
    with a_run(tmp_path, "--run.steps", "1000", "--schedule.kind", kind) as (run, join):
        guest = join("--replicas", "2")
        at_work(run, 1, 2)
        guest.interrupt()
        at_work(run, 0)
        ends_well(run)


def test_a_new_controller_finds_the_machines_that_had_joined_and_starts_their_components_again(tmp_path):
    with a_run(tmp_path, "--run.steps", "1000") as (run, join):
        guest = join("--replicas", "2")
        at_work(run, 1, 2)
        before = guest.components()
        for _ in range(2):
            restarts = run.events("ControllerRestarted")
            os.kill(run.controller(), signal.SIGKILL)
            run.until(lambda seen=restarts: run.events("ControllerRestarted") > seen, "another controller")
            at_work(run, 0, 1, 2)
        assert guest.components() == before
        assert (len(joined(run)), left(run), run.events("%Lost")) == (1, [], 0)

        os.kill(before["replica1"], signal.SIGKILL)
        os.kill(before["relay1"], signal.SIGKILL)
        run.until(
            lambda: guest.components().keys() == before.keys() and guest.components() != before, "both to be back"
        )
        at_work(run, 1, 2)
        assert guest.components()["replica2"] == before["replica2"]
        assert not left(run)
        ends_well(run)


def test_a_resumed_run_does_not_wait_for_the_machines_of_then(tmp_path):
    with a_run(tmp_path, "--run.steps", "60") as (run, join):
        guest = join()
        at_work(run, 1)
        run.kill()  # the supervisor, and so everybody but the worker
        run.child = None
        run.finish("--resume")
        run.child = None
        assert [one.host for one in left(run)] == [1]
        assert prove(run.folder).steps == 60
        guest.child.kill()
        gone(run, guest)


# ------------------------------------------------------------------------------------------------------------- doors


def refused(guest: Guest, words: str) -> None:
    status, err = guest.wait()
    assert (status, len(err.strip().splitlines())) == (2, 1), err
    assert re.search(words, err), err


def test_without_the_key_nobody_gets_in(tmp_path):
    with a_run(tmp_path, "--run.steps", "1000") as (run, _):
        key, where = (run.folder / "join.key").read_text(), ("--join", address(run))
        refused(Guest(tmp_path / "a", *where, key=f"{key[:64]}.{'0' * 64}"), "refused this join key")
        refused(Guest(tmp_path / "b", *where, key=f"{'0' * 64}{key[64:]}"), "refused this join key")
        assert not joined(run)
        Guest(tmp_path / "c", *where, key=key)
        at_work(run, 1)
        ends_well(run)


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ((), None, "required: --join"),
        (("--join", "here"), None, "'here', not an address; write HOST:PORT"),
        (("--join", "here:99999"), None, "not an address"),
        (("--join", "127.0.0.1:1"), None, "a join key is needed"),
        (("--join", "127.0.0.1:1"), "secret", "no join key"),
        (("--join", "127.0.0.1:1", "--key", "/nowhere/join.key"), None, "cannot be read"),
        (("--join", "127.0.0.1:1", "--key", "/"), None, "cannot be read"),
        (("--join", "127.0.0.1:1", "--replicas", "0"), None, "not a number of replicas"),
        (("--join", "127.0.0.1:1", "--replicas", "many"), None, "not a number of replicas"),
        (("--join", "127.0.0.1:1", "--model.path", "x"), None, "--model.path is the run's"),
        (("--join", "no.such.host.invalid:1"), f"{'0' * 64}.{'0' * 64}", "no such host"),
        (("--join", "127.0.0.1:1"), f"{'0' * 64}.{'0' * 64}", "nobody answered at 127.0.0.1:1 within 10 s"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, options, key, words):
    refused(Guest(tmp_path, *options, key=key), words)


@pytest.mark.parametrize(
    ("listen", "words"),
    [("here", "no address"), ("0.0.0.0", "everywhere"), ("192.0.2.1", "not an address of this host")],
)
def test_a_bad_address_to_listen_at_is_one_sentence(tmp_path, listen, words):
    status, _, err = Run(tmp_path, EMULATED, "--local.listen", listen).start().wait()
    assert (status, words in err) == (2, True), err


def test_a_machine_that_lacks_the_model_says_so(tmp_path):
    """The run goes on without it."""
    with a_run(tmp_path, "--run.steps", "1000", "--model.path", str(tmp_path / "model")) as (run, join):
        refused(join(), "not on this machine; copy the model to the same path here")
        at_work(run, 0)
        ends_well(run)


# ----------------------------------------------------------------------------------------------------------- network


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_between_hosts_a_machine_is_cut_off_and_comes_back(tmp_path):
    with on_two_hosts(tmp_path, "--run.steps", "100000") as (network, run, join):
        guest = join()
        at_work(run, 1)
        network.isolate(1)
        run.until(partial(left, run), "its loss")
        at_work(run, 0)
        network.heal()
        run.until(lambda: len(joined(run)) == 2, "its return")
        at_work(run, 2)
        gone_first = "replica1" not in guest.components()
        ends_well(run)
        assert gone_first
        assert guest.wait()[0] == 0
