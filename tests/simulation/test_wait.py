"""Under the policy `wait` the trainer waits for what is due, and nothing is generated for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import load
from tailrace.sim.simulation import Simulation

OWN_BOX = Path(__file__).parents[2] / "examples/clusters/own_box.toml"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["trajectory", "partial"])
def test_without_faults_nothing_is_dropped(kind: str, seed: int) -> None:
    words = f"--schedule.kind {kind} --schedule.max_staleness 3 --schedule.staleness_policy wait"
    config = load([OWN_BOX], [*words.split(), "--run.seed", str(seed), "--run.steps", "12"])
    simulation = Simulation(config)
    result = simulation.run()
    tally = simulation.plane.state.ledger.tally
    assert (tally.dropped_stale, tally.failed) == (0, 0)
    assert tally.trained == 12 * config.workload.prompts_per_step
    assert result.staleness.max == 3, "the bound was reached, so the policy had something to decide"
