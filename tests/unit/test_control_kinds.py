"""Replicas of different speed: who is of which kind, who gets how much, and what is taken from the slow."""

from typing import Any

import pytest

from drive import Drive, config
from tailrace.config.tree import Rollout, Schedule, ScheduleKind
from tailrace.control.kinds import Kind, ReplicaFigures, batch_sizes, shares, sort_out
from tailrace.control.quota import quota
from tailrace.control.repack import Move, View, plan, spread
from tailrace.protocol import EngineWork, Generate, LoadWeights, Parked, Progressed, Release, TimerFired, TrajectoryMeta


def test_replicas_that_are_about_as_fast_are_one_kind_and_share_evenly():
    kinds, numbers = sort_out([ReplicaFigures(rate, 1000) for rate in (100.0, 110.0, 0.0, 124.0)])
    assert kinds == [Kind(pace=1.0, kv_capacity=1000, members=4)]
    assert numbers == [0, 0, 0, 0]


def test_kinds_differ_in_speed_or_in_kv():
    replicas = [ReplicaFigures(400.0, 1000, 0.01), ReplicaFigures(100.0, 1000, 0.04), ReplicaFigures(390.0, 4000, 0.01)]
    kinds, numbers = sort_out(replicas)
    assert numbers == [1, 0, 2]
    assert [kind.kv_capacity for kind in kinds] == [1000, 1000, 4000]
    assert sum(kind.pace * kind.members for kind in kinds) == pytest.approx(3)
    assert kinds[1].pace == pytest.approx(4 * kinds[0].pace)
    assert [kind.tail_s for kind in kinds] == [0.04, 0.01, 0.01]


def test_whoever_is_at_home_has_no_share():
    kinds, _ = sort_out([ReplicaFigures(400.0, 1000), ReplicaFigures(100.0, 1000, works=False)])
    assert [kind.members for kind in kinds] == [0, 1]
    assert kinds[1].pace == 1.0


def test_samples_are_dealt_out_by_speed():
    assert shares(10, [1.0, 1.0, 1.0, 1.0]) == [3, 3, 2, 2], "as without speeds"
    assert shares(10, [1.6, 1.6, 0.4, 0.4]) == [4, 4, 1, 1]
    assert sum(shares(7, [1.7, 0.9, 0.4])) == 7


def test_what_one_kind_has_no_room_for_goes_to_the_others():
    kinds = [Kind(pace=0.4, members=2), Kind(pace=1.6, members=2)]
    assert batch_sizes(kinds, 100, [80, 80]) == pytest.approx([10, 40])
    assert batch_sizes(kinds, 260, [80, 80]) == pytest.approx([50, 80])
    assert batch_sizes(kinds, 900, [80, 80]) == [80, 80]


def view(id, kv, requests=2, tail_s=1.0):
    return View(id, 1, kv, kv + 1, 100, requests, 0, 100, 8, tail_s)


def test_a_tail_goes_to_the_fast_and_never_to_the_slow():
    assert plan([view(0, 10, tail_s=4.0), view(1, 20, tail_s=4.0), view(2, 50)], 1, lambda _: True) == [Move(0, 2)]
    assert plan([view(0, 10), view(1, 20, tail_s=4.0)], 1, lambda _: True) == [Move(1, 0)]


def test_the_fastest_of_the_idle_takes_from_who_needs_longest():
    views = [view(0, 50, 6), view(1, 50, 4, 4.0), view(2, 0, 0, 4.0), view(3, 0, 0)]
    assert spread(views)[0] == Move(1, 3)


# ------------------------------------------------------------------------------------------------ through the plane


def work(drive, replica, seconds):
    """A few reports of an engine that takes so long for ten decode steps."""
    for count in range(1, 9):
        done = EngineWork(count * seconds, 10 * count, 40 * count, 400 * count, 10 * count)
        drive.tell(Progressed(replica, 1, 40, 4, 0, done))


def mixed(kind: ScheduleKind = "trajectory", **schedule: Any) -> Drive:
    """Replica 0 is four times as fast as replica 1, which is known since version 1 was made."""
    settings = {"max_inflight": 40, **schedule}
    drive = Drive(config(kind, prompts=4, size=4, schedule=Schedule(kind=kind, **settings))).join_all()
    work(drive, 0, 0.1)
    work(drive, 1, 0.4)
    drive.finish_all()
    drive.train(after=10.0)
    drive.store_everywhere(1)
    drive.fetch()
    return drive


def test_the_fast_one_gets_four_times_as_much():
    fleet = mixed().plane.state.fleet
    assert fleet.pace(fleet.replicas[0]) == pytest.approx(4 * fleet.pace(fleet.replicas[1]), rel=0.01)
    drive = mixed("sync")
    for replica in (0, 1):
        drive.load(replica)
    given = {one.replica: len(one.requests) for one in drive.orders(Generate)[-2:]}
    assert given == {0: 13, 1: 3}


@pytest.mark.parametrize(("max_running", "most"), [(1024, 285), (40, 50)])
def test_a_batch_is_what_the_kv_holds_and_no_more_than_the_engine_decodes_together(max_running, most):
    """A quarter more waits for a place there."""
    sections = {
        "schedule": Schedule(kind="adaptive", steps_ahead=64.0, mixed_share=1.0),
        "rollout": Rollout(max_running=max_running),
    }
    drive = Drive(config("adaptive", prompts=8, size=16, **sections)).join_all()
    for request in drive.running()[:64]:
        drive.finish(request)
    assert quota(drive.plane._context) == most


def test_what_the_slow_one_would_bring_too_late_goes_on_at_the_fast_one():
    drive = mixed(max_staleness=1, steps_ahead=4.0)
    for order in drive.orders(LoadWeights):
        drive.load(order.replica)
    drive.fetch()
    slow = drive.running(1)
    assert slow
    work(drive, 1, 0.4)
    drive.tell(TimerFired("repack"), after=18.0)
    release = drive.orders(Release)[-1]
    assert release.replica == 1
    metas = [TrajectoryMeta(one.trajectory, one.attempt, 30, 1, 1) for one in release.samples]
    drive.tell(Parked(1, 1, tuple(metas)))
    samples = drive.plane.state.ledger.samples
    assert {samples[one.trajectory].replica for one in release.samples} == {0}
