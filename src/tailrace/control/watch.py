"""Timers and heartbeats: who has fallen silent, who is started again, which groups are overdue."""

from __future__ import annotations

from math import inf

from tailrace.control import groups, health, replicas, steps, weights
from tailrace.control.fleet import Replica
from tailrace.control.relays import Relay
from tailrace.control.state import Desk
from tailrace.control.training import Training
from tailrace.protocol import TRAINER, Alive, ControllerRestarted, Part, RunStarted, SetTimer, Start, Stop, TimerFired


def run_started(desk: Desk, event: RunStarted) -> None:
    _start(desk, "trainer", TRAINER, desk.training)
    for id in range(event.relays):
        _start(desk, "relay", id, desk.relays.relays.setdefault(id, Relay(id)))
    for id in range(event.replicas):
        _start(desk, "replica", id, desk.fleet.replicas.setdefault(id, Replica(id)))
    _set_timers(desk)


def _set_timers(desk: Desk) -> None:
    _set_timer(desk, "health", desk.config.health.heartbeat_s)
    if desk.repacks:
        _set_timer(desk, "repack", desk.config.repack.every_s)


def _set_timer(desk: Desk, timer: str, after: float) -> None:
    desk.state.timers[timer] = desk.now + after
    desk.send(SetTimer(timer, desk.now + after))


def timer_fired(desk: Desk, event: TimerFired) -> None:
    if desk.now < desk.state.timers.get(event.timer, inf):
        return  # one that was set before the controller was restarted, or a second copy
    if event.timer == "repack":
        desk.repack_due = True
        _set_timer(desk, "repack", desk.config.repack.every_s)
    elif event.timer == "health":
        _find_lost(desk)
        _restart_due(desk)
        groups.deliver_overdue(desk)
        desk.more_work = True
        _set_timer(desk, "health", desk.config.health.heartbeat_s)


def alive(desk: Desk, event: Alive) -> None:
    if event.part == "relay":
        relay = desk.relays.current(event.id, event.incarnation)
        if relay is not None:
            relay.last_seen = desk.now
    elif event.part == "trainer" and event.incarnation == desk.training.incarnation:
        desk.training.last_seen = desk.now


def _find_lost(desk: Desk) -> None:
    config, now = desk.config.health, desk.now
    for replica in desk.fleet.replicas.values():
        if replica.live and health.silent(config, now, replica):
            replicas.lose(desk, replica, f"no heartbeat for {now - replica.last_seen:.1f} s")
        elif replica.state in ("pulling", "releasing") and now - replica.since > config.pull_deadline_s:
            replicas.lose(desk, replica, f"still {replica.state} after {now - replica.since:.1f} s")
    for relay in desk.relays.relays.values():
        if relay.live and health.silent(config, now, relay):
            weights.lose_relay(desk, relay, f"no heartbeat for {now - relay.last_seen:.1f} s")
    if desk.training.live and health.silent(config, now, desk.training):
        steps.lose(desk, f"no heartbeat for {now - desk.training.last_seen:.1f} s")


def _restart_due(desk: Desk) -> None:
    for replica in desk.fleet.replicas.values():
        if replica.state == "lost" and health.due(desk.now, replica):
            _restart_replica(desk, replica)
    for relay in desk.relays.relays.values():
        if not relay.live and health.due(desk.now, relay):
            _start(desk, "relay", relay.id, relay)
    if not desk.training.live and health.due(desk.now, desk.training):
        _start(desk, "trainer", TRAINER, desk.training)


def _restart_replica(desk: Desk, replica: Replica) -> None:
    if not health.hopeless(desk.config.health, replica):
        _start(desk, "replica", replica.id, replica)
        return
    replica.enter("quarantined", desk.now)
    if all(one.state == "quarantined" for one in desk.fleet.replicas.values()):
        steps.stop(desk, f"no replica is left; the last one was given up because: {replica.reason}", failed=True)


def _start(desk: Desk, part: Part, id: int, record: Replica | Relay | Training) -> None:
    desk.send(Start(part, id, health.note_start(desk.config.health, desk.now, record)))


def controller_restarted(desk: Desk, _: ControllerRestarted) -> None:
    """Nobody could be heard while the controller was away, and its last orders may not have been sent."""
    if desk.state.stopped and not desk.state.failed:
        desk.send(Stop(desk.state.stopped))
        return
    desk.state.stopped, desk.state.failed = "", False
    for replica in desk.fleet.replicas.values():
        if replica.state == "quarantined":  # what was wrong with it may have been mended
            replica.enter("lost", desk.now)
            replica.restarts = 0
    for part in (*desk.fleet.replicas.values(), *desk.relays.relays.values(), desk.training):
        part.last_seen = desk.now
        if part.restart_at > desk.now:
            health.plan_restart(desk.config.health, desk.now, part)
    desk.state.fetching = False
    desk.more_work = True
    _set_timers(desk)
