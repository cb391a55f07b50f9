"""Several simulations give the same results in one process and in several."""

from __future__ import annotations

from pathlib import Path

from tailrace.config import load, with_values
from tailrace.sim.sweep import sweep

OWN_BOX = Path(__file__).parents[2] / "examples/clusters/own_box.toml"
SMALL = ["--workload.prompts_per_step", "16", "--workload.group_size", "4", "--run.steps", "3"]


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    config = load([OWN_BOX], SMALL)
    configs = [with_values(config, {"schedule.kind": kind}) for kind in ("sync", "partial", "trajectory")]
    told: list[tuple[int, int, str]] = []
    alone = sweep(configs, [True, False, False], lambda *each: told.append(each))
    assert told[0] == (0, 9, "sync on 8 GPUs")
    assert told[-1][:2] == (9, 9)
    together = sweep(configs, [True, False, False], lambda *each: told.append(each), pays_from=0)
    assert together == alone
    assert told[-1] == (9, 9, "3 simulations")
    assert [bool(outcome.timeline) for outcome in alone] == [True, False, False]
