"""What no schedule can beat: an upper bound on the trained tokens per second of one config, and which limit sets it.

Five limits, each as the seconds that a step takes at least:

- trainer: its arithmetic and its exchanges, with no rank waiting for another, the stalls of its publications, and what
  fetching its samples takes;
- rollout: the decode roofline of the fleet, every replica with the largest batch that KV, engine and admission allow;
- admission: Little's law. So many groups may be under way (`schedule.steps_ahead`), and none takes less time than its
  longest sample does alone on a replica;
- longest sample: of schedules in rounds, which end with the longest sample of a step;
- cores: where processes share those of one machine (`cpu_sharing.py`), the processor seconds of both over all of them.

Where training and generation take turns (shared GPUs, or a barrier without anything ahead), their times add up. All of
it is from the cost model, pure, without a simulation. What is left out (pulls, moves, KV that is computed again,
uneven ranks, faults) only makes a run slower, so the bound holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from tailrace.config.tree import Config
from tailrace.control.sampling import admission_limit
from tailrace.control.schedules import Traits, traits
from tailrace.sim.cost_model import CostModel
from tailrace.sim.cpu_sharing import shared_cores, threads_of
from tailrace.sim.measured_costs import PoolCosts, cost_model_of, pools_of
from tailrace.sim.sizes import Sizes, sizes_of

Limit = Literal["trainer", "rollout", "admission", "longest sample", "cores"]
GROUPS_DRAWN, SAMPLES_DRAWN = 2048, 65_536  # at most


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The least seconds of a step by each limit (0: it does not apply), and the throughput that follows."""

    trainer_s: float
    rollout_s: float
    admission_s: float
    longest_sample_s: float
    cores_s: float
    step_s: float
    tokens_per_s: float
    limit: Limit


def bound(config: Config) -> Bound:
    """The bound of this config, its schedule's barrier included."""
    alone, kind = _alone_on_its_cores(config), traits(config)
    costs, pools = cost_model_of(alone), pools_of(alone)
    drawn = max(1, min(GROUPS_DRAWN, SAMPLES_DRAWN // config.workload.group_size))
    sizes = sizes_of(config.workload, config.run.seed, drawn, beyond_a_step=True)
    trainer = _trainer_s(config, costs, sizes)
    seconds: dict[Limit, float] = {
        "trainer": trainer,
        "rollout": _rollout_s(config, pools, sizes, kind),
        "admission": 0.0 if kind.rounds else _admission_s(config, pools, sizes, trainer),
        "longest sample": _longest_s(config, pools, sizes) if kind.rounds else 0.0,
    }
    seconds["cores"] = _cores_s(config, trainer - _waits_s(config, costs), seconds["rollout"])
    step = _step_s(config, kind, seconds, costs.switch_s if config.colocated else 0.0)
    tokens = float(np.mean(sizes.sequences)) * config.workload.trajectories_per_step
    return Bound(
        trainer_s=seconds["trainer"],
        rollout_s=seconds["rollout"],
        admission_s=seconds["admission"],
        longest_sample_s=seconds["longest sample"],
        cores_s=seconds["cores"],
        step_s=step,
        tokens_per_s=tokens / step,
        limit=max(seconds, key=lambda name: seconds[name]),
    )


def _alone_on_its_cores(config: Config) -> Config:
    """Measured costs are processor seconds where cores are shared: at best a process has all that it can use."""
    engine, trainer = threads_of(config)
    figures = config.costs
    shorter = msgspec.structs.replace(
        figures,
        decode_step=figures.decode_step / engine,
        decode_sequence=figures.decode_sequence / engine,
        decode_kv_token=figures.decode_kv_token / engine,
        prefill_token=figures.prefill_token / engine,
        load=figures.load / engine,
        train_mini_batch=figures.train_mini_batch / trainer,
        train_token=figures.train_token / trainer,
    )
    return msgspec.structs.replace(config, costs=shorter)


def _step_s(config: Config, kind: Traits, seconds: dict[Limit, float], switch_s: float) -> float:
    """Side by side, or as far as the schedule says one after the other."""
    generation = max(seconds["rollout"], seconds["longest sample"])
    if config.colocated:
        return max(seconds["trainer"] + generation + switch_s, seconds["admission"])
    after = 0.0
    if kind.rounds and not kind.behind:  # nothing of the next round is begun before this one is trained
        after = seconds["trainer"] / (config.trainer.waits if kind.streams else 1)
    return max(*seconds.values(), generation + after)


def _trainer_s(config: Config, costs: CostModel, sizes: Sizes) -> float:
    """Of a step whose mini-batches are all alike."""
    per_step = config.workload.trajectories_per_step / len(sizes.sequences)
    trained = costs.train_at_best(sizes.sequences, per_step, config.trainer.mini_batches)
    return trained + _waits_s(config, costs)


def _waits_s(config: Config, costs: CostModel) -> float:
    """In which the trainer computes nothing: publications, and samples that are handed over."""
    return costs.push() / config.schedule.publish_every + costs.fetch(config.workload.trajectories_per_step)


def _cores_s(config: Config, training_s: float, rollout_s: float) -> float:
    """All that is computed in a step, if no core is ever idle."""
    cores, (engine, trainer) = shared_cores(config), threads_of(config)
    return (training_s * trainer + rollout_s * config.replicas * engine) / cores if cores else 0.0


def _rollout_s(config: Config, pools: Sequence[PoolCosts], sizes: Sizes, kind: Traits) -> float:
    """A step's tokens, at the batch at which a replica decodes most of them per second."""
    steps = kind.behind + 1.0 if kind.rounds else admission_limit(config) / config.workload.prompts_per_step
    samples = config.workload.trajectories_per_step
    speeds = [config.rollout.speed(id) for id in range(max(1, config.replicas))]
    mean = sum(speeds) / len(speeds)
    # of several kinds, one may have more than its even share
    even = len(pools) == 1 and max(speeds) == min(speeds)
    most = steps * samples / (pools[0].replicas or 1 if even else 1)
    return samples / mean / sum(pool.replicas / _per_sample_s(pool.costs, sizes, most) for pool in pools)


def _per_sample_s(costs: CostModel, sizes: Sizes, most: float) -> float:
    """Of a replica with as large a batch as KV and engine allow, at most `most`."""
    batch = max(1.0, min(costs.kv_capacity / sizes.kv, costs.config.rollout.max_running, most))
    step = costs.decode_base(max(1, int(batch))) + costs.decode_per_kv_token * batch * sizes.kv
    return float(sizes.completions.mean()) * step / batch + costs.prefill(sizes.prefill, 0)


def _admission_s(config: Config, pools: Sequence[PoolCosts], sizes: Sizes, trainer_s: float) -> float:
    latency = float(np.mean(_alone_s(config, pools, sizes.longest))) + trainer_s / config.trainer.mini_batches
    return latency * config.workload.prompts_per_step / admission_limit(config)


def _longest_s(config: Config, pools: Sequence[PoolCosts], sizes: Sizes) -> float:
    """The longest sample of a step alone on a replica that has just got its weights."""
    groups = min(config.workload.prompts_per_step, len(sizes.longest))
    rounds = sizes.longest[: len(sizes.longest) // groups * groups].reshape(-1, groups)
    pull = min(pool.costs.pull(remote=False) for pool in pools)
    return float(np.mean(_alone_s(config, pools, rounds.max(axis=1)))) + pull


def _alone_s(config: Config, pools: Sequence[PoolCosts], tokens: np.ndarray) -> np.ndarray:
    """Seconds of samples that have a replica of the fastest kind for themselves, with their calls and their judging."""
    workload, costs = config.workload, min((pool.costs for pool in pools), key=lambda costs: costs.decode_base(1))
    waits = (workload.turns.mean - 1) * workload.turns.latency_s + workload.reward_s
    prompt = workload.prompt_tokens
    reading = costs.decode_per_kv_token * (prompt + tokens / 2)
    fastest = max(config.rollout.speeds, default=1.0)
    return waits + (costs.prefill(prompt, 0) + tokens * (costs.decode_base(1) + reading)) / fastest
