"""How to run what the planner recommends: the settings to write, and the command that starts it.

One box: `tailrace train`. Several hosts: `tailrace launch`, where a cluster manager starts the same ranks and replicas
on every host; hosts that only generate join with `tailrace worker`. What cannot be run as it is gives no command, but a
sentence that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor
from typing import Any

import msgspec

from tailrace.config import Config
from tailrace.planner.placement import NodeGroup
from tailrace.planner.sizing import Sizing, TrainerSize, engine_bytes, fewest_ranks, longest_sequence, room
from tailrace.sim.gpus import rollout_card
from tailrace.sim.sharding import arithmetic_s

MOST_PROCESSES = 1024  # ranks of a trainer, and replicas of a run


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` by dotted key. Without `commands`, the notes say what is in the way."""

    settings: dict[str, Any]
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def launch_command(config: Config, sizing: Sizing | None, files: Sequence[str] = ()) -> LaunchCommand:
    """For a recommended config and its sizing; `files` are what the user calls his settings."""
    named = " ".join(files) or "FILE"
    if config.costs.measured:  # the processes of one machine, as [local] says
        return LaunchCommand(settings={}, commands=(f"tailrace train {named}",), notes=())
    problem = _problem(config, sizing)
    if problem or sizing is None:
        return LaunchCommand(settings={}, commands=(), notes=(problem,))
    return LaunchCommand(
        settings=dict(_settings(config, sizing)),
        commands=tuple(_commands(sizing, named)),
        notes=tuple(_notes(config, sizing)),
    )


def _problem(config: Config, sizing: Sizing | None) -> str:
    if sizing is None:
        return (
            f"a replica of {config.split.tensor_parallel} GPUs is larger than a host of "
            f"{config.cluster.gpus_per_host}; replicas do not reach over hosts"
        )
    if sizing.trainer is None:
        return _no_trainer(config, sizing)
    if max(sizing.placement.ranks, sizing.placement.replicas) > MOST_PROCESSES:
        return f"a run takes up to {MOST_PROCESSES:,} trainer ranks and as many replicas; write fewer cluster.gpus"
    return ""


def _no_trainer(config: Config, sizing: Sizing) -> str:
    if sizing.placement.shared:
        return (
            "on shared cards a replica keeps its memory while the trainer works, and both do not fit "
            f"{'one' if sizing.placement.ranks == 1 else 'each'} {rollout_card(config.cluster).name}; "
            "split the cards: split.colocated = false"
        )
    fewest = fewest_ranks(config)
    if fewest:
        ways = config.split.trainer_parallel
        again = f", which has no ways of its own (split.trainer_parallel = {ways})," if ways > 1 else ""
        return (
            f"Tailrace's trainer{again} needs at least {fewest} ranks for this model, and "
            f"{sizing.placement.ranks} are planned; write split.trainer_parallel = 1 and plan again"
        )
    return (
        f"Tailrace's trainer divides weights between its ranks, not sequences, and one of {longest_sequence(config):,} "
        f"tokens does not fit a card of {room(config) / 1e9:.0f} GB; write a smaller workload.max_completion_tokens"
    )


# ------------------------------------------------------------------------------------------------------------ settings


def _settings(config: Config, sizing: Sizing) -> Iterator[tuple[str, Any]]:
    placement, trainer = sizing.placement, sizing.trainer
    assert trainer is not None
    yield from trainer_settings(config, trainer)
    if placement.shared:
        yield "rollout.memory", _shared_memory(config, trainer)
    if placement.ways > 1:
        yield "rollout.engine", "vllm"
        yield "rollout.vllm.tensor_parallel_size", placement.ways
    if placement.nodes == 1:
        yield "local.replicas", placement.replicas


def trainer_settings(config: Config, size: TrainerSize) -> Iterator[tuple[str, Any]]:
    yield "trainer.ranks", size.ranks
    if size.ranks > size.ranks_per_host:
        yield "trainer.sharding", size.sharding
    if size.recompute != config.trainer.recompute:
        yield "trainer.recompute", size.recompute
    if size.tokens_per_batch != config.trainer.tokens_per_batch:
        yield "trainer.tokens_per_batch", size.tokens_per_batch


def _shared_memory(config: Config, size: TrainerSize) -> float:
    """The share of a card that the trainer leaves to its replica."""
    left = size.room - size.memory.total + engine_bytes(config)
    return floor(100 * left / rollout_card(config.cluster).memory_bytes) / 100


# ------------------------------------------------------------------------------------------------------------ commands


def _commands(sizing: Sizing, file: str) -> Iterator[str]:
    first, *others = sizing.placement.groups
    if sizing.placement.nodes == 1:
        yield f"tailrace train {file}"
        return
    yield f"tailrace launch ray {file} {_per_node(first)}"
    for group in others:
        where = "one more host" if group.nodes == 1 else f"each of {group.nodes} more hosts"
        ranks = f" --ranks {group.ranks}" if group.ranks else ""
        yield f"tailrace worker --join HOST:PORT --replicas {group.replicas}{ranks}    # on {where}"


def _per_node(group: NodeGroup) -> str:
    return f"--nodes {group.nodes} --replicas-per-node {group.replicas} --ranks-per-node {group.ranks}"


def _notes(config: Config, sizing: Sizing) -> Iterator[str]:
    placement = sizing.placement
    if placement.nodes > 1:
        yield "k8s and slurm take the same options as ray; with slurm the controller's machine is one of the nodes."
    if placement.ranks > placement.ranks_per_node:
        yield "Write trainer.interface too: the network between your hosts that you trust (NCCL does not encrypt)."
    if placement.ways > 1:
        yield "vLLM needs a Python of its own: write it as rollout.python."
    yield from trainer_notes(config, sizing.trainer)
    if not placement.shared and (placement.ranks, placement.replicas) != (config.trainer_gpus, config.replicas):
        yield (
            f"{config.trainer_gpus} + {config.rollout_gpus} GPUs cannot be divided evenly over the hosts; these "
            f"are {placement.ranks} ranks and {placement.replicas} replicas."
        )


def trainer_notes(config: Config, size: TrainerSize | None) -> Iterator[str]:
    if not config.model.path:
        yield "Write model.path, the directory of the model, in place of its shape."
    if config.split.trainer_parallel > 1:
        yield (
            f"split.trainer_parallel = {config.split.trainer_parallel} is simulated only: Tailrace's ranks divide "
            "weights, not sequences, so long ones take longer than the table says."
        )
    if size and size.recompute and not config.trainer.recompute:
        more = arithmetic_s(config, 1.0, recompute=True) / arithmetic_s(config, 1.0, recompute=False) - 1
        yield f"Recomputing activations is not simulated: the trainer computes {more:.0%} more than the table has."
