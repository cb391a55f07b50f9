"""How a recommended split is run: the trainer's sharding, recomputation and packs, and what a weight publish moves.

Of all ways to run the trainer that fit into its cards, `size_trainer` takes the one whose mini-batch is fastest, and
among equally fast ones that which changes least, or on shared cards that which leaves most to the replicas. A pass over
a pack takes its arithmetic or its exchange, whichever is longer: FSDP2 gathers the next layer while one computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

import msgspec

from tailrace.config import Config
from tailrace.planner.placement import Placement, placements
from tailrace.sim.cost_model import ENGINE_RESERVE, kv_bytes_per_token
from tailrace.sim.publishing import PublishPlan, publish_of
from tailrace.sim.sharding import (
    TRAINER_MEMORY,
    RankMemory,
    Sharding,
    arithmetic_s,
    exchange,
    rank_memory,
    trainer_card,
)
from tailrace.sim.sizes import sizes_of

AS_FAST = 1.01  # ways to train this close count as equal


class TrainerSize(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train that fits. Seconds are of one mini-batch on one rank."""

    ranks: int
    ranks_per_host: int
    sharding: Sharding
    recompute: bool
    tokens_per_batch: int
    memory: RankMemory
    room: float  # bytes of a card that the rank may use
    passes: int
    arithmetic_s: float  # of one pass
    exchange_s: float

    @property
    def mini_batch_s(self) -> float:
        return self.passes * max(self.arithmetic_s, self.exchange_s)


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """A split on hosts. `trainer` is None where no way to train fits."""

    placement: Placement
    trainer: TrainerSize | None
    publish: PublishPlan


def size(config: Config) -> Sizing | None:
    """Of the equally near placements the one that trains fastest; None where a replica is larger than a host."""
    sizes = sizes_of(config.workload, config.run.seed)
    tokens = sum(sizes.sequences) / len(sizes.sequences)
    return _fastest([_sized(config, placement, tokens) for placement in placements(config)])


def _fastest(found: list[Sizing]) -> Sizing | None:
    """The first that is about as fast as any: hosts that are alike come first, which one command starts."""
    seconds = [each.trainer.mini_batch_s if each.trainer else inf for each in found]
    least = min(seconds, default=inf)
    return next((each for each, took in zip(found, seconds, strict=True) if took <= AS_FAST * least), None)


def _sized(config: Config, placement: Placement, mean_tokens: float) -> Sizing:
    return Sizing(
        placement=placement,
        trainer=size_trainer(config, placement, mean_tokens),
        publish=publish_of(config, placement.ranks, placement.ranks_per_node, placement.nodes),
    )


# ------------------------------------------------------------------------------------------------------------- trainer


def size_trainer(config: Config, placement: Placement, mean_tokens: float) -> TrainerSize | None:
    fitting = [each for each in _ways_to_train(config, placement, mean_tokens) if each.memory.total <= each.room]
    fastest = min((each.mini_batch_s for each in fitting), default=0.0)
    close = [each for each in fitting if each.mini_batch_s <= AS_FAST * fastest]
    if placement.shared:  # what the trainer does not need is KV of the replicas
        return min(close, key=lambda each: each.memory.total, default=None)
    return min(close, key=lambda each: (_changes(config, each), each.mini_batch_s), default=None)


def _changes(config: Config, size: TrainerSize) -> int:
    trainer = config.trainer
    own = (trainer.sharding, trainer.recompute, trainer.tokens_per_batch)
    return sum(a != b for a, b in zip(own, (size.sharding, size.recompute, size.tokens_per_batch), strict=True))


def _ways_to_train(config: Config, placement: Placement, mean_tokens: float) -> Iterator[TrainerSize]:
    ranks, per_host = placement.ranks, placement.ranks_per_node
    shardings: tuple[Sharding, ...] = ("full", "hybrid") if ranks > per_host else ("full",)
    share = mean_tokens * config.workload.trajectories_per_step / config.trainer.mini_batches / ranks
    for sharding in shardings:
        exchange_s = exchange(config, ranks, per_host, sharding).pass_s(config.trainer.forward_passes)
        for recompute in sorted({config.trainer.recompute, True}):
            for tokens in token_budgets(config):
                passes = max(1, ceil(share / tokens))
                yield TrainerSize(
                    ranks=ranks,
                    ranks_per_host=per_host,
                    sharding=sharding,
                    recompute=recompute,
                    tokens_per_batch=tokens,
                    memory=rank_memory(config, ranks, ranks if sharding == "full" else per_host, tokens, recompute),
                    room=room(config, placement.shared),
                    passes=passes,
                    arithmetic_s=arithmetic_s(config, share / passes, recompute),
                    exchange_s=exchange_s,
                )


def token_budgets(config: Config) -> list[int]:
    """Sizes of a pack: the user's, larger and smaller ones, but the longest sequence goes through in one piece."""
    own, longest = config.trainer.tokens_per_batch, longest_sequence(config)
    sizes = {own // 8, own // 4, own // 2, own, 2 * own, 4 * own, longest}
    return sorted(each for each in sizes if each >= longest)


def longest_sequence(config: Config) -> int:
    return config.workload.prompt_tokens + config.workload.max_completion_tokens


def room(config: Config, shared: bool = False) -> float:
    """Bytes of a card for one rank; on a shared card a replica keeps its memory while the trainer works."""
    return trainer_card(config).memory_bytes * TRAINER_MEMORY - (engine_bytes(config) if shared else 0.0)


def engine_bytes(config: Config) -> float:
    """The least of a card that a replica needs: its share of the weights and of one sequence."""
    ways = config.split.tensor_parallel
    held = config.model.weight_bytes + longest_sequence(config) * kv_bytes_per_token(config, ways)
    return held / ways + ENGINE_RESERVE


# -------------------------------------------------------------------------------------------------------------- limits


def fewest_ranks(config: Config, shared: bool = False) -> int:
    """The least number of ranks over which training fits, all memory saved that can be; 0: none would be enough."""
    limit = room(config, shared)
    if _leanest(config, 1).total <= limit:
        return 1
    sharded = _leanest(config, 2)
    divided = sharded.weights + sharded.gradients + sharded.moments + sharded.frozen + sharded.snapshot
    left = limit - (sharded.total - divided)
    return max(2, ceil(2 * divided / left)) if left > 0 else 0


def _leanest(config: Config, ranks: int) -> RankMemory:
    return rank_memory(config, ranks, ranks, longest_sequence(config), recompute=True)
