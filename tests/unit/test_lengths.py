"""Completion lengths and turns: they show the figures asked for, and do not depend on who asks when."""

import json
import math
import sqlite3

import numpy as np
import pytest

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Lengths, Turns, Workload
from tailrace.lengths import LengthLaw, read_lengths
from tailrace.sim.episodes import Episodes


def law(cap=16384, seed=7, base=None, **lengths):
    workload = Workload(max_completion_tokens=cap, lengths=Lengths(**lengths))
    return LengthLaw(workload, seed) if base is None else LengthLaw(workload, seed, base)


def sample(length_law, groups=20_000, size=16, step=0):
    return np.array([length_law.group(index, size, step) for index in range(groups)])


FIGURES = [
    {"median": 2000, "sigma": 1.0},
    {"median": 1100, "mean": 3536},
    {"median": 1000, "p99": 9000},
    {"mean": 3000, "sigma": 1.0},
    {"mean": 3000, "p99": 12000},
    {"p99": 12000, "sigma": 0.7},
]


@pytest.mark.parametrize("figures", FIGURES, ids=" and ".join)
@pytest.mark.parametrize(
    "tail", [{}, {"law": "mixture", "tail_share": 0.02, "tail_alpha": 1.5}], ids=["plain", "tailed"]
)
def test_what_is_drawn_shows_the_figures_asked_for(figures, tail):
    drawn = law(correlation=0.0, **figures, **tail)
    lengths = sample(drawn)
    assert lengths.min() >= 1
    assert lengths.max() <= 16384
    observed = {"mean": lengths.mean(), "median": np.median(lengths), "p99": np.quantile(lengths, 0.99)}
    for name, value in observed.items():
        assert getattr(drawn, name) == pytest.approx(value, rel=0.01 if name != "p99" else 0.03)
        if name in figures:
            assert getattr(drawn, name) == pytest.approx(figures[name], rel=0.001)


def test_the_mean_is_the_one_observed_after_the_cap():
    drawn = law(cap=4096, median=1000, mean=1400)
    assert sample(drawn).mean() == pytest.approx(1400, rel=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_samples_of_a_group_are_as_alike_as_asked(correlation):
    logs = np.log(sample(law(cap=10**7, median=5000, sigma=0.8, correlation=correlation), size=2))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(correlation, abs=0.02)


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_group_does_not_depend_on_what_was_asked_before(drift):
    figures = {"median": 2000, "sigma": 1.0, "drift_per_step": drift}
    forward, backward = law(**figures), law(**figures)
    indices = range(0, 6000, 37)
    rising = {index: forward.group(index, 16, 3) for index in indices}
    falling = {index: backward.group(index, 16, 3) for index in reversed(indices)}
    assert rising == falling
    assert law(**figures).group(37, 40, 3)[:16] == rising[37]
    assert law(**figures).group(37, 4, 3) == rising[37][:4]
    assert law(seed=8, **figures).group(37, 16, 3) != rising[37]


def test_drift_scales_every_length_and_the_cap_still_holds():
    drawn = law(cap=3000, median=1000, sigma=0.5, drift_per_step=0.1)
    now, later = np.array(drawn.group(3, 16)), np.array(drawn.group(3, 16, 5))
    below = (now < 3000) & (later < 3000)
    assert below.any()
    assert later.max() <= 3000
    assert later[below] / now[below] == pytest.approx(1.1**5, rel=0.01)
    assert set(drawn.group(3, 16, 100_000)) == {3000}


def test_a_mixture_has_a_heavier_tail_than_a_log_normal_of_the_same_body():
    body = {"median": 1000, "sigma": 0.5}
    plain = law(cap=10**6, **body)
    tailed = law(cap=10**6, law="mixture", tail_share=0.02, tail_alpha=1.2, **body)
    assert tailed.median == pytest.approx(plain.median)
    share_above = [np.mean(sample(drawn) > 10_000) for drawn in (plain, tailed)]
    # 2 % start at the body's p90; the rest of the tail falls as a power. The body alone never comes this far.
    start = 1000 * math.exp(0.5 * 1.2816)
    assert share_above[0] < 1e-5
    assert share_above[1] == pytest.approx(0.02 * (start / 10_000) ** 1.2, rel=0.15)


def test_a_fixed_length_is_fixed():
    assert law(law="fixed", mean=700).group(5, 3) == [700, 700, 700]


def test_recorded_lengths_come_back_as_often_as_they_were_seen(tmp_path):
    (tmp_path / "seen.txt").write_text("10\n20\n20\n99999\n")
    drawn = law(law="empirical", file="seen.txt", base=tmp_path)
    values, counts = np.unique(sample(drawn, groups=5000), return_counts=True)
    assert values.tolist() == [10, 20, 16384]
    assert counts / counts.sum() == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    assert drawn.mean == pytest.approx((10 + 20 + 20 + 16384) / 4, rel=0.01)


def test_lengths_are_read_from_a_list_and_from_the_journal_of_a_run(tmp_path):
    (tmp_path / "seen.json").write_text("[1, 2.5]")
    with sqlite3.connect(tmp_path / "run.db") as journal:
        journal.execute(
            "CREATE TABLE journal (seq INTEGER PRIMARY KEY, now REAL, kind TEXT, event TEXT, commands TEXT)"
        )
        events = [
            ("Finished", {"meta": {"tokens": 640}}),
            ("Started", {"meta": {"tokens": 1}}),
            ("Finished", {"meta": {}}),
        ]
        for kind, event in events:
            journal.execute("INSERT INTO journal (now, kind, event) VALUES (0, ?, ?)", (kind, json.dumps(event)))
    journal.close()
    assert read_lengths(tmp_path / "seen.json") == [1, 2.5]
    assert read_lengths(tmp_path) == read_lengths(tmp_path / "run.db") == [640]


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ({"median": 2000}, "exactly two of"),
        ({"median": 2000, "sigma": 1, "mean": 3000}, "exactly two of"),
        ({"median": 2000, "p99": 1000}, "larger p99"),
        ({"median": 2000, "mean": 1000}, "write a mean between"),
        ({"median": 2000, "mean": 16000}, "write a mean between"),
        ({"mean": 20000, "sigma": 1}, "raise max_completion_tokens"),
        ({"law": "fixed"}, "write either"),
        ({"law": "mixture", "median": 2000, "sigma": 1, "tail_share": 0.1, "tail_alpha": 1}, "no finite mean"),
        ({"law": "mixture", "median": 2000, "sigma": 1, "tail_alpha": 2}, "write a share between"),
        ({"median": 2000, "sigma": 1, "tail_share": 0.1}, '"mixture"'),
        ({"median": 2000, "sigma": 1, "file": "seen.txt"}, '"empirical"'),
        ({"law": "empirical"}, "lengths.file"),
        ({"law": "empirical", "file": "absent.txt"}, "Cannot read"),
        ({"law": "empirical", "file": "absent.db"}, "Cannot read"),
        ({"median": 2000, "sigma": 1, "drift_per_step": -1}, "above -1"),
    ],
)
def test_figures_that_cannot_be_are_refused_with_a_way_out(lengths, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        law(base=tmp_path, **lengths)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no lengths"),
        ("[]", "no lengths"),
        ("5\n-3\n", "not negative"),
        ("nan", "finite"),
        ("five", "one number per line"),
    ],
)
def test_files_that_are_no_lengths_are_refused(text, sentence, tmp_path):
    (tmp_path / "seen.txt").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_lengths(tmp_path / "seen.txt")


def episodes(seed=7, **turns):
    return Episodes(Workload(turns=Turns(**turns)), seed)


def test_turns_share_the_tokens_and_only_the_last_has_no_call():
    agent = episodes(mean=4, maximum=20, latency_s=2.0, latency_sigma=0.5, tool_tokens=300)
    split = [agent.split(index, 3, 1000) for index in range(20_000)]
    assert all(sum(turn.tokens for turn in turns) == 1000 and min(turns).tokens >= 1 for turns in split)
    assert np.mean([len(turns) for turns in split]) == pytest.approx(4, rel=0.02)
    assert max(len(turns) for turns in split) == 20
    calls = [turn for turns in split for turn in turns[:-1]]
    assert np.mean([turn.latency_s for turn in calls]) == pytest.approx(2.0, rel=0.02)
    assert {turn.tool_tokens for turn in calls} == {300}
    assert {turns[-1][1:] for turns in split} == {(0.0, 0)}


def test_an_episode_does_not_depend_on_what_was_asked_before():
    turns = {"mean": 4, "maximum": 20, "latency_s": 1.0}
    fresh, used = episodes(**turns), episodes(**turns)
    for index in range(0, 20_000, 100):
        used.split(index, index % 16, 500)
    assert fresh.split(300, 2, 777) == used.split(300, 2, 777)
    assert fresh.split(300, 2, 777) != fresh.split(300, 3, 777)


def test_few_tokens_make_few_turns_and_a_mean_at_the_maximum_fixes_them():
    agent = episodes(mean=5, maximum=5)
    assert {len(agent.split(index, 0, 100)) for index in range(500)} == {5}
    assert [turn.tokens for turn in agent.split(0, 0, 3)] == [1, 1, 1]
    assert episodes().single
    assert episodes().split(0, 0, 50) == ((50, 0.0, 0),)


def test_more_turns_than_the_maximum_are_refused():
    with pytest.raises(ConfigError, match=r"raise turns\.maximum"):
        episodes(mean=3)
