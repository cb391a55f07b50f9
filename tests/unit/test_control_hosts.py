"""Machines that join and leave, replicas that are slow, and replicas that do nothing well."""

from __future__ import annotations

from typing import Any

from drive import Drive, config
from tailrace.config.tree import Local, Schedule
from tailrace.control.plane import ControlPlane
from tailrace.obs.event_text import EventText
from tailrace.obs.fold import Fold
from tailrace.protocol import (
    Command,
    ControllerRestarted,
    Event,
    Generate,
    GiveUp,
    HostJoined,
    HostLeft,
    LoadWeights,
    PullFailed,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    SampleFailed,
    Start,
    Stop,
    TrainerJoined,
    TrainerLost,
    TrainerWaits,
    VersionStored,
)


def starts(commands: list[Command]) -> list[tuple[str, int]]:
    return [(one.role, one.id) for one in commands if isinstance(one, Start)]


def fleet(replicas: int) -> Drive:
    """With so much admitted that the trainer need not do anything."""
    schedule: Any = Schedule(kind="trajectory", max_staleness=100, max_inflight=32)
    return Drive(config(prompts=8, size=4, schedule=schedule), replicas=replicas).join_all()


def feed(drive: Drive) -> None:
    if drive.plane.state.fetching:
        drive.fetch()


def joined_by_a_host() -> Drive:
    """Replica 0 at home; replicas 1 and 2, and relay 1, on a machine that has joined."""
    drive = fleet(1)
    assert starts(drive.tell(HostJoined(1, (1, 2)))) == [("relay", 1), ("replica", 1), ("replica", 2)]
    drive.tell(RelayJoined(1, 1))
    drive.tell(VersionStored(1, 1, 0))
    for replica in (1, 2):
        drive.tell(ReplicaJoined(replica, 1, 1, 0, 10_000, 64))
    return drive


def test_replicas_of_a_host_that_joined_are_given_work():
    drive = joined_by_a_host()
    assert drive.running(1)
    assert drive.running(2)


def test_when_a_host_leaves_its_work_goes_elsewhere_and_nobody_is_started_there_again():
    drive = joined_by_a_host()
    held = {one.trajectory for id in (1, 2) for one in drive.running(id)}
    drive.tell(HostLeft(1, "its host left"))
    state = drive.plane.state
    assert {state.fleet.replicas[id].state for id in (1, 2)} == {"departed"}
    assert not state.relays.relays[1].live
    assert not drive.running(1) + drive.running(2)
    assert held <= set(state.ledger.samples)
    drive.tick(1000.0)
    assert {id for part, id in starts(drive.tick(1000.0)) if part != "trainer"} == {0}


def test_a_host_that_left_is_not_waited_for_by_the_next_controller_and_cannot_come_back_under_its_number():
    drive = joined_by_a_host()
    drive.tell(HostLeft(1, "its host left"))
    drive.plane = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    drive.tell(ControllerRestarted())
    drive.tell(ReplicaJoined(1, 7, 1, 0, 10_000, 64))
    drive.tell(RelayJoined(1, 7))
    assert not drive.plane.state.fleet.replicas[1].live
    assert not drive.plane.state.relays.relays[1].live


def test_a_host_may_leave_before_its_replicas_were_up():
    drive = fleet(1)
    drive.tell(HostJoined(1, (1, 2)))
    drive.tell(HostLeft(1, "replica 1 cannot start"))
    assert {drive.plane.state.fleet.replicas[id].state for id in (1, 2)} == {"departed"}


def test_the_run_ends_when_the_last_host_leaves_and_everybody_else_is_quarantined():
    drive = joined_by_a_host()
    for incarnation in (1, 2, 3):
        if incarnation > 1:
            drive.join(0, incarnation=incarnation)
        drive.tell(ReplicaLost(0, incarnation, "out of memory"))
        drive.tick(0.0)
        for id in (1, 2):  # silence is not what this is about
            drive.plane.state.fleet.replicas[id].last_seen = drive.now + 1000.0
        drive.tick(60.0)
    assert drive.plane.state.fleet.replicas[0].state == "quarantined"
    assert not drive.orders(Stop)
    drive.tell(HostLeft(1, "its host left"))
    assert "its host left" in drive.orders(Stop)[0].reason


def wear_out_relay(drive: Drive, relay: int) -> None:
    """It is lost again and again, until it is not started any more."""
    for incarnation in range(1, 9):
        drive.tell(RelayLost(relay, incarnation, "no shared memory"))
        drive.keep_alive()
        if drive.tick(100.0) and drive.plane.state.relays.relays[relay].quarantined:
            return
        drive.tell(RelayJoined(relay, incarnation + 1))
    raise AssertionError("it is started for ever")


def test_the_run_ends_when_its_last_relay_is_given_up_after_a_guest_has_come_and_gone():
    drive = joined_by_a_host()
    drive.tell(HostLeft(1, "its host left"))
    wear_out_relay(drive, 0)
    assert "no relay is left; the last one was given up because: no shared memory" in drive.orders(Stop)[0].reason


def test_the_run_ends_when_the_last_relay_leaves_with_its_host():
    drive = joined_by_a_host()
    wear_out_relay(drive, 0)
    assert not drive.orders(Stop), "the guest has a relay"
    drive.tell(HostLeft(1, "its host left"))
    assert "no relay is left; the last one was given up because: its host left" in drive.orders(Stop)[0].reason


def test_the_run_ends_when_the_last_replica_fails_at_everything_after_the_good_ones_have_left():
    drive = joined_by_a_host()
    fail_all(drive, 0)
    drive.finish_all(1)
    drive.tell(HostLeft(1, "its host left"))
    for _ in range(20):
        if drive.plane.state.fleet.replicas[0].state == "quarantined":
            break
        fail_all(drive, 0)
        feed(drive)
    assert "no replica is left" in drive.orders(Stop)[0].reason


def test_the_story_says_where_a_guest_came_from_and_why_it_went():
    text = EventText(Fold(config()))
    events: list[Event] = [HostJoined(1, (1, 2)), HostLeft(1, "its host left")]
    told = [sentence for event in events for about, sentence in text.describe(event) if about == ("replica", 2)]
    assert told == ["r2 is to run on host 1, which joined", "departed with host 1: its host left"]


# ------------------------------------------------------------------------------------------------------ slow and bad


def test_a_slow_replica_is_given_less():
    """One finishes all it has, the other one sample: work goes where there is room."""
    drive = fleet(2)
    for _ in range(6):
        drive.finish_all(0)
        drive.finish(drive.running(1)[0])
        feed(drive)
    given = {0: 0, 1: 0}
    for order in drive.orders(Generate):
        given[order.replica] += len(order.requests)
    assert given[0] > 2 * given[1] > 0


def fail_all(drive: Drive, replica: int) -> None:
    for request in drive.running(replica):
        drive.tell(SampleFailed(replica, request.trajectory, request.attempt, "no compiler here"))


def test_a_replica_on_which_everything_fails_is_quarantined_while_others_do_well():
    drive = fleet(2)
    for _ in range(20):
        if drive.plane.state.fleet.replicas[1].state == "quarantined":
            break
        drive.finish_all(0)
        fail_all(drive, 1)
        feed(drive)
    replica = drive.plane.state.fleet.replicas[1]
    assert (replica.state, "no compiler here" in replica.reason) == ("quarantined", True)
    (order,) = [one for one in drive.orders(GiveUp) if one.id == 1]
    assert "failed here and not elsewhere" in order.reason
    assert drive.running(0)
    assert not drive.running(1)


def test_where_everything_fails_everywhere_it_is_not_the_replica():
    drive = fleet(2)
    for _ in range(20):
        for request in drive.running():
            at = drive.plane.state.ledger.samples[request.trajectory].replica
            drive.tell(SampleFailed(at, request.trajectory, request.attempt, "the reward is broken"))
    assert all(one.live for one in drive.plane.state.fleet.replicas.values())


def test_a_replica_that_can_never_load_weights_is_quarantined_with_the_reason():
    drive = Drive(config(), replicas=2).join_all()
    drive.tell(ReplicaLost(1, 1, "it died"))
    for incarnation in range(2, 9):
        drive.tick(0.0)
        for part in (*drive.plane.state.fleet.replicas.values(), *drive.plane.state.relays.relays.values()):
            part.last_seen = drive.now + 1000.0
        drive.plane.state.training.last_seen = drive.now + 1000.0
        drive.tick(100.0)
        if drive.plane.state.fleet.replicas[1].state == "quarantined":
            break
        drive.join(1, incarnation=incarnation, version=-1)
        drive.tell(PullFailed(1, incarnation, 0, "no room on the device"))
    assert "no room on the device" in drive.plane.state.fleet.replicas[1].reason
    assert [one.reason for one in drive.orders(GiveUp) if "quarantined" in one.reason]


def test_a_replica_whose_far_relay_dies_under_its_hands_pulls_from_another_and_is_not_blamed():
    drive = Drive(config(), replicas=4, relays=3).join_all()
    drive.tell(RelayLost(2, 1, "it died"))
    drive.tell(ReplicaLost(2, 1, "it died"))
    assert isinstance(order := drive.join(2, incarnation=2, version=-1)[-1], LoadWeights)
    assert order.relay == 0
    drive.tell(RelayLost(0, 1, "it died"))
    (order,) = [one for one in drive.tell(PullFailed(2, 2, 0, "nobody listens")) if isinstance(one, LoadWeights)]
    assert (order.replica, order.incarnation, order.relay) == (2, 2, 1)
    drive.tell(PullFailed(2, 2, 0, "nobody listens"))
    assert not drive.plane.state.fleet.replicas[2].live  # that one is there: others reach it


# ------------------------------------------------------------------------------------------------ what others bring


def test_a_trainer_that_waits_for_ranks_is_not_started_again_and_again_and_its_wait_does_not_count():
    drive = fleet(1)
    training = drive.plane.state.training
    drive.tell(TrainerLost(1, "a host was lost"))
    restarts = training.restarts
    assert ("trainer", 0) in starts(drive.tick(60.0))
    drive.tell(TrainerWaits("the trainer waits for 2 more ranks"))
    drive.tell(TrainerWaits("the trainer waits for 1 more rank"))
    assert (training.restarts, training.reason) == (restarts, "the trainer waits for 1 more rank")
    assert ("trainer", 0) not in starts(drive.tick(1000.0))
    drive.tell(TrainerJoined(2, 0))
    assert training.live


def test_a_trainer_that_waited_is_ordered_anew_after_a_restart_of_the_controller_or_a_failed_start():
    drive = fleet(1)
    drive.tell(TrainerLost(1, "a host was lost"))
    drive.tick(60.0)
    drive.tell(TrainerWaits("the trainer waits"))
    drive.tell(ControllerRestarted())
    assert ("trainer", 0) in starts(drive.tick(60.0))
    drive.tell(TrainerWaits("the trainer waits"))
    drive.tell(TrainerLost(2, "it ended before it was up"))
    assert ("trainer", 0) in starts(drive.tick(60.0))


def test_a_run_without_replicas_of_its_own_waits_for_machines_that_bring_some():
    drive = Drive(config(local=Local(replicas=0, listen="10.0.0.1")), replicas=0).join_all()
    for host in (1, 2):
        drive.tell(HostJoined(host, (host,), ranks=1))
        drive.tell(HostLeft(host, "its host left"))
    drive.tell(HostJoined(3, (), ranks=2))
    drive.tell(HostLeft(3, "its host left"))
    assert not drive.orders(Stop)
    drive.tell(HostJoined(4, (4,)))
    assert ("replica", 4) in starts(drive.sent)
