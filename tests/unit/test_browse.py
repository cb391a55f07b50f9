"""Samples of a run for people: found by what they are, shown as what they are, indexed beside the run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from sample_runs import Written, written_run
from tailrace.browse import listing
from tailrace.browse.conditions import Order, SampleFilter
from tailrace.browse.console import plain
from tailrace.browse.decoding import BROKEN, TokenDecoder, decoder_of
from tailrace.browse.index import SearchIndex, build, state_of
from tailrace.browse.index_file import INDEX, BrowseError
from tailrace.browse.listing import find_samples
from tailrace.browse.prompts import PromptFilter, prompt_rates
from tailrace.browse.sample import view_samples
from tailrace.store.journal import Journal
from tailrace.store.trajectories import known_trajectories
from tailrace.types import EVALUATION, Row, id_bytes

HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\u202e\r gone"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with written_run(tmp_path / "run") as written:
        written.ask("what is six times seven", "name a river", rows=[7, 9])
        written.answer(
            Written(0, ["it is 42, I think"], 1.0, parts={"format": 0.5}),
            Written(0, ["<tool>6 * 7</tool>", "42", "so forty two"], 0.0, version=1),
            Written(1, [HOSTILE], 0.25, version=2),
            Written(1, ["the river"], None, reason="the reward raised ValueError: no number"),
        )
        written.ask("what is six times seven", rows=[7])
        written.answer(Written(2, ["forty two"], 1.0, version=3), Written(2, ["42"], 1.0, version=3))
        written.begin(Written(2, ["still thinki"], version=3))
    return tmp_path / "run"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tailrace", *words]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=wide)


def ids(run: Path, **asked: object) -> list[int]:
    list(build(run))
    return [one.id for one in find_samples(run, SampleFilter(**asked)).samples]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, [5, 4, 3, 2, 1, 0]),
        ({"state": "ended", "limit": 2}, [5, 4]),
        ({"group": 3}, [6]),
        ({"order": "oldest", "limit": 2, "offset": 1}, [1, 2]),
        ({"text": "forty"}, [4, 1]),
        ({"text": '"it is" think'}, [0]),
        ({"text": "thin*"}, [0]),
        ({"text": 'script" OR NEAR('}, []),
        ({"asked": "river"}, [3, 2]),
        ({"text": "42", "min_reward": 0.5}, [5, 0]),
        ({"row": 7, "max_reward": 0.5}, [1]),
        ({"prompt": 1}, [3, 2]),
        ({"group": 0}, [1, 0]),
        ({"version": 2}, [2]),
        ({"failed": True}, [3]),
        ({"error": "valueerror"}, [3]),
        ({"state": "running"}, [6]),
        ({"min_tokens": 17, "max_tokens": 17}, [0]),
        ({"order": "best", "limit": 3}, [5, 4, 0]),
        ({"order": "shortest", "limit": 1}, [5]),
    ],
)
def test_samples_are_found_by_what_they_are(run: Path, asked: dict[str, object], found: list[int]) -> None:
    assert ids(run, **asked) == found


@pytest.mark.parametrize("more", [{}, {"order": "best"}, {"min_reward": 0.5}, {"limit": 1, "offset": 1}])
def test_by_words_of_few_prompts_the_same_is_found_as_by_words_of_many(run: Path, monkeypatch, more) -> None:
    found = [ids(run, asked=words, **more) for words in ("river", "what", "nowhere")]
    monkeypatch.setattr(listing, "FEW_PROMPTS", 0)
    assert [ids(run, asked=words, **more) for words in ("river", "what", "nowhere")] == found


def test_every_attempt_that_failed_is_found_and_read_also_after_a_good_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with written_run(run) as written:
        written.ask("name a river")
        written.answer(Written(0, ["one river"], None, reason="ValueError: no number"))
        written.answer_again(0, 2, Written(0, ["two rivers"], None, version=1, reason="KeyError: 'rivers'"))
        written.answer_again(0, 3, Written(0, ["three"], 1.0, version=1))
        written.answer(Written(0, ["<river>"], None, reason="KeyError: '<'"))

    def found(**asked: object) -> list[tuple[int, int]]:
        list(build(run))
        return [(one.id, one.attempt) for one in find_samples(run, SampleFilter(**asked)).samples]  # type: ignore[arg-type]

    assert found() == [(1, 1), (0, 3)]
    assert found(failed=True) == found(state="failed") == [(1, 1), (0, 2), (0, 1)]
    assert found(error="keyerror") == [(1, 1), (0, 2)]
    assert found(failed=True, text="river*", order="oldest") == [(0, 2), (0, 1), (1, 1)]
    assert found(failed=True, version=1, min_tokens=10) == [(0, 2)]
    assert found(text="three") == [(0, 3)]
    assert found(text="rivers") == [], "it is not what the sample says now"
    listed = command("samples", str(run), "--error", "KeyError").stdout.splitlines()
    assert [line.split("KeyError: ")[1] for line in listed[:2]] == ["'<' | <river>", "'rivers' | two rivers"]
    lines = command("samples", str(run), "t0").stdout.splitlines()
    order = ["  | three", "attempt 1 failed: ValueError: no number", "  | one river"]
    order += ["attempt 2 failed: KeyError: 'rivers'", "  | two rivers"]
    assert [line for line in lines if line in order] == order
    last = json.loads(command("samples", str(run), "t1", "--json").stdout)
    assert (last["known"]["state"], last["passages"][1]["pieces"], last["failed"]) == ("failed", list("<river>"), [])


def test_a_filter_finds_the_same_with_the_index_however_far_it_is_behind(tmp_path: Path) -> None:
    run = tmp_path / "run"
    filters = [{"order": order} for order in get_args(Order)]
    filters += [{"version": 2}, {"step": 3}, {"group": 1}, {"failed": True}, {"error": "no"}, {"state": "trained"}]
    filters += [{"min_reward": 0.5}, {"max_tokens": 5, "order": "worst"}, {"finish": "stop", "order": "longest"}]

    def compare() -> list[list[int]]:
        pages = [{**each, "offset": offset, "limit": 4} for each in filters for offset in (0, 3, 6)]
        with_index = [find_samples(run, SampleFilter(**each)) for each in pages]  # type: ignore[arg-type]
        (run / INDEX).rename(run / "hidden")
        assert [find_samples(run, SampleFilter(**each)) for each in pages] == with_index  # type: ignore[arg-type]
        (run / "hidden").rename(run / INDEX)
        return [[one.id for one in found.samples] for found in with_index]

    with written_run(run) as written:
        written.ask("q")
        rewards = [1.0, None, 0.0, 0.5, 1.0, 0.0, 1.0, None]
        samples = [
            Written(0, ["a" * (3 + n % 4)], r, version=n // 2, reason="" if r is not None else "no number")
            for n, r in enumerate(rewards)
        ]
        written.answer(*samples)
        table = written.store.trajectories
        table.trained([0, 4], 3)
        table.forget([0, 1, 4, 5], archived=True)
        table.forget([2], archived=True, ending="lost")
        written.store.commit()
        list(build(run))
        with sqlite3.connect(run / INDEX) as index:
            assert index.execute("SELECT id FROM settled ORDER BY id").fetchall() == [(0,), (1,), (4,), (5,)]
            assert index.execute("SELECT id FROM unsettled ORDER BY id").fetchall() == [(2,), (3,), (6,), (7,)]
        before = compare()
        table.trained([3], 3)  # and the index does not know it yet
        written.answer(*samples[:2])
        assert compare() != before
        list(build(run))
        compare()


def test_a_sample_is_shown_with_its_turns_versions_and_log_probs(run: Path) -> None:
    journal = Journal(run)
    decoder = decoder_of(journal.config, run)
    view, tools = view_samples(run, journal.config, known_trajectories(run, "group", 0), decoder)
    assert [(each.origin, each.version, each.text) for each in tools.passages] == [
        ("prompt", None, "what is six times seven"),
        ("policy", 1, "<tool>6 * 7</tool>"),
        ("environment", None, "42"),
        ("policy", 1, "so forty two"),
    ]
    assert tools.passages[1].calls == ["6 * 7"]
    assert tools.passages[1].logprobs[0] == pytest.approx(-0.1)
    assert (view.parts, view.columns) == ({"format": 0.5}, {"answer": "42"})
    assert (view.advantage, tools.advantage) == (0.7071, -0.7071)
    (growing,) = view_samples(run, journal.config, known_trajectories(run, "trajectory", 6), decoder, most=30)
    assert (growing.passages[1].text, growing.hidden) == ("still t", 5), "what there is of it, as far as is asked for"


def test_advantages_are_those_of_the_whole_group_also_where_some_of_it_was_not_trained_on(tmp_path: Path) -> None:
    with written_run(tmp_path / "run", group_size=5) as written:
        written.ask("one", rows=[0])
        written.answer(*[Written(0, [str(reward)], reward) for reward in (1.0, 0.0, 0.0, 0.0, 0.0)])
        written.store.trajectories.trained([0, 1, 2], 0)
        written.store.commit()
    run, config = tmp_path / "run", Journal(tmp_path / "run").config
    shown = view_samples(run, config, known_trajectories(run, "group", 0), decoder_of(config, run))
    assert [one.advantage for one in shown] == [1.7889, -0.8944, -0.8944, None, None]  # two stand for four


def test_a_letter_of_several_tokens_belongs_to_the_last_of_them() -> None:
    text = "aß水b"
    decoder = TokenDecoder(lambda ids: bytes(ids).decode(errors="replace"), known=True)
    pieces = decoder.pieces(list(text.encode()))
    assert pieces == ["a", "", "ß", "", "", "水", "b"]
    assert "".join(decoder.pieces([*b"ab", 0xFF])) == f"ab{BROKEN}"


def test_nothing_in_a_sample_steers_the_terminal(run: Path) -> None:
    for words in (["t2"], ["--text", "alert"], ["--order", "oldest"]):
        shown = command("samples", str(run), *words).stdout
        assert "<script>alert(1)</script>\\x1b[2J" in shown
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown)
    assert plain("a\tb\nc\x9b\u2028") == "a\tb\nc\\x9b\\u2028"


def test_the_console_lists_samples_and_shows_one_in_full(run: Path) -> None:
    listed = command("samples", str(run), "--text", "forty", "--max-reward", "0.5").stdout
    assert listed.splitlines()[-1] == "1 of 1 sample"
    assert listed.startswith("t1  g0  p0  finished  reward 0")
    story = command("story", str(run), "t1")
    assert "calls a tool: 6 * 7" in story.stdout, story.stderr
    (row,) = command("samples", str(run), "t0", "--json").stdout.splitlines()
    assert json.loads(row)["parts"] == {"format": 0.5}
    wrong = (
        (["t99"], "no sample"),
        (["--order", "up"], "--order: 'up' is none of newest,"),
        (["--state", "trainde"], "--state: 'trainde' is none of running,"),
        (["--prompt", "t3"], "write 12 or p12"),
        (["--limit", "500"], "at most 200"),
        (["--min-reward", "nan"], "not a reward"),
        (["--text", "!"], "no letter"),
        (["--prompts", "--text", "a"], "--text does not go together with --prompts"),
        (["t1", "--failed"], "--failed does not go together with t1"),
    )
    for words, sentence in wrong:
        refused = command("samples", str(run), *words)
        assert (refused.returncode, sentence in refused.stderr) == (2, True), refused.stderr


def test_samples_of_evaluations_are_shown_when_they_are_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with written_run(run, group_size=1, options=["--eval.every", "1", "--task.eval_rows", "1"]) as written:
        written.ask("a question")
        written.answer(Written(0, ["a river"], 1.0))
        written.samples = EVALUATION
        written.file.add_prompts([Row(EVALUATION, id_bytes([1]), "held out", {})])
        written.answer(Written(EVALUATION, ["another river"], 0.0), Written(EVALUATION, ["a sea"], 1.0))
    both = [EVALUATION + 1, EVALUATION, 0]
    for of, found in ((None, [0]), ("training", [0]), ("evaluation", both[:2]), ("all", both)):
        assert ids(run, of=of) == ids(run, of=of, order="oldest")[::-1] == found
        assert ids(run, of=of, min_reward=0.0) == found
        assert ids(run, of=of, text="river") == [id for id in found if id != EVALUATION + 1]
    assert ids(run, prompt=EVALUATION) == both[:2], "they are named"
    assert ids(run, group=EVALUATION) == both[1:2]
    assert [one.newest for one in prompt_rates(run, PromptFilter())] == [0]
    assert [one.newest for one in prompt_rates(run, PromptFilter(of="evaluation"))] == [EVALUATION]
    shown = command("samples", str(run))
    assert shown.stdout.endswith("1 of 1 sample\n")
    assert "--of evaluation" in shown.stderr


def test_a_prompt_that_was_visited_once_neither_rises_nor_falls(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with written_run(run) as written:
        written.ask("once", "twice", "twice", rows=[1, 2, 2])
        written.answer(Written(0, ["x"]), Written(1, ["x"], 1.0), Written(2, ["x"], 0.5))
    list(build(run))
    assert [one.row for one in prompt_rates(run, PromptFilter(order="falling"))] == [2, 1]
    assert [one.row for one in prompt_rates(run, PromptFilter(order="rising"))] == [2, 1]


def test_a_list_says_why_a_sample_failed(run: Path) -> None:
    shown = command("samples", str(run), "--failed").stdout
    assert "the reward raised ValueError: no number" in shown.splitlines()[0]


def test_prompts_are_listed_by_how_often_they_passed_over_time(run: Path) -> None:
    list(build(run))
    river, times = prompt_rates(run, PromptFilter())
    assert (river.row, river.samples, river.passed, river.failed) == (9, 2, 0, 1)
    assert [(visit.version, visit.passed, visit.samples) for visit in times.history] == [(1, 1, 2), (3, 2, 2)]
    assert prompt_rates(run, PromptFilter(order="rising"))[0].row == 7
    shown = command("samples", str(run), "--prompts").stdout
    assert shown.startswith("row 9          0 of 2      passed, 1 failed"), shown
    assert "what is six times seven" in shown


def test_the_index_follows_a_run_has_one_writer_and_is_made_anew_if_it_is_not_ours(tmp_path: Path) -> None:
    with written_run(tmp_path / "run") as written:
        written.ask("q")
        written.answer(Written(0, ["first words"]))
        assert ids(tmp_path / "run", text="words") == [0]
        written.answer(Written(0, ["second words"]))
        index = SearchIndex(tmp_path / "run")
        with pytest.raises(BrowseError, match="another process"):
            SearchIndex(tmp_path / "run")
        assert ids(tmp_path / "run", text="words") == [0], "who finds it locked, reads what is there"
        index.close()
        assert ids(tmp_path / "run", text="words") == [1, 0]
        written.store.trajectories.assign([written.begin(Written(0, ["third"]))])
    path = tmp_path / "run" / INDEX
    assert state_of(tmp_path / "run").samples == 2
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"no database")
    with pytest.raises(BrowseError, match="no text index"):
        find_samples(tmp_path / "run", SampleFilter(text="words"))
    assert ids(tmp_path / "run", text="words") == [1, 0]
