"""Silence, back-off, quarantine, and a controller that comes back."""

from drive import Drive, config
from tailrace.config.tree import Health, Run
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Alive,
    Assignment,
    ControllerRestarted,
    FetchPrompts,
    Finished,
    Progressed,
    PullFailed,
    ReplicaLost,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    Train,
)


def driven(replicas=2, **sections):
    return Drive(config(**sections), replicas=replicas).join_all()


def starts(commands):
    return [(command.part, command.id) for command in commands if isinstance(command, Start)]


def test_who_misses_three_heartbeats_is_lost_and_started_again():
    drive = driven()
    drive.tell(Progressed(0, 1, 0, 0, 0), after=2.0)
    drive.tell(Alive("relay", 0, 1))
    drive.tell(Alive("trainer", 0, 1))
    drive.tick(1.5)
    states = {id: replica.state for id, replica in drive.plane.state.fleet.replicas.items()}
    assert states == {0: "ready", 1: "lost"}
    assert "no heartbeat" in drive.plane.state.fleet.replicas[1].reason
    assert not drive.running(1)
    drive.tell(Progressed(0, 1, 0, 0, 0), after=4.0)
    drive.tell(Alive("relay", 0, 1))
    drive.tell(Alive("trainer", 0, 1))
    assert starts(drive.tick(0.0)) == [("replica", 1)]


def test_a_heartbeat_of_another_part_does_not_keep_the_trainer_alive():
    drive = driven()
    drive.tell(Alive("replica", 0, 1), after=3.5)
    drive.tick(0.0)
    assert not drive.plane.state.training.live


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
    drive.join(0, incarnation=2, held=tuple(Assignment(r.trajectory, r.epoch) for r in running))
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
    assert [one.part for one in commands if isinstance(one, Start)] == ["replica"]
