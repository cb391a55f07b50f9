"""Rewards that hang, raise, die or answer nonsense, and judges that are stopped: one sample each, with the reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from troubled import TROUBLE

from tailrace.config.tree import Config, TaskSettings
from tailrace.envs.base import Answer, Faulted, Row, Scored, Turn
from tailrace.envs.judges import Judges

DEADLINE_S = 60.0
ROW = Row(0, b"", "a 1 b . =", {"answer": "1"})
RIGHT = (Turn("policy", ". 1"),)
TASK = Config(task=TaskSettings(name=f"{Path(__file__).parent / 'troubled.py'}:Troubled", reward_timeout_s=1.0))


@pytest.fixture
def log(tmp_path):
    """Where judges complain to, as they do to the log of their replica."""
    saved, path = os.dup(2), tmp_path / "log"
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    yield path
    os.dup2(saved, 2)
    os.close(saved)


@pytest.fixture
def judges(tmp_path, monkeypatch, log):
    monkeypatch.setenv(TROUBLE, str(tmp_path))
    judges = Judges(TASK)
    assert answer(judges, 0) == Scored(1.0)
    yield judges
    judges.close()


def answer(judges, key):
    judges.ask(key, ROW, RIGHT)
    return last_answer(judges, key)


def last_answer(judges, key):
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        for found, given in judges.poll(0.5):
            assert found == key
            return given
    raise AssertionError("the judge was never heard of again")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("stuck", "did not answer within 1 s"),
        ("raises", "this reward was told to raise"),
        ("nonsense", "instead of Scored or Observed"),
        ("dies", "SIGABRT"),
        ("nan", "the task scored nan"),
    ],
)
def test_one_sample_pays_for_a_reward_in_trouble_and_the_next_is_judged(judges, tmp_path, log, trouble, reason):
    (tmp_path / trouble).touch()
    given = answer(judges, 1)
    assert isinstance(given, Faulted)
    assert reason in given.reason
    assert answer(judges, 2) == Scored(1.0)
    if trouble == "stuck":
        assert "where it was is in the log" in given.reason
        assert "in _trouble" in log.read_text(), "the stack of the stuck reward is in the log"


def test_a_stopped_judge_is_told_from_a_slow_reward(judges):
    os.kill(judges._judges[0].process.pid, signal.SIGSTOP)
    given = answer(judges, 1)
    assert isinstance(given, Faulted)
    assert "is stopped (SIGSTOP" in given.reason
    assert answer(judges, 2) == Scored(1.0)


def test_a_killed_judge_costs_one_sample_at_most(judges):
    os.kill(judges._judges[0].process.pid, signal.SIGKILL)
    judges.ask(1, ROW, RIGHT)
    assert isinstance(last_answer(judges, 1), Faulted | Scored)
    assert answer(judges, 2) == Scored(1.0)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSTOP, "is stopped (SIGSTOP"), (signal.SIGKILL, "was ended by SIGKILL")]
)
def test_so_does_one_that_is_broken_while_it_starts(log, number, reason):
    judges = Judges(TASK, workers=1)
    for key in range(3):
        judges.ask(key, ROW, RIGHT)
    os.kill(judges._judges[0].process.pid, number)
    answers: dict[int, Answer] = {}
    end = time.monotonic() + DEADLINE_S
    while len(answers) < 3 and time.monotonic() < end:
        answers |= dict(judges.poll(0.5))
    judges.close()
    failed = [given.reason for given in answers.values() if isinstance(given, Faulted)]
    assert len(answers) == 3
    assert len(failed) == 1
    assert reason in failed[0]
