"""Whole fleets whose prompts differ in difficulty: what filters save, and that nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from tailrace.config import load
from tailrace.config.tree import Config
from tailrace.obs.live import LiveRun
from tailrace.protocol import Generate
from tailrace.sim.difficulty import SuccessLaw
from tailrace.sim.replay import replay
from tailrace.sim.simulation import Simulation

OWN_BOX = Path(__file__).parents[2] / "examples" / "clusters" / "own_box.toml"
FAULTS = {"replica_per_hour": 150, "trainer_per_hour": 60, "controller_per_hour": 100, "sample_failure": 0.02}


def simulated(steps: int = 6, **settings: object) -> Config:
    sizes = {"workload.prompts_per_step": 8, "workload.group_size": 4, "workload.difficulty.rows": 36}
    words = sizes | {"run.steps": steps, "groups.filter": "all"} | settings
    return load([OWN_BOX], [f"--{name}={value}" for name, value in words.items()])


def test_a_third_of_the_rows_is_too_easy_and_a_third_too_hard_and_training_moves_all():
    law = SuccessLaw(simulated(**{"workload.difficulty.rows": 3000, "workload.difficulty.drift_per_step": 0.1}))
    rates = [law.success_rate(row, 0) for row in range(3000)]
    assert sum(rate > 0.8 for rate in rates) / 3000 == pytest.approx(0.33 + 0.03, abs=0.04)
    assert sum(rate < 0.2 for rate in rates) / 3000 == pytest.approx(0.33 + 0.03, abs=0.04)
    assert fmean(law.success_rate(row, 20) for row in range(3000)) > fmean(rates) + 0.1
    assert (law.row(2), law.row(3002)) == (2, 2)


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["calm", "faults"])
@pytest.mark.parametrize("kind", ["sync", "trajectory", "partial"])
def test_the_fold_of_a_filtered_run_agrees_with_the_ledger(kind, faults):
    config = simulated(**{"schedule.kind": kind} | {f"faults.{name}": rate for name, rate in faults.items()})
    live, journal = LiveRun(config), []

    def see(now, event, commands):
        live.see(now, event, commands)
        journal.append(Entry(len(journal), now, event, tuple(commands)))

    simulation = Simulation(config, see)
    simulation.run()
    ledger, savings = simulation.plane.state.ledger, live.fold.savings
    counts = msgspec.to_builtins(live.fold.groups)
    assert counts == msgspec.to_builtins(ledger.tally) | {"in_flight": ledger.tally.started - ledger.tally.ended}
    assert min(ledger.skipped, ledger.tally.stopped, ledger.tally.filtered) > 0
    assert (savings.skipped_prompts, savings.stopped_groups) == (ledger.skipped, ledger.tally.stopped)
    assert savings.unstarted_samples == ledger.unstarted
    assert all(step.useful == step.groups for step in live.fold.steps)
    assert replay(journal, config).difference is None  # also over restarts of the controller


class Entry(msgspec.Struct):
    seq: int
    now: float
    event: object
    commands: tuple


@pytest.mark.parametrize("kind", ["partial", "trajectory", "adaptive"])
def test_replicas_have_work_while_the_trainer_waits_though_the_data_have_come_round(kind):
    settings = {"workload.prompts_per_step": 24, "workload.difficulty.rows": 24, "schedule.kind": kind}
    simulation = Simulation(simulated(steps=8, **settings))
    result = simulation.run()
    assert simulation.plane.state.ledger.skipped
    assert result.trainer_idle > 0.5
    assert result.rollout_idle < 0.05


def test_filters_cost_fewer_tokens_for_the_same_useful_groups_and_starve_no_useful_prompt():
    costs, visits = {}, {}
    for name, prompts in (("none", 24), ("all", 8)):
        config = simulated(steps=20, **{"groups.filter": name, "workload.prompts_per_step": prompts})
        law, seen = SuccessLaw(config), {}

        def see(now, event, commands, seen=seen):
            requests = [one for command in commands if isinstance(command, Generate) for one in command.requests]
            seen.update({request.group: request.prompt for request in requests})

        simulation = Simulation(config, see)
        simulation.run()
        fold = simulation.meter.fold
        costs[name] = fold.finished_tokens / sum(step.useful for step in fold.steps)
        rows = [law.row(prompt) for prompt in seen.values()]
        useful = [row for row in range(36) if 0.3 < law.success_rate(row, 0) < 0.7]
        visits[name] = min(rows.count(row) for row in useful) / (len(rows) / 36)
    assert costs["none"] > 1.5 * costs["all"]
    assert visits["all"] > 0.5  # of an even share
