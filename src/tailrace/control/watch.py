"""Timers and heartbeats: who has fallen silent, who is started again, which groups are overdue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from tailrace.config.tree import Config
from tailrace.control import groups, health, replicas, steps, stores, weights
from tailrace.control.fleet import Replica
from tailrace.control.relays import Relay
from tailrace.control.state import Desk, State
from tailrace.control.storage import FIRST, Store
from tailrace.control.training import Training
from tailrace.protocol import (
    TRAINER,
    ControllerRestarted,
    GiveUp,
    Heartbeats,
    HostJoined,
    HostLeft,
    Late,
    Role,
    RunStarted,
    SetTimer,
    Start,
    Stop,
    TimerFired,
)


def run_started(desk: Desk, event: RunStarted) -> None:
    _start(desk, "trainer", TRAINER, desk.training)
    for id in range(event.stores):
        _start(desk, "store", id, desk.stores.stores.setdefault(id, Store(id)))
    for id in range(event.relays):
        _start(desk, "relay", id, desk.relays.relays.setdefault(id, Relay(id)))
    for id in range(event.replicas):
        _start(desk, "replica", id, desk.fleet.replicas.setdefault(id, Replica(id)))
    _set_timers(desk)


def host_joined(desk: Desk, event: HostJoined) -> None:
    _start(desk, "relay", event.host, desk.relays.relays.setdefault(event.host, Relay(event.host)))
    if event.store:
        _start(desk, "store", event.host, desk.stores.stores.setdefault(event.host, Store(event.host)))
    for id in event.replicas:
        replica = desk.fleet.replicas.setdefault(id, Replica(id))
        desk.fleet.house(replica, event.host)
        _start(desk, "replica", id, replica)


def host_left(desk: Desk, event: HostLeft) -> None:
    """Nobody is there to start its components again. What its replicas had goes on elsewhere, from its store, unless
    that has left with it."""
    for id in desk.fleet.on_host.get(event.host, ()):
        replica = desk.fleet.replicas[id]
        if replica.live:
            replicas.lose(desk, replica, event.reason)
        replica.enter("departed", desk.now)
    store = desk.stores.stores.get(event.host)
    if store is not None and not store.departed:
        stores.depart(desk, store)
    relay = desk.relays.relays.get(event.host)
    if relay is not None:
        if relay.live:
            weights.lose_relay(desk, relay, event.reason)
        relay.departed = True
        _stop_if_no_relay_is_left(desk, event.reason)
    replicas.stop_if_none_is_left(desk, event.reason)


def _set_timers(desk: Desk) -> None:
    _look_again(desk)
    if desk.repacks:
        _set_timer(desk, "repack", desk.now + desk.config.repack.every_s)


def _look_again(desk: Desk) -> None:
    living = [record for _, _, record in _everybody(desk.state) if record.live]
    _set_timer(desk, "health", health.next_look(desk.config.health, desk.now, living))


def _everybody(state: State) -> Iterator[tuple[Role, int, Replica | Relay | Store | Training]]:
    for replica in state.fleet.replicas.values():
        yield "replica", replica.id, replica
    for relay in state.relays.relays.values():
        yield "relay", relay.id, relay
    for store in state.stores.stores.values():
        yield "store", store.id, store
    yield "trainer", TRAINER, state.training


def _set_timer(desk: Desk, timer: str, at: float) -> None:
    desk.state.timers[timer] = at
    desk.send(SetTimer(timer, at))


def timer_fired(desk: Desk, event: TimerFired) -> None:
    if desk.now < desk.state.timers.get(event.timer, inf):
        return  # one that was set before the controller was restarted, or a second copy
    if event.timer == "repack":
        desk.repack_due = True
        _set_timer(desk, "repack", desk.now + desk.config.repack.every_s)
    elif event.timer == "health":
        _find_lost(desk)
        _restart_due(desk)
        groups.deliver_overdue(desk)
        desk.more_work = True
        _look_again(desk)


def find_late(config: Config, state: State, age_s: Callable[[Role, int], float]) -> Heartbeats:
    """For the drivers, each time that the timer `health` fires. `age_s`: how long ago somebody was last heard."""
    patience = health.late_after(config.health)
    ages: list[tuple[Role, int, int, float]] = [
        (role, id, one.incarnation, age_s(role, id)) for role, id, one in _everybody(state) if one.live
    ]
    return Heartbeats(tuple([Late(*one) for one in ages if one[-1] >= patience]))


def heartbeats(desk: Desk, event: Heartbeats) -> None:
    ages = {(one.role, one.id, one.incarnation): one.age_s for one in event.late}
    for role, id, record in _everybody(desk.state):
        if record.live:
            record.last_seen = desk.now - ages.get((role, id, record.incarnation), 0.0)


def _find_lost(desk: Desk) -> None:
    config, now = desk.config.health, desk.now
    for replica in desk.fleet.replicas.values():
        reason = ""
        if replica.live and health.silent(config, now, replica):
            reason = _silence(desk, replica)
        elif replica.state in ("pulling", "releasing") and now - replica.since > config.pull_deadline_s:
            reason = f"still {replica.state} after {now - replica.since:.1f} s"
        if reason:
            desk.send(GiveUp("replica", replica.id, replica.incarnation, reason))
            replicas.lose(desk, replica, reason)
    for relay in desk.relays.relays.values():
        if relay.live and health.silent(config, now, relay):
            desk.send(GiveUp("relay", relay.id, relay.incarnation, _silence(desk, relay)))
            weights.lose_relay(desk, relay, _silence(desk, relay))
    for store in desk.stores.stores.values():
        if store.live and health.silent(config, now, store):
            desk.send(GiveUp("store", store.id, store.incarnation, _silence(desk, store)))
            stores.lose(desk, store, _silence(desk, store))
    training = desk.training
    if training.live and health.silent(config, now, training):
        desk.send(GiveUp("trainer", TRAINER, training.incarnation, _silence(desk, training)))
        steps.lose(desk, _silence(desk, training))


def _silence(desk: Desk, component: Replica | Relay | Store | Training) -> str:
    return f"no heartbeat for {desk.now - component.last_seen:.1f} s"


def _restart_due(desk: Desk) -> None:
    for replica in desk.fleet.replicas.values():
        if replica.state == "lost" and health.due(desk.now, replica):
            _restart_replica(desk, replica)
    for relay in desk.relays.relays.values():
        if not relay.live and not relay.given_up and health.due(desk.now, relay):
            _restart_relay(desk, relay)
    for store in desk.stores.stores.values():
        if not store.live and not store.departed and health.due(desk.now, store):
            _restart_store(desk, store)
    if not desk.training.live and health.due(desk.now, desk.training):
        _restart_trainer(desk)


def _restart_replica(desk: Desk, replica: Replica) -> None:
    if not health.hopeless(desk.config.health, replica):
        _start(desk, "replica", replica.id, replica)
        return
    replicas.quarantine(desk, replica, replica.reason)


def _restart_relay(desk: Desk, relay: Relay) -> None:
    if not health.hopeless(desk.config.health, relay):
        _start(desk, "relay", relay.id, relay)
        return
    relay.quarantined = True
    _stop_if_no_relay_is_left(desk, relay.reason)


def _restart_store(desk: Desk, store: Store) -> None:
    """Without the first one no run can go on: it has the prompts."""
    if not health.hopeless(desk.config.health, store):
        _start(desk, "store", store.id, store)
    elif store.id == FIRST:
        starts = f"{store.restarts} starts in a row came to nothing (health.max_restarts)"
        steps.stop(desk, f"the sample store is lost, and {starts}; the last one because: {store.reason}", failed=True)
    else:
        stores.depart(desk, store)


def _stop_if_no_relay_is_left(desk: Desk, reason: str) -> None:
    if all(one.given_up for one in desk.relays.relays.values()):
        steps.stop(desk, f"no relay is left; the last one was given up because: {reason}", failed=True)


def _restart_trainer(desk: Desk) -> None:
    if not health.hopeless(desk.config.health, desk.training):
        _start(desk, "trainer", TRAINER, desk.training)
        return
    starts = f"{desk.training.restarts} starts in a row came to nothing (health.max_restarts)"
    steps.stop(desk, f"the trainer is lost, and {starts}; the last one because: {desk.training.reason}", failed=True)


def _start(desk: Desk, role: Role, id: int, record: Replica | Relay | Store | Training) -> None:
    desk.send(Start(role, id, health.note_start(desk.config.health, desk.now, record)))


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
    for relay in desk.relays.relays.values():
        relay.restarts, relay.quarantined = 0 if relay.quarantined else relay.restarts, False
    for restarted in (desk.training, *desk.stores.stores.values()):
        if health.hopeless(desk.config.health, restarted):
            restarted.restarts = 0
    for _role, _id, record in _everybody(desk.state):
        record.last_seen = desk.now
        if record.restart_at > desk.now:
            health.plan_restart(desk.config.health, desk.now, record)
    desk.state.fetching = False
    desk.more_work = True
    _set_timers(desk)
