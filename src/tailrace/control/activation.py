"""Cheapest first: which replicas are asked to generate, where some of them have a price.

Replicas are taken in order of what a useful token costs on them, until the trainer does not have to wait (ECHO-2, arXiv
2602.02192). The others are sent home: they finish what they have in hand, and get neither work nor weights until they
are called back. Who costs nothing is never sent home, and without any price nobody is. Neither are strangers nor
checkers, nor do they count: what a stranger says of its speed must not send others home.

`choose` is a pure function of a few numbers per replica. What the trainer takes is measured, with a margin that grows
when it had to wait all the same. Whoever is at work stays as long as a little more would be needed to send it home than
to call it back, so that nobody goes to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.control.fleet import Replica
from tailrace.control.quota import timely_share
from tailrace.control.state import Context
from tailrace.protocol import Activate, PriceChanged
from tailrace.types import ReplicaId

LEAST_USEFUL = 0.05  # share of what a replica decodes: what it would bring too late, others may finish
STAY = 1.15  # times what is needed must be there without a replica before it is sent home


class Priced(NamedTuple):
    """A replica that could generate."""

    id: ReplicaId
    price: float  # dollars per hour
    rate: float  # useful tokens per second; 0: not known, it has to show it first
    active: bool

    @property
    def cost(self) -> float:
        """Dollars for a million useful tokens."""
        return self.price / 3600.0 * 1e6 / self.rate if self.rate else 0.0


def choose(replicas: Sequence[Priced], needed: float) -> set[ReplicaId]:
    """Who is to generate, if so many useful tokens per second are needed; 0: that is not known, and all are."""
    if not needed:
        return {one.id for one in replicas}
    ordered = sorted(replicas, key=lambda one: (one.cost, one.id))
    at_work = {one.id for one in replicas if one.active}
    return _first(ordered, needed) | (at_work & _first(ordered, STAY * needed))


def _first(ordered: Sequence[Priced], needed: float) -> set[ReplicaId]:
    """As many as are needed, and all that cost nothing."""
    chosen: set[ReplicaId] = set()
    there = 0.0
    for one in ordered:
        if not chosen or there < needed or not one.cost:
            chosen.add(one.id)
            there += one.rate
    return chosen


def price_changed(context: Context, event: PriceChanged) -> None:
    for replica in [context.fleet.replicas[id] for id in event.replicas if id in context.fleet.replicas]:
        replica.price = event.price
    context.fleet_changed = True


def step_made(context: Context) -> None:
    training = context.training
    waited = 1.0 - training.train_s / training.pace_s if training.pace_s else 0.0
    context.state.margin.step_made(training.version, waited)
    context.fleet_changed = True


def decide(context: Context) -> None:
    """Send home whom it takes no more, and call back whom it does."""
    live = [one for one in context.fleet.replicas.values() if one.live and one.own and one.state != "away"]
    if not any(one.price for one in live) and not any(one.resting for one in live):
        return
    priced = {one.id: _priced(context, one) for one in live}
    needed = _needed(context)
    chosen = choose(list(priced.values()), needed)
    there = sum(priced[id].rate for id in chosen)
    for replica in live:
        if replica.resting == (replica.id in chosen):
            cost = priced[replica.id].cost
            context.send(Activate(replica.id, replica.incarnation, replica.id in chosen, cost, needed, there))
            _switch(context, replica)
    context.fleet.sort_out()


def _switch(context: Context, replica: Replica) -> None:
    replica.resting = not replica.resting
    context.more_work = True
    if replica.resting:
        context.fleet.hungry.pop(replica.id, None)
    else:
        context.touch(replica)


def _needed(context: Context) -> float:
    """Useful tokens per second, so that the trainer does not wait; 0: not known yet, or all wait for an evaluation."""
    ledger, training = context.ledger, context.training
    if not training.train_s or not ledger.finished_samples or context.evaluation.ending:
        return 0.0
    tokens = (ledger.finished_tokens - ledger.finished_prompts) / ledger.finished_samples
    return context.state.margin.value * tokens * context.config.workload.trajectories_per_step / training.train_s


def _priced(context: Context, replica: Replica) -> Priced:
    useful = timely_share(context, 0, context.fleet.batch / replica.rate) if replica.rate else 0.0
    return Priced(replica.id, replica.price, replica.rate * max(useful, LEAST_USEFUL), not replica.resting)
