"""What a mini-batch consists of: samples, what they are worth, and how much each counts. No tensors here.

`step.py` calls `mini_batch` with the groups of one part; every rank builds the same one and takes its share of packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.config.tree import Config, Groups, Trainer
from tailrace.trainer.advantages import GROUP_ADVANTAGES, gae
from tailrace.trainer.packing import Pack, Sample, deal, fill, filler, read
from tailrace.types import TOKEN_BYTES, Segment, Trajectory

Floats = NDArray[np.float64]
LARGEST = 1e12  # reward; squared and summed over all parameters it still is a number in float32
INVENTED = 512  # tokens, at most, of an invented sample
DEFAULT_RULES = Groups()


class MiniBatch(NamedTuple):
    """One entry per sample in each."""

    samples: list[Sample]
    rewards: Floats
    advantages: Floats  # within the group; unused with a critic

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array([len(s.targets) for s in self.samples])


def mini_batch(
    groups: Sequence[Sequence[Trajectory]],
    settings: Trainer,
    rules: Groups = DEFAULT_RULES,
    switch: int | None = None,
) -> MiniBatch:
    """A sample that never got to its first token has a reward for its group's mean, but nothing to train on."""
    kept = [entry for group in groups for entry in _group(group, settings, rules) if entry[0].sampled_tokens]
    if not kept:
        raise ValueError("none of the groups to train on has a sampled token")
    trajectories, rewards, advantages = zip(*kept, strict=True)
    return MiniBatch([read(t, switch) for t in trajectories], np.array(rewards), np.array(advantages))


def figures(rewards: Floats, counts: NDArray[np.int64]) -> dict[str, float]:
    """Of the samples with a sampled token, and how many of those each has."""
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "tokens": float(counts.sum()),
        "sequences": float(len(counts)),
    }


def invented_group(config: Config, budget: int) -> list[Trajectory]:
    """Samples to try passes out with: as many as fill a pack or are in a mini-batch, none so long that a pack without
    memory could not be cut finer."""
    work = config.workload
    length = max(2, min(work.prompt_tokens + work.max_completion_tokens, budget // 2, INVENTED))
    samples = max(2, min(budget // length, work.prompts_per_step * work.group_size // config.trainer.mini_batches))
    zeros = bytes(TOKEN_BYTES * (length - 1))
    segments = (Segment(None, bytes(TOKEN_BYTES)), Segment(0, zeros, zeros))
    return [Trajectory(i, 0, 0, segments, "length", float(i % 2)) for i in range(samples)]


def worth_a_pass(batch: MiniBatch, settings: Trainer) -> list[int]:
    """The samples that the gradient depends on: without advantage a sample counts in the mean, but adds nothing."""
    everything = settings.advantage == "gae" or settings.kl or settings.entropy
    return [i for i, advantage in enumerate(batch.advantages) if everything or advantage]


def rank_packs(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    budget: int,
    rank: int,
    ranks: int,
    fold: bool = True,
    switch: int | None = None,
) -> list[Pack]:
    """The packs of one rank's share of the chosen samples; all ranks have the same number of them, at least one."""
    hands = deal([len(samples[i].inputs) for i in chosen], ranks)
    packs = [fill(samples, [chosen[i] for i in hand], budget, fold, switch) for hand in hands]
    return packs[rank] + [filler()] * (max(1, *map(len, packs)) - len(packs[rank]))


def token_credits(members: Sequence[int], batch: MiniBatch, values: Floats, settings: Trainer) -> tuple[Floats, Floats]:
    """Advantages and returns of a pack's sampled tokens, from the critic's values of them."""
    ends = np.cumsum(batch.counts[list(members)])
    pieces = np.split(values, ends[:-1]) if len(members) else []
    credits = [
        gae(batch.rewards[i], v, settings.gamma, settings.gae_lambda) for i, v in zip(members, pieces, strict=True)
    ]
    nothing = [np.zeros(0)]
    return np.concatenate([a for a, _ in credits] or nothing), np.concatenate([r for _, r in credits] or nothing)


def _group(group: Sequence[Trajectory], settings: Trainer, rules: Groups) -> Iterator[tuple[Trajectory, float, float]]:
    rewards = _within_reach(np.array([_reward(t) for t in group]))
    estimate = GROUP_ADVANTAGES.get(settings.advantage, np.zeros_like)
    advantages = np.zeros_like(rewards) if rules.same(rewards.tolist()) else estimate(rewards)
    yield from zip(group, rewards, advantages, strict=True)


def _within_reach(rewards: Floats) -> Floats:
    """Scaled down as a group where one is too large: the advantages keep their order and stay finite."""
    largest = np.abs(rewards).max()
    return rewards * (LARGEST / largest) if largest > LARGEST else rewards


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None or not np.isfinite(trajectory.reward):
        raise ValueError(
            f"trajectory t{trajectory.id} has no finite reward ({trajectory.reward}): it cannot be trained on"
        )
    return trajectory.reward
