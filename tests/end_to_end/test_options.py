"""Absurd values for every option of every command, and for every setting: one sentence, exit code 2, never a trace."""

from __future__ import annotations

from argparse import Action
from pathlib import Path

import pytest

from tailrace.cli import _parser, main
from tailrace.config.fields import fields
from tailrace.errors import TailraceError
from tailrace.launch import doctor

ROOT = Path(__file__).parents[2]
BOX = str(ROOT / "examples/clusters/own_box.toml")
HUGE = "9" * 30
NUMBERS = ["0", "-1", "nan", "inf", "1.5", HUGE, "", "zebra"]
FOLDER = "FOLDER"  # stands for a directory that exists
REST = {  # what else a command needs
    "simulate": [BOX, "--schedules", "sync", "--run.steps", "2", "--workload.prompts_per_step", "4"],
    "plan": [BOX],
    "train": [BOX, "--dry-run"],
    "worker": ["--join", "127.0.0.1:1", "--key", "none"],
    "eval": ["RUN"],
    "export": ["RUN", "--out", "out"],
    "bench": ["schedules", BOX, "--dry-run"],
    "fit": ["RUN"],
    "story": ["RUN", "t0"],
    "page": ["RUN"],
    "replay": ["RUN"],
    "doctor": [BOX],
    "fork": ["RUN", "--version", "1", "--run.name", "b"],
    "price": ["RUN", "r0", "0.5"],
    "samples": ["RUN", "t0"],
    "log": ["RUN", "--to", "jsonl"],
    "report": ["RUN"],
    "trace": ["RUN"],
    "workers": ["RUN"],
    "launch": ["k8s", BOX, "--image", "tailrace:latest"],
}
MEANINGFUL = {("simulate", "--record", name) for name in [*NUMBERS, FOLDER] if name}
MEANINGFUL |= {("train", "--secret", name) for name in [*NUMBERS, FOLDER] if name}  # a dry run reads no secret
MEANINGFUL |= {(name, "-o", file) for name in ("report", "trace") for file in NUMBERS if file}
MEANINGFUL |= {
    ("price", "dollars", "0"),
    ("price", "dollars", "1.5"),
    ("plan", "--throughput", "1.5"),
    ("workers", "--reason", ""),
    ("workers", "journal", FOLDER),  # a key may be made before the run
}
NOTES = ("tailrace: note: ", "tailrace: waiting up to ", "planning: ")  # the last on a busy machine
_, COMMANDS = _parser()
VALUED = [(name, action) for name, parser in COMMANDS.items() for action in parser._actions if action.nargs != 0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["simulate", *REST["simulate"], "--record", str(folder)]) == 0
    return str(folder)


def test_every_command_is_here() -> None:
    assert REST.keys() == COMMANDS.keys()


@pytest.mark.parametrize(("command", "action"), VALUED, ids=lambda part: getattr(part, "dest", part))
def test_an_absurd_value_of_an_option_is_one_sentence(
    command: str, action: Action, run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for value in [*NUMBERS, FOLDER]:
        words = _words(command, action, "folder" if value == FOLDER else value)
        code = main([command, *[run if word == "RUN" else word for word in words]])
        shown = capfd.readouterr()
        option = action.option_strings[0] if action.option_strings else action.dest
        assert code in (0, 2), (words, code)
        assert code == 2 or (command, option, value) in MEANINGFUL, words
        sentences = [line for line in shown.err.splitlines() if not line.startswith(NOTES)]
        assert code == 0 or [line.startswith("tailrace: ") for line in sentences] == [True], (words, shown.err)


def _words(command: str, action: Action, value: str) -> list[str]:
    if action.option_strings:
        return [*REST[command], f"{action.option_strings[0]}={value}"]
    if action.dest == "id":
        return [REST[command][0], value, *REST[command][2:]]
    runs = {"journal": "RUN", "journals": "RUN"}
    place = {"files": BOX, **runs, "dollars": "0.5", "what": "schedules", "placer": "k8s"}[action.dest]
    return [value if word == place else word for word in REST[command]]


@pytest.mark.parametrize("command", [name for name, words in REST.items() if BOX in words])
def test_every_command_that_takes_settings_prints_them_all(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    rest = [word for word in REST[command] if word != "--dry-run"]
    assert main([command, *rest, "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert all(f"\n[{key.rpartition('.')[0]}]\n" in f"\n{printed}" for key in fields())


def test_an_absurd_value_of_a_setting_is_one_sentence_or_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor computes with nearly all of them; what it says of this machine has nothing to do with them."""
    monkeypatch.setattr(doctor, "_machine", lambda seen: ("this machine", []))
    for key in fields():
        for value in NUMBERS:
            assert "\n" not in complaint(f"--{key}={value}"), (key, value)


def complaint(setting: str) -> str:
    """What the command would show as one sentence; anything else that is raised fails the test."""
    try:
        assert doctor.examine([BOX], [setting])
    except TailraceError as error:
        return str(error)
    return ""
