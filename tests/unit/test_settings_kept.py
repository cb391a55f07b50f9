"""What a run goes on with that is resumed by its settings file."""

from pathlib import Path

from tailrace.config import load
from tailrace.launch.folder import begin_store
from tailrace.launch.resumed import note_files, resumed

FILE = """
rollout.engine = "emulated"
model.preset = "qwen2.5-0.5b"
trainer.learning_rate = 1e-6
run.steps = 4
"""


def begun(folder: Path, *options: str) -> tuple[Path, list[str]]:
    file, run = folder / "my.toml", folder / "run"
    file.write_text(FILE)
    store = begin_store(run, load([file], options))
    note_files(store.meta, [str(file)])
    store.close(complete=False)
    return run, [str(file)]


def test_an_option_that_was_given_stays_whether_the_file_says_something_else_or_nothing(tmp_path):
    given = ["--run.steps", "9", "--trainer.kl", "0.1", "--workload.group_size", "4"]
    run, files = begun(tmp_path, *given)
    assert resumed(run, files, []) == load(files, given)


def test_what_has_changed_in_the_file_counts_and_options_before_it(tmp_path):
    run, files = begun(tmp_path, "--run.steps", "9", "--trainer.kl", "0.1")
    Path(files[0]).write_text(FILE.replace("= 4", "= 12") + "trainer.entropy = 0.01\n")
    now = resumed(run, files, ["--trainer.entropy", "0.02"])
    assert (now.run.steps, now.trainer.entropy, now.trainer.kl) == (12, 0.02, 0.1)


def test_what_is_taken_out_of_the_file_stays_as_it_was(tmp_path):
    run, files = begun(tmp_path)
    Path(files[0]).write_text(FILE.replace("trainer.learning_rate = 1e-6", ""))
    assert resumed(run, files, []).trainer.learning_rate == 1e-6


def test_of_a_run_that_did_not_note_its_file_all_of_the_file_counts(tmp_path):
    _, files = begun(tmp_path)
    Path(files[0]).write_text(FILE.replace("1e-6", "2e-6"))
    again = tmp_path / "older"
    begin_store(again, load(files, ["--trainer.learning_rate", "3e-6", "--trainer.kl", "0.1"])).close(complete=False)
    now = resumed(again, files, [])
    assert (now.trainer.learning_rate, now.trainer.kl) == (2e-6, 0.1)
