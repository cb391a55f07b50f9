"""No slow replica holds a group up: what it would bring too late goes on at a faster one.

A sample is late where its replica needs longer for what it is expected to get yet than its group has: until no step may
train on it any more, or, in a round, until the faster replicas are done with theirs. Moving it costs the prefill of its
context on the faster replica. It keeps its version, unless samples may be taken along to another one.
"""

from __future__ import annotations

from math import inf

from tailrace.control.fleet import Replica
from tailrace.control.kinds import ALIKE
from tailrace.control.ledger import Sample
from tailrace.control.state import Context

SURE = 2.0  # times as long as expected a sample may take: lengths are not known


def late_samples(context: Context, source: Replica, slack_s: float = inf) -> list[Sample]:
    """Those of a replica that will not be in time, the latest first."""
    step_s = _step_s(context, source)
    ledger, steps = context.ledger, context.steps(source)
    most = context.config.workload.max_completion_tokens
    found: list[tuple[float, Sample]] = []
    for sample in [ledger.samples[id] for id in source.assigned]:
        needed = step_s * ledger.expected_left(sample, steps, most)
        over = SURE * needed - min(slack_s, _left_s(context, sample))
        if over > 0.0:
            found.append((over, sample))
    return [sample for _, sample in sorted(found, key=lambda one: (-one[0], one[1].id))]


def _step_s(context: Context, replica: Replica) -> float:
    """Of its decode steps, as it is loaded now."""
    costs = context.fleet.costs(replica)
    return costs.step_s(len(replica.assigned), replica.kv_load) if costs else 0.0


def _left_s(context: Context, sample: Sample) -> float:
    """Until the last step that may train on its group has picked its last mini-batch."""
    if context.traits.rounds:
        return inf
    training, group = context.training, context.ledger.groups[sample.group]
    versions = group.oldest + context.config.schedule.max_staleness - training.version
    return (versions + 1.0) * training.pace_s - (context.now - training.made_at)


def round_ends_s(context: Context, ready: list[Replica], source: Replica) -> float:
    """When the replicas that are faster than this one will have generated theirs."""
    if not context.traits.rounds:
        return inf
    ledger, most = context.ledger, context.config.workload.max_completion_tokens
    faster = [one for one in ready if is_faster(context, one, source)]
    longest = [
        max((ledger.expected_left(ledger.samples[id], context.steps(one), most) for id in one.assigned), default=0.0)
        for one in faster
    ]
    return max((_step_s(context, one) * left for one, left in zip(faster, longest, strict=True)), default=inf)


def is_faster(context: Context, one: Replica, other: Replica) -> bool:
    return context.fleet.pace(one) > ALIKE * context.fleet.pace(other)


def may_take(context: Context, target: Replica, source: Replica) -> bool:
    """It is faster, and of the same version or of a newer one that samples may be taken along to."""
    if not is_faster(context, target, source) or target.version < source.version:
        return False
    return target.version == source.version or context.mixed_share > 0.0
