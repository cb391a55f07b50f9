"""How many samples a replica should be generating."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from tailrace.control.kinds import batch_sizes
from tailrace.control.state import Context

TO_RUN_OUT = 2.0  # times what the KV holds: where a batch has to run out before weights are pulled, some of it may wait
WAITING = 0.25  # of the sequences that an engine decodes together, so many more wait there for a place
HALF_A_STEP = 0.5  # the newest version was made so long ago when a group begins, on average


def quota(context: Context, kind: int = 0) -> int:
    """For a replica of this kind: its share of a step, or as many as keep its KV cache full.

    Where replicas choose by cost when to pull, what has to wait for KV is better not assigned at all: it would begin
    under older weights. A schedule that interrupts pays for everything in flight at every update: there the share is
    enough.
    """
    config = context.config
    if config.schedule.max_inflight:
        return max(1, ceil(_dealt(context, config.schedule.max_inflight, kind)))
    full = () if context.traits.interrupts and len(context.fleet.kinds) == 1 else _full_batches(context)
    if context.traits.interrupts or not full:
        return max(1, ceil(_dealt(context, config.workload.trajectories_per_step, kind, full)))
    # where admission is what limits, a larger batch here would leave others without work
    return max(1, min(full[kind], int(_dealt(context, _under_way(context), kind, full))))


def _dealt(context: Context, samples: float, kind: int, most: Sequence[float] = ()) -> float:
    """What a replica gets of so many samples, by its speed. Where replicas are alike, each gets as much as any other,
    whatever the most is that they should have."""
    kinds = context.fleet.kinds
    if len(kinds) == 1:
        return samples * kinds[0].pace / max(1.0, kinds[0].pace * kinds[0].members)
    if not most:
        return samples * kinds[kind].pace / max(1.0, sum([one.pace * one.members for one in kinds]))
    return batch_sizes(kinds, samples, most)[kind]


def _full_batches(context: Context) -> list[int]:
    """For each kind of replica, as many samples as keep its KV cache full; empty: it is not known yet how many."""
    kv = context.ledger.kv_per_sample(context.config.workload.max_completion_tokens)
    fill = context.config.schedule.kv_fill or (1.0 if context.mixed_share else TO_RUN_OUT)
    most = ceil(context.config.rollout.max_running * (1.0 + WAITING))
    full = [min(most, int(fill * kind.kv_capacity / kv)) for kind in context.fleet.kinds] if kv else []
    return full if all(full) else []


def even_share(context: Context, kind: int) -> float:
    """Samples for a replica, if what is under way and what may still start were dealt out by speed."""
    return _dealt(context, _under_way(context), kind)


def _under_way(context: Context) -> int:
    """Samples that are generated, and those that may still start."""
    ledger = context.ledger
    startable = max(0, context.admits()) * context.config.workload.group_size
    return ledger.unfinished - ledger.scoring - len(ledger.handed_in) + startable


def timely_share(context: Context, lag: int, step_s: float) -> float:
    """Share of the tokens that are trained before they are too old, of what starts under weights that are `lag`
    versions behind and gets a token every `step_s`. The last mini-batch that may take it is picked within the step on
    top of the last version that is near enough; where a step has one mini-batch, at its very beginning."""
    schedule, workload = context.config.schedule, context.config.workload
    if schedule.staleness_policy != "drop":
        return 1.0
    limit = (schedule.max_staleness - lag - HALF_A_STEP + last_pick(context)) * context.training.pace_s / step_s
    return context.ledger.lengths.useful_share(limit, workload.group_size, workload.max_completion_tokens)


def last_pick(context: Context) -> float:
    """When the last mini-batch of a step is picked, as a share of the step."""
    return 1.0 - 1.0 / len(context.mini_batch_sizes)
