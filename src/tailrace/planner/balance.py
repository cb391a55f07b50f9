"""LlamaRL's balance of training and generation, from the cost model alone: no simulation.

A unit is the GPUs that work on one sample together: `m_t` of them train it, `m_g` generate it. With `eta_t` and
`eta_g` seconds per sample on one unit, B0 samples a step and G0 GPUs,

    sync   (B0 / G0) * (m_t eta_t / c + m_g eta_g)                       one memory holds both roles
    async  (B0 / G0) * max(m_t eta_t / theta, m_g eta_g / (1 - theta))   each role has its own memory

with `c` the share of its speed that a trainer keeps on shared cards (`efficiency.colocated`). The two sides of async
meet at `theta* = m_t eta_t / (m_t eta_t + m_g eta_g)`, the trainer's share of the GPUs. `eta_g` falls with
the batch, which the KV cache bounds, and so does the work in flight.

The formulas assume a generation that is always in full swing. A synchronous round is not: it ends with its longest
sample. `sync_round_s` adds that tail, so the difference between the two speed-ups is what asynchrony is about.
Left out of both: moving weights, waiting for tools, uneven ranks of the trainer.
"""

from __future__ import annotations

from math import ceil

import msgspec
import numpy as np

from tailrace.config import Config, ConfigError
from tailrace.sim.cost_model import CostModel, check_fit
from tailrace.sim.sizes import Sizes, sizes_of


class Theory(msgspec.Struct, frozen=True, kw_only=True):
    """What the closed form says of one config. Seconds; parallelism in GPUs."""

    theta_star: float
    eta_t: float  # training, per sample on one unit
    eta_g: float  # generation, per sample on one unit, at `batch_g`
    m_t: int
    m_g: int
    m_g_sync: int  # the same in sync, where weights of both roles share a card
    batch_g: float  # samples that one replica decodes together
    batch_g_sync: float
    sync_step_s: float
    async_step_s: float
    speed_up: float  # by LlamaRL's formula, which knows no tail
    sync_round_s: float  # generation of a synchronous step up to its longest sample
    tail_speed_up: float  # the speed-up with that tail counted
    longest_over_mean: float  # completions of one step


def theory(config: Config) -> Theory:
    """The balance for this config's parallelism. Sync takes the least parallelism from there on that fits."""
    check_fit(split_config(config))
    sizes = sizes_of(config.workload, config.run.seed)
    m_t, m_g = config.split.trainer_parallel, config.split.tensor_parallel
    per_gpu = config.workload.trajectories_per_step / config.cluster.gpus
    eta_t = training_seconds(config, sizes)
    theta, batch, eta_g = _balanced(config, sizes, eta_t)
    sync = _shared_config(config)
    sync_batch = _batch(sync, sizes, sync.replicas)
    sync_eta_g = generation_seconds(CostModel(sync), sizes, sync_batch)
    trained = per_gpu * m_t * eta_t / config.efficiency.colocated
    sync_step = trained + per_gpu * sync.split.tensor_parallel * sync_eta_g
    async_step = per_gpu * max(m_t * eta_t / theta, m_g * eta_g / (1 - theta))
    round_s = _round_seconds(sync, sizes, sync_batch, sync_eta_g)
    return Theory(
        theta_star=theta,
        eta_t=eta_t,
        eta_g=eta_g,
        m_t=m_t,
        m_g=m_g,
        m_g_sync=sync.split.tensor_parallel,
        batch_g=batch,
        batch_g_sync=sync_batch,
        sync_step_s=sync_step,
        async_step_s=async_step,
        speed_up=sync_step / async_step,
        sync_round_s=round_s,
        tail_speed_up=(trained + round_s) / async_step,
        longest_over_mean=float(sizes.completions.max() / sizes.completions.mean()),
    )


def balance(m_t: int, eta_t: float, m_g: int, eta_g: float) -> float:
    """theta*: the trainer's share of the GPUs at which neither side waits for the other."""
    return m_t * eta_t / (m_t * eta_t + m_g * eta_g)


def training_seconds(config: Config, sizes: Sizes) -> float:
    """eta_t: one sample on `trainer_parallel` GPUs."""
    alone = _with_split(config, trainer_gpus=config.split.trainer_parallel, colocated=False)
    return CostModel(alone).train(sizes.sequences) / len(sizes.sequences)


def generation_seconds(costs: CostModel, sizes: Sizes, batch: float) -> float:
    """eta_g: one sample on one replica whose batch is always full."""
    step = costs.decode_base(max(1, round(batch))) + costs.decode_per_kv_token * batch * sizes.kv
    return float(sizes.completions.mean()) * step / batch + costs.prefill(sizes.prefill, 0)


def split_config(config: Config) -> Config:
    """The config with its two roles on different GPUs, whatever its schedule, and some GPUs for both."""
    if config.cluster.gpus < 2:
        raise ConfigError("cluster.gpus is 1, too few for a trainer beside a replica; write 2 or more")
    trainer = config.split.trainer_gpus or max(1, round(config.cluster.gpus * config.split.trainer_share))
    return _with_split(config, trainer_gpus=min(trainer, config.cluster.gpus - 1), colocated=False)


def _with_split(config: Config, **values: int | bool) -> Config:
    return msgspec.structs.replace(config, split=msgspec.structs.replace(config.split, **values))


def _shared_config(config: Config) -> Config:
    """Both roles on all GPUs, with as many ways as it takes for the weights and one sequence to fit."""
    ways = config.split.tensor_parallel
    while True:
        shared = _with_split(config, colocated=True, tensor_parallel=ways)
        try:
            check_fit(shared)
        except ConfigError:
            ways *= 2
            if ways > config.cluster.gpus:
                raise
        else:
            return shared


def _balanced(config: Config, sizes: Sizes, eta_t: float) -> tuple[float, float, float]:
    """theta*, the batch and eta_g. The batch depends on the split (fewer replicas, more each), so it is bisected."""
    m_t, m_g, gpus = config.split.trainer_parallel, config.split.tensor_parallel, config.cluster.gpus
    apart = split_config(config)
    costs = CostModel(apart)

    def at(theta: float) -> tuple[float, float, float]:
        batch = _batch(apart, sizes, (1 - theta) * gpus / m_g)
        eta_g = generation_seconds(costs, sizes, batch)
        return balance(m_t, eta_t, m_g, eta_g), batch, eta_g

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[0] > middle else (low, middle)
    return at(low)


def _batch(config: Config, sizes: Sizes, replicas: float) -> float:
    """The largest batch of one replica: by the KV cache, by the engine, and by the work in flight."""
    in_flight: float = config.schedule.max_inflight or config.workload.trajectories_per_step
    if config.colocated:
        in_flight = config.workload.trajectories_per_step
    elif config.schedule.max_open:  # a group holds its place until its longest sample has ended
        generating = float(sizes.completions.mean() / sizes.longest.mean())
        in_flight = min(in_flight, config.schedule.max_open * config.workload.group_size * generating)
    by_memory = CostModel(config).kv_capacity / sizes.kv
    return max(1.0, min(by_memory, config.rollout.max_running, in_flight / max(replicas, 1e-9)))


def round_seconds(config: Config) -> float:
    """Generation of a step's samples in one round on this config's replicas, up to the longest."""
    sizes = sizes_of(config.workload, config.run.seed)
    batch = _batch(config, sizes, config.replicas)
    return _round_seconds(config, sizes, batch, generation_seconds(CostModel(config), sizes, batch))


def stream_seconds(config: Config) -> float:
    """The same where other samples take the places of those that end, so that batches are always full."""
    sizes = sizes_of(config.workload, config.run.seed)
    batch = _batch(config, sizes, config.replicas)
    share = config.workload.trajectories_per_step / max(1, config.replicas)
    return share * generation_seconds(CostModel(config), sizes, batch)


def _round_seconds(config: Config, sizes: Sizes, batch: float, eta_g: float) -> float:
    """A synchronous round on the replica that has the longest sample: what does not fit at once, then the drain."""
    share = max(1, ceil(config.workload.trajectories_per_step / max(1, config.replicas)))
    costs, running = CostModel(config), min(share, max(1, round(batch)))
    last = np.quantile(sizes.completions, np.arange(1, running + 1) / running)
    seconds = max(0, share - running) * eta_g + running * costs.prefill(sizes.prefill, 0)
    before = 0.0
    for length in last.tolist():
        step = costs.decode_base(running) + costs.decode_per_kv_token * running * (before + length) / 2
        seconds += (length - before) * step
        before = length
        running -= 1
    return seconds
