"""What has been said of prices since (`tailrace price`), as events for control."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.control.fleet import Fleet
from tailrace.protocol import PriceChanged
from tailrace.store.prices import Prices
from tailrace.types import ReplicaId, parse_label


def price_changes(prices: Prices, fleet: Fleet) -> Iterator[PriceChanged]:
    """Of replicas that have another one so far; that of a replica itself wins over that of its host."""
    by_replica: dict[ReplicaId, float] = {}
    for name in sorted(prices):  # hosts first
        kind, number = parse_label(name)
        named = [number] if kind == "replica" else fleet.on_host.get(number, ())
        by_replica |= dict.fromkeys(named, prices[name])
    changed = {
        id: price for id, price in by_replica.items() if id in fleet.replicas and fleet.replicas[id].price != price
    }
    for price in sorted(set(changed.values())):
        yield PriceChanged(tuple([id for id, other in changed.items() if other == price]), price)
