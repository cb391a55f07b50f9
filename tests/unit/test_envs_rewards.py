"""Rewards: found by path, told apart by their parameters, their results checked."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest

from tailrace.config.errors import ConfigError
from tailrace.envs.answers import exact
from tailrace.envs.base import Row, Turn
from tailrace.envs.rewards import RewardError, as_reward, load_reward

SIGNATURES = """
import sys
from typing import Any

def trl(prompts, completions, level, **columns) -> list[float]:
    assert prompts == ["1 + 1"] and level == [3] and columns["answer"] == ["2"]
    return [float(completions == ["two"])]

def trl_of_messages(completions, **columns):
    return [float(completions[0][-1] == {"role": "assistant", "content": "two"})]

def trl_of_columns_only(**columns):
    return [float(columns["completions"] == ["two"])]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "book" and extra_info is None
    return {"score": float(solution_str == "two" and ground_truth == "2"), "length": 3}

async def verifiers(completion, answer, **kw) -> float:
    assert kw["level"] == 3 and kw["state"]["completion"] == completion
    return float(completion == "two" and answer == "2")

async def verifiers_of_messages(prompt, completion, info):
    return float(completion[-1]["content"] == "two" and info == {} and prompt[0]["role"] == "user")

def plain(completion, answer):
    return completion == "two" and answer == "2"

class Grader:
    def __call__(self, completion: str, level: int = 0) -> int:
        return int(completion == "two" and level == 3)

grader = Grader()

def stranger(text, expected):
    return 1.0

def too_many(completions, **columns):
    return [1.0, 2.0]

def no_list(completions, **columns):
    return 1.0

def greedy(completion, difficulty):
    return 1.0

nothing = 3
"""
MESSAGES = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SIGNATURES)
    (tmp_path / "mine_for_import.py").write_text(SIGNATURES)
    (tmp_path / "broken.py").write_text("x = 1 / 0")
    return tmp_path


def row(prompt="1 + 1") -> Row:
    return Row(0, b"", prompt, {"answer": "2", "level": 3, "data_source": "book"})


def says(text: str) -> tuple[Turn, ...]:
    return (Turn("policy", "thinking"), Turn("environment", "seen"), Turn("policy", text))


@pytest.mark.parametrize(
    ("function", "prompt"),
    [
        ("trl", "1 + 1"),
        ("trl_of_messages", MESSAGES),
        ("trl_of_columns_only", "1 + 1"),
        ("compute_score", MESSAGES),
        ("verifiers", "1 + 1"),
        ("verifiers_of_messages", MESSAGES),
        ("plain", MESSAGES),
        ("grader", "1 + 1"),
    ],
)
def test_every_signature_is_called_as_it_expects(folder: Path, function: str, prompt) -> None:
    for path in (f"mine.py:{function}", f"{folder}/mine.py:{function}", f"mine_for_import:{function}"):
        reward = load_reward(path, [Path("/nowhere"), folder])
        assert reward(row(prompt), says("two")) == 1.0
        assert reward(row(prompt), says("three")) == 0.0


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("mine.py:plian", "there is no 'plian' in it; did you mean 'plain'?"),
        ("mine.py:nothing", "is int, which cannot be called"),
        ("mine.py:stranger", r"takes \(text, expected\), which is not f\(completion, answer\)"),
        ("mine.py", "names no function; write 'my_module:name'"),
        ("math_verfy", "did you mean 'math_verify'"),
        ("absent.py:f", "there is no file absent.py in "),
        ("absent_module:f", "there is no module 'absent_module' to import"),
        ("broken.py:f", r"cannot be imported: ZeroDivisionError: division by zero \(broken.py, line 1\)"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_when_it_is_loaded(folder: Path, path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_reward(path, [folder])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("too_many", "returned 2 rewards for 1 completion"),
        ("no_list", "returned 1.0; it takes completions, so it returns a list"),
        ("greedy", "wants 'difficulty', which the row lacks; it has answer, level"),
    ],
)
def test_a_result_of_the_wrong_shape_is_no_reward(folder: Path, function: str, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        load_reward(f"mine.py:{function}", [folder])(row(), says("two"))


def test_only_finite_numbers_are_rewards() -> None:
    numpy = pytest.importorskip("numpy")
    good = [1, True, 0.25, Fraction(1, 2), numpy.float32(0.5), numpy.array(2.0), {"score": 1}]
    assert [as_reward(value, "f") for value in good] == [1.0, 1.0, 0.25, 0.5, 0.5, 2.0, 1.0]
    assert as_reward(numpy.array([0.5]), "f", one_of_a_list=True) == 0.5
    assert math.copysign(1.0, as_reward(-0.0, "f")) == 1.0, "SQLite has no minus zero"
    assert [as_reward(value, "f") for value in (1e308, 5e-324, numpy.bool_(True), numpy.array(-0.0))] == [
        1e308,
        5e-324,
        1.0,
        0.0,
    ]
    for bad in (10**400, 10**5000, Fraction(10**400), numpy.longdouble("1e400"), numpy.float32("nan")):
        with pytest.raises(RewardError, match="a reward is a finite number"):
            as_reward(bad, "f")
    for bad in (None, "1", float("nan"), float("-inf"), [1.0], {"value": 1}, numpy.array([1.0]), 1j):
        with pytest.raises(RewardError):
            as_reward(bad, "f")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("It is 7.", 7, 1.0),
        ("7 is wrong, so 8", "7", 0.0),
        ("so -3", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("in all 1,234.50", "1234.5", 1.0),
        ("<answer> 7 </answer> or 8?", "7", 1.0),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0),
        ("I think\n#### 12\nyes, 13", "12", 1.0),
        ("no idea", "7", 0.0),
        ("", "7", 0.0),
        ("Let me think.\nThe capital:\nparis.", "Paris", 1.0),
        ("Paris or Rome", "Paris", 0.0),
        ("a1b2", "2", 0.0),
    ],
)
def test_the_final_answer_counts(completion: str, answer, reward: float) -> None:
    assert exact(completion, answer) == reward


def test_math_verify_compares_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward("math_verify", [])
    half = Row(0, b"", "", {"answer": r"\frac{1}{2}"})
    assert [reward(half, says(text)) for text in ("so $0.5$", r"\boxed{2/4}", "$0.6$", "none")] == [1.0, 1.0, 0.0, 0.0]
