"""Which host gets how many trainer ranks and replicas: whole cards, and a replica never reaches over two hosts.

Two ways to divide hosts that are alike: every host gets the same (one command starts it), or some train and the others
generate. One host, and hosts of which the last has fewer cards, are filled one after the other. The search offers
splits that can be placed exactly so (`exact_splits`); for any other `placements` has the nearest. `sizing.py` says what
fits into the cards.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import msgspec

from tailrace.config import Config
from tailrace.sim.gpus import rollout_card, trainer_card


class NodeGroup(NamedTuple):
    """Hosts that are alike."""

    nodes: int
    ranks: int  # on each of them
    replicas: int


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs where. `shared`: every card trains and generates."""

    groups: tuple[NodeGroup, ...]
    ways: int  # cards of a replica
    shared: bool = False

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def ranks(self) -> int:
        return sum(group.nodes * group.ranks for group in self.groups)

    @property
    def replicas(self) -> int:
        return sum(group.nodes * group.replicas for group in self.groups)

    @property
    def ranks_per_node(self) -> int:
        return max(group.ranks for group in self.groups)


def nodes_of(config: Config) -> int:
    return ceil(config.cluster.gpus / config.cluster.gpus_per_host)


def ways_to_try(config: Config) -> list[int]:
    """Cards of a replica: what divides a host or doubles, where the model's heads can be divided so; and the user's."""
    host = min(config.cluster.gpus_per_host, config.cluster.gpus)
    doubling = {1 << power for power in range(host.bit_length())}
    ways = doubling | {each for each in range(1, host + 1) if host % each == 0}
    return sorted({each for each in ways if heads_divide(config, each)} | {config.split.tensor_parallel})


def ways_over_hosts(config: Config) -> list[int]:
    """Of replicas that are simulated only: a synchronous baseline for models that no host holds beside training."""
    host, gpus = config.cluster.gpus_per_host, config.cluster.gpus
    doubled = [host << power for power in range(1, 4)]
    return [ways for ways in doubled if ways <= gpus and config.model.heads % ways == 0]


def heads_divide(config: Config, ways: int) -> bool:
    """Every card gets the same number of query heads, and whole key heads or copies of them."""
    heads, keys = config.model.heads, config.model.kv_heads or config.model.heads
    return not heads or (heads % ways == 0 and (keys % ways == 0 or ways % keys == 0))


def two_kinds(config: Config) -> bool:
    """Trainer and replicas have different cards, so they are on different hosts."""
    cluster = config.cluster
    return trainer_card(cluster) != rollout_card(cluster)


# -------------------------------------------------------------------------------------------------------------- splits


@lru_cache(maxsize=64)
def exact_splits(config: Config, ways: int) -> list[int]:
    """Trainer sizes that leave no card unused and can be placed as they are."""
    gpus, nodes, cards = config.cluster.gpus, nodes_of(config), config.cluster.gpus_per_host
    if is_even(config):
        alike = {nodes * ranks for ranks in range(1, cards - ways + 1) if (cards - ranks) % ways == 0}
        apart = {cards * training for training in range(1, nodes) if cards % ways == 0}
        sizes = sorted(alike | apart)
    else:
        filled = ((size, _filled(config, size, ways)) for size in range(1, gpus))
        sizes = [size for size, placed in filled if size + placed.replicas * ways == gpus]
    return [size for size in sizes if size % config.split.trainer_parallel == 0]


def is_even(config: Config) -> bool:
    """Several hosts, all with the same number of cards."""
    return (
        config.cluster.gpus > config.cluster.gpus_per_host and config.cluster.gpus % config.cluster.gpus_per_host == 0
    )


# ----------------------------------------------------------------------------------------------------------- placement


def placements(config: Config) -> list[Placement]:
    """Where the ranks and replicas of this config can go, equally near to its split; none: a replica is larger than a
    host."""
    ways = config.split.tensor_parallel
    if ways > min(config.cluster.gpus, config.cluster.gpus_per_host):
        return []
    if config.colocated:
        return [_shared(config, ways)]
    if two_kinds(config):
        return [_on_own_hosts(config, ways)]
    if not is_even(config):
        return [_filled(config, config.trainer_gpus, ways)]
    return _nearest(config, list(_on_hosts(config, ways)))


def _shared(config: Config, ways: int) -> Placement:
    whole, rest = divmod(config.cluster.gpus, config.cluster.gpus_per_host)
    cards = config.cluster.gpus_per_host
    return Placement(
        groups=_kept(NodeGroup(whole, cards, cards // ways), NodeGroup(1, rest, rest // ways)), ways=ways, shared=True
    )


def _filled(config: Config, ranks: int, ways: int) -> Placement:
    """Host after host: first ranks, then replicas. The last host has the cards that are left."""
    cards = config.cluster.gpus_per_host
    whole, rest = divmod(config.cluster.gpus, cards)
    training, more = divmod(ranks, cards)
    mixed = cards if training < whole else rest  # cards of the host that has some of both
    generating = whole - training - (1 if more and training < whole else 0)
    return Placement(
        groups=_kept(
            NodeGroup(training, cards, 0),
            NodeGroup(1, more, (mixed - more) // ways if more else 0),
            NodeGroup(generating, 0, cards // ways),
            NodeGroup(1, 0, rest // ways if training < whole or not more else 0),
        ),
        ways=ways,
    )


def _kept(*groups: NodeGroup) -> tuple[NodeGroup, ...]:
    return tuple(group for group in groups if group.nodes and (group.ranks or group.replicas))


def _on_hosts(config: Config, ways: int) -> Iterator[Placement]:
    """Of several hosts: the same on each, or some for the trainer alone."""
    nodes, cards = nodes_of(config), config.cluster.gpus_per_host
    for ranks in range(1, cards - ways + 1):
        yield Placement(groups=(NodeGroup(nodes, ranks, (cards - ranks) // ways),), ways=ways)
    for training in range(1, nodes):
        generating = NodeGroup(nodes - training, 0, cards // ways)
        yield Placement(groups=(NodeGroup(training, cards, 0), generating), ways=ways)


def _nearest(config: Config, found: list[Placement]) -> list[Placement]:
    """Those that make the slower side least slow; 1 where the split is exact."""
    slowdowns = [max(config.trainer_gpus / each.ranks, config.replicas / each.replicas) for each in found]
    least = min(slowdowns)
    return [each for each, slowdown in zip(found, slowdowns, strict=True) if slowdown == least]


def _on_own_hosts(config: Config, ways: int) -> Placement:
    per_host = config.cluster.gpus_per_host
    training, generating = ceil(config.trainer_gpus / per_host), ceil(config.rollout_gpus / per_host)
    ranks, replicas = config.trainer_gpus // training, min(per_host, config.rollout_gpus) // ways
    return Placement(groups=(NodeGroup(training, ranks, 0), NodeGroup(generating, 0, replicas)), ways=ways)
