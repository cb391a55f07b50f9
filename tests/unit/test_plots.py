"""Plots: both kinds are made from plain rows and spans, say what they should, and stay small."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import re
import struct
import sys
from itertools import pairwise

import pytest

from tailrace.obs.activity import StateSpan
from tailrace.obs.charts import REPLICAS, decode_lane, encode_lane, merge, ticks
from tailrace.obs.plots import draw
from tailrace.obs.sweep import GRAINS, MARKS, log_ticks, spread, sweep_charts

SCHEDULES = ("sync", "one_step", "stream", "partial", "trajectory")


def row(schedule="trajectory", gpus=64, rate=100_000.0, **more):
    age = {"mean": 0.5, "p95": 1.0, "max": 2}
    shares = {"trainer_idle": 0.25, "rollout_idle": 0.125, "kv_usage": 0.5}
    base = {"gpus": gpus, "schedule": schedule, "repack": schedule == "trajectory", "tokens_per_s": rate}
    return base | {"step_s": 20.0, "staleness": age, "virtual_s": 100.0} | shares | more


def sweep(*counts):
    return [row(name, gpus, 1000.0 * gpus * (i + 1)) for gpus in counts for i, name in enumerate(SCHEDULES)]


def spans(replicas=4, end=100.0, pieces=10, states=("generating", "pulling", "idle", "repacked")):
    step = end / pieces
    return [
        (r, states[(r + i) % len(states)], i * step, (i + 1) * step) for r in range(replicas) for i in range(pieces)
    ]


def html(tmp_path, rows, timelines, title="A run"):
    path = tmp_path / "out.html"
    draw(path, rows, timelines, title)
    return path.read_text(encoding="utf-8")


def embedded(page):
    """What the scripts draw."""
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])


@pytest.mark.parametrize("counts", [(64,), (48, 64), (32, 64, 128, 1024)])
@pytest.mark.parametrize("timelines", [{}, {name: spans() for name in SCHEDULES}], ids=["bare", "strips"])
def test_a_bitmap_is_made(tmp_path, counts, timelines):
    path = tmp_path / "out.PNG"
    draw(path, sweep(*counts), timelines, "A run, $x_1$")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1800
    assert height > (1200 if timelines else 300)


@pytest.mark.parametrize("counts", [(64,), (48, 64), (32, 64, 128)])
def test_a_report_shows_every_schedule_and_needs_nothing_from_elsewhere(tmp_path, counts):
    page = html(tmp_path, sweep(*counts), {name: spans() for name in SCHEDULES})
    data = embedded(page)
    assert [series["name"] for series in data["series"]] == list(SCHEDULES)
    assert [strip["name"] for strip in data["strips"]] == list(SCHEDULES)
    assert data["series"][-1]["label"] == f"{1000 * counts[-1] * 5:,} (5.0× sync)"
    assert bool(data["ideal"]) == (len(counts) > 1)
    assert len(data["rows"]) == len(counts) * len(SCHEDULES)
    assert data["rows"][-1][:4] == ["trajectory", f"{counts[-1]}", f"{5000 * counts[-1]:,}", "5.00x"]
    assert not re.search(r"https?:|src=|<link|@import|url\(", page.replace("http://www.w3.org/2000/svg", ""))


def test_only_the_scripts_of_a_report_may_run(tmp_path):
    """Its policy names them by their checksums: one that does not match would leave the report empty."""
    page = html(tmp_path, [row()], {})
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0]
    codes = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes]
    assert sorted(re.findall(r"'sha256-(.*?)'", policy)) == sorted(hashes)
    assert policy.startswith("default-src 'none'")


def test_no_text_ends_the_data_of_a_report(tmp_path):
    evil = '"></script><script>alert(1)</script>&<!--'
    page = html(tmp_path, [row(evil), row("sync")], {evil: [(0, evil, 0.0, 100.0)]}, evil)
    data = embedded(page)
    assert "<script>alert" not in page
    assert (data["title"], data["series"][0]["name"], data["strips"][0]["name"]) == (evil, evil, evil)
    assert data["series"][0]["kind"] == "other"


def test_thousands_of_spans_become_a_bounded_number_of_marks():
    crowd = spans(replicas=200, pieces=3000)
    charts = sweep_charts([row()], {"trajectory": crowd, "sync": crowd}, "")
    assert [strip.replicas for strip in charts.strips] == ["48 of 200 replicas"] * 2
    assert all(REPLICAS <= sum(len(lane.ends) for lane in strip.lanes) <= MARKS for strip in charts.strips)


def test_a_lane_is_drawn_as_it_was_with_its_gaps():
    marks = [StateSpan("generating", 0.0, 50.0), StateSpan("pulling", 60.0, 60.5), StateSpan("lost", 60.5, 100.0)]
    assert decode_lane(encode_lane("r0", marks, 100.0)) == marks
    assert decode_lane(encode_lane("r0", [StateSpan("unheard of", 1.0, 2.0)], 2.0)) == []


def test_a_short_pull_between_long_spans_is_kept():
    marks = [
        StateSpan("generating", 0.0, 50.0),
        StateSpan("pulling", 50.0, 50.01),
        StateSpan("generating", 50.01, 100.0),
    ]
    assert merge(marks, 0.1) == marks


def test_short_marks_merge_into_what_prevails_and_cover_the_same_time():
    marks = [StateSpan("idle" if i % 4 == 0 else "generating", i * 0.01, (i + 1) * 0.01) for i in range(1000)]
    merged = merge(marks, 0.1)
    assert [mark.state for mark in merged] == ["generating"]
    assert (merged[0].start, merged[0].end) == (0.0, 10.0)


def test_replicas_are_chosen_evenly_with_both_ends():
    strip = sweep_charts([row()], {"trajectory": spans(replicas=480)}, "").strips[0]
    chosen = [int(lane.name[1:]) for lane in strip.lanes]
    assert (len(chosen), chosen[0], chosen[-1]) == (REPLICAS, 0, 479)
    assert {b - a for a, b in pairwise(chosen)} <= {10, 11}


def test_the_window_is_three_of_the_slowest_steps_at_the_end_of_each_run():
    rows = [row("sync", step_s=20.0, virtual_s=200.0), row(step_s=10.0, virtual_s=100.0)]
    picture = sweep_charts(rows, {"sync": spans(end=200.0), "trajectory": spans(end=100.0)}, "")
    assert picture.seconds == 60.0
    assert [strip.begins for strip in picture.strips] == [140.0, 40.0]
    assert picture.caption == "Timeline of the replicas on 64 GPUs, last 60 s of each run"
    assert {lane.ends[-1] for lane in picture.strips[0].lanes} == {60.0}


def test_a_short_run_is_shown_whole():
    picture = sweep_charts([row(step_s=60.0)], {"trajectory": spans()}, "")
    assert (picture.seconds, picture.strips[0].begins) == (100.0, 0.0)
    assert picture.caption.endswith("whole run")


def test_a_strip_is_annotated_by_the_result_of_its_own_run():
    rows = [row(gpus=32, rate=1.0, virtual_s=300.0), row(gpus=64, rate=200_000.0)]
    picture = sweep_charts(rows, {"trajectory": spans(), "sync": spans(end=77.0)}, "")
    assert picture.strips[0].notes[0] == "200,000 tokens/s"
    assert picture.strips[1].notes == []


def test_runs_with_and_without_repack_are_two_lines():
    picture = sweep_charts([row(), row(repack=False)], {}, "")
    assert [line.name for line in picture.series] == ["trajectory", "trajectory, no repack"]
    assert len({line.kind for line in picture.series}) == 2


@pytest.mark.parametrize(("counts", "logarithmic"), [((64,), False), ((64, 128), False), ((32, 64, 128), True)])
def test_a_wide_range_is_drawn_on_logarithmic_axes(counts, logarithmic):
    assert sweep_charts(sweep(*counts), {}, "").log == logarithmic


def test_a_schedule_that_trained_nothing_can_be_drawn(tmp_path):
    for suffix in ("png", "html"):
        draw(tmp_path / f"out.{suffix}", [row(rate=0.0, gpus=8), row(rate=0.0, gpus=64)], {}, "")
        draw(tmp_path / f"one.{suffix}", [row(rate=0.0)], {"trajectory": []}, "")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4


def test_labels_keep_their_distance_and_their_order():
    assert spread([0.5, 0.1], 0.1, 0.0, 1.0) == [0.5, 0.1]
    assert spread([5.0, 5.0, 5.0], 2.0, 0.0, 10.0) == [3.0, 5.0, 7.0]
    assert spread([9.9, 10.0], 2.0, 0.0, 10.0) == [8.0, 10.0]
    moved = spread([0.3, 0.31, 0.32, 0.45, 0.99, 1.0], 0.1, 0.0, 1.0)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(moved))


def test_ticks_are_round():
    assert ticks(0, 844, 8) == [0, 200, 400, 600, 800]
    assert log_ticks(1.0, 1e9) == [10.0**power for power in range(10)]
    assert log_ticks(51_000, 455_000) == [70_000, 100_000, 200_000, 300_000]
    assert GRAINS >= 500


@pytest.mark.parametrize("name", ["out.pdf", "out", "out.svg"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"a plot ends in \.png or \.html"):
        draw(tmp_path / name, [row()], {}, "")
    assert not (tmp_path / name).exists()


def test_no_results_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path / "out.html", [], {}, "")


def test_a_bitmap_without_matplotlib_names_the_ways_out(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **named):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *rest, **named)

    monkeypatch.delitem(sys.modules, "tailrace.obs.png", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"needs matplotlib; install tailrace\[plot\], or write --plot out\.html"):
        draw(tmp_path / "out.png", [row()], {}, "")
    draw(tmp_path / "out.html", [row()], {}, "")
