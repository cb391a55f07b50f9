"""The command as a person meets it: real processes, exit codes, one sentence for every mistake."""

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

ROOT = Path(__file__).parents[2]
OWN_BOX = str(ROOT / "examples/clusters/own_box.toml")
SMALL = ["--workload.prompts_per_step", "16", "--workload.group_size", "4", "--run.steps", "3"]
RESULT_KEYS = {
    *("gpus", "schedule", "repack", "tokens_per_s", "step_s", "trainer_idle", "rollout_idle", "kv_usage", "staleness"),
    *("trained", "dropped", "moved", "pull_wait_s", "publish_stall_s"),
}


def tailrace(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tailrace", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def succeeded(*words: str) -> str:
    done = tailrace(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "new" / "run"
    succeeded("simulate", OWN_BOX, *SMALL, "--schedules", "trajectory", "--record", str(folder))
    return str(folder)


# ------------------------------------------------------------------------------------------------------------- works


def test_help_names_every_command_and_loads_nothing() -> None:
    text = succeeded("--help")
    assert all(name in text for name in ("simulate", "plan", "story", "replay", "doctor"))
    program = "import sys, tailrace.cli; tailrace.cli._parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "rich", "msgspec", "sqlite3", "asyncio"} & set(loaded.split())


def test_simulate_shows_the_six_schedules() -> None:
    lines = succeeded("simulate", OWN_BOX, *SMALL).splitlines()
    first_words = [line.split()[0] for line in lines if line.strip()]
    assert first_words[-6:] == ["sync", "one_step", "stream", "partial", "trajectory", "adaptive"]
    assert "…" not in "".join(lines)


def test_json_is_one_object_with_all_keys() -> None:
    told = json.loads(
        succeeded("simulate", OWN_BOX, *SMALL, "--gpus", "16,8", "--schedules", "trajectory,sync", "--json")
    )
    assert told["config"]["model"]["parameters"] == 1_543_714_304
    rows = [(row["gpus"], row["schedule"], row["repack"]) for row in told["results"]]
    assert rows == [(8, "sync", False), (8, "trajectory", True), (16, "sync", False), (16, "trajectory", True)]
    for row in told["results"]:
        assert row.keys() >= RESULT_KEYS
        assert row["staleness"].keys() == {"mean", "p95", "max"}
        assert row["trained"] == 48


def test_schedule_kind_on_the_command_line_simulates_that_one_alone() -> None:
    told = json.loads(succeeded("simulate", "--schedule.kind=stream", OWN_BOX, *SMALL, "--json"))
    assert [row["schedule"] for row in told["results"]] == ["stream"]


def test_a_trainer_of_a_fixed_size_grows_with_the_cluster() -> None:
    words = ["--split.trainer_gpus", "2", "--schedules", "one_step", "--gpus", "8,32", "--json"]
    done = tailrace("simulate", OWN_BOX, *SMALL, *words)
    assert done.returncode == 0
    assert "split.trainer_gpus (2 on 8 GPUs) grows with the cluster: 8 on 32" in done.stderr
    assert len(json.loads(done.stdout)["results"]) == 2


def test_work_in_flight_grows_with_the_cluster_too() -> None:
    words = ["--schedule.max_inflight", "32", "--schedules", "partial", "--gpus", "8,32", "--dry-run"]
    done = tailrace("simulate", OWN_BOX, *SMALL, *words)
    assert "schedule.max_inflight (32 on 8 GPUs) grows with the cluster: 128 on 32" in done.stderr
    told = json.loads(succeeded("simulate", OWN_BOX, *SMALL, *words[:-2], "32", "--json"))
    assert told["results"][0]["gpus"] == 32


@pytest.mark.parametrize(("rate", "lost", "shown"), [("300", ["sync"], ["partial"]), ("20000", ["sync"], [])])
def test_a_fleet_that_dies_is_said_and_fails(rate: str, lost: list[str], shown: list[str]) -> None:
    faults = ["--faults.replica_per_hour", rate, "--health.max_restarts", "0", "--schedules", "sync,partial"]
    done = tailrace("simulate", OWN_BOX, *SMALL, *faults)
    assert done.returncode == 2
    assert f"tailrace: {lost[0]} on 8 GPUs: the run failed after" in done.stderr
    assert "no replica is left" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()][3:] == shown


@pytest.mark.parametrize("peer", ["areal_1_5b", "verl_7b_h20"])
def test_peers_that_drop_nothing_drop_nothing_here_and_what_a_bound_of_ours_drops_is_noted(peer: str) -> None:
    words = ["simulate", str(ROOT / f"examples/clusters/{peer}.toml"), "--cluster.gpus", "16", "--schedules", "partial"]
    words += ["--workload.prompts_per_step", "32", "--run.steps", "5", "--json"]
    described = tailrace(*words)
    assert json.loads(described.stdout)["results"][0]["dropped"] == 0
    assert "drops" not in described.stderr
    bound = tailrace(*words, "--schedule.max_staleness", "1")
    found = json.loads(bound.stdout)["results"][0]
    share = found["dropped"] / (found["dropped"] + found["trained"])
    assert share > 0.03
    assert f"note: partial on 16 GPUs drops {100 * share:.0f} % of its groups" in bound.stderr


def test_a_schedule_that_cannot_run_is_left_out_unless_asked_for() -> None:
    fresh = ["simulate", OWN_BOX, *SMALL, "--schedule.max_staleness", "0"]
    done = tailrace(*fresh, "--json")
    assert done.returncode == 0
    assert "one_step on 8 GPUs is left out" in done.stderr
    assert "one_step" not in {row["schedule"] for row in json.loads(done.stdout)["results"]}
    assert tailrace(*fresh, "--schedules", "sync,one_step").returncode == 2


def test_dry_run_prints_settings_that_can_be_read_again(tmp_path: Path) -> None:
    text = succeeded("simulate", OWN_BOX, *SMALL, "--dry-run", "--record", str(tmp_path / "run"), "--schedules", "sync")
    assert 'kind = "sync"' in text
    (tmp_path / "again.toml").write_text(text)
    assert succeeded("simulate", str(tmp_path / "again.toml"), "--schedules", "sync", "--dry-run") == text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["out.png", "out.html"])
def test_plots(tmp_path: Path, name: str) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib")
    succeeded("simulate", OWN_BOX, *SMALL, "--schedules", "sync,trajectory", "--plot", str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 2000


def test_story_and_replay(run: str) -> None:
    assert "t3 given to r0 (attempt 1, version 0)" in succeeded("story", run, "t3")
    for name in ("g0", "r0", "h0", "v1", "p0"):
        assert succeeded("story", run, name)
    assert "events gave the same commands" in succeeded("replay", run)


def test_replay_of_a_changed_journal(run: str, tmp_path: Path) -> None:
    copy = tmp_path / "run.db"
    copy.write_bytes((Path(run) / "run.db").read_bytes())
    with closing(sqlite3.connect(copy)) as database, database:
        database.execute("DELETE FROM meta WHERE key = 'complete'")
    done = tailrace("replay", str(tmp_path))
    assert done.returncode == 0
    assert "without a clean end" in done.stderr
    with closing(sqlite3.connect(copy)) as database, database:
        database.execute("UPDATE journal SET commands = '[]' WHERE seq = 1")
    done = tailrace("replay", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("event 1 at 0.000 s")


def test_lengths_from_a_recorded_run(run: str) -> None:
    words = ["--workload.lengths.law", "empirical", "--workload.lengths.median", "0", "--workload.lengths.sigma", "0"]
    told = succeeded("simulate", OWN_BOX, *SMALL, *words, "--workload.lengths.file", run, "--schedules", "sync")
    assert "sync" in told


def test_doctor() -> None:
    assert "Python" in succeeded("doctor")
    assert "KV of a replica" in succeeded("doctor", OWN_BOX)


def test_doctor_warns_where_python_keeps_no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, warned in (("", False), ("1", True)):
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", value)
        assert ("compiles torch anew" in succeeded("doctor")) == warned


def test_plan_recommends() -> None:
    pytest.importorskip("tailrace.planner")
    told = json.loads(succeeded("plan", OWN_BOX, *SMALL, "--json"))
    assert told


# ----------------------------------------------------------------------------------------------------------- mistakes

BOX = "BOX"  # stands for the example file
MISTAKES = [
    ("simulat BOX", "did you mean 'simulate'?"),
    ("fly", "the commands are"),
    ("simulate", "FILE"),
    ("simulate nowhere.toml", "does not exist"),
    ("simulate BOX --jsn", "did you mean --json?"),
    ("simulate BOX --shedule.kind sync", "did you mean --schedule.kind?"),
    ("simulate BOX --schedule.kind snyc", "did you mean 'sync'?"),
    ("simulate BOX --run.steps four", "wants a whole number"),
    ("simulate BOX --run.steps", "has no value"),
    ("simulate BOX --rollout_batch_size 4", "name, not an option here"),
    ("simulate BOX actor_rollout_ref.rollout.n=8", "verl's name, not an option here; write --workload.group_size"),
    ("simulate BOX +trainer.total_epochs=15", "write --task.epochs"),
    ("simulate BOX trainer.learning_rate=1e-6", "written with two dashes: --trainer.learning_rate=1e-6"),
    ("simulate BOX nowhere=1.toml", "does not exist"),
    ("simulate BOX --gpus 8,many", "--gpus 64,256,1024"),
    ("simulate BOX --gpus 0", "--gpus 64,256,1024"),
    ("simulate BOX --gpus", "expected one argument"),
    ("simulate BOX --gpus 8,1", "too few"),
    ("simulate BOX --schedules sync,laminar", "which is no schedule"),
    ("simulate BOX --schedules sync --schedule.kind sync", "write one of them"),
    ("simulate BOX --split.trainer_gpus 9", "split.trainer_gpus is 9"),
    ("simulate BOX --split.tensor_parallel 5", "tensor_parallel"),
    ("simulate BOX --model.preset llama-3.1-405b", "no room"),
    ("simulate BOX --cluster.gpu H900", "no GPU 'H900'"),
    ("simulate BOX --workload.lengths.law mixture --workload.lengths.tail_alpha 0.9", "no finite mean"),
    ("simulate BOX --plot out.pdf", ".png or .html"),
    ("simulate BOX --plot no/where/out.png", "does not exist"),
    ("simulate BOX --record run", "pick one schedule"),
    ("simulate BOX --record run --gpus 8,16 --schedules sync", "pick one schedule"),
    ("simulate broken.toml", "not valid TOML"),
    ("plan nowhere.toml", "does not exist"),
    ("plan BOX --model.preset llama-3.1-405b", ""),
    ("story", "RUN"),
    ("story nowhere t1", "there is no run"),
    ("story . t1", "has no run.db"),
    ("story broken.toml t1", "not a SQLite file"),
    ("story RUN 17", "is not an id"),
    ("story RUN t99999", "its trajectories are t0 to"),
    ("story RUN t1 --verbose", "no option --verbose"),
    ("replay nowhere", "there is no run"),
    ("replay cut.db", "cut in the middle"),
    ("replay other.db", "in journal format 9"),
    ("eval RUN", "simulated or emulated, so it has no weights"),
    ("export RUN --out model", "simulated or emulated, so it has no weights"),
    ("export RUN --trajectories samples.parquet", "is a simulation, which has no samples"),
    ("fork RUN --run.name other", "simulated or emulated, so it has no weights to fork"),
    ("train . --resume", "has no run to resume"),
    ("train --log.to jsonl tensorboard", "as A,B, without spaces"),
    ("log nowhere --to jsonl", "there is no run nowhere"),
    ("doctor nowhere.toml", "does not exist"),
    ("doctor BOX --model.preset llama-3.1-405b", "no room"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_nothing_is_written(run: str, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "broken.toml").write_text("[run\n")
    whole = (Path(run) / "run.db").read_bytes()
    (tmp_path / "cut.db").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.db").write_bytes(whole)
    with closing(sqlite3.connect(tmp_path / "other.db")) as database, database:
        database.execute("UPDATE meta SET value = '9' WHERE key = 'format'")
    before = sorted(tmp_path.iterdir())
    done = tailrace(*[{"BOX": OWN_BOX, "RUN": run}.get(word, word) for word in line.split()], cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("tailrace: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_run_is_refused(run: str) -> None:
    before = (Path(run) / "run.db").read_bytes()
    done = tailrace("simulate", OWN_BOX, *SMALL, "--schedules", "sync", "--record", run)
    assert done.returncode == 2
    assert "already has a run" in done.stderr
    assert (Path(run) / "run.db").read_bytes() == before


def test_a_reader_that_has_seen_enough(run: str) -> None:
    command = f"'{sys.executable}' -m tailrace story '{run}' r0 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["--schedule.kind", "sync"], []], ids=["one simulation", "several processes"])
def test_ctrl_c(words: list[str]) -> None:
    command = [sys.executable, "-m", "tailrace", "simulate", OWN_BOX, "--run.steps", "1000000", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    while " 0 of " in (line := process.stderr.readline()) or "begun" in line:
        pass  # until steps have been simulated, in whatever process
    assert line.startswith("simulating: ")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, (stdout, stderr)
    assert stdout == ""
    told = [each for each in stderr.splitlines() if not each.startswith("simulating: ")]
    assert told == ["tailrace: interrupted"]
