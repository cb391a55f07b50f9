"""Repack: who may give, who may take, and what is looked at again when the work has been handed back."""

from drive import Drive, config, only
from tailrace.config.tree import Schedule
from tailrace.control import repack
from tailrace.control.repack import Move, View, spread
from tailrace.protocol import EngineWork, Generate, Parked, Progressed, Release, ReplicaLost, TimerFired


def plan(views, most=100, is_worthwhile=lambda id: True):
    return repack.plan(views, most, is_worthwhile)


def view(id, kv, version=1, before=None, requests=2, waiting=0, batch=100, limit=100, roofline=8):
    return View(id, version, kv, kv + 1 if before is None else before, limit, requests, waiting, batch, roofline)


def test_the_smallest_goes_to_the_emptiest():
    assert plan([view(0, 10), view(1, 50), view(2, 80)]) == [Move(0, 1)]
    assert plan([view(0, 30), view(1, 50, requests=7), view(2, 60)]) == [Move(0, 2)], "that has room for its requests"


def test_no_more_are_emptied_than_can_be_put_to_use():
    views = [view(id, 10, requests=1) for id in range(8)]
    assert len(plan(views)) > 2
    assert len(plan(views, 2)) == 2


def test_nobody_is_emptied_whose_work_ends_sooner_than_it_moves():
    moves = plan([view(id, 10) for id in range(4)], is_worthwhile=lambda id: id > 1)
    assert {move.source for move in moves} <= {2, 3}


def test_what_fits_nowhere_is_not_weighed():
    asked: list[int] = []
    plan([view(0, 60), view(1, 70)], is_worthwhile=lambda id: bool(asked.append(id)))
    assert not asked
    plan([view(0, 20), view(1, 70)], is_worthwhile=lambda id: bool(asked.append(id)))
    assert asked == [0, 1], "either would fit into the other"


def test_the_idle_take_half_of_the_largest_batches_of_their_version():
    views = [view(0, 50, requests=6), view(1, 80, requests=8), view(2, 0, requests=0), view(3, 9, requests=1)]
    assert spread([*views, view(4, 0, version=2, requests=0)]) == [Move(1, 2)]
    assert not spread([view(0, 9, requests=1), view(1, 0, requests=0)]), "one sample cannot be divided"


def test_a_lone_straggler_whose_kv_never_falls_is_past_its_peak():
    straggler = view(0, 10, before=5, requests=1, batch=16)
    assert plan([straggler, view(1, 50)]) == [Move(0, 1)]
    assert not plan([view(0, 10, before=5, requests=15, batch=16), view(1, 50)])


def test_a_target_does_not_become_a_source():
    moves = plan([view(id, 20 + id) for id in range(4)])
    assert moves
    assert not {move.source for move in moves} & {move.target for move in moves}


def test_loads_include_the_plan_so_far():
    moves = plan([view(id, 40, requests=1) for id in range(5)])
    received = [move.target for move in moves]
    assert max(received.count(id) for id in received) == 1  # 40 + 40 fits below 100, a third 40 does not
    assert not plan([view(0, 1, requests=5), view(1, 2, requests=5)]), "nor more requests than the roofline"


def test_only_the_same_version_exchanges_work():
    assert not plan([view(0, 10, version=1), view(1, 10, version=2)])


def test_one_candidate_alone_stays():
    assert not plan([view(0, 10)])
    assert not plan([view(0, 10), view(1, 10, waiting=3), view(2, 100), view(3, 0, requests=0)])


def tail():
    """Two replicas at the end of their batches, newer weights for them to pull, and prompts for new batches."""
    drive = Drive(config(prompts=2, size=4)).join_all()
    drive.finish_all()
    drive.train()
    drive.store_everywhere(1)
    drive.fetch()
    for replica in (0, 1):
        for request in drive.running(replica)[:-1]:
            drive.finish(request)
        drive.tell(Progressed(replica, 1, 60, 1, 0))
    return drive


def test_a_release_is_followed_by_generation_elsewhere_from_the_prefix():
    drive = tail()
    (release,) = [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
    (request,) = drive.running(release.replica)
    commands = drive.tell(Parked(release.replica, 1, (drive.meta(request),)))
    order = next(c for c in commands if isinstance(c, Generate) and c.replica != release.replica)
    (moved,) = order.requests
    assert (moved.trajectory, moved.resume, moved.attempt) == (request.trajectory, True, request.attempt + 1)


def test_the_fit_is_checked_again_when_the_work_has_been_handed_back():
    drive = tail()
    (release,) = [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
    (request,) = drive.running(release.replica)
    target = 1 - release.replica
    drive.tell(Progressed(target, 1, 9_990, 8, 0))  # its cache has filled up meanwhile
    order = only(drive.tell(Parked(release.replica, 1, (drive.meta(request),))), Generate)
    assert order.replica == release.replica


def test_a_move_whose_source_dies_is_forgotten():
    drive = tail()
    (release,) = [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
    drive.tell(ReplicaLost(release.replica, 1, "it died"))
    assert not drive.plane.state.fleet.moves


def test_an_idle_replica_takes_over_samples_where_nothing_may_start():
    drive = Drive(config(prompts=2, size=4, schedule=Schedule(max_inflight=16, steps_ahead=0))).join_all()
    work = EngineWork(20.0, 1000, 4000, 400_000, 1000)  # a step takes 10 ms and each of its sequences 2 more
    for replica in (0, 1):
        drive.tell(Progressed(replica, 1, 200, 4, 0, work))
    for request in drive.running(0):
        drive.finish(request)
    (release,) = [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
    assert release.replica == 1
    moved = {one.trajectory for one in release.samples}
    assert len(moved) == 2, "half of what it has"
    parked = [request for request in drive.running(1) if request.trajectory in moved]
    commands = drive.tell(Parked(1, 1, tuple([drive.meta(request) for request in parked])))
    assert {
        request.trajectory for c in commands if isinstance(c, Generate) and c.replica == 0 for request in c.requests
    } == moved
    assert len(drive.running(1)) == 2


def test_what_tools_have_is_not_divided():
    drive = Drive(config(prompts=2, size=4, schedule=Schedule(max_inflight=16, steps_ahead=0))).join_all()
    drive.tell(Progressed(1, 1, 200, 4, 0, EngineWork(20.0, 1000, 4000, 400_000, 1000)))
    for request in drive.running(0):
        drive.finish(request)
    drive.score(*drive.running(1), final=False)
    assert not [c for c in drive.tell(TimerFired("repack"), after=5.0) if isinstance(c, Release)]
