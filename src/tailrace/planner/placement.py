"""Which host gets how many trainer ranks and replicas: whole cards, and a replica never reaches over two hosts.

Two ways to divide several hosts: every host gets the same (one command starts it), or some hosts train and the others
generate. The search offers splits that one of them makes exactly (`exact_splits`); for any other `placements` has
the nearest. `sizing.py` says what fits into the cards.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import msgspec

from tailrace.config import Config
from tailrace.sim.gpus import find


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


def cards_per_node(config: Config) -> int:
    """What every host has at least, if the last one has fewer."""
    return config.cluster.gpus // nodes_of(config)


def ways_to_try(config: Config) -> list[int]:
    """Cards of a replica: what divides a host or doubles, where the model's heads can be divided so; and the user's."""
    host = min(config.cluster.gpus_per_host, config.cluster.gpus)
    doubling = {1 << power for power in range(host.bit_length())}
    ways = doubling | {each for each in range(1, host + 1) if host % each == 0}
    return sorted({each for each in ways if heads_divide(config, each)} | {config.split.tensor_parallel})


def heads_divide(config: Config, ways: int) -> bool:
    """Every card gets the same number of query heads, and whole key heads or copies of them."""
    heads, keys = config.model.heads, config.model.kv_heads or config.model.heads
    return not heads or (heads % ways == 0 and (keys % ways == 0 or ways % keys == 0))


def two_kinds(config: Config) -> bool:
    """Trainer and replicas have different cards, so they are on different hosts."""
    cluster = config.cluster
    return bool(cluster.trainer_gpu) and find(cluster.trainer_gpu) != find(cluster.gpu)


# -------------------------------------------------------------------------------------------------------------- splits


def exact_splits(config: Config, ways: int) -> list[int]:
    """Trainer sizes that leave no card unused and can be placed as they are."""
    gpus, nodes, cards = config.cluster.gpus, nodes_of(config), cards_per_node(config)
    if nodes == 1 or gpus % nodes:
        sizes = [size for size in range(1, gpus) if (gpus - size) % ways == 0]
    else:
        alike = {nodes * ranks for ranks in range(1, cards - ways + 1) if (cards - ranks) % ways == 0}
        apart = {cards * training for training in range(1, nodes) if cards % ways == 0}
        sizes = sorted(alike | apart)
    return [size for size in sizes if size % config.split.trainer_parallel == 0]


# ----------------------------------------------------------------------------------------------------------- placement


def placements(config: Config) -> list[Placement]:
    """Where the ranks and replicas of this config can go, equally near to its split; none: a replica is larger than a
    host."""
    ways, cards = config.split.tensor_parallel, cards_per_node(config)
    if ways > cards:
        return []
    if config.colocated:
        return [Placement(groups=(NodeGroup(nodes_of(config), cards, cards // ways),), ways=ways, shared=True)]
    if two_kinds(config):
        return [_on_own_hosts(config, ways)]
    if nodes_of(config) == 1:
        return [Placement(groups=(NodeGroup(1, config.trainer_gpus, config.replicas),), ways=ways)]
    return _nearest(config, list(_on_hosts(config, ways)))


def _on_hosts(config: Config, ways: int) -> Iterator[Placement]:
    """Of several hosts: the same on each, or some for the trainer alone."""
    nodes, cards = nodes_of(config), cards_per_node(config)
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
