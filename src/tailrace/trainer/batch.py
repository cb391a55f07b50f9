"""What a mini-batch consists of: samples, what they are worth, how much each counts, and which rank has which. No
tensors here.

A learner plans its mini-batch with `mini_batch` and `rank_share`, from metadata alone: every rank makes the same plan.
Then each reads and packs its own share (`read_packs`). Samples that no gradient depends on are read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.config.tree import Config, Groups, Trainer
from tailrace.trainer.advantages import gae, group_advantages
from tailrace.trainer.packing import Pack, SampleArrays, assign, deal, input_tokens, lay_out, read
from tailrace.trainer.reader import SampleInfo, TrajectoryReader
from tailrace.types import TOKEN_BYTES, Segment, Trajectory

Floats = NDArray[np.float64]
LARGEST = 1e12  # reward; squared and summed over all parameters it still is a number in float32
INVENTED = 512  # tokens, at most, of an invented sample
DEFAULT_RULES = Groups()


class MiniBatch(NamedTuple):
    """One entry per sample in each, and where their tokens are."""

    samples: list[SampleInfo]
    rewards: Floats
    advantages: Floats  # within the group; unused with a critic
    reader: TrajectoryReader

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array([info.sampled for info in self.samples])


def plan_mini_batch(
    samples: Sequence[SampleInfo], reader: TrajectoryReader, settings: Trainer, rules: Groups = DEFAULT_RULES
) -> MiniBatch:
    """A sample that never got to its first token has a reward for its group's mean, but nothing to train on."""
    groups = [list(members) for _, members in groupby(samples, key=lambda info: info.group)]
    kept = [entry for group in groups for entry in _group(group, settings, rules) if entry[0].sampled]
    if not kept:
        raise ValueError("none of the groups to train on has a sampled token")
    infos, rewards, advantages = zip(*kept, strict=True)
    return MiniBatch(list(infos), np.array(rewards), np.array(advantages), reader)


def figures(batch: MiniBatch) -> dict[str, float]:
    """Of the samples with a sampled token, and how many of those there are."""
    return {
        "reward": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        "tokens": float(batch.counts.sum()),
        "sequences": float(len(batch.samples)),
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


def sample_sizes(batch: MiniBatch, switch: int | None = None) -> list[int]:
    """Tokens that each sample takes in a pack."""
    return [input_tokens(info.length, info.prompt, switch) for info in batch.samples]


def rank_share(batch: MiniBatch, chosen: Sequence[int], rank: int, ranks: int, switch: int | None = None) -> list[int]:
    """Which of the chosen samples this rank trains on."""
    sizes = sample_sizes(batch, switch)
    return [chosen[i] for i in deal([sizes[i] for i in chosen], ranks)[rank]]


def read_packs(
    batch: MiniBatch, share: Sequence[int], budget: int, fold: bool = True, switch: int | None = None
) -> Iterator[Pack]:
    """The samples of a share in packs, which are read and laid out one after the other, as they are asked for."""
    packs = assign(sample_sizes(batch, switch), share, budget)
    arriving = iter(batch.reader.read([batch.samples[i].id for members in packs for i in members]))
    for members in packs:
        samples = [_read_as_planned(next(arriving), batch.samples[i], switch) for i in members]
        yield lay_out(samples, members, fold, switch)


def _read_as_planned(trajectory: Trajectory, info: SampleInfo, switch: int | None) -> SampleArrays:
    sample = read(trajectory, switch)
    found, planned = (trajectory.id, sample.lengths[-1] + 1, len(sample.targets)), (info.id, info.length, info.sampled)
    if found != planned:
        raise ValueError(
            f"t{info.id} was planned with {info.length} tokens, {info.sampled} of them sampled, but what was read is "
            f"t{found[0]} with {found[1]}, {found[2]} of them sampled"
        )
    return sample


def token_credits(members: Sequence[int], batch: MiniBatch, values: Floats, settings: Trainer) -> tuple[Floats, Floats]:
    """Advantages and returns of a pack's sampled tokens, from the critic's values of them."""
    ends = np.cumsum(batch.counts[list(members)])
    pieces = np.split(values, ends[:-1]) if len(members) else []
    credits = [
        gae(batch.rewards[i], v, settings.gamma, settings.gae_lambda) for i, v in zip(members, pieces, strict=True)
    ]
    nothing = [np.zeros(0)]
    return np.concatenate([a for a, _ in credits] or nothing), np.concatenate([r for _, r in credits] or nothing)


def _group(group: Sequence[SampleInfo], settings: Trainer, rules: Groups) -> Iterator[tuple[SampleInfo, float, float]]:
    rewards = _within_reach(np.array([*[_reward(info) for info in group], *group[0].left_out]))
    advantages = group_advantages(rewards, settings, rules, trained=len(group))
    yield from zip(group, rewards[: len(group)], advantages, strict=True)


def _within_reach(rewards: Floats) -> Floats:
    """Scaled down as a group where one is too large: the advantages keep their order and stay finite."""
    largest = np.abs(rewards).max()
    return rewards * (LARGEST / largest) if largest > LARGEST else rewards


def _reward(info: SampleInfo) -> float:
    if info.reward is None or not np.isfinite(info.reward):
        raise ValueError(f"trajectory t{info.id} has no finite reward ({info.reward}): it cannot be trained on")
    return info.reward
