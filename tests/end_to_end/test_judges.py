"""Rewards in processes that can be killed: whatever the user's code does, every question gets one answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace.config import load
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, TaskSettings
from tailrace.envs.base import Faulted, Observed, Row, Scored, Turn
from tailrace.envs.examine import examine
from tailrace.envs.judges import Judges

REWARDS = """
import ctypes, os, sys, time

def behave(completion, answer):
    print("printing", completion)
    os.write(1, b"more on standard output")
    if completion == "hang":
        time.sleep(1000)
    if completion == "hold":
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock
    if completion == "segfault":
        os.kill(os.getpid(), 11)
    if completion == "exit":
        os._exit(3)
    if completion == "leave":
        sys.exit("bye")
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    if completion == "read":
        return len(sys.stdin.read())
    return float(completion == answer)

def wants_more(completion, difficulty):
    return 1.0

def process(completion, answer):
    return float(os.getpid())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 3)
    return tmp_path


def settings(folder: Path, function: str = "behave", **more) -> Config:
    path = f"{folder}/rewards.py:{function}"
    return Config(task=TaskSettings(data=str(folder / "data.jsonl"), eval_rows=1, reward=path, **more))


ROW = Row(0, b"", "1 + 1", {"answer": "2"})


def said(text: str) -> tuple[Turn, ...]:
    return (Turn("policy", text),)


def collect(judges: Judges, count: int) -> dict:
    """Answers to so many questions; the deadline is far beyond what is tested."""
    answers: dict = {}
    until = time.monotonic() + 60
    while len(answers) < count and time.monotonic() < until:
        for key, answer in judges.poll(timeout_s=1.0):
            assert key not in answers
            answers[key] = answer
    assert not judges.outstanding
    return answers


def ask_all(config: Config, completions: list[str], workers: int = 1, timeout_s: float = 20.0) -> dict:
    judges = Judges(config, workers, timeout_s)
    try:
        for number, text in enumerate(completions):
            judges.ask((number, text), ROW, said(text))
        answers = collect(judges, len(completions))
    finally:
        judges.close()
    assert answers.keys() == set(enumerate(completions))
    return {text: answers[number, text] for number, text in enumerate(completions)}


def test_errors_are_reasons_and_never_rewards(folder: Path) -> None:
    words = ["2", "raise", "nan", "none", "leave", "segfault", "exit", "read", "3"]
    answers = ask_all(settings(folder), words)
    assert answers["2"] == Scored(1.0)
    assert answers["3"] == Scored(0.0)
    assert answers["read"] == Scored(0.0), "standard input is empty, and not the channel"
    reasons = {text: answer.reason for text, answer in answers.items() if isinstance(answer, Faulted)}
    assert set(reasons) == set(words) - {"2", "3", "read"}
    assert "KeyError: 'no such thing' (rewards.py, line" in reasons["raise"]
    assert "nan; a reward is a finite number" in reasons["nan"]
    assert "returned None" in reasons["none"]
    assert "SystemExit: bye" in reasons["leave"]
    assert "SIGSEGV" in reasons["segfault"]
    assert "status 3" in reasons["exit"]


def test_held_out_rows_are_judged_too(folder: Path) -> None:
    judges = Judges(settings(folder), workers=1, timeout_s=20.0)
    try:
        judges.ask("held out", Row(-1, b"", "1 + 1", {"answer": "2"}), said("2"))
        assert collect(judges, 1) == {"held out": Scored(1.0)}
    finally:
        judges.close()


def test_a_hang_costs_its_own_sample_only(folder: Path) -> None:
    quick = [f"quick {number}" for number in range(30)]  # enough to be sent ahead, behind the one that hangs
    answers = ask_all(settings(folder), [*quick, "hang", "2", *quick[:3], "hold", "2"], timeout_s=4.0)
    assert answers["2"] == Scored(1.0)
    for text in ("hang", "hold"):
        answer = answers[text]
        assert isinstance(answer, Faulted)
        assert answer.reason.startswith("the scoring process did not answer within 4 s: process ")
    assert all(answers[text] == Scored(0.0) for text in quick)


def test_several_judges_share_the_work(folder: Path) -> None:
    judges = Judges(settings(folder, "process"), workers=2)
    try:
        processes: set[float] = set()
        until = time.monotonic() + 60
        while len(processes) < 2 and time.monotonic() < until:  # one may be quick while the other starts
            for number in range(100):
                judges.ask(number, ROW, said(""))
            processes |= {answer.reward for answer in collect(judges, 100).values()}
    finally:
        judges.close()
    assert len(processes) == 2


def test_a_reward_that_cannot_be_imported_faults_every_question(folder: Path) -> None:
    answers = ask_all(settings(folder, "behav"), ["2", "3"])
    assert answers["2"] == answers["3"]
    assert "did you mean 'behave'?" in answers["2"].reason


def test_examination_refuses_before_anything_starts(folder: Path) -> None:
    examine(settings(folder))
    with pytest.raises(ConfigError, match="wants 'difficulty', which the row lacks"):
        examine(settings(folder, "wants_more"))
    (folder / "rewards.py").write_text("import nowhere_to_be_found")
    with pytest.raises(ConfigError, match="no module 'nowhere_to_be_found'"):
        examine(settings(folder))
    (folder / "rewards.py").write_text("import os; os._exit(4)")
    with pytest.raises(ConfigError, match="ended by itself with status 4"):
        examine(settings(folder))


def test_the_example_of_an_own_task_works() -> None:
    config = load([Path(__file__).parents[2] / "examples" / "own_task" / "run.toml"])
    examine(config)
    judges = Judges(config)
    row = Row(0, b"", "", {"answer": "river", "most": 4})
    try:
        for text in ("The river is deep.", "The river is very deep.", ""):
            judges.ask(text, row, said(text))
        rewards = {text: answer.reward for text, answer in collect(judges, 3).items()}
    finally:
        judges.close()
    assert rewards == {"The river is deep.": 1.0, "The river is very deep.": 0.5, "": 0.0}


def test_tools_are_answered_until_the_turns_are_used_up(folder: Path) -> None:
    judges = Judges(settings(folder, tools="python", max_turns=2))
    call = Turn("policy", "Let me see. <tool>print(6 * 7)</tool>")
    try:
        judges.ask("first", ROW, (call,))
        judges.ask("second", ROW, (call, Turn("environment", "42"), call))
        judges.ask("done", ROW, (call, Turn("environment", "42"), Turn("policy", "2")))
        answers = collect(judges, 3)
    finally:
        judges.close()
    assert answers == {"first": Observed("42"), "second": Scored(0.0), "done": Scored(1.0)}


def test_a_trusted_task_is_asked_without_a_process() -> None:
    judges = Judges(Config(task=TaskSettings(name="calculator", max_turns=3)))
    row = Row(0, b"", "What is 2 + 3?", {"answer": "5"})
    judges.ask("call", row, said("<tool>2 + 3</tool>"))
    judges.ask("answer", row, said("<answer>5</answer>"))
    assert dict(judges.poll()) == {"call": Observed("5"), "answer": Scored(1.0)}
    assert not judges.poll(timeout_s=30), "with nothing outstanding there is nothing to wait for"


PARENT = """
import sys
from tailrace.config.tree import Config, TaskSettings
from tailrace.envs.base import Row, Turn
from tailrace.envs.judges import Judges
judges = Judges(Config(task=TaskSettings(data="data.jsonl", reward="rewards.py:behave")))
judges.ask(0, Row(0, b"", "", {"answer": ""}), (Turn("policy", "2"),))
while not judges.poll(30): pass
print(judges._judges[0].process.process.pid, flush=True)
judges.ask(1, Row(0, b"", "", {"answer": ""}), (Turn("policy", "hang"),))
judges.poll(100)
"""


def test_a_judge_dies_with_its_parent_even_while_it_hangs(folder: Path) -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    judge = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=10)
    parent.stdout.close()
    until = time.monotonic() + 30
    while _runs(judge) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(judge)


def _runs(pid: int) -> bool:
    """Not a process that has ended and that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_judge_loads_nothing_heavy() -> None:
    program = "import sys, tailrace.envs.judge; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not {"numpy", "torch", "transformers", "pyarrow", "asyncio"} & set(loaded.stdout.split())
