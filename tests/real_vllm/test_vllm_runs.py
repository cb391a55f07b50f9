"""Whole runs with vLLM: weights that change under running answers, samples that move between engines, a killed vLLM."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import runs
from engines_under_test import START, model_of
from runs import Run, nothing_is_left, replayed
from tailrace.config import load
from tailrace.launch.evaluation import measure
from tailrace.protocol import Finished, Parked, ReplicaLost
from tailrace.runtime.local import read_records
from tailrace.store.journal import Journal

PYTHON = os.environ["TAILRACE_VLLM_PYTHON"]
SETTINGS = f"""
[model]
path = "{START}"
[task]
name = "running_total"
[task.options]
held_out = 16
[workload]
prompts_per_step = 4
group_size = 4
prompt_tokens = 100
max_completion_tokens = 320
[rollout]
engine = "vllm"
python = "{PYTHON}"
kv_tokens = 16384
stream_tokens = 8
max_running = 32
[rollout.vllm]
enforce_eager = true
[repack]
every_s = 0.3
[trainer]
mini_batches = 1
learning_rate = 1e-4
tokens_per_batch = 4096
threads = 1
[health]
heartbeat_s = 1.0
strikes = 60
backoff_s = 0.5
[local]
replicas = 1
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DEADLINE_S", 900.0)  # vLLM takes a minute to start on two cores


def rows(file: Path, query: str) -> list[tuple[float, ...]]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        return database.execute(query).fetchall()


def metric(run: Run, name: str) -> list[float]:
    return [value for (value,) in rows(run.folder / "run.db", f"SELECT value FROM metrics WHERE name = '{name}'")]


def test_weights_change_under_running_answers_and_the_mismatch_is_reported(tmp_path: Path):
    run = Run(tmp_path, SETTINGS, "--schedule.kind", "partial", "--run.steps", "8", "--run.evaluate", "false")
    run.finish()
    assert run.events("WeightsLoaded") >= 4
    spans = rows(
        run.folder / "samples-0.db",
        "SELECT count(DISTINCT version) FROM segments WHERE version IS NOT NULL GROUP BY trajectory_id",
    )
    assert max(spans)[0] > 1, "no answer has tokens of two versions"
    query = "SELECT step, value FROM metrics WHERE name = 'mismatch_kl'"
    mismatch = {int(step): value for step, value in rows(run.folder / "run.db", query)}
    assert len(mismatch) >= 4, "only a step in which no sample has an advantage goes without"
    assert mismatch.get(0, 0.0) < 1e-6, "the first step is of the weights that generated it"
    assert metric(run, "engine/loads")[-1] >= 4
    replayed(run)
    assert nothing_is_left(run)


def test_held_out_prompts_are_played_on_vllm(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(SETTINGS)
    found = measure(load([file]), None, lambda done, total: None)
    (result,) = found.results
    assert (found.done, found.total, result.failed) == (16, 16, 0)
    assert 0.1 < result.accuracy < 0.8  # what the start of the default recipe can do
    assert result.mean_tokens > 5


@contextmanager
def native_worker(run: Run, folder: Path) -> Iterator[int]:
    """Another machine, as it were, whose replica has the native engine."""
    folder.mkdir()
    where = ["--join", f"127.0.0.1:{read_records(run.folder).port}", "--key", str(run.folder / "join.key")]
    command = [sys.executable, "-m", "tailrace", "worker", *where, "--rollout.engine", "native"]
    own = ["--rollout.kv_tokens", "2048"]
    child = subprocess.Popen([*command, *own], env=os.environ | {"TMPDIR": str(folder)})
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait(60)


def movers(run: Run) -> set[tuple[int, int]]:
    """(from, to) of samples that were handed back half done by one replica and brought to their end by another."""
    time.sleep(1)  # all of the journal is read
    parked: dict[int, int] = {}
    found: set[tuple[int, int]] = set()
    for entry in Journal(run.folder).entries():
        event = entry.event
        if isinstance(event, Parked):
            parked |= {one.id: event.replica for one in event.samples if one.tokens}
        elif isinstance(event, Finished) and event.meta.id in parked:
            found.add((parked[event.meta.id], event.replica))
    return found


def children(pid: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]


def vllm_of(run: Run, replica: int) -> list[int]:
    """The process of vLLM that a replica started, while it lives."""
    record = next(one for one in read_records(run.folder).components if (one.role, one.id) == ("replica", replica))
    found = [child for pid, _ in record.processes for child in children(pid)]
    return [pid for pid in found if b"vllm_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def moved_after_a_pause(run: Run, worker: int) -> bool:
    """Whether samples of the native replica have moved: it stands still until the other one has nothing to do."""
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for pid in children(worker):
            os.kill(pid, sign)
        time.sleep(2)
    return (1, 0) in movers(run)


def generated(run: Run, replica: int) -> int:
    query = f"SELECT count(*) FROM journal WHERE kind = 'Finished' AND json_extract(event, '$.replica') = {replica}"
    return int(rows(run.folder / "run.db", query)[0][0])


def babbling(folder: Path) -> Path:
    """A model of random weights: its answers are long, and of very different lengths."""
    shutil.copytree(START, folder)
    model_of(0).save_pretrained(folder)
    return folder


def test_samples_move_between_vllm_and_native_and_a_killed_vllm_is_a_killed_replica(tmp_path: Path):
    options = ["--run.steps", "1000", "--run.evaluate", "false", "--local.listen", "127.0.0.1"]
    # nothing more may start until the step is trained: whoever is done takes over half of what the other still has
    options += ["--workload.prompts_per_step", "2", "--workload.group_size", "8", "--repack.every_s", "0.1"]
    options += ["--schedule.steps_ahead", "0", "--model.path", str(babbling(tmp_path / "model"))]
    run = Run(tmp_path, SETTINGS, *options).start()
    try:
        run.until((run.folder / "join.key").exists, "its key")
        run.until(lambda: run.events("Trained"), "a step")
        with native_worker(run, tmp_path / "worker") as worker:
            run.until(lambda: generated(run, 1), "work of the native replica")
            run.until(lambda: (0, 1) in movers(run), "samples that moved to it")
            run.until(lambda: moved_after_a_pause(run, worker), "samples that moved to vLLM")
            (vllm,) = vllm_of(run, 0)
            os.kill(vllm, signal.SIGKILL)
            run.until(lambda: run.events("ReplicaLost"), "the loss of its replica")
            before = generated(run, 0)
            run.until(lambda: generated(run, 0) > before, "work of the replica that was started again")
        status, out, err = run.interrupt()
        assert status == 130, f"{out}\n{err}\n{run.logs()}"
    finally:
        if run.child is not None and run.child.poll() is None:
            run.kill()
    lost = [entry.event for entry in Journal(run.folder).entries() if isinstance(entry.event, ReplicaLost)]
    assert "vLLM" in lost[0].reason
    replayed(run)
    until = time.monotonic() + 30
    while not nothing_is_left(run) and time.monotonic() < until:
        time.sleep(0.1)
    assert nothing_is_left(run)
