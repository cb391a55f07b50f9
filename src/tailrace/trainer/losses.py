"""What is minimised: pure functions over the sampled tokens of one forward pass.

Every loss reads the same `TokenBatch`, which holds sampled tokens only, and is a weighted sum over them. The weights
come from the whole mini-batch (`WEIGHTS`), so the sum over its forward passes, and over ranks, is the loss of the
mini-batch, however it was cut. Statistics are sums over tokens for the same reason; `step.py` divides them.

Three policies meet here: the behavior policy that sampled (perhaps several versions in one sequence), the proximal
policy with the weights at the start of the training step, and the one being trained. Where the clip is around the
behavior policy (grpo, dr_grpo, dapo, ppo) no importance weight is put on top of it. Importance weights are detached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.config.tree import Trainer

LOG_RATIO_LIMIT = 20.0  # beyond this a ratio is useless and its exponential dangerous


@dataclass(frozen=True)
class TokenBatch:
    """One number per sampled token, in any order."""

    new: Tensor  # log-prob under the weights being trained; carries the gradient
    behavior_logprobs: Tensor  # under the weights that sampled it
    proximal: Tensor  # under the weights at the start of the training step
    advantages: Tensor
    weight: Tensor  # its share of the mini-batch's mean; 0 leaves it out
    entropy: Tensor | None = None  # of the distribution it was drawn from, under the weights being trained
    reference: Tensor | None = None  # log-prob under the starting weights
    values: Tensor | None = None  # the critic's, being trained
    old_values: Tensor | None = None  # the critic's at the start of the training step; advantages come from these
    returns: Tensor | None = None


class LossOutput(NamedTuple):
    loss: Tensor
    stats: dict[str, Tensor]  # sums over tokens


PolicyLoss = Callable[[TokenBatch, Trainer], LossOutput]


def reinforce(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """No correction: right for fresh samples only."""
    return LossOutput(_total(tokens, -tokens.advantages * tokens.new), {})


def ppo(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """The clipped ratio to the behavior policy. GRPO, Dr.GRPO and DAPO differ from it in their weights and limits."""
    surrogate, clipped = _clipped(tokens.new, tokens.behavior_logprobs, tokens.advantages, settings)
    return LossOutput(_total(tokens, -surrogate), clipped)


def decoupled_ppo(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """The clip is around the proximal policy, so old samples still teach; their age is paid for by a capped weight."""
    surrogate, clipped = _clipped(tokens.new, tokens.proximal, tokens.advantages, settings)
    weight, capped = _importance(tokens.proximal, tokens, settings)
    return LossOutput(_total(tokens, -weight * surrogate), clipped | {"cap_fraction": capped})


def aipo(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """REINFORCE with the ratio to the behavior policy as weight, capped from above only."""
    return _importance_weighted(tokens, tokens.new, settings)


def tis(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """The same with the proximal policy's ratio: the weight stays while a step's mini-batches move the policy."""
    return _importance_weighted(tokens, tokens.proximal, settings)


LOSSES: dict[str, PolicyLoss] = {
    "grpo": ppo,
    "dr_grpo": ppo,
    "dapo": ppo,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "aipo": aipo,
    "tis": tis,
    "reinforce": reinforce,
}
NEEDS_PROXIMAL = frozenset({"decoupled_ppo", "tis"})


def policy_loss(tokens: TokenBatch, settings: Trainer) -> LossOutput:
    """The loss that the settings name, with the penalty for leaving the reference and the bonus for entropy."""
    loss, stats = LOSSES[settings.loss](tokens, settings)
    if tokens.reference is not None:
        divergence = k3(tokens.new, tokens.reference)
        loss, stats = loss + settings.kl * _total(tokens, divergence), stats | {"kl": _sum(divergence)}
    if tokens.entropy is not None:
        stats = stats | {"entropy": _sum(tokens.entropy)}
        if settings.entropy:  # an entropy without a weight needs no gradient
            loss = loss - settings.entropy * _total(tokens, tokens.entropy)
    return LossOutput(loss, stats | _drift(tokens))


def value_loss(tokens: TokenBatch, reach: float) -> LossOutput:
    """Squared error of the critic; a value that moved further than `reach` in one step gains nothing by it."""
    assert tokens.values is not None
    assert tokens.old_values is not None
    assert tokens.returns is not None
    near = tokens.old_values + (tokens.values - tokens.old_values).clamp(-reach, reach)
    error = 0.5 * torch.maximum((tokens.values - tokens.returns) ** 2, (near - tokens.returns) ** 2)
    return LossOutput(_total(tokens, error), {"value_loss": _sum(error), "value": _sum(tokens.values)})


def k3(new: Tensor, other: Tensor) -> Tensor:
    """Estimate of KL(new || other) from a token of `new`: never negative, little variance."""
    log_ratio = (other - new).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - log_ratio - 1


def _drift(tokens: TokenBatch) -> dict[str, Tensor]:
    """How far the weights being trained are from those that sampled, and the size of the advantages."""
    ratio = _ratio(tokens.new, tokens.behavior_logprobs)
    return {
        "mismatch_kl": _sum(k3(tokens.behavior_logprobs, tokens.new)),
        "ratio": _sum(ratio),
        "ratio_squared": _sum(ratio**2),
        "advantage": _sum(tokens.advantages),
        "advantage_size": _sum(tokens.advantages.abs()),
    }


def sequence_mean(counts: NDArray[np.int64], longest: int) -> NDArray[np.float64]:
    """Every sequence counts the same, whatever its length (GRPO)."""
    return 1.0 / (counts * len(counts))


def constant(counts: NDArray[np.int64], longest: int) -> NDArray[np.float64]:
    """A token's weight depends on nothing that was sampled (Dr.GRPO)."""
    return np.full(len(counts), 1.0 / (longest * len(counts)))


def token_mean(counts: NDArray[np.int64], longest: int) -> NDArray[np.float64]:
    """Every token counts the same (DAPO and the rest)."""
    return np.full(len(counts), 1.0 / counts.sum())


def token_weights(loss: str, counts: NDArray[np.int64], longest: int) -> NDArray[np.float64]:
    """The weight of each sequence's tokens, from the sampled tokens of all sequences of the mini-batch and the most
    that a sequence may have."""
    special = {"grpo": sequence_mean, "dr_grpo": constant}
    return special.get(loss, token_mean)(counts, longest)


def _clipped(new: Tensor, old: Tensor, advantages: Tensor, settings: Trainer) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate. The minimum has no floor for a bad token whose ratio has grown large, as that of an old one may
    have: one such token would outweigh all others. The dual clip is that floor."""
    ratio = _ratio(new, old)
    free, held = ratio * advantages, ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    surrogate, stats = torch.minimum(free, held), {"clip_fraction": _count(held < free)}
    if not settings.dual_clip:
        return surrogate, stats
    floor = torch.where(advantages < 0, settings.dual_clip * advantages, -torch.inf)
    return torch.maximum(surrogate, floor), stats | {"dual_clip_fraction": _count(surrogate < floor)}


def _importance_weighted(tokens: TokenBatch, policy: Tensor, settings: Trainer) -> LossOutput:
    weight, capped = _importance(policy, tokens, settings)
    return LossOutput(_total(tokens, -weight * tokens.advantages * tokens.new), {"cap_fraction": capped})


def _importance(policy: Tensor, tokens: TokenBatch, settings: Trainer) -> tuple[Tensor, Tensor]:
    ratio = _ratio(policy, tokens.behavior_logprobs).detach()
    return ratio.clamp(max=settings.importance_cap), _count(ratio > settings.importance_cap)


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _total(tokens: TokenBatch, each: Tensor) -> Tensor:
    return (tokens.weight * each).sum()


def _sum(each: Tensor) -> Tensor:
    return each.detach().sum()


def _count(which: Tensor) -> Tensor:
    return which.sum(dtype=torch.float32)
