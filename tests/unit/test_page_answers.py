"""What the page answers to its script: samples, curves, lanes, logs; and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sample_runs import Written, written_run
from tailrace.browse.index import build
from tailrace.config import load
from tailrace.obs.bounded_series import BoundedSeries
from tailrace.obs.live import LiveRun
from tailrace.obs.spans import MOST, SpanLog
from tailrace.obs.trace import trace_events
from tailrace.page import shared_answers
from tailrace.page.answers import BadQueryError, RunAnswers, parse_query
from tailrace.page.follow import PageContent
from tailrace.page.runs import RunLibrary
from tailrace.page.series import POINTS, Point
from tailrace.page.shared_answers import SharedAnswers
from tailrace.page.timeline import GRAIN, TimelineQuery, timeline
from tailrace.protocol import (
    Finished,
    Generate,
    Parked,
    ReplicaJoined,
    Request,
    RunStarted,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrainGroup,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.store.errors import JournalError


@pytest.fixture
def library(tmp_path: Path) -> RunLibrary:
    for name in ("first", "second"):
        with written_run(tmp_path / "runs" / name, options=["--run.name", name]) as written:
            written.ask("what is six times seven", rows=[7])
            written.answer(Written(0, ["forty two"], 1.0), Written(0, ["no idea"], 0.0))
            written.store.metrics.measure(1.0, 0, "trainer", {"loss": 0.5})
            for replica in ("r0", "r1"):
                written.store.metrics.measure(1.0, 0, replica, {"kv": 0.25})
        list(build(tmp_path / "runs" / name))
    logs = tmp_path / "runs" / "second" / "logs"
    logs.mkdir()
    (logs / "trainer0.log").write_text("first line\n" + "x" * 70_000 + "\nlast line\n")
    (logs / "outside.log").symlink_to("/etc/passwd")
    return RunLibrary([tmp_path / "runs"])


def answer(library: RunLibrary, target: str) -> Any:
    address, _, query = target.partition("?")
    return json.loads(RunAnswers(library).table[address](parse_query(query)).content)


def number_of(library: RunLibrary, name: str) -> int:
    return next(one.number for one in library.list() if one.name == name)


def test_all_runs_of_a_folder_are_listed_and_each_is_asked_for_by_its_number(library: RunLibrary) -> None:
    runs = answer(library, "/runs")["runs"]
    assert sorted((one["name"], one["ended"]["state"]) for one in runs) == [
        ("first", "complete"),
        ("second", "complete"),
    ]
    for one in runs:
        data = answer(library, f"/data?run={one['number']}")
        assert data["about"]["name"] == one["name"]
    library.stop()
    with pytest.raises(JournalError, match="no run 2"):
        answer(library, "/data?run=2")


def test_a_listed_run_has_the_mean_reward_of_its_last_whole_step(tmp_path: Path) -> None:
    with written_run(tmp_path, options=["--trainer.mini_batches", "2"]) as written:
        for step, reward in ((0, 0.0), (0, 0.0), (1, 0.25), (1, 0.75), (2, 1.0)):
            written.store.metrics.measure(float(step), step, "trainer", {"reward": reward, "loss": 0.5})
    (run,) = RunLibrary([tmp_path]).list()
    assert (run.done, run.reward) == (2, 0.5), "the third is under way"


def test_samples_prompts_and_metrics_are_answered(library: RunLibrary) -> None:
    (row,) = answer(library, "/samples?text=forty&min_reward=0.5")["samples"]
    assert (row["known"]["id"], row["text"]) == (0, "forty two")
    assert answer(library, "/sample?id=1")["advantage"] == -0.7071
    assert [one["known"]["id"] for one in answer(library, "/group?id=0")["samples"]] == [0, 1]
    (prompt,) = answer(library, "/prompts?order=hardest")["prompts"]
    assert (prompt["rate"]["row"], prompt["text"]) == (7, "what is six times seven")
    names = {one["name"]: one["sources"] for one in answer(library, "/curves")["metrics"]}
    assert names == {"loss": ["trainer"], "kv": ["replicas"]}
    assert answer(library, "/series?source=replicas&name=kv")["points"] == [[1.0, 0, 0.25, 0.25, 0.25, 1]] * 2
    assert 'name = "first"' in answer(library, f"/config?run={number_of(library, 'first')}")["config"]
    assert answer(library, "/index")["samples"] == 2


@pytest.mark.parametrize(
    "target",
    [
        *("/samples?order=up", "/samples?limit=1000", "/samples?drop=table", "/sample?id=99", "/sample"),
        *("/sample?id=-1", "/log?name=../run", "/log?name=outside", "/log?name=/etc/passwd"),
        *("/timeline?count=9999", "/data?run=x"),
    ],
)
def test_what_makes_no_sense_is_refused(library: RunLibrary, target: str) -> None:
    with pytest.raises(BadQueryError):
        answer(
            library, f"{target}&run={number_of(library, 'second')}" if "?" in target and "run" not in target else target
        )


def test_a_log_is_shown_from_its_end(library: RunLibrary) -> None:
    second = number_of(library, "second")
    assert [one["name"] for one in answer(library, f"/logs?run={second}")["logs"]] == ["trainer0"]
    log = answer(library, f"/log?run={second}&name=trainer0")
    assert (log["cut"], log["text"]) == (True, "last line\n")


def test_curves_keep_their_mean_and_stay_bounded() -> None:
    series = BoundedSeries[Point](POINTS)
    for number in range(10 * POINTS + 3):
        series.add(Point(float(number), number, float(number % 7), float(number % 7), float(number % 7), 1))
    assert POINTS // 2 <= len(series.points) <= POINTS
    total = sum(point.count for point in series.points)
    assert total == 10 * POINTS + 3
    mean = sum(point.mean * point.count for point in series.points) / total
    assert mean == pytest.approx(sum(number % 7 for number in range(total)) / total)


def moved_run() -> LiveRun:
    """r0 gives a sample to r1, and both then have nothing to do until a version is there."""
    live = LiveRun(load([], ["--model.preset", "qwen2.5-7b", "--workload.group_size", "2"]), log=True)
    one, two = Request(0, 1, 0, 0, 10), Request(1, 1, 0, 0, 10)
    meta = TrajectoryMeta(0, 1, 5, 0, 0)
    done = [TrajectoryMeta(id, attempt, 9, 0, 0, "stop", 1.0) for id, attempt in ((0, 2), (1, 1))]
    for now, event, *commands in (
        (0.0, RunStarted(2, 1)),
        (1.0, ReplicaJoined(0, 1, 0, 0, 100, 8)),
        (1.0, ReplicaJoined(1, 1, 0, 0, 100, 8)),
        (1.0, TrainerJoined(1, 0)),
        (2.0, VersionStored(0, 1, 0), Generate(0, 1, (one,)), Generate(1, 1, (two,))),
        (4.0, Parked(0, 1, (meta,)), Generate(1, 1, (Request(0, 2, 0, 0, 10, resume=True),))),
        (6.0, Finished(1, done[0])),
        (7.0, Finished(1, done[1]), Train(1, 0, 0, True, (TrainGroup(0, (0, 1)),))),
        (9.0, Trained(1, 0, 0)),
        (12.0, VersionStored(0, 1, 1)),
        (13.0, WeightsLoaded(0, 1, 1)),
        (14.0, TimerFired("health")),
    ):
        live.see(now, event, commands)
    return live


def test_lanes_are_seen_closely_with_versions_and_moves() -> None:
    live = moved_run()
    whole = timeline(live, TimelineQuery())
    assert [lane.name for lane in whole.lanes] == ["trainer", "r0", "r1"]
    assert whole.moves == [(4.0, 4.0, 1, 2, 1)]
    assert (whole.lanes[1].states, whole.lanes[1].versions[-1], whole.lanes[1].ends[-1]) == ("sgii", 1, 14.0)
    part = timeline(live, TimelineQuery(begin=3.0, end=5.0, first=1, count=1))
    assert [(lane.name, lane.states, lane.start, lane.ends) for lane in part.lanes] == [("r0", "gi", 3.0, [4.0, 5.0])]


def test_idle_time_is_told_by_its_cause() -> None:
    causes = moved_run().view().idle_causes
    assert causes["replicas"] == pytest.approx({"admission": 7 / 17, "trainer": 4 / 17, "weights": 6 / 17})
    assert set(causes["trainer"]) == {"generation", "nothing"}


def test_a_long_lane_is_blurred_and_never_cut() -> None:
    log = SpanLog(0.0)
    for number in range(20 * MOST):
        log.enter(("generating", "pulling")[number % 2], number // 2, float(number + 1))
    assert len(log.starts) <= MOST
    spans = log.window(0.0, 20.0 * MOST, 20.0 * MOST)
    assert (spans[0][2], spans[-1][3]) == (0.0, 20.0 * MOST)
    assert all(before[3] == after[2] for before, after in pairwise(spans))
    assert GRAIN < MOST


def test_a_trace_has_a_thread_per_process_spans_and_arrows() -> None:
    events = list(trace_events(moved_run(), "run"))
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert threads == {"trainer": 0, "r0": 1, "r1": 2}
    generating = [event for event in events if event["name"] == "generating" and event["tid"] == 1]
    assert [(event["ts"], event["dur"], event["args"]["version"]) for event in generating] == [
        (2_000_000, 2_000_000, 0)
    ]
    arrows = [(event["ph"], event["tid"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 1, 4_000_000), ("f", 2, 4_000_001)]
    assert {event["name"] for event in events if event["ph"] == "C"} == {"reward", "staleness", "tokens per s"}


def test_what_several_ask_for_at_once_is_worked_out_once_and_again_when_the_run_has_changed() -> None:
    now, written, worked = [0.0], ["first"], []
    shared = SharedAnswers(clock=lambda: now[0])

    def ask(asked: str = "/samples") -> bytes:
        def work() -> PageContent:
            worked.append(asked)
            return PageContent("tag", written[0].encode())

        return shared.get(asked, lambda: written[0] if asked == "/samples" else None, work).content

    assert [ask() for _ in range(3)] == [b"first"] * 3
    written[0] = "second"
    assert shared.fresh("/samples") == PageContent("tag", b"first")
    now[0] += 1.0
    assert shared.fresh("/samples") is None
    assert ask() == b"second"
    now[0] += 1.0
    assert ask() == b"second", "the files are as they were"
    assert worked == ["/samples"] * 2
    for _ in range(2):
        now[0] += 1.0
        ask("/log")
    assert worked[2:] == ["/log"] * 2, "it follows from more than files of the run"


def test_what_is_kept_of_answers_is_bounded_and_an_error_is_kept_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "KEPT", 100)
    shared = SharedAnswers(clock=lambda: 0.0)
    for number in range(5):
        shared.get(str(number), lambda: None, lambda: PageContent("", b"x" * 40))
    assert [shared.fresh(str(number)) is not None for number in range(5)] == [False, False, False, True, True]

    def fail() -> PageContent:
        raise JournalError("not now")

    with pytest.raises(JournalError, match="not now"):
        shared.get("5", lambda: None, fail)
    assert shared.get("5", lambda: None, lambda: PageContent("", b"now")).content == b"now"
