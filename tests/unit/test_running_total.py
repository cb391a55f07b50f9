"""The task of the default recipe: what its rows are, which of them are held out, and how answers are judged."""

from __future__ import annotations

import statistics

import pytest

from tailrace.config.errors import ConfigError
from tailrace.envs.base import Row, Turn
from tailrace.envs.running_total import LABELS, RunningTotal, render


def _judge(answer: str, text: str) -> float:
    row = Row(id=0, tokens=b"", prompt="", columns={"answer": answer})
    return RunningTotal({}, seed=0).respond(row, (Turn("policy", text),)).reward


def test_the_answer_is_the_sum_of_the_digits_modulo_ten():
    task = RunningTotal({}, seed=3)
    for index in range(50):
        row = task.row(index)
        *items, end, dot, sign = row["prompt"].split()
        assert [dot, sign] == [".", "="]
        assert row["answer"] == str(sum(map(int, items[1::2])) % 10)
        assert len({*items[::2], end}) == row["items"] + 1  # every label once: looking one up has one result


def test_labels_follow_each_other_and_begin_again_after_the_last():
    assert render([(LABELS[-1], 7), (LABELS[0], 3)]) == f"{LABELS[-1]} 7 a 3 b . ="
    items = RunningTotal({"median": 9, "sigma": 0}, seed=0).row(0)["prompt"].split()[::2][:-1]
    assert [LABELS.index(label) - LABELS.index(items[0]) for label in items] == list(range(len(items)))


def test_rows_depend_on_seed_and_index_alone():
    task, again = RunningTotal({}, seed=1), RunningTotal({}, seed=1)
    assert task.row(7) == again.row(7)
    assert [task.row(i) for i in range(9)] == [again.row(i) for i in reversed(range(9))][::-1]
    assert task.row(7) != RunningTotal({}, seed=2).row(7)


def test_no_seed_trains_on_a_held_out_prompt():
    held_out = {row["prompt"] for row in RunningTotal({"held_out": 400}, seed=0).held_out()}
    trained = {RunningTotal({}, seed).row(index)["prompt"] for seed in range(3) for index in range(1500)}
    assert not held_out & trained


def test_all_seeds_are_measured_by_the_same_questions():
    assert RunningTotal({}, seed=1).held_out() == RunningTotal({}, seed=2).held_out()


def test_careful_chains_are_heavy_tailed():
    task = RunningTotal({}, seed=0)
    lengths = [3 * task.row(index)["items"] + 4 for index in range(4000)]
    assert statistics.quantiles(lengths, n=100)[98] >= 8 * statistics.median(lengths)


def test_no_prompt_is_longer_than_allowed():
    task = RunningTotal({"most": 5}, seed=0)
    assert {task.row(index)["items"] for index in range(200)} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("text", [". 4", "k 1 1 l 3 4 m . 4", "k 9 9 . 4"])
def test_the_last_word_after_a_dot_decides(text: str):
    assert _judge("4", text) == 1.0


@pytest.mark.parametrize("text", ["", "4", ".", ". 5", "k 1 1 l 3 4", ". 4 4", ". 4 k"])
def test_anything_else_earns_nothing(text: str):
    assert _judge("4", text) == 0.0


@pytest.mark.parametrize("options", [{"median": 0}, {"most": 128}, {"length": 3}, {"rows": 0}])
def test_bad_options_are_refused_with_a_sentence(options: dict[str, int]):
    with pytest.raises(ConfigError, match=r"task\.options of running_total"):
        RunningTotal(options, seed=0)
