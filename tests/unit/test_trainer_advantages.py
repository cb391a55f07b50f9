from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace.config.tree import Groups, Trainer
from tailrace.trainer.advantages import GROUP_ADVANTAGES, dr_grpo, gae, group_advantages, grpo, rloo
from tailrace.trainer.batch import plan_mini_batch
from tailrace.trainer.reader import in_memory
from tailrace.types import Segment, Trajectory

REWARDS = np.array([1.0, 0.0, 0.0, 0.5])


def samples(rewards):
    """A group with these."""
    sampled = (Segment.of(None, (1,)), Segment.of(0, (2,), (-1.0,)))
    return [Trajectory(id, 0, 0, sampled, "stop", reward) for id, reward in enumerate(rewards)]


def test_group_advantages_by_hand():
    assert dr_grpo(REWARDS).tolist() == [0.625, -0.375, -0.375, 0.125]
    others = [REWARDS[np.arange(4) != i].mean() for i in range(4)]
    assert rloo(REWARDS) == pytest.approx(REWARDS - others)


def test_grpo_divides_by_the_deviation_of_a_sample_as_trl_and_verl_do():
    spread = torch.tensor(REWARDS).std()  # torch's own: one degree of freedom less
    assert spread.item() == pytest.approx(statistics.stdev(REWARDS.tolist()))
    assert grpo(REWARDS) == pytest.approx(((torch.tensor(REWARDS) - REWARDS.mean()) / (spread + 1e-6)).numpy())
    assert grpo(np.array([1.0, 0.0])) == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_nothing_is_learned_from_equal_rewards_or_from_a_sample_alone(name):
    assert not GROUP_ADVANTAGES[name](np.full(3, 0.1)).any()
    assert not GROUP_ADVANTAGES[name](np.array([0.7])).any()


def test_a_beta_posterior_leaves_a_little_to_learn_from_a_group_that_is_all_right():
    right = GROUP_ADVANTAGES["beta"](np.ones(4))
    assert right == pytest.approx([(1 / 5) ** 0.5] * 4)  # success 5/6, (1 - p) / sqrt(p (1 - p))
    mixed = GROUP_ADVANTAGES["beta"](np.array([1.0, 0.0, 0.0, 0.0]))
    assert mixed[0] > 0 > mixed[1] == mixed[2]
    batch = [plan_mini_batch(*in_memory([samples(rewards)]), Trainer(advantage="beta")) for rewards in ((1, 1), (0, 0))]
    assert [bool(one.advantages.any()) for one in batch] == [True, False]


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_wrong_samples_that_are_not_trained_on_are_stood_for_by_the_others(advantage):
    """Right ones are worth as much as in the whole group; the wrong ones together, as much as all of them."""
    rewards, settings = np.array([1.0, 0.0, 0.25, 0.0, 0.25, 0.0, 0.25]), Trainer(advantage=advantage)
    whole, some = (group_advantages(rewards, settings, Groups(), trained) for trained in (None, 3))
    assert some[0] == whole[0] > 0
    assert some[1:].sum() == pytest.approx(whole[1:].sum())

    infos, reader = in_memory([samples(rewards[:3])])
    told = [replace(info, left_out=tuple(rewards[3:])) for info in infos]
    assert plan_mini_batch(told, reader, settings).advantages == pytest.approx(some)


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, "gae"])
@pytest.mark.parametrize("rewards", [(1e308, 1e308, 0.0, -1e308), (1.7e308, 5e-324), (-1e308, -1e308, -1e308)])
def test_rewards_of_any_size_have_finite_advantages(advantage, rewards):
    batch = plan_mini_batch(*in_memory([samples(rewards)]), Trainer(advantage=advantage))
    assert np.isfinite(np.float32(batch.advantages) ** 2).all()
    assert np.isfinite(np.float32(batch.rewards) ** 2).all()
    if advantage != "gae":
        order = np.argsort(rewards, kind="stable")
        assert (np.diff(batch.advantages[order]) >= 0).all()
        assert batch.advantages.any() == (len(set(rewards)) > 1)


def test_gae_is_the_discounted_sum_of_surprises():
    values, gamma, lam, reward = np.array([0.1, 0.4, -0.2, 0.3]), 0.9, 0.7, 2.0
    rewards, after = np.array([0, 0, 0, reward]), np.array([0.4, -0.2, 0.3, 0])
    td_errors = rewards + gamma * after - values
    slow = [sum((gamma * lam) ** (k - t) * td_errors[k] for k in range(t, 4)) for t in range(4)]
    advantages, returns = gae(reward, values, gamma, lam)
    assert advantages == pytest.approx(slow)
    assert returns == pytest.approx(advantages + values)


def test_gae_without_discount_compares_the_reward_with_the_value():
    values = np.array([0.1, 0.4, -0.2])
    advantages, returns = gae(1.0, values, 1.0, 1.0)
    assert advantages == pytest.approx(1.0 - values)
    assert returns == pytest.approx(np.ones(3))
