"""Tasks by settings: built-in ones, what they refuse, and tools between turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, Run, Sampling, TaskSettings
from tailrace.envs import sandbox
from tailrace.envs.base import UNSCORED, Faulted, Observed, Row, Scored, Turn
from tailrace.envs.judge import answer_to
from tailrace.envs.judge_wire import HEAD, FrameError, Judged, frame, reply_in
from tailrace.envs.sandbox import run_python
from tailrace.envs.tasks import build_task, may_go_on
from tailrace.envs.tools import calculate, make_tool, stop_strings
from tailrace.launch import doctor

ONE_DIGIT = {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def build(seed: int = 0, **settings):
    return build_task(Config(task=TaskSettings(**settings), run=Run(seed=seed)))


def answered(task, row: dict, *texts: str):
    """What the task says to these turns, environment and policy in turn."""
    roles = ("policy", "environment") * len(texts)
    transcript = tuple(Turn(role, text) for role, text in zip(roles, texts, strict=False))
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return task.respond(Row(0, b"", row["prompt"], columns), transcript)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "no task is given; write task.data"),
        ({"name": "runing_total"}, "did you mean 'running_total'"),
        ({"name": "chess"}, "there are running_total, calculator, reasoning_gym"),
        ({"name": "running_total", "data": "x.jsonl"}, "task.data is not used by the task 'running_total'"),
        ({"name": "running_total", "options": {"medain": 3}}, "medain"),
        ({"name": "running_total", "max_turns": 3}, "nothing answers between turns; write task.tools"),
        ({"name": "calculator"}, "never read what a tool answers; write 2 or more"),
        ({"name": "calculator", "max_turns": 2, "options": {"term": 3}}, "unknown field `term`; it takes terms"),
        ({"name": "calculator", "max_turns": 2, "options": {"operators": "/"}}, "made of"),
        ({"name": "reasoning_gym", "options": {"dataset": "chain_sums"}}, "did you mean 'chain_sum'"),
        ({"name": "reasoning_gym", "options": ONE_DIGIT | {"max_digit": 1}}, "did you mean 'max_digits'"),
        ({"name": "reasoning_gym", "options": ONE_DIGIT | {"min_terms": 9}}, "refuses these settings"),
        ({"name": "reasoning_gym", "options": ONE_DIGIT | {"seed": 9}}, "the seed is run.seed"),
        ({"name": "reasoning_gym", "options": {"threshold": 3}}, "threshold"),
        ({"data": "x.jsonl", "options": {"size": 3}}, "task.options.size belongs to a built-in task"),
        ({"data": "x.jsonl", "reward": "nowhere.py:f"}, "there is no file nowhere.py"),
    ],
)
def test_what_cannot_be_built_is_refused(settings: dict, sentence: str) -> None:
    if settings.get("name") == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=sentence):
        build(**settings)


def test_own_data_is_not_read_until_a_row_is_wanted(tmp_path: Path) -> None:
    task = build(data=str(tmp_path / "not_written_yet.jsonl"), eval_rows=1)
    assert answered(task, {"prompt": "", "answer": "3"}, "it is 3") == Scored(1.0)
    (tmp_path / "not_written_yet.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    assert (len(task), task.row(0)["prompt"], task.held_out()[0]["prompt"]) == (1, "a", "b")


class Answering:
    """A class of the user's that answers this."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def respond(self, row: Row, transcript: tuple[Turn, ...]):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Scored(-0.0), Scored(0.0)),
        (Scored(True), Scored(1.0)),
        (Scored(np.float32(0.5)), Scored(0.5)),  # type: ignore[arg-type]
        (Scored(np.array(2)), Scored(2.0)),  # type: ignore[arg-type]
        (Scored(1e308), Scored(1e308)),
        (Scored(float("nan")), "the task scored nan; a reward is a finite number"),
        (Scored(float("-inf")), "the task scored -inf; a reward is a finite number"),
        (Scored(10**400), "the task scored a number that no float holds; a reward is a finite number"),
        (Scored("1"), "the task scored '1', which is not a number"),  # type: ignore[arg-type]
        (Observed(5), "the task answered Observed with int instead of text"),  # type: ignore[arg-type]
        (1.0, "the task answered float instead of Scored or Observed"),
    ],
)
def test_what_a_task_of_the_users_own_answers_is_checked(answer, expected) -> None:
    given = answer_to(Answering(answer), Row(0, b"", "", {}), (Turn("policy", ""),))  # type: ignore[arg-type]
    assert repr(given) == repr(Faulted(expected) if isinstance(expected, str) else expected), "a plain float"
    assert reply_in(frame(Judged(0, given, 0.0))[HEAD:]) == Judged(0, given, 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_judge_process_that_sends_no_number_is_broken(reward: float) -> None:
    with pytest.raises(FrameError, match=f"a reward of {reward}, which is not a finite number"):
        reply_in(frame(Judged(0, Scored(reward), 0.0))[HEAD:])


DOCUMENTED = Path(__file__).parents[2] / "docs" / "tasks.md"


def documented() -> str:
    """The class of the documentation's example."""
    return DOCUMENTED.read_text().rpartition("```python\n")[2].partition("```")[0]


def test_a_task_may_be_a_class_of_the_users_own(tmp_path: Path) -> None:
    half = "\nclass Half:\n    def __init__(self, options, seed): self.first = options['first']\n"
    (tmp_path / "my_env.py").write_text(documented() + half)
    task = build(name=f"{tmp_path}/my_env.py:Guess", options={"turns": 2})
    row = task.row(41)
    assert answered(task, row, "50") == Observed("lower")
    assert answered(task, row, "well") == Observed("higher")
    assert answered(task, row, "50", "lower", "42") == Scored(1.0)
    assert answered(task, row, "50", "lower", "41") == Scored(0.0)
    with pytest.raises(ConfigError, match="has no __len__; a task has"):
        build(name=f"{tmp_path}/my_env.py:Half", options={"first": 1})
    with pytest.raises(ConfigError, match=r"cannot be made from \(options, seed\): KeyError: 'first'"):
        build(name=f"{tmp_path}/my_env.py:Half")


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "calculator", "max_turns": 2, "options": {"terms": 2, "digits": 1, "size": 300}},
        {"name": "reasoning_gym", "options": ONE_DIGIT | {"size": 300}},
        {"name": "running_total"},
    ],
)
def test_nothing_held_out_is_trained_on_and_rows_depend_on_the_seed(settings: dict) -> None:
    if settings["name"] == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    task, again, other = build(**settings), build(**settings), build(seed=1, **settings)
    rows = [task.row(index) for index in range(300)]
    assert rows == [again.row(index) for index in range(300)]
    assert rows != [other.row(index) for index in range(300)]
    held_out = {row["prompt"] for row in task.held_out()}
    assert held_out
    assert not held_out & {row["prompt"] for row in rows}


def test_reasoning_gym_gives_nothing_for_crumbs() -> None:
    pytest.importorskip("reasoning_gym")
    task = build(name="reasoning_gym", options=ONE_DIGIT)
    row = task.row(0)
    right = row["answer"]
    assert answered(task, row, f"The answer is {right}.") == Scored(1.0)
    assert answered(task, row, "junk") == answered(task, row, "100") == answered(task, row, "") == Scored(0.0)


def test_a_call_is_answered_and_the_last_turn_is_scored() -> None:
    task = build(name="calculator", max_turns=3, options={"terms": 2, "digits": 3})
    row = task.row(0)
    expression = row["prompt"].partition("What is ")[2].partition("?")[0]
    call = f"I compute <tool>{expression}</tool>"
    assert answered(task, row, call) == Observed(row["answer"])
    assert answered(task, row, call, row["answer"], f"<answer>{row['answer']}</answer>") == Scored(1.0)
    assert answered(task, row, "<answer>0.5</answer>") == Scored(0.0)
    assert answered(task, row, "1 <tool>2</tool> <tool>3 / 0</tool>") == Observed("error: division by zero")
    assert answered(task, row, call, "1", call, "2", call) != Observed(row["answer"]), "no turn is left to read it in"
    assert answered(task, row, "<tool>1 + 1") == Scored(0.0), "a call that was not finished is none"


SHOWN = """
def shown(completions, **columns):
    assert completions == [[{"role": "assistant", "content": "<tool>1 + 1</tool>"}, {"role": "tool", "content": "2"}]]
    return [-0.5]
"""


def test_an_episode_without_tokens_for_another_turn_is_scored_and_not_answered(tmp_path: Path) -> None:
    """Its transcript ends with what the policy was answered, or with as much of it as fitted."""
    (tmp_path / "mine.py").write_text(SHOWN)
    ended = (Turn("policy", "<tool>1 + 1</tool>"), Turn("environment", "2"))
    own = build(data="x.jsonl", reward=f"{tmp_path}/mine.py:shown", tools="calculator", max_turns=3)
    messages = [{"role": "user", "content": "1 + 1"}]
    assert answer_to(own, Row(0, b"", messages, {}), ended) == Scored(-0.5)
    built_in = build(name="calculator", max_turns=3)
    for answer, reward in (("2", 0.0), ("1", 1.0)):  # what the tool said is not what the policy answered
        assert answer_to(built_in, Row(0, b"", "", {"answer": answer}), ended) == Scored(reward)
    (tmp_path / "my_env.py").write_text(documented() + "\nclass Silent(Guess):\n    score = None\n")
    guess, silent = (build(name=f"{tmp_path}/my_env.py:{name}") for name in ("Guess", "Silent"))
    row = Row(0, b"", "", {"answer": 7})
    cut = (Turn("policy", "50"), Turn("environment", "low"))
    assert answer_to(guess, row, cut) == Scored(0.0)
    assert answer_to(silent, row, cut) == Faulted(UNSCORED)
    assert answer_to(silent, row, cut[:1]) == Observed("lower")


def test_whether_a_turn_may_be_followed_by_another_is_known_as_far_as_that_is_possible(tmp_path: Path) -> None:
    said, called = (Turn("policy", "2"),), (Turn("policy", "<tool>1 + 1</tool>"),)
    used_up = (*called, Turn("environment", "2"))
    own, tools = build(data="x.jsonl"), build(data="x.jsonl", tools="calculator", max_turns=2)
    (tmp_path / "my_env.py").write_text(documented())
    guess = build(name=f"{tmp_path}/my_env.py:Guess")
    found = [[may_go_on(task, transcript) for transcript in (said, called, used_up)] for task in (own, tools, guess)]
    assert found == [[False, False, False], [False, True, False], [True, True, False]]
    assert not may_go_on(tools, (*used_up, *called)), "there is no third turn"


def test_a_call_ends_a_turn() -> None:
    config = Config(task=TaskSettings(name="calculator"), sampling=Sampling(stop=("END",)))
    assert stop_strings(config) == ("END", "</tool>")
    assert stop_strings(Config(task=TaskSettings(name="running_total"))) == ()
    assert stop_strings(Config(task=TaskSettings(data="x", tools="python"))) == ("</tool>",)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 % 2", "1"),
        ("2 ** 100", str(2**100)),
        ("2 ** 10 ** 10", "error: the number is too large"),
        ("9 ** 9 ** 9", "error: the number is too large"),
        ("(-8) ** 0.5", "error: the root of a negative number"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: only numbers, brackets and + - * / // % ** are known"),
        ("True + 1", "error: only numbers, brackets and + - * / // % ** are known"),
        ("2 +", "error: this is not an arithmetic expression"),
        ("(" * 199, "error: this is not an arithmetic expression"),
        ("1 + " * 100, "error: the expression has more than 200 characters"),
    ],
)
def test_the_calculator_computes_and_nothing_else(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(sum(range(10)))", "45"),
        ("x = 1", "(no output)"),
        ("1 / 0", "ZeroDivisionError: division by zero\nerror: the program ended with status 1"),
        ("memory = bytearray(1 << 33)", "MemoryError\nerror: the program ended with status 1"),
        ("while True: pass", "error: the program did not end within 0.5 s"),
        ("open('file', 'w').write('x' * (2 << 20))", "File too large\nerror: the program ended with status 1"),
    ],
)
def test_a_program_gets_only_so_much(program: str, output: str) -> None:
    seconds = 0.5 if "while" in program else 20.0
    assert run_python(program, seconds).endswith(output)


def test_a_program_is_ended_without_walls_too() -> None:
    assert run_python("print(1)", 20.0, layers=()) == "1"
    late = "error: the program did not end within 0.5 s"
    assert run_python("import os\nos.fork()\nwhile True: pass", 0.5, layers=()) == late


@pytest.mark.parametrize(
    ("there", "gaps"),
    [
        ({"namespaces": "for a user", "landlock": "version 6", "seccomp": "a list"}, []),
        ({"namespaces": "for a user", "seccomp": "a list"}, ["the mounts of the namespace alone hide files"]),
        ({"landlock": "version 7", "seccomp": "a list"}, ["no folder to write to, and can ask if a file exists"]),
        (
            {"landlock": "version 3", "seccomp": "a list"},
            ["no folder to write to", "Landlock 3 does not know of TCP, device ioctls, signals and abstract sockets"],
        ),
        ({"seccomp": "a list"}, ["read and change your files"]),
        ({}, ["every system call", "read and change your files"]),
    ],
)
def test_what_a_machine_does_not_guarantee_is_said(there: dict[str, str], gaps: list[str], monkeypatch) -> None:
    layers = sandbox.Layers(there, {})
    assert [gap in said for gap, said in zip(gaps, layers.gaps(), strict=True)] == [True] * len(gaps)
    monkeypatch.setattr(sandbox, "layers_here", lambda: layers)
    assert all(gap in doctor.examine([], []) for gap in gaps)


def test_a_machine_without_walls_refuses_programs_unless_told_otherwise(monkeypatch) -> None:
    weak = sandbox.Layers({"seccomp": "a filter"}, {"namespaces": "not permitted", "landlock": "none"})
    monkeypatch.setattr(sandbox, "layers_here", lambda: weak)
    with pytest.raises(ConfigError, match=r"cannot wall them off .*not permitted.* task.sandbox = 'weak'"):
        make_tool("python", 10.0)
    assert make_tool("python", 10.0, weak=True)("print(6 * 7)") == "42"
