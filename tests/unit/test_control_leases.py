"""Machines that are cut off: they keep what they have for a while, and it counts once, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from drive import Drive, config
from tailrace.config.tree import Health
from tailrace.protocol import (
    Assignment,
    Command,
    CutOff,
    Finished,
    Generate,
    GiveUp,
    Heartbeats,
    HostJoined,
    Late,
    LoadWeights,
    RelayJoined,
    ReplicaJoined,
    Request,
    Start,
    TimerFired,
    VersionStored,
)

OURS, THEIRS, HOST = 0, 7, 3
SILENT_S, LEASE_S = 3.0, 60.0


def fleet(lease_s: float = LEASE_S) -> Drive:
    """One replica of our own, and one on a machine that joined; both have work."""
    health = Health(heartbeat_s=1.0, strikes=3, backoff_s=2.0, lease_s=lease_s)
    drive = Drive(config(prompts=2, health=health), replicas=1).join_all()
    drive.tell(HostJoined(HOST, (THEIRS,)))
    drive.tell(RelayJoined(HOST, 1))
    drive.tell(VersionStored(HOST, 1, 0))
    drive.tell(ReplicaJoined(THEIRS, 1, HOST, 0, 10_000, 64))
    assert drive.running(THEIRS)
    return drive


def silence(drive: Drive, seconds: float) -> list[Command]:
    """Nothing is heard of that machine; of the others it is."""
    commands: list[Command] = []
    for _ in range(int(seconds)):
        drive.now += 1.0
        known = drive.plane.state
        ages = {"replica": known.fleet.replicas[THEIRS], "relay": known.relays.relays[HOST]}
        late = [Late(role, one.id, one.incarnation, drive.now - one.last_seen) for role, one in ages.items()]  # type: ignore[arg-type]
        commands += drive.tell(Heartbeats(tuple(late)))
        commands += drive.tell(TimerFired("health"))
    return commands


def back(drive: Drive, held: list[Request], **fields: Any) -> list[Command]:
    assignments = tuple(Assignment(one.trajectory, one.attempt) for one in held)
    return drive.tell(ReplicaJoined(THEIRS, 2, HOST, 0, 10_000, 64, assignments, **fields))


def kinds(commands: list[Command], role: str) -> list[type]:
    return [type(one) for one in commands if isinstance(one, CutOff | GiveUp | Start) and one.role == role]


def test_who_is_cut_off_keeps_its_samples_and_gets_no_more():
    drive = fleet()
    had = drive.running(THEIRS)
    commands = silence(drive, 20)
    assert kinds(commands, "replica") == [CutOff]
    assert drive.running(THEIRS) == had
    assert not [one for one in commands if isinstance(one, Generate | LoadWeights) and one.replica == THEIRS]


def test_what_was_made_meanwhile_counts_once_and_the_rest_goes_on():
    drive = fleet()
    done, *rest = drive.running(THEIRS)
    silence(drive, 20)
    drive.finish(done)  # reports that were not heard come before it joins again
    before = drive.plane.state.ledger.finished_samples
    drive.tell(Finished(THEIRS, drive.meta(done)))
    assert drive.plane.state.ledger.finished_samples == before, "a second report changes nothing"
    back(drive, rest)
    assert drive.plane.state.fleet.replicas[THEIRS].state == "ready"
    assert {one.trajectory for one in rest} <= {one.trajectory for one in drive.running(THEIRS)}


def test_after_the_lease_others_have_it_and_what_comes_late_is_refused():
    drive = fleet()
    had = drive.running(THEIRS)
    commands = silence(drive, SILENT_S + LEASE_S)
    assert kinds(commands, "replica")[:2] == [CutOff, GiveUp]
    before = drive.plane.snapshot()
    drive.tell(Finished(THEIRS, drive.meta(had[0])))
    assert drive.plane.snapshot() == before
    drive.finish_all(OURS)
    again = {one.trajectory for one in drive.orders(Generate)[-1].requests} if drive.orders(Generate) else set()
    assert again | {one.trajectory for one in drive.running(OURS)}


def test_a_relay_that_is_cut_off_leaves_its_route_and_comes_back_with_what_it_has():
    drive = fleet()
    commands = silence(drive, 20)
    assert kinds(commands, "relay") == [CutOff], "it is not replaced"
    assert drive.plane.state.relays.order == []
    assert drive.plane.state.relays.tail == 0
    drive.tell(RelayJoined(HOST, 2, (0,)))
    assert drive.plane.state.relays.tail == HOST
    assert drive.plane.state.relays.relays[HOST].versions == [0]


def test_without_leases_who_is_silent_is_lost():
    commands = silence(fleet(lease_s=0.0), 20)
    assert kinds(commands, "replica")[0] is GiveUp
    assert kinds(commands, "relay")[0] is GiveUp


@pytest.mark.parametrize("at", [5, 30])
def test_our_own_replicas_have_no_lease(at: int):
    drive = fleet()
    replica = drive.plane.state.fleet.replicas[OURS]
    drive.now += at
    drive.tell(Heartbeats((Late("replica", OURS, replica.incarnation, float(at)),)))
    drive.tell(TimerFired("health"))
    assert replica.state == "lost"
