"""Machines that are cut off: what they have is leased to them, so they go on with it for a while and hand it in when
they are back.

    heard of -> silent for `strikes` heartbeats -> away: nothing more is given to it, and what it has stays assigned
                                                   -> joins again: both sides compare what it holds, as always
                                                   -> `lease_s` after it was last heard: lost, its samples go elsewhere

Whoever comes back is asked to introduce itself (`CutOff` hangs up on it): then its reports come first, in their order,
and count where their attempt is still the newest; then it joins. So nothing is counted twice, and what has gone stale
meanwhile, or elsewhere, is refused as any late report is.
"""

from __future__ import annotations

from tailrace.control import evaluation, groups, weights
from tailrace.control.fleet import Replica
from tailrace.control.relays import Relay
from tailrace.control.state import Context
from tailrace.control.storage import Store
from tailrace.control.training import Training
from tailrace.protocol import CutOff


def keeps(context: Context, replica: Replica, reason: str) -> bool:
    """Whether a silent replica keeps what it has for now."""
    until = _until(context, replica)
    if replica.state == "away":
        return context.now < replica.lease_until
    if not replica.leased or context.now >= until:
        return False
    weights.end_pull(context, replica)
    evaluation.lose(context, replica)  # nobody waits for an evaluation that long
    context.fleet.cut_off(context.now, replica, until, reason)
    context.fleet_changed = True
    context.send(CutOff("replica", replica.id, replica.incarnation, until, reason))
    return True


def announces(context: Context, relay: Relay, reason: str) -> bool:
    """Whether a silent relay is left alone: it is taken out of its route all the same, and joins again."""
    until = _until(context, relay)
    if not relay.leased or context.now >= until:
        return False
    context.send(CutOff("relay", relay.id, relay.incarnation, until, reason))
    return True


def postpone_restart(context: Context, relay: Relay) -> None:
    """What it holds is worth more than a new one."""
    if relay.leased:
        relay.restart_at = max(relay.restart_at, _until(context, relay))


def renew(context: Context, component: Replica | Relay | Store | Training) -> None:
    """Nobody could be heard while the controller was away."""
    if isinstance(component, Replica) and component.state == "away":
        component.lease_until = _until(context, component)


def take_back_overdue(context: Context) -> None:
    """A stranger that is there and hands nothing in must not hold up its groups: others generate what it was given."""
    for replica in context.fleet.replicas.values():
        late = [id for id, due in replica.due.items() if due <= context.now]
        samples = [context.ledger.samples[id] for id in late]
        groups.cancel(context, samples)
        for id in late:
            context.ledger.take_back(id, anew=True)


def _until(context: Context, component: Replica | Relay) -> float:
    return component.last_seen + context.config.health.lease_s
