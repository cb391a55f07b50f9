"""What one weight publish moves and how long it takes, when every trainer rank sends its own share.

The path: each rank copies its shard within the card (the trainer stall) and sends it to the relay of its host; that
relay passes it on to the master relay; the master puts the version together and broadcasts it to all relays. The master
is a relay on a host with ranks. Shares are streamed in chunks, so the links of the first two hops work at the same time
and the slowest sets the pace; the broadcast begins when the master has everything. Nothing here is simulated:
`publish_plan` is arithmetic on sizes and link rates, for the planner and for `benchmarks/published.py`.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

import msgspec

from tailrace.config.tree import Config, RelaySettings
from tailrace.sim.chain import best_chunks, broadcast_s, chunk_count, farthest
from tailrace.sim.gpus import trainer_card

TRAINED_BYTES = 4.0  # of a weight in the trainer: float32


class LinkRates(NamedTuple):
    """Bytes per second, and the start of a message in seconds."""

    network: float  # host memory to host memory, of one host
    host: float  # from a card to its host's memory, of one card
    device: float  # reads and writes within a card
    latency_s: float
    relay: float = inf  # that one relay takes in and verifies; unless it is known, links are the limit


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one publish at one place."""

    received: float
    sent: float


class PublishPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One version, from the trainer's cards to every relay. Bytes and seconds."""

    version_bytes: float
    ranks: int
    ranks_per_host: int
    relays: int
    rank: Traffic
    master: Traffic
    relay_with_ranks: Traffic | None  # not the master, and not the last of a longer chain; None: there is no such host
    relay_without_ranks: Traffic | None  # the same; None: every host has ranks
    host_memory: float  # versions kept, the one that arrives, and the copies of this host's ranks
    stall_s: float  # training stands still
    master_s: float  # from the end of the training step until the master has the version
    everywhere_s: float  # until the last relay has it


def publish_plan(
    weight_bytes: float,
    ranks: int,
    ranks_per_host: int,
    relays: int,
    links: LinkRates,
    relay: RelaySettings | None = None,
    trained_bytes: float = 0.0,
) -> PublishPlan:
    """`trained_bytes`: all weights as the trainer has them; 0: twice as large as those that are published."""
    relay = relay or RelaySettings()
    per_host = min(ranks, ranks_per_host)
    with_ranks = ceil(ranks / per_host)
    relays = max(relays, with_ranks)
    share, part = weight_bytes / ranks, weight_bytes * per_host / ranks
    targets = 1 if relay.topology == "chain" else relay.fan_out
    onwards = weight_bytes * min(targets, relays - 2)
    stall_s = ((trained_bytes or 2 * weight_bytes) / ranks + share) / links.device
    master_s = stall_s + max(_to_master_s(share, weight_bytes - part, links), weight_bytes / links.relay)
    return PublishPlan(
        version_bytes=weight_bytes,
        ranks=ranks,
        ranks_per_host=per_host,
        relays=relays,
        rank=Traffic(0.0, share),
        master=Traffic(weight_bytes, weight_bytes * min(targets, relays - 1)),
        relay_with_ranks=Traffic(part + weight_bytes, part + onwards) if with_ranks > 1 else None,
        relay_without_ranks=Traffic(weight_bytes, onwards) if relays > with_ranks else None,
        host_memory=(relay.keep_versions + 1) * weight_bytes + part,
        stall_s=stall_s,
        master_s=master_s,
        everywhere_s=master_s + _broadcast_s(weight_bytes, relays, links, relay),
    )


def _to_master_s(share: float, from_others: float, links: LinkRates) -> float:
    """All cards copy at once; what other hosts have goes through the master's link. Chunks overlap the two."""
    hops = 2 if from_others else 1
    return max(share / links.host, from_others / links.network) + hops * links.latency_s


def _broadcast_s(weight_bytes: float, relays: int, links: LinkRates, relay: RelaySettings) -> float:
    transfer_s = weight_bytes / links.network
    best = best_chunks(relays, transfer_s, links.latency_s)
    chunks = chunk_count(weight_bytes, relay.chunk_mbytes, best)
    fan_out = min(relay.fan_out, relays - 1) if relay.topology == "tree" else 1
    return broadcast_s(farthest(relays, relay), transfer_s, links.latency_s, chunks, fan_out)


def link_rates(config: Config) -> LinkRates:
    """The links of a config's cluster, from the trainer's cards on."""
    cluster = config.cluster
    card = trainer_card(cluster)
    reached = card.memory_bytes_per_s * config.efficiency.bandwidth
    network, latency_s = cluster.network_gbytes_per_s * 1e9, cluster.hop_latency_us * 1e-6
    return LinkRates(network, card.host_bytes_per_s, reached, latency_s)


def publish_of(config: Config, ranks: int, ranks_per_host: int, relays: int) -> PublishPlan:
    """The publish of a config's model."""
    model = config.model
    trained = TRAINED_BYTES * model.parameters
    links = link_rates(config)
    return publish_plan(model.weight_bytes, ranks, ranks_per_host, relays, links, config.relay, trained)
