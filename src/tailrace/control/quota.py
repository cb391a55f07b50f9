"""How many samples a replica should be generating."""

from __future__ import annotations

from math import ceil

from tailrace.control.state import Context

TO_RUN_OUT = 2.0  # times what the KV holds: where a batch has to run out before weights are pulled, some of it may wait
HALF_A_STEP = 0.5  # the newest version was made so long ago when a group begins, on average


def quota(context: Context) -> int:
    """Its share of a step, or as many as keep its KV cache full.

    Where replicas choose by cost when to pull, what has to wait for KV is better not assigned at all: it would begin
    under older weights. A schedule that interrupts pays for everything in flight at every update: there the share is
    enough.
    """
    config, live = context.config, _generating(context)
    if config.schedule.max_inflight:
        return max(1, ceil(config.schedule.max_inflight / live))
    share = ceil(config.workload.trajectories_per_step / live)
    full = _full_batch(context)
    if context.traits.interrupts or not full:
        return max(1, share)
    # where admission is what limits, a larger batch here would leave others without work
    return max(1, min(full, int(even_share(context))))


def _generating(context: Context) -> int:
    """Replicas that do, and can be given more; checkers do not."""
    checkers = [context.fleet.replicas.get(id) for id in range(context.config.strangers.checkers)]
    return max(1, context.fleet.live - context.fleet.away - sum(one is not None and one.live for one in checkers))


def _full_batch(context: Context) -> int:
    """As many samples as keep a KV cache full; 0: it is not known yet how many that are."""
    kv = context.ledger.kv_per_sample(context.config.workload.max_completion_tokens)
    fill = context.config.schedule.kv_fill or (1.0 if context.mixed_share else TO_RUN_OUT)
    return int(fill * context.fleet.fits(kv))


def even_share(context: Context) -> float:
    """Samples for each replica, if what is under way and what may still start were dealt out evenly."""
    ledger = context.ledger
    startable = max(0, context.admits()) * context.config.workload.group_size
    return (ledger.unfinished - ledger.scoring - len(ledger.handed_in) + startable) / _generating(context)


def timely_share(context: Context, lag: int, step_s: float) -> float:
    """Share of the tokens that are trained before they are too old, of what starts under weights that are `lag`
    versions behind and gets a token every `step_s`. The last mini-batch that may take it is picked within the step on
    top of the last version that is near enough; where a step has one mini-batch, at its very beginning."""
    schedule, workload = context.config.schedule, context.config.workload
    if schedule.staleness_policy != "drop":
        return 1.0
    last_pick = 1.0 - 1.0 / len(context.mini_batch_sizes)  # of a step
    limit = (schedule.max_staleness - lag - HALF_A_STEP + last_pick) * context.training.pace_s / step_s
    return context.ledger.lengths.useful_share(limit, workload.group_size, workload.max_completion_tokens)
