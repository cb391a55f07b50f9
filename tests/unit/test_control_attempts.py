"""Late, doubled and lost messages are harmless, and groups come to their end whatever happens to their samples."""

import pytest

from drive import Drive, config, only
from tailrace.config.tree import Groups, Schedule
from tailrace.protocol import (
    Assignment,
    Cancel,
    Finished,
    Forget,
    Generate,
    Parked,
    ReplicaLost,
    SampleFailed,
    TrajectoryMeta,
)


def driven(**sections):
    """A step's worth of groups is under way, one on each replica, and no more may start."""
    return Drive(config(schedule=Schedule(max_inflight=4, steps_ahead=0), **sections)).join_all()


def test_a_sample_counts_once_however_often_it_is_reported():
    drive = driven()
    request = drive.running()[0]
    drive.finish(request)
    before = drive.plane.snapshot()
    drive.tell(Finished(0, drive.meta(request)))
    assert drive.plane.snapshot() == before


def test_what_a_lost_replica_still_reports_is_ignored():
    drive = driven()
    old = drive.running(0)[0]
    drive.tell(ReplicaLost(0, 1, "it died"))
    new = next(request for request in drive.running() if request.trajectory == old.trajectory)
    assert new.attempt > old.attempt
    drive.tell(Finished(0, drive.meta(old)))
    assert drive.plane.state.ledger.samples[old.trajectory].state == "running"
    drive.finish(new)
    assert drive.plane.state.ledger.samples[old.trajectory].state == "done"


def test_a_lost_replicas_samples_go_on_from_their_prefix_where_the_version_is_the_same():
    drive = driven()
    given = drive.tell(ReplicaLost(0, 1, "it died"))
    order = only(given, Generate)
    assert order.replica == 1
    assert all(request.resume for request in order.requests)


def test_the_second_copy_of_an_answer_does_not_end_a_later_release():
    """It must not make control forget what the replica is about to hand back."""
    drive = driven()
    drive.plane.state.fleet.replicas[0].enter("releasing", 0.0)
    drive.plane.state.fleet.moves[0] = 1
    held = drive.running(0)
    drive.tell(Parked(0, 1, ()))  # of an earlier release
    drive.tell(Parked(0, 1, tuple(drive.meta(request) for request in held)))
    again = {request.trajectory: request.attempt for request in drive.running()}
    assert all(again[request.trajectory] > request.attempt for request in held)


def test_a_replica_that_comes_back_keeps_what_both_sides_know_and_forgets_the_rest():
    drive = driven()
    first, second = drive.running(0)
    stray = Assignment(first.trajectory, 99)
    commands = drive.join(0, incarnation=2, held=(Assignment(second.trajectory, second.attempt), stray))
    assert only(commands, Cancel).samples == (stray,)
    assert second in drive.running(0)
    moved = next(request for request in drive.running() if request.trajectory == first.trajectory)
    assert moved.attempt > first.attempt


def test_a_failed_sample_is_tried_again_from_the_start_and_then_given_up():
    drive = driven(groups=Groups(max_failures=2, min_survivors=1))
    first, second = drive.running(0)
    drive.finish(second)
    id = first.trajectory
    for attempt in (1, 2):
        request = next(request for request in drive.running() if request.trajectory == id)
        assert (request.attempt, request.resume, request.failures) == (attempt, False, attempt - 1)
        drive.tell(SampleFailed(0, id, request.attempt, "the tool hung"))
    assert drive.plane.state.ledger.survivors(drive.plane.state.ledger.groups[first.group]) == [second.trajectory]


def test_only_its_own_failures_give_a_sample_other_random_numbers():
    """Neither a lost replica nor a move does, before a failure or after it."""
    drive = driven()
    failed, other = drive.running(0)
    drive.tell(SampleFailed(0, failed.trajectory, failed.attempt, "the tool hung"))
    drive.tell(ReplicaLost(0, 1, "it died"))
    held = drive.running(1)
    drive.plane.state.fleet.replicas[1].enter("releasing", drive.now)
    drive.plane.state.fleet.moves[1] = 1
    drive.tell(Parked(1, 1, tuple(drive.meta(request) for request in held)))
    again = {request.trajectory: request for request in drive.running()}
    assert again[failed.trajectory].attempt > failed.attempt + 1
    assert again[failed.trajectory].failures == 1
    assert {request.failures for id, request in again.items() if id != failed.trajectory} == {0}
    assert again[other.trajectory].attempt > other.attempt


def test_a_group_with_too_few_survivors_fails_and_is_forgotten():
    drive = driven(groups=Groups(max_failures=1, min_survivors=2))
    first, second = drive.running(0)
    drive.tell(SampleFailed(0, first.trajectory, 1, "the tool hung"))
    commands = drive.finish(second)
    assert only(commands, Forget).trajectories == (first.trajectory, second.trajectory)
    assert drive.plane.state.ledger.tally.failed == 1


def test_a_group_that_teaches_nothing_is_filtered_and_others_are_trained():
    drive = driven(groups=Groups(min_survivors=1, filter="zero_advantage"))
    first, second = drive.running(0)[:2]
    assert first.group == second.group
    drive.tell(Finished(0, TrajectoryMeta(first.trajectory, first.attempt, 5, 0, 0, "stop", 1.0)))
    commands = drive.tell(Finished(0, TrajectoryMeta(second.trajectory, second.attempt, 7, 0, 0, "stop", 1.0)))
    assert only(commands, Forget) == Forget((first.trajectory, second.trajectory), "filtered")
    tally = drive.plane.state.ledger.tally
    assert (tally.filtered, tally.failed) == (1, 0)
    third, fourth = [request for request in drive.running() if request.group != first.group][:2]
    drive.tell(Finished(0, TrajectoryMeta(third.trajectory, third.attempt, 5, 0, 0, "stop", 1.0)))
    drive.tell(Finished(0, TrajectoryMeta(fourth.trajectory, fourth.attempt, 5, 0, 0, "stop", 0.0)))
    assert (tally.filtered, len(drive.plane.state.ledger.ready)) == (1, 1)


@pytest.mark.parametrize(
    ("rewards", "filtered"),
    [((0.3, 0.1 + 0.2), 1), ((1e6, 1e6 + 0.1), 1), ((-1e-7, 1e-7), 1), ((0.3, 0.301), 0), ((1e6, 1e6 + 10), 0)],
)
def test_rewards_that_differ_by_rounding_teach_nothing(rewards, filtered):
    drive = driven(groups=Groups(min_survivors=1, filter="zero_advantage"))
    for request, reward in zip(drive.running(0)[:2], rewards, strict=True):
        drive.tell(Finished(0, TrajectoryMeta(request.trajectory, request.attempt, 5, 0, 0, "stop", reward)))
    ledger = drive.plane.state.ledger
    assert (ledger.tally.filtered, len(ledger.ready)) == (filtered, 1 - filtered)


def test_past_its_deadline_a_group_goes_on_with_its_survivors():
    drive = driven(groups=Groups(deadline_s=2.0, min_survivors=1))
    done, straggler = drive.running(0)
    drive.finish(done)
    drive.tick(1.0)
    assert not drive.orders(Cancel)
    commands = drive.tick(1.5)
    assert (
        Assignment(straggler.trajectory, 1)
        in only(
            [command for command in commands if isinstance(command, Cancel) and command.replica == 0], Cancel
        ).samples
    )
    assert done.group in drive.plane.state.ledger.ready
    drive.tell(Finished(0, drive.meta(straggler)))  # it comes too late
    assert drive.plane.state.ledger.survivors(drive.plane.state.ledger.groups[done.group]) == [done.trajectory]
