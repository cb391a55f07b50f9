"""Whole runs of the default recipe's model: the real engine, the real trainer, real processes. Short, but nothing is
emulated."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from runs import NATIVE, START, Run
from tailrace.cli import main
from tailrace.store.journal import Journal

ROOT = Path(__file__).parents[2]
Batch = set[tuple[int, int, tuple[int, ...], float]]  # (prompt, trajectory, completion, reward)


def batches_of(run: Run) -> list[Batch]:
    """What every step was trained on, from the run's own files."""
    with closing(sqlite3.connect(run.folder / "run.db")) as database:
        rows = database.execute("SELECT step, prompt_id, id, reward FROM trajectories WHERE step NOT NULL").fetchall()
    with closing(sqlite3.connect(run.folder / "samples-0.db")) as database:
        pieces = database.execute("SELECT trajectory_id, tokens FROM segments ORDER BY number").fetchall()
    tokens: dict[int, list[int]] = {}
    for id, blob in pieces:
        tokens.setdefault(id, []).extend(np.frombuffer(blob, "<i4").tolist())
    steps: dict[int, Batch] = {}
    for step, prompt, id, reward in rows:
        steps.setdefault(step, set()).add((prompt, id, tuple(tokens[id]), reward))
    return [steps[step] for step in sorted(steps)]


def reference_batches(folder: Path) -> list[Batch]:
    dump = folder / "batches.json"
    words = ["--steps", "3", "--prompts-per-step", "4", "--group-size", "4", "--mini-batches", "2", "--eval-rows", "0"]
    command = [sys.executable, str(ROOT / "examples" / "sync_reference.py"), *words, "--threads", "1"]
    subprocess.run([*command, "--dump", str(dump)], check=True, timeout=300, capture_output=True)
    return [
        {(row, id, tuple(tokens), reward) for row, id, tokens, reward in step} for step in json.loads(dump.read_text())
    ]


def test_at_staleness_0_it_builds_the_batches_of_the_plain_synchronous_program(tmp_path):
    run = Run(
        tmp_path, NATIVE, "--schedule.kind", "sync", "--schedule.max_staleness", "0", "--trainer.mini_batches", "2"
    )
    run.finish()
    ours, theirs = batches_of(run), reference_batches(tmp_path)
    assert [len(batch) for batch in ours] == [16, 16, 16]
    assert ours == theirs


@pytest.mark.soak  # emulated it is in test_runs.py; with a model, two ranks are killed below
def test_killed_in_the_middle_it_goes_on_and_consumes_the_same_prompts(tmp_path):
    run = Run(tmp_path, NATIVE, "--schedule.kind", "sync").start()
    run.until(lambda: run.events("Trained") >= 1 and run.events("Finished") > 20, "the second step")
    run.kill()
    run.finish("--resume")
    prompts = [prompt for part in run.trained_prompts() for prompt in part]
    assert sorted(prompts) == list(range(12))
    assert Journal(run.folder).complete


def test_two_trainer_ranks_train_publish_and_save_together_and_one_goes_on(tmp_path):
    every_step = ("--trainer.checkpoint_every", "1")
    run = Run(tmp_path, NATIVE, "--schedule.kind", "sync", "--trainer.ranks", "2", *every_step)
    run.options += ["--run.steps", "2"]
    run.start()
    run.until(lambda: run.events("Checkpointed") >= 1, "the first checkpoint")
    run.kill()
    first = next(iter(sorted((run.folder / "checkpoints").glob("step-*"))))
    assert (first / "rank-00001-of-00002.safetensors").exists()
    assert main(["export", str(run.folder), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    run.finish("--resume", "--trainer.ranks", "1")
    assert [sorted(prompts) for prompts in run.trained_prompts()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (run.folder / "checkpoints" / "step-00000002" / "model.safetensors").exists()


def test_a_run_that_diverges_ends_with_a_sentence_and_goes_on_at_a_lower_rate(tmp_path):
    options = ("--schedule.kind", "sync", "--workload.prompts_per_step", "16", "--trainer.mini_batches", "4")
    run = Run(tmp_path, NATIVE, *options, "--run.steps", "2")
    status, out, err = run.start("--trainer.learning_rate", "1e8").wait()
    assert status == 2, f"{out}\n{err}\n{run.logs()}"
    assert "an update of step 1 is skipped: its loss or gradient is not finite" in out
    assert "the trainer cannot go on: the loss or gradient of an update of step 1 is not finite" in err
    assert "the last good weights are those that the run started from" in err
    assert "so it is skipped" in (run.folder / "logs" / "trainer0.log").read_text()
    assert run.events("TrainerJoined") == 1
    assert not Journal(run.folder).complete
    run.finish("--resume", "--trainer.learning_rate", "3e-4")
    assert len(run.trained_prompts()) == 8
    with closing(sqlite3.connect(run.folder / "run.db")) as database:
        skipped = database.execute("SELECT value FROM metrics WHERE name = 'skipped' ORDER BY rowid").fetchall()
    assert [value for (value,) in skipped][:4] == [0, 1, 1, 1]
    assert not any(value for (value,) in skipped[4:])


@pytest.mark.parametrize("kind", ["trajectory", pytest.param("partial", marks=pytest.mark.soak)])
def test_an_asynchronous_run_trains_every_sample_within_the_bound_and_its_weights_can_be_used(tmp_path, kind):
    run = Run(tmp_path, NATIVE, "--schedule.kind", kind, "--local.replicas", "2", "--run.steps", "4")
    run.finish()
    summary = json.loads((run.folder / "summary.json").read_text())
    ledger = summary["ledger"]
    ended = ledger["trained"] + ledger["dropped_stale"] + ledger["filtered"] + ledger["failed"] + ledger["lost"]
    assert ledger["started"] == ended + ledger["in_flight"]
    assert (summary["steps"], summary["trained_samples"]) == (4, 64)
    assert summary["staleness"]["max"] <= 4
    assert (run.folder / "summary.png").stat().st_size > 10_000
    out = tmp_path / "exported"
    assert main(["export", str(run.folder), "--out", str(out)]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(START)
    assert any((a != b).any() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert tokenizer("a 1 b 2 =")["input_ids"]
