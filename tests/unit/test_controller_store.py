"""What the controller lets into the store, and what it does while it cannot write there."""

from __future__ import annotations

import pytest

from tailrace.protocol import Alive, Finished, SampleFailed, TrajectoryMeta
from tailrace.runtime.controller import with_a_reward


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_sample_reported_without_a_finite_reward_counts_as_failed(reward: float | None) -> None:
    event = with_a_reward(Finished(1, TrajectoryMeta(7, 2, 10, 0, 0, "stop", reward)))
    assert event == SampleFailed(1, 7, 2, f"its replica reported a reward of {reward}; a reward is a finite number")


def test_other_reports_pass_as_they_are() -> None:
    for event in (Alive("relay", 0, 1), Finished(1, TrajectoryMeta(7, 2, 10, 0, 0, "stop", -0.0))):
        assert with_a_reward(event) is event
