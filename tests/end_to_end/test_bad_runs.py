"""What cannot work is refused in a sentence, before anything starts where that is possible, and harms nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

import tailrace
from runs import EMULATED, Run, replayed
from tailrace.config import load
from tailrace.launch.folder import begin_store
from tailrace.page.follow import Follower
from tailrace.protocol import SampleFailed
from tailrace.store.journal import Journal

START = Path(__file__).parents[2] / "examples" / "running_total" / "start"
OWN = """
[model]
path = "model"
[task]
data = "rows.jsonl"
eval_rows = 1
{task}
[workload]
prompts_per_step = 2
group_size = 2
prompt_tokens = 16
max_completion_tokens = 16
[rollout]
kv_tokens = {kv}
[trainer]
mini_batches = 1
[groups]
max_failures = 1
[run]
steps = 2
evaluate = false
[local]
replicas = 1
"""
ROWS = [
    {"prompt": "a 1 b 2 =", "answer": "3"},
    {"prompt": "a 2 b 2 =", "answer": "4"},
    {"prompt": "a 1 =", "answer": "1"},
]


def make(folder: Path, task: str = "", kv: int = 512, rows=ROWS, reward: str = "") -> Run:
    shutil.copytree(START, folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if reward:
        (folder / "rewards.py").write_text(reward)
        task += '\nreward = "rewards.py:judge"'
    return Run(folder, OWN.format(task=task, kv=kv))


def refusal(run: Run, *options: str) -> str:
    status, out, err = run.start(*options).wait()
    assert status == 2, f"{status}\n{out}\n{err}\n{run.logs()}"
    assert not run.components()
    return err


def test_a_model_directory_without_weights(tmp_path):
    run = make(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "weights" in refusal(run)
    assert not run.folder.exists()


def test_a_tokenizer_without_an_end_token(tmp_path):
    run = make(tmp_path)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        table = {key: value for key, value in json.loads(file.read_text()).items() if "eos" not in key}
        file.write_text(json.dumps(table))
    assert "end token" in refusal(run)
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "rows.jsonl"), ([{"prompt": "a 1 =", "answer": "1"}, {"answer": "2"}], "'prompt'")],
)
def test_data_without_rows_or_a_row_without_a_prompt(tmp_path, rows, words):
    run = make(tmp_path, rows=rows)
    assert words in refusal(run)
    assert not run.folder.exists()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("setting", "device", "words"),
    [("rollout", "cuda", "but "), ("trainer", "cuda:3", "but "), ("trainer", "gpu", "which is no device")],
)
def test_a_device_that_is_not_there(tmp_path, setting, device, words):
    run = make(tmp_path)
    complaint = refusal(run, f"--{setting}.device", device)
    assert f'{setting}.device is "{device}", {words}' in complaint
    assert "Traceback" not in complaint
    assert not run.folder.exists()


def test_fewer_rows_than_a_step_takes(tmp_path):
    complaint = refusal(make(tmp_path, "epochs = 1"), "--workload.prompts_per_step", "3")
    assert "has 2 rows to train on, so task.epochs = 1 gives 2 prompts, and one step takes 3" in complaint
    assert not (tmp_path / "runs").exists()


def test_a_context_longer_than_the_models(tmp_path):
    assert "context" in refusal(make(tmp_path), "--workload.max_completion_tokens", "4000")


def test_a_pool_too_small_for_one_sequence(tmp_path):
    complaint = refusal(make(tmp_path, kv=16), "--sampling.top_k", "5")
    assert "KV pool" in complaint
    assert "sampling.top_k is 5: tokens are sampled from a part of the vocabulary" in complaint  # said before it starts


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('gold')", "gold"),
        *[  # what the judges make of each is tested with them
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("import time; time.sleep(60)", "did not answer"),
                ("return float('nan')", "nan"),
                ("return [1.0, 2.0]", "judge"),
            )
        ],
    ],
)
def test_a_reward_that_raises_hangs_or_answers_nonsense(tmp_path, body, words):
    run = make(tmp_path, "reward_timeout_s = 0.5", reward=f"def judge(completion, answer):\n    {body}\n")
    complaint = refusal(run)
    assert "in a row could not be judged" in complaint
    assert words in complaint
    assert not Journal(run.folder).complete
    ended = json.loads((run.folder / "summary.json").read_text())["ended"]
    assert ended["state"] == "failed"
    assert ended["reason"] in complaint
    assert json.loads(Follower(run.folder).latest.content)["about"]["ended"] == ended
    told = subprocess.run(
        [sys.executable, "-m", "tailrace", "story", str(run.folder), "r0"], capture_output=True, text=True, check=True
    )
    assert f"the run failed: {ended['reason']}" in told.stdout


PICKY = """
import os, zlib

def judge(completion, answer):
    number = zlib.crc32(completion.encode())
    if number % 5 == 0:
        os._exit(3)
    if number % 3 == 0:
        raise ValueError(f"cannot read <{completion}>")
    return number % 2
"""


def test_what_a_reward_failed_on_is_read_with_its_error_and_each_failure_once(tmp_path):
    """The reward raises on some completions, and kills its judge on others."""
    run = make(tmp_path, reward=PICKY)
    run.finish("--groups.max_failures", "3", "--groups.min_survivors", "1", "--run.steps", "4")
    replayed(run)
    events = [entry.event for entry in Journal(run.folder).entries()]
    reasons = Counter(event.reason for event in events if isinstance(event, SampleFailed))
    assert any("status 3" in reason for reason in reasons)
    command = [sys.executable, "-m", "tailrace", "samples", str(run.folder), "--limit", "200", "--json"]

    def listed(*words: str) -> list[dict]:
        out = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
        return [json.loads(line) for line in out.splitlines()]

    failed = listed("--failed")
    assert Counter(one["known"]["reason"] for one in failed) == reasons
    assert all(one["known"]["tokens"] and len(one["passages"]) > 1 for one in failed)
    raised = listed("--error", "cannot read")
    assert 0 < len(raised) < len(failed)
    for one in raised:
        text = "".join("".join(part["pieces"]) for part in one["passages"][1:])
        (quoted,) = re.findall("cannot read <(.*)>", one["known"]["reason"])
        assert quoted.strip() in text
    assert any(one["known"]["state"] == "trained" and one["failed"] for one in listed()), "a later attempt was trained"
    rows = list(tailrace.Run(run.folder).failures())
    assert Counter(row["reason"] for row in rows) == reasons
    assert all(row["completion"] in row["reason"] for row in rows if "cannot read" in row["reason"])


EXTREME = """
import numpy
REWARDS = [-0.0, 1e308, -1e308, 5e-324, True, numpy.float32(0.1), numpy.array(2), numpy.bool_(True)]
seen = iter(REWARDS * 1000)
def judge(completion, answer):
    return next(seen)
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run that was stopped and whose rows have changed since, run to its end with them; and what was said first."""
    folder = tmp_path_factory.mktemp("resumed")
    run, rows = make(folder, reward=EXTREME), folder / "rows.jsonl"
    begin_store(run.folder, load([run.file])).close(complete=False)
    rows.write_text(rows.read_text().replace("a 1 b 2", "b 2 a 1"))
    complaint = refusal(run, "--resume")
    run.finish("--resume", "--accept-changed-inputs")
    return run, complaint


def test_a_run_is_not_resumed_with_other_data_unless_that_is_accepted(resumed):
    run, complaint = resumed
    rows = run.file.with_name("rows.jsonl")
    assert f"{rows} has changed (it is as long as it was, but not the same) since the run was begun" in complaint
    assert complaint.strip().endswith("by --accept-changed-inputs")
    assert Journal(run.folder).complete


def test_rewards_at_the_ends_of_what_a_float_holds_are_trained_on(resumed):
    with closing(sqlite3.connect(resumed[0].folder / "run.db")) as database:
        failed = database.execute("SELECT reason FROM trajectories WHERE state = 'failed'").fetchall()
        trained = database.execute("SELECT count(*) FROM trajectories WHERE state = 'trained'").fetchone()[0]
    assert (failed, trained) == ([], 2 * 2 * 2)


@pytest.mark.parametrize("words", [["train", "run.toml"], ["worker", "--join", "localhost:1"]])
def test_a_limit_of_open_files_that_is_too_low_is_named(tmp_path, words):
    (tmp_path / "run.toml").write_text(EMULATED)
    command = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", sys.executable, "-m", "tailrace", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    sentence = r"tailrace: this takes up to \d+ open files in one process, and the limit here is 24; raise it with"
    assert re.match(sentence, done.stderr)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_reward_with_a_typo_is_found_before_anything_starts(tmp_path):
    run = make(tmp_path, reward="def jugde(completion, answer):\n    return 1.0\n")
    assert "judge" in refusal(run)
    assert not run.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_ends_the_run_and_what_is_written_stays_readable(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        run = Run(tmp_path, EMULATED, "--run.steps", "5000", "--run.folder", str(disk))
        run.folder = disk / "run"
        complaint = refusal(run)
        assert "full" in complaint or "room" in complaint
        assert sum(1 for _ in Journal(run.folder).entries()) > 10
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
