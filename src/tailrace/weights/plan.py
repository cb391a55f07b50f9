"""What one publication moves and how long it takes, by arithmetic: for planners, which have no cluster to measure.

Every rank copies its part and sends it to the relay of its host; relays on other hosts pass theirs on to the master;
the master assembles the version and sends it along the chain while it arrives. All of this happens at the same time,
so the slowest resource decides, and every further relay adds the time of one piece. `benchmarks/publish_plan.py`
compares it with a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.types import Struct
from tailrace.weights.checksum import PIECE


class Rates(Struct):
    """Bytes per second, all that share a resource taken together."""

    snapshot: float  # that one rank copies and converts, counted as they are published
    assemble: float  # that one relay takes in, verifies and hashes
    network: float  # of a host's link, in each direction
    round_trip_s: float = 0.0


class PublishPlan(Struct):
    """Of one version. Bytes of a rank, a relay or a host are those of the one that has most of them."""

    rank_bytes: int  # copied, kept and sent by a rank
    relay_memory_bytes: int  # of one version in a relay's shared memory
    master_in_bytes: int  # that the master takes in from other hosts
    host_out_bytes: int  # that leave a host: parts passed on, and the version for the next relay
    snapshot_s: float  # training stands still
    master_s: float  # until the master has it
    everywhere_s: float  # until the last relay has it


def publish_plan(
    weight_bytes: int, ranks_per_host: Sequence[int], relays: int, rates: Rates, hybrid: bool = False
) -> PublishPlan:
    """`weight_bytes` in the rollout precision. `ranks_per_host`: of the hosts that train, the master's first. `relays`:
    one per host of the run, in a chain. `hybrid`: the ranks of the first host have everything."""
    hosts = list(ranks_per_host[:1] if hybrid else ranks_per_host)
    of_host = [weight_bytes * ranks // sum(hosts) for ranks in hosts]
    abroad = weight_bytes - of_host[0]
    forwarded = weight_bytes if relays > 1 else 0
    passed_on = max(of_host[1:], default=0)
    rank_bytes = -(-weight_bytes // sum(hosts))
    master_s = max(weight_bytes / rates.assemble, abroad / rates.network)
    last_link_s = (passed_on + forwarded) / rates.network
    hops_s = max(0, relays - 1) * (PIECE / rates.network + rates.round_trip_s / 2)
    return PublishPlan(
        rank_bytes=rank_bytes,
        relay_memory_bytes=weight_bytes,
        master_in_bytes=abroad,
        host_out_bytes=passed_on + forwarded,
        snapshot_s=rank_bytes / rates.snapshot,
        master_s=master_s,
        everywhere_s=max(master_s, last_link_s) + hops_s,
    )
