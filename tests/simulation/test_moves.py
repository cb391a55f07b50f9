"""Work that is spread out over idle replicas arrives there."""

from pathlib import Path

import pytest

from tailrace.config.load import load
from tailrace.sim.simulation import Simulation

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.mark.parametrize("kind", ["trajectory", "adaptive"])
def test_a_batch_larger_than_a_replica_takes_at_once_is_spread_in_parts_and_not_moved_for_ever(kind):
    """Two of four replicas start with everything, nearly a thousand samples each: more than repack lets one take."""
    settings = ["--cluster.gpus=32", "--workload.prompts_per_step=64", "--run.steps=4", f"--schedule.kind={kind}"]
    simulation = Simulation(load([CLUSTERS / "verl_7b_h20.toml"], settings))
    simulation.run()
    assert 0 < simulation.plane.state.moved < simulation.plane.state.ledger.next_sample
