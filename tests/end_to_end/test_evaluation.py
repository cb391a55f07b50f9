"""Every schedule, and evaluation while training, in real runs: a result belongs to one version, and the best stay."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from runs import EMULATED, NATIVE, Run, nothing_is_left, replayed
from tailrace.envs.running_total import RunningTotal
from tailrace.protocol import Evaluate, RecordEvaluation
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.types import EVALUATION

EVALUATED = ["--task.eval_rows", "6", "--eval.every", "4", "--eval.samples", "2"]


def recorded(run: Run) -> list[RecordEvaluation]:
    commands = [one for entry in Journal(run.folder).entries() for one in entry.commands]
    return [one for one in commands if isinstance(one, RecordEvaluation)]


def versions_of_samples(run: Run) -> dict[int, set[int]]:
    """The versions that the tokens of each sample of an evaluation are of, as its store has them."""
    found: dict[int, set[int]] = {}
    with closing(sqlite3.connect(run.folder / "samples-0.db")) as database:
        query = "SELECT trajectory_id, version FROM segments WHERE trajectory_id >= ? AND version >= 0"
        for id, version in database.execute(query, (EVALUATION,)):
            found.setdefault(id, set()).add(version)
    return found


def given_for(run: Run) -> dict[int, int]:
    """The version that each sample was last given out for."""
    orders = [one for entry in Journal(run.folder).entries() for one in entry.commands if isinstance(one, Evaluate)]
    return {request.trajectory: order.version for order in orders for request in order.requests}


def tailrace(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["sync", "one_step", "stream", "partial", "trajectory"])
def test_every_schedule_runs_to_its_end_and_a_version_is_evaluated_by_samples_of_its_own(tmp_path, kind):
    run = Run(tmp_path, EMULATED, "--schedule.kind", kind, "--local.relays", "2", *EVALUATED)
    run.finish()
    ledger = replayed(run).state.ledger
    assert ledger.tally.trained == 12 * 4
    assert ledger.tally.started == ledger.tally.ended + len(ledger.groups)
    found, given = versions_of_samples(run), given_for(run)
    assert {one.version for one in recorded(run)} >= {0, 12}
    assert len(found) == 12 * len(recorded(run))
    assert all(versions == {given[id]} for id, versions in found.items())
    summary = json.loads((run.folder / "summary.json").read_text())
    assert [one["version"] for one in summary["evaluations"]] == [one.version for one in recorded(run)]
    names = {one.name for one in measurements(run.folder) if one.source == "eval"}
    assert names >= {"eval/held_out/avg@2", "eval/held_out/pass@2", "eval/held_out/reward"}
    run.until(lambda: nothing_is_left(run), "its processes to be gone")


def test_interrupted_in_the_middle_of_an_evaluation_it_is_evaluated_all_the_same(tmp_path):
    run = Run(tmp_path, EMULATED, *EVALUATED, "--task.eval_rows", "40").start()
    run.until(lambda: run.events("Trained") >= 2 and evaluated_samples(run) > 3, "an evaluation under way")
    run.kill()
    run.finish("--resume")
    results = recorded(run)
    assert results[-1].version == 12
    assert all(one.results[0].prompts == 40 for one in results)
    found, given = versions_of_samples(run), given_for(run)
    ended = [id for id in found if id in given]
    assert all(found[id] == {given[id]} for id in ended)


def test_whoever_is_killed_in_the_middle_of_an_evaluation_every_result_is_there_once_and_of_one_version(tmp_path):
    """A replica and the controller with kill -9, then all of it; then it is resumed, and once more for more steps."""
    run = Run(tmp_path, EMULATED, *EVALUATED, "--task.eval_rows", "40", "--health.backoff_s", "0.1").start()

    def in_the_middle(of: int) -> bool:
        return evaluated_samples(run) > of + 3 and len(recorded(run)) * 80 < evaluated_samples(run)

    run.until(lambda: run.events("Trained") and in_the_middle(0), "an evaluation under way")
    os.kill(run.components()["replica0"], signal.SIGKILL)
    run.until(lambda: run.events("ReplicaLost") and in_the_middle(0), "an evaluation that goes on")
    os.kill(run.controller(), signal.SIGKILL)
    run.until(lambda: run.events("ControllerRestarted") and in_the_middle(80), "another evaluation under way")
    run.kill()
    run.finish("--resume")
    run.finish("--resume", "--run.steps", "16")
    replayed(run)
    versions = [one.version for one in recorded(run)]
    assert versions == sorted(set(versions))
    assert {0, 12, 16} <= set(versions)
    assert all(result.prompts == 40 for one in recorded(run) for result in one.results)
    measured = [(one.step, one.name) for one in measurements(run.folder) if one.source == "eval"]
    assert len(measured) == len(set(measured))
    assert sorted({step for step, _ in measured}) == versions
    summary = json.loads((run.folder / "summary.json").read_text())
    assert [one["version"] for one in summary["evaluations"]] == versions
    found, given = versions_of_samples(run), given_for(run)
    assert all(found[id] == {given[id]} for id in found if id in given)


def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path):
    early = [*EVALUATED, "--eval.every", "1", "--eval.patience", "1"]  # a coin judges: no version is better for long
    run = Run(tmp_path, EMULATED, "--schedule.kind", "sync")
    assert "stopped early: " in run.finish(*early)
    begun = recorded(run)[-1].version
    assert begun < 12
    status, _, err = run.start("--resume").wait()
    assert (status, "one that stopped early with more patience (--eval.patience 2)" in err) == (2, True), err
    assert "all steps are done" in run.finish("--resume", "--eval.patience", "0")
    replayed(run)
    assert recorded(run)[-1].version == 12


def evaluated_samples(run: Run) -> int:
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        query = "SELECT count(*) FROM trajectories WHERE id >= ? AND state IN ('finished', 'evaluated')"
        return database.execute(query, (EVALUATION,)).fetchone()[0]


def own_sets(folder: Path) -> str:
    """Data and reward of a user's own, with two sets to evaluate by greedy decoding."""
    task = RunningTotal({}, 0)
    for name, first, count in (("train", 0, 40), ("small", 40, 6), ("other", 46, 4)):
        rows = [task.row(index) for index in range(first, first + count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text("def judge(completion, answer):\n    return float(str(answer) in completion)\n")
    data = 'data = "train.jsonl"\neval_rows = 0\nreward = "rewards.py:judge"'
    sets = (
        '[eval]\nevery = 1\ntemperature = 0\nkeep_best = 2\n[eval.sets]\nsmall = "small.jsonl"\nother = "other.jsonl"\n'
    )
    return NATIVE.replace('name = "running_total"', data) + sets


def test_several_sets_greedily_and_the_best_checkpoints_stay(tmp_path):
    run = Run(tmp_path, own_sets(tmp_path), "--schedule.kind", "sync", "--run.steps", "4")
    out = run.finish()
    results = recorded(run)
    assert [one.version for one in results] == [1, 2, 3, 4]
    assert [[one.name for one in each.results] for each in results] == [["small", "other"]] * 4
    best = results[-1].best
    kept = {int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").glob("step-*")}
    assert kept == {3, 4, *best}, "the newest two, from which it is resumed, and the best"
    assert any(line.startswith("best ") and f"v{best[0]}" in line for line in out.splitlines())
    accuracy = next(one.results[0].accuracy for one in results if one.version == best[0])
    again = tailrace("eval", str(run.folder), "--version", str(best[0]))
    assert f"small: accuracy {accuracy:.3f}" in again, "measured by itself, it comes to the same"
