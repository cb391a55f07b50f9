"""Strangers in real runs: a worker with a key of its own takes part, is revoked while it works, or lies and is found
out. What is trained is proved as everywhere (`proof.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests import HONEST, LIES, Guest, address, trained_of_strangers

from runs import EMULATED, NATIVE, Run, replayed
from tailrace.launch.workers import workers
from tailrace.obs.summary import summarise
from tailrace.protocol import CheckFailed, Dismiss, Finished, Generate, WorkerRefused, WorkerRevoked
from tailrace.runtime.local import read_records
from tailrace.store.journal import Journal

STRANGERS = (
    "--local.listen",
    "127.0.0.1",
    "--strangers.checkers",
    "1",
    "--schedule.kind",
    "trajectory",
    "--health.strikes",
    "60",
)
ENDLESS = ("--local.replicas", "2", "--run.steps", "100000")
PATIENCE_S = 120.0

Join = Callable[..., Guest]


@contextmanager
def open_run(folder: Path, settings: str, *options: str) -> Iterator[tuple[Run, Join]]:
    """A run with a checker, and how a stranger joins it, by its name."""
    run, guests = Run(folder, settings, *STRANGERS, *options).start(), list[Guest]()
    try:
        run.until((run.folder / "join.key").exists, "its key")
        run.until(lambda: read_records(run.folder).port, "its address")

        def join(name: str, lie: str = "") -> Guest:
            workers(run.folder, name, None, "")
            words = ("--join", address(run), "--key", str(run.folder / "workers" / f"{name}.key"))
            program = (sys.executable, str(LIES), lie) if lie else HONEST
            guests.append(Guest(folder / name, *words, program=program))
            return guests[-1]

        yield run, join
    finally:
        for guest in guests:
            guest.child.kill()
            guest.child.wait(PATIENCE_S)
        if run.child is not None and run.child.poll() is None:
            run.kill()


def found(run: Run, kind: type) -> list:
    return [entry.event for entry in Journal(run.folder).entries() if isinstance(entry.event, kind)]


@pytest.mark.parametrize(
    "settings", [pytest.param(EMULATED, marks=pytest.mark.soak), NATIVE], ids=["emulated", "native"]
)
def test_an_honest_stranger_generates_for_a_run_and_every_check_passes(tmp_path: Path, settings: str):
    with open_run(tmp_path, settings, "--local.replicas", "1", "--strangers.check_share", "0.5") as (run, join):
        stranger = join("alice")
        status, out, err = run.wait()
        assert status == 0, f"{out}\n{err}\n{run.logs()}"
        assert stranger.child.wait(PATIENCE_S) == 0
    replayed(run)
    assert trained_of_strangers(run)
    record = summarise(run.folder).live.fold.strangers["alice"]
    assert record.handed_in > record.scored > 0
    assert not record.excluded
    assert "stranger alice" in out


def goes_on(run: Run) -> None:
    """It trains after whatever has happened, and is then ended in order."""
    trained = run.events("Trained")
    run.until(lambda: run.events("Trained") > trained + 2, "more steps")
    run.interrupt()
    replayed(run)


def test_a_key_is_revoked_while_its_worker_works(tmp_path: Path):
    with open_run(tmp_path, EMULATED, *ENDLESS) as (run, join):
        stranger = join("alice")
        kept = (run.folder / "workers" / "alice.key").read_text()
        run.until(lambda: run.events("HandedIn"), "something handed in")
        workers(run.folder, None, "alice", "the laptop was stolen")
        assert stranger.child.wait(PATIENCE_S) == 2
        assert "the laptop was stolen" in stranger.child.communicate()[1]
        (tmp_path / "kept.key").write_text(kept)
        again = Guest(tmp_path / "again", "--join", address(run), "--key", str(tmp_path / "kept.key"))
        assert again.child.wait(PATIENCE_S) == 2
        assert "refused this join key" in again.child.communicate()[1]
        goes_on(run)
    (revoked,) = found(run, WorkerRevoked)
    assert revoked.reason == "the laptop was stolen"


FOUND_OUT = {  # what each liar is dismissed for
    "tokens": CheckFailed,
    "logprobs": CheckFailed,
    "best_of_many": CheckFailed,
    "cut_short": CheckFailed,
    "other_version": WorkerRefused,
    "a_reward": WorkerRefused,
    "another_sample": WorkerRefused,
    "a_failure": WorkerRefused,
    "an_older_sample": CheckFailed,
    "nothing_at_all": CheckFailed,
    "nobody_sampled_it": CheckFailed,
    "too_long": WorkerRefused,
    "no_numbers": WorkerRefused,
    "more_than_certain": WorkerRefused,
    "no_tokens_of_ours": WorkerRefused,
    "others_data": WorkerRefused,
    "a_flood": WorkerRefused,
    "very_many_samples": WorkerRefused,
    "a_long_message": WorkerRefused,
    "an_endless_engine": WorkerRefused,
}


@pytest.mark.parametrize("which", [slice(0, 6), slice(6, 12), slice(12, None)])
def test_strangers_that_lie_are_found_out_and_nothing_of_them_is_left(tmp_path: Path, which: slice):
    """One after the other, each named after its lie."""
    lies = dict(list(FOUND_OUT.items())[which])
    slowly = ("--costs.train_mini_batch", "0.2")
    with open_run(tmp_path, EMULATED, *ENDLESS, *slowly, "--strangers.check_share", "1") as (run, join):
        for lie in lies:
            assert join(lie, lie).child.wait(PATIENCE_S) == 2, lie
        goes_on(run)
    entries = list(Journal(run.folder).entries())
    dismissed = [(one, type(entry.event)) for entry in entries for one in entry.commands if isinstance(one, Dismiss)]
    assert {one.worker: kind for one, kind in dismissed} == lies
    assert not trained_of_strangers(run)
    records = summarise(run.folder).summary.strangers
    assert {one.worker: records[one.worker].excluded for one, _ in dismissed} == {
        one.worker: one.reason for one, _ in dismissed
    }


def test_a_stranger_that_samples_many_times_with_a_real_model_is_found_out(tmp_path: Path):
    """The run itself goes on; it is not waited for."""
    with open_run(tmp_path, NATIVE, *ENDLESS, "--strangers.check_share", "1") as (run, join):
        stranger = join("mallory", "best_of_many_for_real")
        run.until(lambda: run.events("CheckFailed"), "a check")
        assert stranger.child.wait(PATIENCE_S) == 2
        run.interrupt()
    assert "is not the one that the seed draws" in found(run, CheckFailed)[0].reason
    assert trained_of_strangers(run) <= checked(run), "at best what the seed draws too, where the model is certain"


def test_what_a_stranger_says_of_its_engine_does_not_end_the_run(tmp_path: Path):
    with open_run(tmp_path, EMULATED, *ENDLESS) as (run, join):
        join("mallory", "an_engine_beyond_reason")
        run.until(lambda: run.events("HandedIn"), "something handed in")
        goes_on(run)


def checked(run: Run) -> set[int]:
    """The samples that a trusted replica has scored again, and found to be what the seed draws."""
    asked, passed = set[tuple[int, int]](), set[int]()
    for entry in Journal(run.folder).entries():
        if isinstance(entry.event, Finished) and (entry.event.meta.id, entry.event.meta.attempt) in asked:
            passed.add(entry.event.meta.id)
        for command in entry.commands:
            if isinstance(command, Generate):
                asked |= {(one.trajectory, one.attempt) for one in command.requests if one.check == "draws"}
    return passed
