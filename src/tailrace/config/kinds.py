"""Several kinds of GPU in one fleet: how many there are of each, on which hosts, at which site.

A table `[cluster.cards.NAME]` that says `gpus` makes NAME a kind of the fleet. `tree.py` derives replicas and hosts
from here, `check.py` refuses tables that cannot work, `sim/gpus.py` reads the figures in the same tables. Nothing here
knows what a card can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, cast

COUNTS = ("gpus", "gpus_per_host", "tensor_parallel")
NAMES = ("gpu", "site")
OF_A_KIND = (*COUNTS, *NAMES)  # the rest of a table [cluster.cards.NAME] are figures of the card
MOST_GPUS = 1_000_000  # of a kind
OF_A_LINK = ("gbytes_per_s", "latency_ms")


class GpuKind(NamedTuple):
    """Cards that are alike and at one place."""

    name: str  # of its table; the card's own name, or the table says which card it is (`gpu`)
    gpus: int
    gpus_per_host: int
    ways: int  # GPUs of a replica
    site: str = ""

    def replicas_on_hosts(self, taken: int) -> Iterator[int]:
        """Replicas on each host that has any, if the trainer has `taken` cards, on the first hosts."""
        for first in range(0, self.gpus, self.gpus_per_host):
            cards = min(self.gpus_per_host, self.gpus - first)
            replicas = (cards - min(cards, max(0, taken - first))) // self.ways
            if replicas:
                yield replicas


class FleetHost(NamedTuple):
    """A host with a relay, and the replicas on it."""

    kind: GpuKind
    replicas: int


class FarLink(NamedTuple):
    """From a site to the others."""

    bytes_per_s: float = inf  # no limit but the hosts' own network
    latency_s: float = 0.0


def kinds_of(cards: Mapping[str, Any], per_host: int, ways: int) -> tuple[GpuKind, ...]:
    """The kinds of a fleet, in the order of their tables; none: `cluster.gpu` says which one there is."""
    return tuple([_kind(name, table, per_host, ways) for name, table in _counted(cards).items()])


def gpus_in(cards: Mapping[str, Any]) -> int:
    return sum([table["gpus"] for table in _counted(cards).values()])


def _counted(cards: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables = {name: cast("dict[str, Any]", table) for name, table in cards.items() if isinstance(table, dict)}
    return {name: table for name, table in tables.items() if _is_count(table.get("gpus"), 1)}


def _kind(name: str, table: Mapping[str, Any], per_host: int, ways: int) -> GpuKind:
    given = {key: table[key] for key in ("gpus_per_host", "tensor_parallel") if key in table}
    own_ways = given.get("tensor_parallel", ways)
    return GpuKind(name, table["gpus"], given.get("gpus_per_host", per_host), own_ways, table.get("site", ""))


def link_of(sites: Mapping[str, Any], site: str) -> FarLink:
    table = sites.get(site, {})
    return FarLink(table.get("gbytes_per_s", inf) * 1e9, table.get("latency_ms", 0.0) * 1e-3)


def fleet_hosts(
    kinds: Sequence[GpuKind], trainer: GpuKind, trainer_gpus: int, sites: Mapping[str, Any]
) -> tuple[FleetHost, ...]:
    """In the order in which relays pass a version on: the trainer's site first, then from the fastest link to the
    slowest, so that no site waits behind a slower one. Where nobody generates at the trainer's site, a relay alone is
    there: a version leaves the site once."""
    ordered = sorted(kinds, key=lambda kind: _distance(kind, trainer, sites))
    taken = {trainer.name: trainer_gpus}
    found = [
        FleetHost(kind, replicas) for kind in ordered for replicas in kind.replicas_on_hosts(taken.get(kind.name, 0))
    ]
    alone = not found or found[0].kind.site != trainer.site
    return (*([FleetHost(trainer, 0)] if alone else []), *found)


def _distance(kind: GpuKind, trainer: GpuKind, sites: Mapping[str, Any]) -> tuple[Any, ...]:
    link = link_of(sites, kind.site)
    return kind.site != trainer.site, -link.bytes_per_s, link.latency_s, kind.site


# --------------------------------------------------------------------------------------------------------------- rules


def bad_tables(cards: Mapping[str, Any], sites: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with single values; figures of cards are judged where they are read."""
    for name, table in cards.items():
        if not name.strip():
            yield "a kind in [cluster.cards] has no name; write one, such as [cluster.cards.H100]"
        yield from _bad_kind(f"cluster.cards.{name}", table)
    for name, table in sites.items():
        yield from _bad_link(f"cluster.sites.{name}", table)


def _bad_kind(where: str, table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"{where} wants a table; write [{where}] and below it gpus = 8"
        return
    values = cast("dict[str, Any]", table)
    for key in COUNTS:
        least = 0 if key == "gpus" else 1
        if key in values and not _is_count(values[key], least):
            yield f"{where}.{key} is {values[key]!r}; write a whole number of {least} or more"
        elif values.get(key, 0) > MOST_GPUS:
            yield f"{where}.{key} is {values[key]:,}; write {MOST_GPUS:,} or fewer"
    for key in NAMES:
        if not isinstance(values.get(key, ""), str):
            yield f"{where}.{key} is {values[key]!r}; write a name in quotes"
    left_over = [key for key in ("gpus_per_host", "tensor_parallel", "site") if key in values]
    if left_over and "gpus" not in values:
        yield f"{where}.{left_over[0]} is of a kind that the fleet has none of; write {where}.gpus too"


def _bad_link(where: str, table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"{where} wants a table; write [{where}] and below it gbytes_per_s = 0.1"
        return
    for key, value in cast("dict[str, Any]", table).items():
        if key not in OF_A_LINK:
            yield f"{where}.{key} does not exist; a site has {' and '.join(OF_A_LINK)}"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            yield f"{where}.{key} is {value!r}; write a number of 0 or more"
        elif key == "gbytes_per_s" and not value:
            yield f"{where}.{key} is 0, over which nothing arrives; write a number above 0"


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
