"""The provisioning rule for a config: its figures from the cost model, and what it says in words.

For the planner, `tailrace doctor` and `benchmarks/provisioning.py`; the rule itself is `control/provisioning.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.config.tree import Config
from tailrace.control.provisioning import Provisioning, advice_on
from tailrace.control.sampling import admission_limit
from tailrace.control.schedules import traits
from tailrace.sim.cost_model import CostModel
from tailrace.sim.measured_costs import PoolCosts, cost_model_of, pools_of
from tailrace.sim.sizes import Sizes, sizes_of

__all__ = [
    "Provisioning",
    "advice_on",
    "batch_of",
    "group_s",
    "provision_of",
    "sample_s",
    "share_of",
    "training_step_s",
]


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
        picks=config.trainer.waits if traits(config).streams else 1,
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
