"""Changing one's mind: a run resumed with other settings, a finished run extended. Both replay to the same commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from runs import NATIVE, START, Run
from tailrace.launch.models import weights_of
from tailrace.obs.summary import summarise
from tailrace.protocol import SettingsChanged, SettingValue
from tailrace.sim.replay import replay
from tailrace.store.database import reading
from tailrace.store.journal import Journal
from tailrace.trainer.manifest import found_in, step_of


def changes(run: Run) -> list[dict[str, SettingValue]]:
    return [entry.event.values for entry in Journal(run.folder).entries() if isinstance(entry.event, SettingsChanged)]


def replays(run: Run) -> bool:
    journal = Journal(run.folder)
    return replay(journal.entries(), journal.begun).difference is None


def steps_of(run: Run) -> int:
    with reading(run.folder / "run.db") as database:
        return database.execute("SELECT count(DISTINCT step) FROM metrics WHERE name = 'trainer/seconds'").fetchone()[0]


def test_a_finished_run_is_extended_by_its_file_or_folder_and_its_journal_still_replays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.finish("--run.steps", "2")
    status, _, err = run.start("--run.steps", "2", "--resume").wait()
    assert (status, "is complete; to train it further, resume it with more steps" in err) == (2, True), err
    status, _, err = run.start("--run.steps", "4", "--resume", "--workload.group_size", "3").wait()
    assert status == 2
    assert "was begun with workload.group_size = 2, and now it is 3, which a run cannot change" in err
    assert "tailrace fork" in err

    out = run.finish("--run.steps", "4", "--resume")
    assert "all steps are done" in out
    assert "step 3/4" in out
    assert "step 4/4" in out
    assert summarise(run.folder).summary.steps == 4
    assert (steps_of(run), changes(run), replays(run)) == (4, [{"run.steps": 4}], True)
    status, out, err = tailrace("train", str(run.folder), "--resume", "--run.steps", "5")
    assert (status, "all steps are done" in out) == (0, True), err
    assert (steps_of(run), changes(run)[1:], replays(run)) == (5, [{"run.steps": 5}], True)
    status, _, err = tailrace("train", str(run.folder))
    assert (status, "is a run; go on with it by --resume" in err) == (2, True), err


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps as it was begun, and three more with other settings."""
    run = Run(tmp_path_factory.mktemp("changed"), NATIVE, "--schedule.kind", "sync", "--trainer.checkpoint_every", "1")
    run.options += ["--trainer.archive_every", "2"]
    run.finish("--run.steps", "2")
    new = ["--trainer.learning_rate", "1e-4", "--trainer.kl", "0.1", "--trainer.keep_checkpoints", "3"]
    run.finish("--run.steps", "5", "--resume", *new)
    return run


def test_a_run_goes_on_with_another_learning_rate_kl_and_checkpoints(changed: Run) -> None:
    assert changes(changed) == [
        {"run.steps": 5, "trainer.keep_checkpoints": 3, "trainer.kl": 0.1, "trainer.learning_rate": 1e-4}
    ]
    rates, kl = by_step(changed, "lr"), by_step(changed, "kl")
    assert rates == {0: 3e-4, 1: 3e-4, 2: 1e-4, 3: 1e-4, 4: 1e-4}
    assert sorted(kl) == [2, 3, 4], "against the weights that the run started from"
    assert min(kl.values()) > 0
    assert [step_of(path) for path in found_in(changed.folder / "checkpoints")] == [2, 3, 4, 5], "2 is archived"
    assert replays(changed)


def by_step(run: Run, name: str) -> dict[int, float]:
    with reading(run.folder / "run.db") as database:
        rows = database.execute("SELECT step, value FROM metrics WHERE name = ? ORDER BY step", (name,))
        return dict(rows.fetchall())


def test_a_fork_begins_with_the_weights_and_the_next_prompts_of_a_version(changed: Run) -> None:
    folder = changed.folder.with_name("second")
    frozen = ["--trainer.learning_rate", "1e-12"]  # so that what it began with is still there at its end
    status, _, err = tailrace("fork", str(changed.folder), "--version", "2", "--run.name", "second", *frozen)
    assert status == 0, err
    assert "second begins with v2 of" in err

    assert Journal(folder).config.run.steps == 3, "as many as the first had left"
    assert prompts_of(folder)[:8] == prompts_of(changed.folder)[8:16], "those after two steps of four"
    begun = changed.folder / "checkpoints" / "step-00000002"
    ended = distances(folder / "checkpoints" / "step-00000003", begun, START)
    assert ended[0] < 1e-6 < 1e-4 < ended[1]
    origin = msgspec.json.decode(Journal(folder).meta["origin"])
    assert (origin["run"], origin["version"]) == (str(changed.folder), 2)
    assert weights_of(Journal(folder), 0) == folder / "origin" / "step-00000002"
    assert replay(Journal(folder).entries(), Journal(folder).begun).difference is None

    status, _, err = tailrace("fork", str(changed.folder), "--version", "9", "--run.name", "third")
    assert (status, "has no weights of v9; it has v0, v2, v3, v4, v5" in err) == (2, True), err
    status, _, err = tailrace("fork", str(changed.folder), "--version", "best", "--run.name", "third")
    assert (status, "nothing was evaluated while training" in err) == (2, True), err
    status, _, err = tailrace("fork", str(changed.folder), "--run.name", "third", "--model.path", "elsewhere")
    assert (status, "--model.path cannot differ" in err) == (2, True), err


def tailrace(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *words], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def prompts_of(folder: Path) -> list[str]:
    with reading(folder / "samples-0.db") as database:
        return [text for (text,) in database.execute("SELECT prompt FROM prompts ORDER BY id")]


def distances(weights: Path, *others: Path) -> list[float]:
    """The largest difference of any parameter from each of the others."""
    own = load_file(weights / "model.safetensors")
    found = [load_file(other / "model.safetensors") for other in others]
    return [max(float((own[name] - one[name]).abs().max()) for name in own) for one in found]
