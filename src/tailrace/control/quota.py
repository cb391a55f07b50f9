"""How many samples a replica should be generating."""

from __future__ import annotations

from math import ceil

from tailrace.control.state import Context


def quota(context: Context) -> int:
    """Its share of a step, or as many as keep its KV cache full.

    Where replicas choose by cost when to pull, what has to wait for KV is better not assigned at all: it would begin
    under older weights. A schedule that interrupts pays for everything in flight at every update: there the share is
    enough.
    """
    config, live = context.config, max(1, context.fleet.live)
    if config.schedule.max_inflight:
        return max(1, ceil(config.schedule.max_inflight / live))
    share = ceil(config.workload.trajectories_per_step / live)
    full = int(config.schedule.batch_per_kv * context.fleet.fits(context.ledger.mean_tokens))
    if context.traits.interrupts or not full:
        return max(1, share)
    # where admission is what limits, a larger batch here would leave others without work
    return max(1, min(full, int(even_share(context))))


def even_share(context: Context) -> float:
    """Samples for each replica, if what is under way and what may still start were dealt out evenly."""
    ledger = context.ledger
    startable = max(0, context.admits()) * context.config.workload.group_size
    return (ledger.unfinished - ledger.scoring + startable) / max(1, context.fleet.live)
