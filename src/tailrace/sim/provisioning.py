"""The provisioning rule for a config: its figures from the cost model, and what it says in words.

For the planner, `tailrace doctor` and `benchmarks/provisioning.py`; the rule itself is `control/provisioning.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tailrace.config.tree import Config
from tailrace.control.provisioning import Provisioning
from tailrace.control.sampling import admission_limit
from tailrace.control.schedules import traits
from tailrace.sim.cost_model import CostModel
from tailrace.sim.measured_costs import PoolCosts, cost_model_of, pools_of
from tailrace.sim.sizes import Sizes, sizes_of


def provision_of(config: Config) -> Provisioning:
    """In tokens that are trained on."""
    sizes, costs, pools = sizes_of(config.workload, config.run.seed), cost_model_of(config), pools_of(config)
    work = float(np.sum(sizes.sequences)) * config.workload.trajectories_per_step / len(sizes.sequences)
    step_s, most = training_step_s(config, costs, sizes), share_of(config, config.replicas)
    fixed = config.schedule.max_inflight or config.schedule.kind == "partial"  # else no more than is needed (`pacing`)
    share = most if fixed else _least_share(pools, sizes, work / step_s, most)
    return Provisioning(
        work=work,
        rate=_rate(pools, sizes, most),
        step_s=step_s,
        broadcast_s=costs.push() + costs.everywhere() + max(pool.costs.pull(remote=False) for pool in pools),
        generate_s=max(group_s(pool.costs, sizes, batch_of(pool.costs, sizes, share)) for pool in pools),
        staleness=config.schedule.max_staleness,
        publish_every=config.schedule.publish_every,
        picks=config.trainer.mini_batches if traits(config).streams else 1,
    )


def _rate(pools: Sequence[PoolCosts], sizes: Sizes, share: float) -> float:
    """Of all replicas, each with so many samples as far as they fit."""
    tokens = float(np.mean(sizes.sequences))
    return sum(
        pool.replicas * tokens / sample_s(pool.costs, sizes, batch_of(pool.costs, sizes, share)) for pool in pools
    )


def _least_share(pools: Sequence[PoolCosts], sizes: Sizes, rate: float, most: float) -> float:
    """Samples of a replica with which they all make this rate: more under way would only take longer."""
    low, high = 1.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _rate(pools, sizes, middle) < rate else (low, middle)
    return high


def training_step_s(config: Config, costs: CostModel, sizes: Sizes) -> float:
    """Of a step that waits for nobody: its mini-batches as they are drawn, and its share of a publish."""
    size = max(1, len(sizes.sequences) // config.trainer.mini_batches)
    drawn = [sizes.sequences[size * number : size * (number + 1)] for number in range(config.trainer.mini_batches)]
    seconds = sum(map(costs.train, drawn))
    larger = config.workload.trajectories_per_step / len(sizes.sequences)
    return seconds * larger + costs.push() / config.schedule.publish_every


def batch_of(costs: CostModel, sizes: Sizes, share: float) -> float:
    """Samples that a replica decodes together: its share, as far as its KV and engine hold it."""
    return max(1.0, min(costs.kv_capacity / sizes.kv, costs.config.rollout.max_running, share))


def share_of(config: Config, replicas: int) -> float:
    """Samples of each replica, if all that may be under way is dealt out evenly."""
    return _under_way(config) / max(1, replicas)


def _under_way(config: Config) -> float:
    """Samples that are generated at once, if there is room for them."""
    per_step = config.workload.trajectories_per_step
    if config.schedule.max_inflight or config.schedule.kind == "partial":
        return config.schedule.max_inflight or per_step
    return admission_limit(config) * config.workload.group_size


def sample_s(costs: CostModel, sizes: Sizes, batch: float) -> float:
    """Seconds of a replica per sample, at a batch that is always full."""
    return float(sizes.completions.mean()) * _step_s(costs, sizes, batch) / batch + costs.prefill(sizes.prefill, 0)


def group_s(costs: CostModel, sizes: Sizes, batch: float) -> float:
    """Until the last sample of a typical group is done."""
    return float(sizes.longest.mean()) * _step_s(costs, sizes, batch)


def _step_s(costs: CostModel, sizes: Sizes, batch: float) -> float:
    return costs.decode_base(max(1, round(batch))) + costs.decode_per_kv_token * batch * sizes.kv


def advice_on(rule: Provisioning) -> Iterator[str]:
    """What to change where the trainer would have to wait; nothing: it would not."""
    if not rule.keeps_up:
        yield (
            f"replicas generate {rule.rate:,.0f} tokens/s and the trainer could take {rule.work / rule.step_s:,.0f}, "
            "so it waits; give it fewer GPUs, or add replicas"
        )
    elif not rule.link_keeps_up:
        yield (
            f"a version takes {rule.broadcast_s:,.0f} s until it is everywhere and a step {rule.step_s:,.0f} s, so "
            f"versions queue up on the link; write schedule.publish_every = {rule.least_publish_every}"
        )
    elif not rule.holds:
        every = "every step" if rule.publish_every == 1 else f"every {rule.publish_every} steps"
        later = rule.broadcast_s + rule.generate_s
        yield (
            f"weights are published {every} and their first groups are done {later:,.0f} s later, too late for "
            f"schedule.max_staleness = {rule.staleness} and steps of {rule.step_s:,.0f} s, so the trainer "
            f"waits; write schedule.max_staleness = {rule.least_staleness}"
        )
