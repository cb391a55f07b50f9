"""Each tracker told of a real run, beside it or afterwards; and none of them can hurt it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runs import EMULATED, Run
from tailrace.page.follow import Follower
from tailrace.page.prometheus import exposition
from tailrace.types import EVALUATION

STEPS = 6
EXPECTED = {
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/truncated_share",
    "reward/mean",
    "reward/std",
    "reward/zero_variance_share",
    "staleness/mean",
    "trainer/idle_ratio",
    "rollout/idle_ratio",
    "kv_usage",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two evaluations, whose trackers are told afterwards."""
    run = Run(tmp_path_factory.mktemp("run"), EMULATED, "--run.steps", str(STEPS), "--task.eval_rows", "4")
    run.finish("--eval.every", str(STEPS))
    return run.folder


def tailrace(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tailrace", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


def tell(run: Path, name: str, **environment: str) -> str:
    done = tailrace("log", str(run), "--to", name, **environment)
    assert done.returncode == 0, done.stderr
    assert f"{name}: {STEPS + 2} rows" in done.stdout
    return done.stdout


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_have_every_step_and_evaluation_and_go_on_where_they_ended(finished):
    tell(finished, "jsonl")
    rows = lines(finished / "log" / "metrics.jsonl")
    steps = [row for row in rows if row.keys() >= EXPECTED]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/held_out/avg@1" in row] == [0, STEPS]
    assert all(0 < row["completions/min_length"] <= row["completions/mean_length"] for row in steps)
    samples = lines(finished / "log" / "samples.jsonl")
    assert {row["step"] for row in samples} == set(range(STEPS + 1))
    assert all(row["prompt"] and row["completion"] for row in samples)
    again = tailrace("log", str(finished), "--to", "jsonl")
    assert "jsonl: 0 rows" in again.stdout
    assert lines(finished / "log" / "metrics.jsonl") == rows


def test_tensorboard_reads_scalars_and_samples(finished):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(finished, "tensorboard")
    found = EventAccumulator(str(finished / "log" / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) >= EXPECTED | {"eval/held_out/avg@1"}
    assert [one.step for one in found.Scalars("reward/mean")] == list(range(1, STEPS + 1))
    (text,) = found.Tensors("samples")[-1].tensor_proto.string_val
    assert b"reward" in text


def test_wandb_offline_has_metrics_and_samples(finished):
    pytest.importorskip("wandb")
    tell(finished, "wandb", WANDB_MODE="offline")
    (folder,) = (finished / "log" / "wandb").glob("offline-run-*")
    (records,) = folder.glob("*.wandb")
    assert all(name.encode() in records.read_bytes() for name in EXPECTED)
    tables = [json.loads(file.read_text()) for file in (folder / "files" / "media" / "table").glob("samples*.json")]
    assert len(tables) == STEPS + 2
    assert all("completion" in table["columns"] and table["data"] for table in tables)


def test_trackio_has_metrics_and_samples(finished, tmp_path):
    pytest.importorskip("trackio")
    tell(finished, "trackio", TRACKIO_DIR=str(tmp_path))
    with closing(sqlite3.connect(tmp_path / "tailrace.db")) as database:
        rows = [(step, json.loads(values)) for step, values in database.execute("SELECT step, metrics FROM metrics")]
    steps = [step for step, values in rows if values.keys() >= EXPECTED]
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert any("samples" in values for _, values in rows)


def test_prometheus_reads_the_newest_figures(finished):
    text = exposition(Follower(finished).latest.content).decode()
    assert f'tailrace_steps{{run="run"}} {STEPS}.0' in text
    assert 'tailrace_eval{run="run",name="held_out/avg@1"}' in text
    assert 'tailrace_replica_kv{run="run",replica="0"}' in text
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(names)) == text.count("# TYPE"), "each is announced once"


def test_parquet_has_every_sample_with_its_tokens(finished, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    done = tailrace("export", str(finished), "--trajectories", str(tmp_path / "samples.parquet"))
    assert done.returncode == 0, done.stderr
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    trained = [row for row in rows if row["state"] == "trained"]
    assert len(trained) == STEPS * 8
    for row in trained:
        assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["versions"]) == row["tokens"]
        assert (min(row["versions"]), max(row["versions"])) == (row["oldest"], row["newest"])
    assert sum(row["evaluation"] for row in rows) == sum(row["id"] >= EVALUATION for row in rows) == 2 * 4


def test_told_while_it_goes_on_and_a_tracker_that_fails_does_not_hurt_it(tmp_path):
    broken = tmp_path / "packages" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('the tracker is down')\n")
    run = Run(tmp_path, EMULATED, "--run.steps", "4", "--log.to", "jsonl,wandb")
    os.environ["PYTHONPATH"] = f"{broken.parent}{os.pathsep}{(before := os.environ.get('PYTHONPATH', ''))}"
    try:
        status, out, err = run.start().wait()
    finally:
        os.environ["PYTHONPATH"] = before
    assert status == 0, err
    assert "not all of the run is in wandb" in out + err
    assert "RuntimeError: the tracker is down" in out + err
    rows = lines(run.folder / "log" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
