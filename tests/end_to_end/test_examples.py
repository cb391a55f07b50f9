"""Every example that is shipped goes through every command that takes settings, and gets a useful answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import load
from tailrace.planner import plan, render_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))
SMALL = ["--workload.prompts_per_step", "4", "--workload.group_size", "2", "--trainer.mini_batches", "1"]
SMALL += ["--run.steps", "2"]
FEW_GPUS = ["--cluster.gpus", "64"]  # the largest fleet takes minutes as it is
AS_IT_IS = {"hosts_64_405b", "mixed_7b"}  # a model that does not fit on fewer; kinds of card with their numbers
OWN_CLUSTER = {"clusters", "heavy_tail.toml"}  # what describes the fleet that is simulated


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(words) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    return shown.out, shown.err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_command_answers_every_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, describes_fleet = str(path), bool(OWN_CLUSTER & {path.name, path.parent.name})
    assert "[workload]" in answer(capsys, "train", file, "--dry-run")[0]
    doctor, _ = answer(capsys, "doctor", file)
    assert ("training here" in doctor) == (path.parent.name != "clusters")
    assert ("can run, as these settings say" in doctor) == describes_fleet
    small = [*SMALL, *(FEW_GPUS if path.stem not in AS_IT_IS else ())]
    table, _ = answer(capsys, "simulate", file, *small, "--schedules", "sync,trajectory")
    assert [line.split()[0] for line in table.splitlines()][-2:] == ["sync", "trajectory"]
    planned = render_plan(plan(load([file], small), simulations=16, processes=1))
    assert "synchronous training" in planned
    assert "Why:" in planned


def test_what_is_assumed_of_a_training_file_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples/calculator.toml")
    _, notes = answer(capsys, "simulate", file, "--schedules", "sync")
    assert "no [cluster] is given, so this is for 8 GPUs (H100)" in notes
    assert "answers are taken to have a median of 12 tokens, cut at 96" in notes
