"""How much better a sample was than expected. Pure functions of numbers; `step.py` calls them for every group.

The group methods give one number per sample, which holds for each of its tokens; `gae` gives one per token. A group
whose samples all got the same reward has advantage zero, exactly, and so has a sample that is alone in its group; with
`beta` a group that is all right has a small one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tailrace.config.tree import Groups, Trainer
from tailrace.types import RIGHT_ABOVE

Floats = NDArray[np.float64]
SPREAD_FLOOR = 1e-6  # keeps a group whose rewards differ by next to nothing from being blown up


def grpo(rewards: Floats) -> Floats:
    """Distance from the group's mean in units of its standard deviation, that of a sample: TRL and verl divide by it
    too."""
    return dr_grpo(rewards) / (rewards.std(ddof=1) + SPREAD_FLOOR) if len(rewards) > 1 else np.zeros(1)


def dr_grpo(rewards: Floats) -> Floats:
    """Distance from the group's mean: easy and hard prompts are not blown up."""
    return (
        rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)
    )  # exactly zero, whatever the rounding


def rloo(rewards: Floats) -> Floats:
    """Distance from the mean of the others."""
    others = len(rewards) - 1
    return dr_grpo(rewards) * len(rewards) / others if others else np.zeros(1)


def beta(rewards: Floats) -> Floats:
    """Distance from the mean of a Beta posterior of the success rate, in units of its spread (AERO). A group that is
    all right still says a little: that this is the way."""
    chance = (1.0 + np.clip(rewards, 0.0, 1.0).sum()) / (2.0 + len(rewards))
    return (rewards - chance) / np.sqrt(chance * (1.0 - chance))


GROUP_ADVANTAGES: dict[str, Callable[[Floats], Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "beta": beta,
}


def group_advantages(rewards: Floats, settings: Trainer, rules: Groups, trained: int | None = None) -> Floats:
    """Of a group as it is trained; zeros where a critic says how good each token was. `trained`: only so many, the
    first, are trained on. The others, which were wrong, count in the mean and the spread all the same, and the wrong
    ones that are trained on stand for them: the gradient is that of the whole group, as expected."""
    estimate = GROUP_ADVANTAGES.get(settings.advantage, np.zeros_like)
    keeps = settings.advantage == "beta" and float(rewards.mean()) > RIGHT_ABOVE
    advantages = np.zeros_like(rewards) if rules.same(rewards.tolist()) and not keeps else estimate(rewards)
    return advantages if trained is None else _of_trained(rewards, advantages, trained)


def _of_trained(rewards: Floats, advantages: Floats, trained: int) -> Floats:
    wrong = rewards <= RIGHT_ABOVE
    stands_for = wrong.sum() / max(1, wrong[:trained].sum())
    return np.where(wrong, advantages * stands_for, advantages)[:trained]


def gae(reward: float, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of a sample's tokens, from a critic's value before each and a reward after the last.

    `values` has the sampled tokens only: a tool's output between two of them is part of the world, not a step.
    """
    after = np.append(values[1:], 0.0)
    td_errors = gamma * after - values
    td_errors[-1] += reward
    advantages, carried = np.zeros_like(values), 0.0
    for index in reversed(range(len(values))):
        carried = td_errors[index] + gamma * lam * carried
        advantages[index] = carried
    return advantages, advantages + values
