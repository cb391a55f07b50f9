"""A replica and a newer version: what it does about one that is there, and whether one that is on its way is worth
waiting for. `update_costs.py` compares the choices; this file gathers what they depend on, and explains what was chosen
to the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from math import inf

from tailrace.control import update_costs, weights
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NONE
from tailrace.control.quota import even_share, last_pick, quota, timely_share
from tailrace.control.speed import DecodeCosts
from tailrace.control.state import Context
from tailrace.protocol import Explain, UpdateChoice
from tailrace.types import TrajectoryId, Version

MOVE = 2.0  # a move is to gain at least so many times what it costs
LOOK_AGAIN = 0.875  # of the samples that it had at the last look: from there on the choice may be another one


def choose(context: Context, replica: Replica, version: Version) -> UpdateChoice:
    """Whoever stays does so until there is a newer version; who drains is looked at again from time to time."""
    if replica.chosen_for == version and not _is_due(context, replica):
        return replica.choice
    costs = _costs(context, replica)
    if costs is None or not may_mix(context, replica):
        return "drain"
    choice, reckoned = update_costs.choose(_situation(context, replica, version, costs))
    if (choice, version) != (replica.choice, replica.chosen_for):
        drain_s = reckoned.drain_s if reckoned.drain_s < inf else None
        seconds = (reckoned.recompute_s, drain_s, reckoned.stay_s)
        context.send(Explain(replica.id, version, choice, replica.unfinished, *seconds))
    replica.choice, replica.chosen_for, replica.chosen_with = choice, version, replica.unfinished
    return choice


def _costs(context: Context, replica: Replica) -> DecodeCosts | None:
    """Where KV is kept, taking along recomputes nothing."""
    costs = context.fleet.costs(replica)
    keeps = context.config.schedule.in_flight_kv == "keep"
    return costs._replace(prefill_token=0.0) if costs is not None and keeps else costs


def _is_due(context: Context, replica: Replica) -> bool:
    few = replica.unfinished <= LOOK_AGAIN * replica.chosen_with
    return replica.choice == "drain" and (few or context.more_work)


def _situation(context: Context, replica: Replica, version: Version, costs: DecodeCosts) -> update_costs.Situation:
    """Of one that may take its work along."""
    behind = version - replica.version
    batch, elsewhere = _opportunity(context, replica, costs)
    samples = in_flight(context, replica)
    return update_costs.Situation(
        costs=costs,
        samples=samples,
        kv=_kv_in_use(replica, samples),
        batch=batch,
        elsewhere=elsewhere,
        late_share=_late_share(context, max(batch, len(replica.assigned)), behind, costs),
        pace_s=context.training.pace_s,
        lag_price=update_costs.price_of_lag(context.training.waits),
        away=replica.unfinished - len(replica.assigned),
        may_mix=True,
        may_stay=behind < context.config.schedule.max_staleness and context.admits(behind) > 0,
    )


def _late_share(context: Context, batch: float, behind: int, costs: DecodeCosts) -> list[float]:
    """How much more of what starts 1, 2, ... versions behind, in a batch of this size, comes too late than of what
    starts on the newest."""
    step_s = costs.step_s(batch, batch * context.ledger.kv_per_sample(context.config.workload.max_completion_tokens))
    in_time = [timely_share(context, lag, step_s) for lag in range(behind + 1)]
    return [1.0 - share / in_time[0] if in_time[0] else 0.0 for share in in_time[1:]]


def in_flight(context: Context, replica: Replica) -> list[update_costs.InFlight]:
    """What a replica generates, as far as can be told from its last report, the time since and the lengths of other
    samples."""
    ledger, steps, workload = context.ledger, context.steps(replica), context.config.workload
    at_stake = workload.group_size * (ledger.finished_tokens / max(1, ledger.finished_samples))  # tokens of a group
    due_s: Callable[[Version], float] = cache(partial(_due_s, context))
    samples: list[update_costs.InFlight] = []
    for id in replica.assigned:
        sample = ledger.samples[id]
        group = ledger.groups[sample.group]
        grown = sample.grown(steps)
        left = ledger.lengths.residual(grown, group.log_tokens, group.known, workload.max_completion_tokens)
        part = at_stake / max(1, group.unfinished)
        samples.append(update_costs.InFlight(grown + group.prompt.tokens, left, due_s(group.oldest), part))
    return samples


def _kv_in_use(replica: Replica, samples: list[update_costs.InFlight]) -> float:
    """As last reported, but no more than what it generates now has: much of it may have ended since."""
    return min(replica.kv_load, sum([one.context for one in samples]))


def _due_s(context: Context, oldest: Version) -> float:
    """From now until the last mini-batch is picked that may take a group whose oldest token is of this version."""
    schedule, training = context.config.schedule, context.training
    if schedule.staleness_policy != "drop" or oldest == NONE:
        return inf
    steps = oldest + schedule.max_staleness - training.version + last_pick(context)
    return steps * training.pace_s - (context.now - training.made_at)


def _opportunity(context: Context, replica: Replica, costs: DecodeCosts) -> tuple[float, float]:
    """How many samples it would generate if it were fed, and what one of them adds elsewhere, in tokens per second:
    nothing where every replica is full, and as much as to an average replica where work is scarce."""
    ledger = context.ledger
    startable = max(0, context.admits()) * context.config.workload.group_size + len(ledger.waiting)
    if not startable:
        return 0.0, 0.0
    most, even = quota(context, replica.kind), even_share(context, replica.kind)
    if even >= most:
        return most, 0.0
    step_s = costs.step_s(even, even * replica.kv_load / max(1, len(replica.assigned)))
    return even, costs.step / step_s**2  # d/dn of n / (step + n x the rest)


def may_mix(context: Context, replica: Replica) -> bool:
    return may_mix_samples(context, replica.to_generate())


def may_mix_samples(context: Context, ids: Iterable[TrajectoryId]) -> bool:
    """What is mixed already may be mixed again."""
    ledger = context.ledger
    if not context.mixed_share:
        return False
    more = sum([not ledger.samples[id].mixed for id in ids])
    return ledger.mixed + more <= context.mixed_share * ledger.next_sample


def fresher_is_coming(context: Context, replica: Replica) -> bool:
    """A version was made, and is expected on its relay so soon that what starts now would only be staler."""
    training, publish_s = context.training, context.relays.publish_s
    if not training.live or not context.traits.chooses:
        return False
    made = training.version - training.version % context.config.schedule.publish_every
    if made <= replica.version or made <= weights.wanted(context, replica):
        return False
    waited = context.now - training.made_at
    return publish_s <= update_costs.CHEAPEST * training.pace_s and waited <= 2 * publish_s


def is_worth_moving(context: Context, replica: Replica) -> bool:
    """Its work costs less to compute again elsewhere than to wait for here."""
    costs = context.fleet.costs(replica)
    if costs is None:
        return True
    batch, elsewhere = _opportunity(context, replica, costs)
    samples = in_flight(context, replica)
    kv = _kv_in_use(replica, samples)
    now = update_costs.Situation(costs, samples, kv, batch, elsewhere, may_mix=False, may_stay=False)
    recompute_s = costs.prefill_token * kv
    return update_costs.drain_s(now, enough=recompute_s) > recompute_s


def gains_by_spreading(context: Context, replica: Replica, target: Replica, count: int) -> bool:
    """What two batches decode more than one, until they end, against what the moved samples do not while their KV is
    computed again."""
    costs, there = context.fleet.costs(replica), context.fleet.costs(target)
    if costs is None or there is None:
        return False
    samples = in_flight(context, replica)
    mean = sum(one.context for one in samples) / len(samples)
    left = sum(one.left for one in samples) / len(samples)
    whole, rest = len(samples), len(samples) - count
    gain = costs.rate(rest, rest * mean) + there.rate(count, count * mean) - costs.rate(whole, whole * mean)
    step_s = costs.step_s(whole, whole * mean)
    return gain * left * step_s > MOVE * there.prefill_token * count * mean * count / step_s
