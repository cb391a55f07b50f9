"""A trainer sharded by FSDP2: what one rank holds, what the ranks exchange in a pass, and what a pass computes.

Used by the planner to size a trainer; the simulator has its own, simpler exchange (`cost_model.py`). A rank holds its
shards of the float32 weights, gradients and moments, of the policies that the loss looks back at and of the snapshot
that is published; two layers and the embeddings gathered in bfloat16, one layer's gradients until they are reduced, and
the activations of one pack. The tests hold this against the measured peaks of `benchmarks/results/gpu_trainer.json`.

`full` divides everything by all ranks; `hybrid` by the ranks of one host, so only gradients cross the network.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.config.tree import Config, Model
from tailrace.sim import gpus

Sharding = Literal["full", "hybrid"]

WEIGHT_BYTES = 4.0  # float32
COMPUTE_BYTES = 2.0  # of a weight that a pass computes with, and of an element between two layers: bfloat16
MOMENTS = 2
LAYERS_GATHERED = 2  # the one that computes and the next
VOCABULARY = 150_000  # rows of the embedding, and of the head: gathered as long as a pass takes
LOGIT_BYTES = 4.0 * 2**30  # of the largest chunk of logits, in float32
TRAINER_MEMORY = 0.92  # share of a card; the rest is for the context, NCCL and fragments
LOOKING_BACK = ("decoupled_ppo", "tis")  # losses that keep the policy of the step's start


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank's card."""

    weights: float
    gradients: float
    moments: float
    frozen: float  # policies that the loss looks back at
    snapshot: float  # of the weights, in the rollout's precision, until they are published
    gathered: float  # layers of other ranks, and gradients for them; with one rank the bfloat16 copy
    activations: float  # of one pack
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Exchange(msgspec.Struct, frozen=True):
    """Seconds of one collective over all layers."""

    gather_s: float
    reduce_s: float

    def pass_s(self, forward_passes: float) -> float:
        """Forward, backward and the extra forward passes over one pack."""
        return (2 + forward_passes) * self.gather_s + self.reduce_s


# -------------------------------------------------------------------------------------------------------------- memory


def rank_memory(config: Config, ranks: int, shards: int, tokens: int, recompute: bool) -> RankMemory:
    """`shards`: over how many ranks weights are divided. `tokens`: of the largest pack."""
    model, shard = config.model, config.model.parameters / shards
    return RankMemory(
        weights=WEIGHT_BYTES * shard,
        gradients=WEIGHT_BYTES * shard,
        moments=MOMENTS * WEIGHT_BYTES * shard,
        frozen=frozen_policies(config) * WEIGHT_BYTES * shard,
        snapshot=model.weight_bytes / ranks,
        gathered=gathered_bytes(model, shards),
        activations=tokens * activation_bytes(model, recompute),
        logits=LOGIT_BYTES,
    )


def frozen_policies(config: Config) -> int:
    """Copies of the weights: the reference of a KL term, and the policy at the start of a step of several updates."""
    trainer = config.trainer
    looks_back = trainer.loss in LOOKING_BACK or trainer.advantage == "gae"
    return int(trainer.kl > 0) + int(looks_back and trainer.mini_batches > 1)


def gathered_bytes(model: Model, shards: int) -> float:
    """With one rank: a copy of all weights in bfloat16."""
    if shards == 1:
        return COMPUTE_BYTES * model.parameters
    layer = layer_parameters(model)
    return COMPUTE_BYTES * (LAYERS_GATHERED * layer + 2 * embedding(model)) + WEIGHT_BYTES * layer


def embedding(model: Model) -> float:
    """Parameters of one matrix between tokens and hidden states, at most a quarter of the model."""
    return min(VOCABULARY * model.hidden, model.parameters / 4)


def layer_parameters(model: Model) -> float:
    """Of the whole layer, all its experts included."""
    return (model.parameters - embedding(model)) / max(1, model.layers)


def activation_bytes(model: Model, recompute: bool) -> float:
    """Of one token: all layers' activations, or what goes into each layer and the activations of one."""
    inputs = COMPUTE_BYTES * model.hidden * model.layers
    return inputs + layer_activations(model) if recompute else layer_activations(model) * model.layers


def layer_activations(model: Model) -> float:
    """Of one token in one layer: two norms in float32, attention and a gated MLP in bfloat16."""
    queries, keys = _widths(model)
    return 20.0 * model.hidden + 4.0 * (queries + keys) + 8.0 * mlp_width(model)


def mlp_width(model: Model) -> float:
    """Inner width of the MLP that one token passes, of all its experts together: what is left of the parameters."""
    queries, keys = _widths(model)
    layer = (model.active - embedding(model)) / max(1, model.layers)
    return max(0.0, layer - 2 * model.hidden * (queries + keys)) / (3 * max(1, model.hidden))


def _widths(model: Model) -> tuple[int, int]:
    """Of all query heads, and of all key heads."""
    width = model.head_dim or model.hidden // max(1, model.heads)
    return model.heads * width, (model.kv_heads or model.heads) * width


# ---------------------------------------------------------------------------------------------------------------- time


def exchange(config: Config, ranks: int, ranks_per_host: int, sharding: Sharding) -> Exchange:
    """The bandwidth bound: a host takes in what its ranks lack over its network while they share it over their links.

    Of `hybrid`, every collective of weights stays within the host; gradients are then summed over the hosts.
    """
    if ranks == 1:
        return Exchange(0.0, 0.0)
    hosts = max(1.0, ranks / ranks_per_host)
    within = min(ranks, ranks_per_host) if sharding == "hybrid" else ranks
    across = 1.0 if sharding == "hybrid" else hosts
    weights, gradients = COMPUTE_BYTES * config.model.parameters, WEIGHT_BYTES * config.model.parameters
    summed_s = 2 * gradients * (1 - 1 / hosts) / network(config) if sharding == "hybrid" else 0.0
    return Exchange(
        _collective_s(config, weights, within, across), _collective_s(config, gradients, within, across) + summed_s
    )


def _collective_s(config: Config, size: float, ranks: float, hosts: float) -> float:
    """All-gather or reduce-scatter of `size` bytes: the slower of the two kinds of links."""
    link = trainer_card(config).interconnect_bytes_per_s * config.efficiency.bandwidth
    return max(size * (1 - 1 / ranks) / link, size * (1 - 1 / hosts) / network(config))


def network(config: Config) -> float:
    return config.cluster.network_gbytes_per_s * 1e9


def trainer_card(config: Config) -> gpus.Gpu:
    return gpus.trainer_card(config.cluster)


def arithmetic_s(config: Config, tokens: float, recompute: bool) -> float:
    """Forward, backward and extra forward passes over so many tokens on one card, attention left out."""
    reached, passes, extra = config.efficiency, 4.0 if recompute else 3.0, config.trainer.forward_passes
    products = 2.0 * config.model.active * (passes / reached.training + extra / reached.forward)
    return tokens * (products / trainer_card(config).flops_like_h100 + memory_bound_s(config, passes + extra))


def memory_bound_s(config: Config, passes: float) -> float:
    """One token on one card in so many forward passes: all that is no matrix product."""
    moved = config.model.layers * layer_activations(config.model) * config.efficiency.activation_passes * passes
    return moved / (trainer_card(config).memory_bytes_per_s * config.efficiency.bandwidth)
