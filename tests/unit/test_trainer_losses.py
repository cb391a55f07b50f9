"""Losses against a slow, obvious computation, and by what must hold for all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tailrace.config.tree import Trainer
from tailrace.trainer.losses import LOSSES, TokenBatch, k3, policy_loss, token_weights, value_loss

COUNTS = np.array([5, 1, 14])
LONGEST = 16
TOKENS = int(COUNTS.sum())


def tokens(seed: int = 0, loss: str = "ppo", **changes: torch.Tensor) -> TokenBatch:
    draw = torch.Generator().manual_seed(seed)

    def some(scale: float) -> torch.Tensor:
        return torch.randn(TOKENS, generator=draw, dtype=torch.float64) * scale

    weights = torch.tensor(np.repeat(token_weights(loss, COUNTS, LONGEST), COUNTS))
    behavior_logprobs = -1 - some(0.3).abs()
    made = {
        "behavior_logprobs": behavior_logprobs,
        "proximal": behavior_logprobs + some(0.6),
        "advantages": some(1.0),
        "weight": weights,
    }
    made["new"] = made["proximal"] + some(0.3)
    return TokenBatch(**(made | changes | {"new": (changes.get("new", made["new"])).clone().requires_grad_()}))


def gradient(batch: TokenBatch, settings: Trainer) -> torch.Tensor:
    return torch.autograd.grad(policy_loss(batch, settings).loss, batch.new)[0]


def slow(loss: str, new: float, behavior_logprobs: float, proximal: float, advantage: float, s: Trainer) -> float:
    """One token's loss, as it stands in the papers."""

    def clip(ratio: float) -> float:
        held = min(ratio * advantage, min(max(ratio, 1 - s.clip_low), 1 + s.clip_high) * advantage)
        return max(held, s.dual_clip * advantage) if s.dual_clip and advantage < 0 else held

    if loss == "reinforce":
        return -advantage * new
    if loss == "aipo":
        return -min(math.exp(new - behavior_logprobs), s.importance_cap) * advantage * new
    if loss == "tis":
        return -min(math.exp(proximal - behavior_logprobs), s.importance_cap) * advantage * new
    if loss == "decoupled_ppo":
        return -min(math.exp(proximal - behavior_logprobs), s.importance_cap) * clip(math.exp(new - proximal))
    return -clip(math.exp(new - behavior_logprobs))


@pytest.mark.parametrize("dual_clip", [0.0, 1.4])  # 0: as TRL has it
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_equals_its_formula_token_by_token(loss, dual_clip):
    settings = Trainer(loss=loss, clip_high=0.28, importance_cap=1.3, dual_clip=dual_clip)
    batch = tokens(1, loss)
    columns = torch.stack(
        [batch.new.detach(), batch.behavior_logprobs, batch.proximal, batch.advantages], dim=1
    ).tolist()
    each = [
        slow(loss, new, behavior_logprobs, proximal, gain, settings)
        for new, behavior_logprobs, proximal, gain in columns
    ]
    rows = np.split(np.array(each), np.cumsum(COUNTS)[:-1])
    wanted = {
        "grpo": np.mean([row.mean() for row in rows]),
        "dr_grpo": np.mean([row.sum() / LONGEST for row in rows]),
    }.get(loss, np.mean(each))
    assert policy_loss(batch, settings).loss.item() == pytest.approx(float(wanted))


@pytest.mark.parametrize("loss", LOSSES)
def test_on_fresh_samples_every_loss_has_the_gradient_of_reinforce(loss):
    behavior_logprobs = tokens().behavior_logprobs
    batch = tokens(2, behavior_logprobs=behavior_logprobs, new=behavior_logprobs, proximal=behavior_logprobs)
    torch.testing.assert_close(gradient(batch, Trainer(loss=loss)), gradient(batch, Trainer(loss="reinforce")))


@pytest.mark.parametrize("loss", LOSSES)
def test_without_advantage_nothing_is_learned(loss):
    assert not gradient(tokens(3, advantages=torch.zeros(TOKENS)), Trainer(loss=loss)).any()


@pytest.mark.parametrize("loss", ["aipo", "tis", "decoupled_ppo"])
def test_a_cap_bounds_the_gradient_of_tokens_the_sampler_found_unlikely(loss):
    base = tokens(4)
    batch = tokens(4, behavior_logprobs=base.proximal - 8, new=base.proximal)
    free, capped = (gradient(batch, Trainer(loss=loss, importance_cap=cap)) for cap in (1e9, 2.0))
    assert (capped.abs() <= 2.0 * (batch.weight * batch.advantages).abs() * (1 + 1e-9)).all()
    assert free.abs().max() > 100 * capped.abs().max()
    assert policy_loss(batch, Trainer(loss=loss, importance_cap=2.0)).stats["cap_fraction"] == TOKENS


def test_clipping_stops_what_has_gone_far_enough_and_nothing_else():
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64).repeat(TOKENS // 4)
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64).repeat(TOKENS // 4)
    behavior_logprobs = tokens().behavior_logprobs
    batch = tokens(5, advantages=signs, behavior_logprobs=behavior_logprobs, new=behavior_logprobs + ratios.log())
    moved = gradient(batch, Trainer(loss="ppo")).bool().reshape(-1, 4)
    assert (moved == torch.tensor([False, True, True, False])).all()
    assert policy_loss(batch, Trainer(loss="ppo")).stats["clip_fraction"] == TOKENS / 2


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "ppo", "decoupled_ppo"])
def test_one_stale_token_does_not_take_over_the_gradient(loss):
    base = tokens(5, loss)
    behavior_logprobs, stale = base.behavior_logprobs.clone(), TOKENS // 2
    behavior_logprobs[stale] -= 12.0  # the policy finds it e^12 times as likely by now
    advantages = base.advantages.clone()
    advantages[stale] = -1.0
    fresh = {"advantages": advantages, "proximal": behavior_logprobs, "new": base.behavior_logprobs}
    batch = tokens(5, loss, behavior_logprobs=behavior_logprobs, **fresh)
    off, on = gradient(batch, Trainer(loss=loss, dual_clip=0.0)), gradient(batch, Trainer(loss=loss))
    assert off.norm() > 1000 * on.norm()
    assert on[stale] == 0
    assert torch.equal(off[torch.arange(TOKENS) != stale], on[torch.arange(TOKENS) != stale])
    assert policy_loss(batch, Trainer(loss=loss)).stats["dual_clip_fraction"] == 1


def test_the_dual_clip_leaves_good_tokens_and_small_ratios_alone():
    ratios = torch.tensor([2.9, 3.1, 40.0, 40.0], dtype=torch.float64).repeat(TOKENS // 4)
    signs = torch.tensor([-1.0, -1.0, -1.0, 1.0], dtype=torch.float64).repeat(TOKENS // 4)
    behavior_logprobs = tokens().behavior_logprobs
    batch = tokens(5, advantages=signs, behavior_logprobs=behavior_logprobs, new=behavior_logprobs + ratios.log())
    moved = gradient(batch, Trainer(loss="ppo")).bool().reshape(-1, 4)
    assert (moved == torch.tensor([True, False, False, False])).all()  # the last one is past the ordinary clip
    each = -policy_loss(batch, Trainer(loss="ppo")).loss.item()
    assert each == pytest.approx((-2.9 - 3.0 - 3.0 + 1.2) / 4)


def test_a_clip_around_the_proximal_policy_lets_old_samples_teach():
    base = tokens(6)
    batch = tokens(6, behavior_logprobs=base.proximal - 3, new=base.proximal)
    assert gradient(batch, Trainer(loss="decoupled_ppo")).all()
    assert not gradient(batch, Trainer(loss="ppo"))[batch.advantages > 0].any()


def test_k3_estimates_the_divergence_and_is_never_negative():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    each = k3(p.log(), q.log())
    assert (each >= 0).all()
    assert (p * each).sum() == pytest.approx((p * (p / q).log()).sum().item())


def test_reference_and_entropy_pull_by_their_weights():
    entropy = torch.ones(TOKENS, dtype=torch.float64)
    batch = tokens(7, advantages=torch.zeros(TOKENS), reference=tokens().behavior_logprobs, entropy=entropy)
    divergence = k3(batch.new, tokens().behavior_logprobs).mean()
    result = policy_loss(batch, Trainer(loss="ppo", kl=0.3, entropy=0.1))
    assert result.loss.item() == pytest.approx(0.3 * divergence.item() - 0.1)
    assert result.stats["kl"].item() == pytest.approx(divergence.item() * TOKENS)


def test_the_value_loss_does_not_reward_a_leap():
    half = torch.full((TOKENS,), 0.5, dtype=torch.float64, requires_grad=True)
    batch = tokens(8, values=half, old_values=torch.zeros(TOKENS), returns=torch.ones(TOKENS))
    loss = value_loss(batch, reach=0.2).loss
    assert loss.item() == pytest.approx(0.5 * 0.8**2)
    assert not torch.autograd.grad(loss, half)[0].any()
    assert value_loss(batch, reach=9.0).loss.item() == pytest.approx(0.5 * 0.5**2)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_a_mini_batch_do_not_depend_on_how_it_is_cut(loss):
    batch = tokens(9, loss)
    whole = policy_loss(batch, Trainer(loss=loss)).loss
    fields = {name: value for name, value in vars(batch).items() if value is not None}
    parts = [TokenBatch(**{n: v[a:b] for n, v in fields.items()}) for a, b in ((0, 5), (5, 6), (6, TOKENS))]
    torch.testing.assert_close(whole, torch.stack([policy_loss(p, Trainer(loss=loss)).loss for p in parts]).sum())
