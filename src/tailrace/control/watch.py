"""Timers and heartbeats: who has fallen silent, who is started again, which groups are overdue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from tailrace.config.tree import Config
from tailrace.control import evaluation, groups, health, leases, replicas, steps, stores, weights
from tailrace.control.fleet import Replica
from tailrace.control.relays import Relay
from tailrace.control.state import Context, State
from tailrace.control.storage import FIRST, Store
from tailrace.control.training import Training
from tailrace.protocol import (
    TRAINER,
    ControllerRestarted,
    Dismiss,
    GiveUp,
    Heartbeats,
    HostJoined,
    HostLeft,
    Late,
    Role,
    RunStarted,
    Start,
    Stop,
    TimerFired,
)


def run_started(context: Context, event: RunStarted) -> None:
    _start(context, "trainer", TRAINER, context.training)
    for id in range(event.stores):
        _start(context, "store", id, context.stores.stores.setdefault(id, Store(id)))
    for id in range(event.relays):
        _start(context, "relay", id, context.relays.relays.setdefault(id, Relay(id)))
    for id in range(event.replicas):
        replica = context.fleet.replicas.setdefault(id, Replica(id))
        replica.checks = id < context.config.strangers.checkers
        _start(context, "replica", id, replica)
    _set_timers(context)


def host_joined(context: Context, event: HostJoined) -> None:
    if event.worker:
        worker = context.state.strangers.welcome(event.worker, event.salt, event.host)
        if worker.excluded:
            context.send(Dismiss(worker.name, worker.excluded))
            return
    site = "" if event.worker else event.site  # what a stranger says of its place makes it nobody's neighbour
    relay = context.relays.relays.setdefault(event.host, Relay(event.host, site=site))
    relay.foreign, relay.leased = bool(event.worker), True
    _start(context, "relay", event.host, relay)
    if event.store:
        _start(context, "store", event.host, context.stores.stores.setdefault(event.host, Store(event.host)))
    for id in event.replicas:
        replica = context.fleet.replicas.setdefault(id, Replica(id))
        replica.worker, replica.leased = event.worker, True
        context.fleet.house(replica, event.host)
        _start(context, "replica", id, replica)


def host_left(context: Context, event: HostLeft) -> None:
    """Nobody is there to start its components again. What its replicas had goes on elsewhere, from its store, unless
    that has left with it."""
    for id in context.fleet.on_host.get(event.host, ()):
        replica = context.fleet.replicas[id]
        if replica.live:
            replicas.lose(context, replica, event.reason)
        replica.enter("departed", context.now)
    store = context.stores.stores.get(event.host)
    if store is not None and not store.departed:
        stores.depart(context, store)
    relay = context.relays.relays.get(event.host)
    if relay is not None:
        if relay.live:
            weights.lose_relay(context, relay, event.reason)
        relay.departed = True
        _stop_if_no_relay_is_left(context, event.reason)
    replicas.stop_if_none_is_left(context, event.reason)


def _set_timers(context: Context) -> None:
    _look_again(context)
    if context.repacks or context.relieves:
        context.set_timer("repack", context.now + context.config.repack.every_s)


def _look_again(context: Context) -> None:
    records = [record for _, _, record in _all_components(context.state) if record.live]
    living = [record for record in records if getattr(record, "state", "") != "away"]
    context.set_timer("health", health.next_look(context.config.health, context.now, living))


def _all_components(state: State) -> Iterator[tuple[Role, int, Replica | Relay | Store | Training]]:
    for replica in state.fleet.replicas.values():
        yield "replica", replica.id, replica
    for relay in state.relays.relays.values():
        yield "relay", relay.id, relay
    for store in state.stores.stores.values():
        yield "store", store.id, store
    yield "trainer", TRAINER, state.training


def timer_fired(context: Context, event: TimerFired) -> None:
    if context.now < context.state.timers.get(event.timer, inf):
        return  # one that was set before the controller was restarted, or a second copy
    if event.timer == "repack":
        context.repack_due = True
        context.set_timer("repack", context.now + context.config.repack.every_s)
    elif event.timer == "health":
        _find_lost(context)
        leases.take_back_overdue(context)
        _restart_due(context)
        groups.deliver_overdue(context)
        context.more_work = True
        _look_again(context)


def find_late(config: Config, state: State, age_s: Callable[[Role, int], float]) -> Heartbeats:
    """For the drivers, each time that the timer `health` fires. `age_s`: how long ago somebody was last heard."""
    patience = health.late_after(config.health)
    ages: list[tuple[Role, int, int, float]] = [
        (role, id, one.incarnation, age_s(role, id)) for role, id, one in _all_components(state) if one.live
    ]
    return Heartbeats(tuple([Late(*one) for one in ages if one[-1] >= patience]))


def heartbeats(context: Context, event: Heartbeats) -> None:
    ages = {(one.role, one.id, one.incarnation): one.age_s for one in event.late}
    for role, id, record in _all_components(context.state):
        if record.live:
            record.last_seen = context.now - ages.get((role, id, record.incarnation), 0.0)


def _find_lost(context: Context) -> None:
    config, now = context.config.health, context.now
    for replica in context.fleet.replicas.values():
        reason = ""
        if replica.live and health.silent(config, now, replica):
            reason = "" if leases.keeps(context, replica, _silence(context, replica)) else _silence(context, replica)
        elif replica.state in ("pulling", "releasing") and now - replica.since > config.pull_deadline_s:
            reason = f"still {replica.state} after {now - replica.since:.1f} s"
        if reason:
            context.send(GiveUp("replica", replica.id, replica.incarnation, reason))
            replicas.lose(context, replica, reason)
    for relay in context.relays.relays.values():
        if relay.live and health.silent(config, now, relay):
            if not leases.announces(context, relay, _silence(context, relay)):
                context.send(GiveUp("relay", relay.id, relay.incarnation, _silence(context, relay)))
            weights.lose_relay(context, relay, _silence(context, relay))
            leases.postpone_restart(context, relay)
    for store in context.stores.stores.values():
        if store.live and health.silent(config, now, store):
            context.send(GiveUp("store", store.id, store.incarnation, _silence(context, store)))
            stores.lose(context, store, _silence(context, store))
    training = context.training
    if training.live and health.silent(config, now, training):
        context.send(GiveUp("trainer", TRAINER, training.incarnation, _silence(context, training)))
        steps.lose(context, _silence(context, training))


def _silence(context: Context, component: Replica | Relay | Store | Training) -> str:
    return f"no heartbeat for {context.now - component.last_seen:.1f} s"


def _restart_due(context: Context) -> None:
    for replica in context.fleet.replicas.values():
        if replica.state == "lost" and health.due(context.now, replica):
            _restart_replica(context, replica)
    for relay in context.relays.relays.values():
        if not relay.live and not relay.given_up and health.due(context.now, relay):
            _restart_relay(context, relay)
    for store in context.stores.stores.values():
        if not store.live and not store.departed and health.due(context.now, store):
            _restart_store(context, store)
    if not context.training.live and health.due(context.now, context.training):
        _restart_trainer(context)


def _restart_replica(context: Context, replica: Replica) -> None:
    if not health.hopeless(context.config.health, replica):
        _start(context, "replica", replica.id, replica)
        return
    replicas.quarantine(context, replica, replica.reason)


def _restart_relay(context: Context, relay: Relay) -> None:
    if not health.hopeless(context.config.health, relay):
        _start(context, "relay", relay.id, relay)
        return
    relay.quarantined = True
    _stop_if_no_relay_is_left(context, relay.reason)


def _restart_store(context: Context, store: Store) -> None:
    """Without the first one no run can go on: it has the prompts."""
    if not health.hopeless(context.config.health, store):
        _start(context, "store", store.id, store)
    elif store.id == FIRST:
        starts = f"{store.restarts} starts in a row came to nothing (health.max_restarts)"
        steps.stop(
            context, f"the sample store is lost, and {starts}; the last one because: {store.reason}", failed=True
        )
    else:
        stores.depart(context, store)


def _stop_if_no_relay_is_left(context: Context, reason: str) -> None:
    if all(one.given_up for one in context.relays.relays.values()):
        steps.stop(context, f"no relay is left; the last one was given up because: {reason}", failed=True)


def _restart_trainer(context: Context) -> None:
    if not health.hopeless(context.config.health, context.training):
        _start(context, "trainer", TRAINER, context.training)
        return
    starts = f"{context.training.restarts} starts in a row came to nothing (health.max_restarts)"
    steps.stop(
        context, f"the trainer is lost, and {starts}; the last one because: {context.training.reason}", failed=True
    )


def _start(context: Context, role: Role, id: int, record: Replica | Relay | Store | Training) -> None:
    context.send(Start(role, id, health.note_start(context.config.health, context.now, record)))


def controller_restarted(context: Context, _: ControllerRestarted) -> None:
    """Nobody could be heard while the controller was away, and its last orders may not have been sent."""
    if context.state.stopped and not context.state.failed:
        context.send(Stop(context.state.stopped))
        return
    if context.state.failed:
        context.state.history.easy_in_vain = context.state.history.hard_in_vain = 0
    context.state.stopped, context.state.failed = "", False
    evaluation.restarted(context)
    for replica in context.fleet.replicas.values():
        if replica.state == "quarantined":  # what was wrong with it may have been mended
            replica.enter("lost", context.now)
            replica.restarts = 0
    for relay in context.relays.relays.values():
        relay.restarts, relay.quarantined = 0 if relay.quarantined else relay.restarts, False
    for restarted in (context.training, *context.stores.stores.values()):
        if health.hopeless(context.config.health, restarted):
            restarted.restarts = 0
    for _role, _id, record in _all_components(context.state):
        record.last_seen = context.now
        leases.renew(context, record)
        if record.restart_at > context.now:
            health.plan_restart(context.config.health, context.now, record)
    context.state.fetching = False
    context.more_work = True
    _set_timers(context)
