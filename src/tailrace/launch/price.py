"""`tailrace price`: what an hour of a replica costs from now on, in a run that goes on or is to be resumed."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import UsageError
from tailrace.logs import output
from tailrace.obs.sentences import span
from tailrace.protocol import HostJoined, ReplicaJoined, RunStarted
from tailrace.store.folder import is_being_written
from tailrace.store.journal import Journal
from tailrace.store.prices import set_price
from tailrace.types import label, parse_label

PRICED = ("replica", "relay")  # a host is known by its relay


def price_replica(run: Path, name: str, price: float) -> int:
    try:
        kind, number = parse_label(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if kind not in PRICED:
        raise UsageError(f"{name} has no price; write rN for a replica, or hN for all replicas of a host")
    journal = Journal(run)
    _refuse_unknown(journal, kind, number)
    folder = journal.path.parent
    set_price(folder, label(kind, number), price)
    when = "the run takes it up within seconds" if is_being_written(folder) else "it holds when the run is resumed"
    output(f"{name}: {price:g} dollars an hour; {when}")
    return 0


def _refuse_unknown(journal: Journal, kind: str, number: int) -> None:
    """It would never have the price, and nobody would notice."""
    known: dict[str, set[int]] = {"replica": set(), "relay": set()}
    for event in journal.events("RunStarted", "HostJoined", "ReplicaJoined"):
        if isinstance(event, RunStarted):
            known["replica"] |= set(range(event.replicas))
            known["relay"] |= set(range(event.relays))
        elif isinstance(event, HostJoined):
            known["replica"] |= set(event.replicas)
            known["relay"].add(event.host)
        elif isinstance(event, ReplicaJoined):
            known["replica"].add(event.replica)
    if number not in known[kind]:
        nouns = {"replica": "replicas", "relay": "hosts"}
        there = f"its {nouns[kind]} are {span(kind, known[kind])}" if known[kind] else f"it has no {nouns[kind]} yet"
        raise UsageError(f"{label(kind, number)} is not in this run; {there}")
