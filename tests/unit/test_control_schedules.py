"""What makes the schedules different: what is in flight at an update, and when replicas pull."""

import pytest

from drive import Drive, config
from tailrace.config.tree import Schedule, Trainer
from tailrace.protocol import Generate, LoadWeights, RelayJoined, ReplicaLost, Train, VersionStored

STEPS_AHEAD = {"stream": 1}


def driven(kind, replicas=2, relays=1, **sections):
    schedule = Schedule(kind=kind, max_staleness=2, steps_ahead=STEPS_AHEAD.get(kind), max_inflight=4)
    return Drive(config(schedule=schedule, **sections), replicas=replicas, relays=relays).join_all()


def finish_until_trained(drive, step):
    """Finish samples, oldest first, until the trainer has made the version after `step`."""
    while drive.plane.state.training.version <= step:
        if drive.plane.state.training.busy:
            drive.train()
        else:
            drive.finish(drive.running()[0])


def pulls(drive):
    return [(order.replica, order.version) for order in drive.orders(LoadWeights)]


def test_sync_generates_nothing_while_it_trains_and_pulls_together():
    drive = driven("sync")
    drive.finish_all()
    assert drive.plane.state.training.busy
    assert not drive.running()
    drive.train()
    assert not drive.running()
    drive.store_everywhere(1)
    assert pulls(drive)[-2:] == [(0, 1), (1, 1)]
    drive.load(0)
    assert not drive.running(), "the barrier: nobody starts before everybody is there"
    drive.load(1)
    assert len(drive.running(0)) == len(drive.running(1)) == 2


@pytest.mark.parametrize("kind", ["one_step", "stream"])
def test_one_step_and_stream_generate_the_next_round_while_they_train(kind):
    drive = driven(kind)
    drive.finish_all()
    assert drive.plane.state.training.busy
    assert len(drive.running()) == 4, "round 1 runs on version 0"
    drive.train()
    drive.store_everywhere(1)
    assert not any(version == 1 for _, version in pulls(drive)), "nobody pulls in the middle of a round"
    drive.finish_all()
    assert pulls(drive)[-2:] == [(0, 1), (1, 1)]


def test_one_step_takes_whole_rounds_and_stream_takes_mini_batches():
    for kind, expected in (("one_step", 0), ("stream", 1)):
        drive = driven(kind, trainer=Trainer(mini_batches=2))
        first = [request for request in drive.running() if request.group == 0]
        for request in first:
            drive.finish(request)
        assert len(drive.orders(Train)) == expected


@pytest.mark.parametrize("kind", ["stream", "partial", "trajectory", "adaptive"])
def test_the_trainer_waits_for_as_many_mini_batches_as_are_required_and_then_trains_them_in_a_row(kind):
    drive = driven(kind, trainer=Trainer(mini_batches=2, require_batches=2))
    first = drive.running()[0].group
    for request in [request for request in drive.running() if request.group == first]:
        drive.finish(request)
    assert not drive.orders(Train), "one of two is ready"
    while not drive.orders(Train):
        drive.finish(drive.running()[0])
    ready = len(drive.plane.state.ledger.ready)
    assert ready, "the second is there before the first is trained"
    drive.train()
    assert [order.mini_batch for order in drive.orders(Train)] == [0, 1]


def test_more_than_a_step_is_never_required():
    drive = driven("partial", trainer=Trainer(mini_batches=2, require_batches=9))
    finish_until_trained(drive, 1)


def test_partial_pulls_at_once_and_its_work_goes_on_under_the_new_weights():
    drive = driven("partial", relays=2)
    finish_until_trained(drive, 0)
    running = drive.running()
    assert running
    drive.tell(VersionStored(0, 1, 1))
    assert not any(version == 1 for _, version in pulls(drive)), "not before it is everywhere"
    drive.tell(VersionStored(1, 1, 1))
    assert sorted(pulls(drive)[-2:]) == [(0, 1), (1, 1)]
    drive.load(0)
    drive.load(1)
    kept = {request.trajectory: request.attempt for request in drive.running()}
    assert all(kept[request.trajectory] == request.attempt for request in running)


def test_under_partial_a_replica_whose_relay_comes_back_pulls_again():
    drive = driven("partial", relays=2)
    drive.tell(RelayJoined(1, 2))
    drive.tell(ReplicaLost(1, 1, "it died"))
    drive.join(1, incarnation=2, version=-1)
    before = len(pulls(drive))
    drive.tell(VersionStored(1, 2, 0))  # no news for the fleet, but for this host
    assert pulls(drive)[before:] == [(1, 0)]


def test_trajectory_replicas_pull_on_their_own_when_their_work_is_done():
    drive = driven("trajectory")
    finish_until_trained(drive, 0)
    drive.store_everywhere(1)
    busy = [id for id in (0, 1) if drive.running(id)]
    assert busy
    assert not any(pull in pulls(drive) for pull in [(id, 1) for id in busy]), "what runs keeps its version"
    drive.finish_all(busy[0])
    assert pulls(drive)[-1] == (busy[0], 1)
    drive.load(busy[0])
    drive.fetch()
    order = drive.orders(Generate)[-1]
    assert order.replica == busy[0]
    sample = drive.plane.state.ledger.samples[order.requests[0].trajectory]
    assert sample.oldest == sample.newest == 1


def test_a_trajectory_replica_takes_more_work_until_there_is_something_newer_to_pull():
    drive = driven("trajectory")
    first = drive.running(0)
    drive.finish(first[0])
    assert {request.group for request in drive.running(0)} > {first[0].group}, "it is filled up before it is empty"
    finish_until_trained(drive, 0)
    drive.store_everywhere(1)
    drive.fetch()
    before = len(drive.orders(Generate))
    (last, *others) = drive.running(0)
    for request in others:
        drive.finish(request)
    assert drive.running(0) == [last]
    assert len(drive.orders(Generate)) == before, "what runs is finished first"


@pytest.mark.parametrize(("pull_s", "used"), [(40.0, True), (1.0, False)])
def test_a_replica_that_can_hardly_pull_as_fast_as_versions_come_uses_each_that_it_has_pulled(pull_s, used):
    drive = driven("trajectory", replicas=1)
    finish_until_trained(drive, 0)
    drive.store_everywhere(1)
    drive.now += 60.0 - pull_s
    drive.finish_all(0)
    drive.now += pull_s
    finish_until_trained(drive, 1)  # 60 s after the one before
    drive.store_everywhere(2)
    drive.fetch()
    assert pulls(drive)[-1] == (0, 1)
    drive.load(0)
    if used:
        assert {drive.plane.state.ledger.samples[one.trajectory].newest for one in drive.running(0)} == {1}
        drive.finish_all(0)
    assert pulls(drive)[-1] == (0, 2)


def test_a_replica_that_joins_in_the_middle_of_a_round_helps():
    drive = driven("sync", replicas=3)
    drive.tell(ReplicaLost(2, 1, "it died"))
    drive.join(2, incarnation=2, version=0)
    drive.tell(ReplicaLost(0, 1, "it died too"))
    assert drive.running(2)
