"""Silence, back-off, quarantine, and a controller that comes back."""

import pytest

from drive import Drive, config, only
from tailrace.config.tree import Health, Run
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Assignment,
    ControllerRestarted,
    FetchPrompts,
    Finished,
    GiveUp,
    Heartbeats,
    Late,
    PullFailed,
    RelayLost,
    ReplicaLost,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    Train,
    TrainerLost,
)


def driven(replicas=2, **sections):
    return Drive(config(**sections), replicas=replicas).join_all()


def starts(commands):
    return [(command.role, command.id) for command in commands if isinstance(command, Start)]


def test_who_misses_three_heartbeats_is_lost_and_started_again():
    drive = driven()
    drive.tell(Heartbeats((Late("replica", 1, 1, 3.0),)), after=3.5)
    commands = drive.tick(0.0)
    states = {id: replica.state for id, replica in drive.plane.state.fleet.replicas.items()}
    assert states == {0: "ready", 1: "lost"}
    assert [one for one in commands if isinstance(one, GiveUp)] == [GiveUp("replica", 1, 1, "no heartbeat for 3.0 s")]
    assert not drive.running(1)
    drive.tell(Heartbeats(), after=4.0)
    assert starts(drive.tick(0.0)) == [("replica", 1)]


@pytest.mark.parametrize(("part", "lost"), [("replica", "r0"), ("relay", "h0"), ("trainer", "trainer")])
def test_only_who_is_named_is_late(part, lost):
    drive = driven()
    drive.tell(Heartbeats((Late(part, 0, 1, 3.0),)), after=100.0)
    drive.tick(0.0)
    assert absent(drive) == {lost}


def absent(drive):
    state = drive.plane.state
    everybody = {f"r{id}": one.live for id, one in state.fleet.replicas.items()}
    everybody |= {f"h{id}": one.live for id, one in state.relays.relays.items()} | {"trainer": state.training.live}
    return {name for name, live in everybody.items() if not live}


def test_who_is_named_as_an_earlier_incarnation_was_heard_in_time():
    drive = driven()
    drive.join(0, incarnation=2)
    drive.tell(Heartbeats((Late("replica", 0, 1, 50.0), Late("relay", 7, 1, 50.0), Late("replica", 9, 1, 50.0))), 60.0)
    drive.tick(0.0)
    assert not absent(drive)


def test_who_is_late_is_lost_exactly_when_its_time_is_over():
    """Of one that was not named at the last look, the true time of its last sign is known from then on."""
    drive = driven()
    drive.tell(Heartbeats(), after=1.0)  # it was last heard at 0.4
    drive.tick(0.0)
    drive.tell(Heartbeats((Late("replica", 1, 1, 1.6),)), after=1.0)
    drive.tick(0.0)
    drive.tell(Heartbeats((Late("replica", 1, 1, 2.6),)), after=1.0)
    commands = drive.tick(0.0)
    assert not absent(drive)
    look = only(commands, SetTimer)
    assert look.at == pytest.approx(0.4 + 3.0)
    drive.now = look.at
    drive.tell(Heartbeats((Late("replica", 1, 1, look.at - 0.4),)))
    commands = drive.tick(0.0)
    assert [one.id for one in commands if isinstance(one, GiveUp)] == [1]


@pytest.mark.parametrize("strikes", [1, 2, 3, 5])
def test_a_driver_names_everybody_before_its_time_is_over(strikes):
    """There is a look in every second; whoever is silent is named at one of them, however the looks fall."""
    settings = config(health=Health(heartbeat_s=1.0, strikes=strikes))
    drive = Drive(settings).join_all()
    assert drive.plane.heartbeats(lambda *_: strikes - 1.0).late
    assert strikes == 1 or not drive.plane.heartbeats(lambda *_: 0.99).late


def test_a_driver_names_the_living_and_no_others():
    drive = driven()
    drive.tell(ReplicaLost(1, 1, "it died"))
    named = drive.plane.heartbeats(lambda part, id: 2.0 + id).late
    assert named == (Late("replica", 0, 1, 2.0), Late("relay", 0, 1, 2.0), Late("trainer", 0, 1, 2.0))


def test_nothing_is_decided_after_heartbeats():
    drive = driven()
    assert drive.tell(Heartbeats((Late("replica", 1, 1, 50.0),)), after=60.0) == []


def test_the_pause_before_a_start_doubles_and_then_the_replica_is_quarantined():
    drive = Drive(config(), replicas=2)
    pauses = []
    for incarnation in (1, 2, 3):
        drive.join(0, incarnation=incarnation)
        drive.tell(ReplicaLost(0, incarnation, "out of memory"))
        pauses.append(drive.plane.state.fleet.replicas[0].restart_at - drive.now)
        drive.tick(pauses[-1])
    assert pauses == [4.0, 8.0, 16.0]
    replica = drive.plane.state.fleet.replicas[0]
    assert (replica.state, replica.reason) == ("quarantined", "out of memory")


def test_good_work_resets_the_count():
    drive = driven()
    assert drive.plane.state.fleet.replicas[0].restarts == 1
    drive.finish(drive.running(0)[0])
    assert drive.plane.state.fleet.replicas[0].restarts == 0


def test_the_run_ends_when_no_replica_is_left():
    drive = Drive(config(), replicas=1)
    for incarnation in (1, 2, 3):
        drive.join(0, incarnation=incarnation)
        drive.tell(ReplicaLost(0, incarnation, "out of memory"))
        drive.tick(60.0)
    assert "out of memory" in drive.orders(Stop)[0].reason


def test_a_replica_that_cannot_load_is_started_afresh():
    drive = driven()
    drive.tell(ReplicaLost(0, 1, "it died"))
    drive.join(0, incarnation=2, version=-1)
    drive.tell(PullFailed(0, 2, 0, "out of memory"))
    assert drive.plane.state.fleet.replicas[0].state == "lost"
    assert drive.plane.state.pulling == 0


def test_a_relay_with_a_damaged_copy_is_started_afresh_and_the_replica_is_not():
    drive = driven()
    drive.tell(ReplicaLost(0, 1, "it died"))
    drive.join(0, incarnation=2, version=-1)
    relay = drive.plane.state.relays.relays[drive.plane.state.fleet.replicas[0].source]
    commands = drive.tell(PullFailed(0, 2, 0, "its checksum is wrong", damaged=True))
    given_up = [command for command in commands if isinstance(command, GiveUp)]
    assert [(one.role, one.id) for one in given_up] == [("relay", relay.id)]
    assert (relay.live, relay.versions) == (False, [])
    assert drive.plane.state.fleet.replicas[0].live
    drive.plane.check()


def test_a_second_copy_of_a_timer_does_not_start_a_second_clock():
    drive = driven()
    assert any(isinstance(command, SetTimer) for command in drive.tick(1.0))
    assert not drive.tell(TimerFired("health"))
    assert not drive.tell(TimerFired("lunch"))


def test_a_small_quota_does_not_starve_a_replica():
    """With fewer places than half a group it still asks for work when there is some again."""
    drive = Drive(config(prompts=1, size=8), replicas=16)
    drive.join_all()
    idle = [r.id for r in drive.plane.state.fleet.replicas.values() if not r.assigned]
    assert set(idle) <= set(drive.plane.state.fleet.hungry)


# ------------------------------------------------------------------------------------------------ the controller


def restart(drive):
    drive.plane = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    return drive.tell(ControllerRestarted(), after=100.0)


def test_a_snapshot_gives_back_the_same_controller():
    drive = driven()
    drive.finish(drive.running()[0])
    twin = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    request = drive.running()[0]
    assert twin.snapshot() == drive.plane.snapshot()
    answer = drive.finish(request)
    assert twin.handle(drive.now, Finished(0, drive.meta(request))) == answer
    assert twin.snapshot() == drive.plane.snapshot()


def test_after_a_restart_nobody_counts_as_silent_and_work_goes_on_where_it_is():
    drive = driven()
    commands = restart(drive)
    assert {command.timer for command in commands if isinstance(command, SetTimer)} == {"health", "repack"}
    assert all(replica.live for replica in drive.plane.state.fleet.replicas.values())
    running = drive.running(0)
    drive.join(0, incarnation=2, held=tuple(Assignment(r.trajectory, r.attempt) for r in running))
    assert drive.running(0) == running


def test_prompts_that_were_asked_for_before_a_restart_are_asked_for_again():
    drive = Drive(config(), replicas=1)
    assert len(drive.orders(FetchPrompts)) == 1
    restart(drive)
    assert len(drive.orders(FetchPrompts)) == 2


def test_the_end_of_the_run_survives_a_restart():
    """The controller may die after deciding to stop and before saying so."""
    drive = driven(run=Run(steps=1))
    while not drive.orders(Train):
        drive.finish_all()
    drive.train()
    assert restart(drive) == [Stop("all steps are done")]


def test_a_run_that_could_not_go_on_is_taken_up_again_when_it_is_resumed():
    drive = Drive(config(health=Health(max_restarts=1, backoff_s=0.0, heartbeat_s=1.0)), replicas=1).join_all()
    drive.tell(ReplicaLost(0, 1, "out of memory"))
    drive.tick(1.0)
    [stop] = drive.orders(Stop)
    assert stop.failed
    assert "out of memory" in stop.reason
    commands = drive.tell(ControllerRestarted())
    assert not [one for one in commands if isinstance(one, Stop)]
    commands = drive.tick(2.0)
    assert [one.role for one in commands if isinstance(one, Start)] == ["replica"]


# --------------------------------------------------------------------------------------- who dies before it is up


def failing_to_start(drive, lost, record, first=2):
    """It was up once; from then on every process of it ends before it has joined."""
    pauses = []
    for incarnation in range(first, first + 10):
        if not starts(drive.tick(max(0.0, record.restart_at - drive.now))):
            break
        drive.tell(lost(incarnation))
        pauses.append(record.restart_at - drive.now)
    return pauses


def beat(drive):
    """Of everybody who lives, so that only what the test breaks is broken."""
    for part in (*drive.plane.state.fleet.replicas.values(), *drive.plane.state.relays.relays.values()):
        part.last_seen = drive.now + 1e6
    drive.plane.state.training.last_seen = drive.now + 1e6


def test_a_replica_that_dies_while_it_starts_is_tried_again_and_quarantined_in_the_end():
    drive = driven()
    drive.finish(drive.running(0)[0])  # good work: the count begins anew
    beat(drive)
    drive.tell(ReplicaLost(0, 1, "it was killed"))
    replica = drive.plane.state.fleet.replicas[0]
    assert failing_to_start(drive, lambda n: ReplicaLost(0, n, f"start {n} failed"), replica) == [4.0, 8.0, 16.0]
    assert (replica.state, replica.reason) == ("quarantined", "start 4 failed")
    assert not drive.orders(Stop)


def test_a_relay_that_cannot_start_is_quarantined_and_the_others_go_on():
    drive = Drive(config(), relays=2).join_all()
    beat(drive)
    drive.tell(RelayLost(1, 1, "it was killed"))
    relay = drive.plane.state.relays.relays[1]
    assert failing_to_start(drive, lambda n: RelayLost(1, n, "no room"), relay) == [4.0, 8.0, 16.0]
    assert (relay.quarantined, relay.reason) == (True, "no room")
    assert starts(drive.tick(1000.0)) == []
    assert not drive.orders(Stop)
    drive.tell(RelayLost(0, 1, "it was killed"))
    failing_to_start(drive, lambda n: RelayLost(0, n, "no room either"), drive.plane.state.relays.relays[0])
    assert "no relay is left" in drive.orders(Stop)[0].reason
    assert "no room either" in drive.orders(Stop)[0].reason
    restart(drive)
    assert {("relay", 0), ("relay", 1)} <= set(starts(drive.tick(60.0))), "what was wrong may have been mended"


def test_a_trainer_that_cannot_start_ends_the_run_with_the_reason():
    drive = driven()
    drive.finish_all()
    drive.train()
    beat(drive)
    drive.tell(TrainerLost(1, "it was killed"))
    failing_to_start(drive, lambda n: TrainerLost(n, "out of memory"), drive.plane.state.training)
    [stop] = drive.orders(Stop)
    assert stop.failed
    assert "out of memory" in stop.reason
    restart(drive)
    assert ("trainer", 0) in starts(drive.tick(60.0))


def test_who_failed_to_start_does_not_join_any_more_but_its_successor_does():
    drive = driven()
    beat(drive)
    drive.tell(ReplicaLost(0, 1, "it was killed"))
    drive.tick(60.0)
    drive.tell(ReplicaLost(0, 2, "it was killed again"))
    drive.join(0, incarnation=2)
    assert not drive.plane.state.fleet.replicas[0].live
    drive.join(0, incarnation=3)
    assert drive.plane.state.fleet.replicas[0].live


def test_by_default_the_samples_of_a_silent_replica_are_elsewhere_within_three_seconds():
    assert Health().heartbeat_s * Health().strikes <= 2.5
