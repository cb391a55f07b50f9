"""Samples that judges have: they take no place among what is generated, and are lost no more than others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from drive import Drive, config, only
from tailrace.config.tree import Groups, Schedule, Trainer
from tailrace.control.plane import ControlPlane
from tailrace.control.work import quota
from tailrace.protocol import (
    Assignment,
    Cancel,
    ControllerRestarted,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    JudgedTurn,
    LoadWeights,
    Parked,
    Progressed,
    Release,
    ReplicaLost,
    ScoringStarted,
    TimerFired,
    Train,
)


def driven(kind: Any = "partial", replicas=2, staleness=4, **sections):
    """Two replicas that generate two samples each."""
    schedule = Schedule(kind=kind, max_staleness=staleness, max_inflight=4)
    return Drive(config(schedule=schedule, **sections), replicas=replicas).join_all()


def state_of(drive, request):
    return drive.plane.state.ledger.samples[request.trajectory].state


def given(commands):
    return [request for command in commands if isinstance(command, Generate) for request in command.requests]


@pytest.mark.parametrize("kind", ["partial", "trajectory"])
def test_what_a_judge_has_makes_room_for_more(kind):
    drive = driven(kind)
    first = drive.running(0)
    assert not given(drive.tell(Progressed(0, 1, 100, 2, 0))), "its batch is full"
    more = given(drive.score(*first))
    assert len(more) == len(first) == 2
    assert [state_of(drive, one) for one in first + more] == ["scoring"] * 2 + ["running"] * 2


def test_a_batch_is_a_share_of_what_is_left_to_generate():
    drive = Drive(config(prompts=4, size=4, schedule=Schedule(kind="trajectory"))).join_all()
    drive.finish(drive.running()[0])  # from here on the mean length is known, and with it what fits
    before = quota(drive.plane._context)
    drive.score(*drive.running(0)[:6])
    assert quota(drive.plane._context) == before - 3, "six less for two replicas"


def test_what_judges_have_stays_under_the_staleness_bound():
    """With max_staleness = 2, two steps of two groups may be under way."""
    drive = driven(staleness=2)
    while running := drive.running():
        drive.score(running[0])
    assert (drive.plane.state.ledger.open_groups, drive.plane.state.ledger.scoring) == (4, 8)
    drive.fetch()
    assert not drive.running(), "a third step could not be trained in time"
    for one in [request for order in drive.orders(Generate) for request in order.requests][:4]:
        drive.finish(one)
    assert only(drive.sent, Train).step == 0
    assert not drive.running()
    drive.train()
    assert len(drive.running()) == 4


def test_what_goes_on_has_its_place_back_and_nothing_is_given_beyond_that():
    drive = driven()
    first = drive.running(0)
    drive.score(*first, final=False)
    assert len(drive.running(0)) == 2
    assert not given(drive.go_on(*first))
    assert len(drive.running(0)) == 4
    assert not given(drive.finish(first[0])), "it still generates more than its batch"
    for one in drive.running(0)[:2]:
        drive.finish(one)
    assert len(drive.running(0)) >= 1


def test_reports_that_come_late_twice_or_out_of_order_change_nothing():
    drive = driven()
    one = drive.running(0)[0]
    drive.go_on(one, turn=1)
    drive.score(one, turn=0, final=False)
    assert state_of(drive, one) == "running", "it had gone on before that was heard"
    drive.score(one, turn=1, final=False)
    drive.score(one, turn=1, final=False)
    assert state_of(drive, one) == "scoring"
    drive.go_on(one, turn=1)
    assert state_of(drive, one) == "scoring", "turn 1 is what the judge has"
    drive.score(one, turn=2)  # that it went on in between was not heard
    drive.go_on(one, turn=2)
    assert (state_of(drive, one), drive.plane.state.ledger.final) == ("scoring", 1)
    drive.finish(one)
    drive.tell(ScoringStarted(0, 1, (JudgedTurn(one.trajectory, one.attempt, 3),)))
    drive.tell(GenerationResumed(0, 1, (JudgedTurn(one.trajectory, one.attempt, 4),)))
    assert state_of(drive, one) == "done"
    other = drive.running(0)[0]
    turn = JudgedTurn(other.trajectory, other.attempt, 0)
    for replica, incarnation, judged in ((0, 9, turn), (1, 1, turn), (0, 1, msgspec.structs.replace(turn, attempt=7))):
        drive.tell(ScoringStarted(replica, incarnation, (judged,)))
    assert state_of(drive, other) == "running", "of another life, another replica, another assignment"


def newer_weights(drive):
    """The first step is trained and published; both replicas have a sample left."""
    for replica in (0, 1):
        drive.finish(drive.running(replica)[0])
        drive.finish(drive.running(replica)[0])
    drive.train()
    drive.store_everywhere(1)
    return drive.running(0)


def pulled(drive, replica):
    return [order.version for order in drive.orders(LoadWeights) if order.replica == replica]


@pytest.mark.parametrize("final", [True, False])
def test_under_trajectory_only_what_may_be_generated_again_keeps_a_replica_from_newer_weights(final):
    drive = driven("trajectory")
    left = newer_weights(drive)
    assert left
    assert 1 not in pulled(drive, 0)
    for one in left:
        drive.score(one, final=final)
    assert (1 in pulled(drive, 0)) == final
    if final:
        drive.load(0)
        assert {one.trajectory for one in drive.running(0)}.isdisjoint(one.trajectory for one in left)
    for one in left:
        drive.finish(one)
    assert 1 in pulled(drive, 0)


def test_when_a_replica_is_lost_another_one_asks_its_own_judge():
    drive = driven()
    first = drive.running(0)
    drive.score(*first)
    again = given(drive.tell(ReplicaLost(0, 1, "it died")) + drive.sent[-3:])
    moved = {one.trajectory: one for one in again}
    waiting = drive.plane.state.ledger.waiting
    assert all(one.trajectory in moved or one.trajectory in waiting for one in first)
    for request in list(drive.running(1)):
        drive.finish(request)
    later = {one.trajectory: one for one in given(drive.sent) if one.attempt == 2}
    assert all(later[one.trajectory].resume for one in first), "from the prefix in the store"


def test_a_release_leaves_what_is_complete_with_its_judge():
    drive = Drive(config(prompts=2, size=4)).join_all()
    drive.finish_all()
    drive.train()
    drive.store_everywhere(1)
    drive.fetch()
    kept, calling = {}, {}
    for replica in (0, 1):
        *done, kept[replica], calling[replica] = drive.running(replica)
        for request in done:
            drive.finish(request)
        drive.score(kept[replica])
        drive.score(calling[replica], final=False)
        drive.tell(Progressed(replica, 1, 60, 1, 0))
    (release,) = [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
    source = release.replica
    moved = given(drive.tell(Parked(source, 1, (drive.meta(calling[source]),))))
    assert calling[source].trajectory in {one.trajectory for one in moved}, "its tool is called again elsewhere"
    assert (state_of(drive, kept[source]), pulled(drive, source)[-1]) == ("scoring", 1)
    drive.finish(kept[source])
    assert state_of(drive, kept[source]) == "done"


@pytest.mark.parametrize("held", [True, False])
def test_whoever_outlived_the_controller_keeps_what_its_judges_have(held):
    drive = driven()
    first = drive.running(0)
    drive.score(*first)
    drive.plane = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    drive.tell(ControllerRestarted())
    commands = drive.join(
        0,
        incarnation=2,
        held=tuple(Assignment(one.trajectory, one.attempt) for one in first if held or one is first[0]),
    )
    assert state_of(drive, first[0]) == "scoring"
    assert state_of(drive, first[1]) == "scoring" if held else state_of(drive, first[1]) in ("waiting", "running")
    assert not [command for command in commands if isinstance(command, Cancel)]
    drive.finish(first[0])
    drive.join(0, incarnation=3, held=(Assignment(first[0].trajectory, first[0].attempt),))
    assert [one.trajectory for one in only(drive.sent[-3:], Cancel).samples] == [first[0].trajectory]


def test_a_group_past_its_deadline_takes_its_samples_from_their_judges():
    drive = driven(groups=Groups(min_survivors=1, deadline_s=1.0))
    first = drive.running(0)
    drive.finish(first[0])
    drive.score(first[1])
    commands = drive.tick(2.0)
    cancelled = {one.trajectory for command in commands if isinstance(command, Cancel) for one in command.samples}
    assert first[1].trajectory in cancelled
    assert drive.plane.state.ledger.scoring == 0
    assert not given(drive.tell(Finished(0, drive.meta(first[1])))), "too late"


def test_what_is_too_old_for_any_step_is_taken_from_its_judges():
    drive = driven(staleness=1, trainer=Trainer(mini_batches=1))
    slow = drive.running(0)
    drive.score(*slow)
    while drive.plane.state.training.version < 2:
        if drive.plane.state.training.busy:
            drive.train()
        elif drive.running():
            drive.finish(drive.running()[0])
        else:
            drive.fetch()
    assert {one.trajectory for one in slow} <= {id for order in drive.orders(Forget) for id in order.trajectories}
    assert drive.plane.state.ledger.scoring == 0


# ------------------------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize(("kind", "overlaps"), [("sync", False), ("one_step", True), ("stream", True)])
def test_the_next_round_does_not_wait_for_judges_but_a_step_waits_for_its_own_round(kind, overlaps):
    schedule = Schedule(kind=kind, max_staleness=2, steps_ahead=1 if kind == "stream" else None)
    drive = Drive(config(schedule=schedule)).join_all()
    first = drive.running()
    for one in first[1:]:
        drive.finish(one)
    drive.score(first[0])
    second = drive.running()
    assert len(second) == (4 if overlaps else 0)
    for one in second:
        drive.finish(one)
    trained = {group.group for order in drive.orders(Train) for group in order.groups}
    assert trained <= {0, 1}, "nothing of the second round is trained in place of what is being scored"
    drive.finish(first[0])
    while drive.plane.state.training.busy:
        drive.train()
    steps = [{group.group for group in order.groups} for order in drive.orders(Train)]
    assert steps == ([{0, 1}, {2, 3}] if overlaps else [{0, 1}])


@pytest.mark.parametrize("kind", ["sync", "one_step"])
def test_a_round_goes_on_when_what_was_being_scored_is_lost_or_fails(kind):
    drive = Drive(config(kind)).join_all()
    first = drive.running()
    for one in first[:-1]:
        drive.finish(one)
    drive.score(first[-1])
    drive.tell(ReplicaLost(drive.plane.state.ledger.samples[first[-1].trajectory].replica, 1, "it died"))
    (again,) = [one for one in drive.running() if one.trajectory == first[-1].trajectory]
    assert (again.attempt, again.resume) == (2, True)
    drive.finish(again)
    assert {group.group for group in only(drive.sent, Train).groups} == {0, 1}


# ---------------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_has_what_judges_have_and_one_from_before_there_were_any_is_read():
    drive = driven()
    drive.score(*drive.running(0), final=False)
    again = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    assert again.snapshot() == drive.plane.snapshot()
    again.check()
    old = msgspec.msgpack.decode(driven().plane.snapshot(), strict=False)
    for sample in old["ledger"]["samples"].values():
        del sample["turn"], sample["final"]
    for group in old["ledger"]["groups"].values():
        del group["round"]
    for replica in old["fleet"]["replicas"].values():
        del replica["scoring"]
    del old["ledger"]["scoring"], old["ledger"]["final"]
    ControlPlane.restore(drive.plane.config, msgspec.msgpack.encode(old)).check()
