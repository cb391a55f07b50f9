"""Plots: both kinds are made from plain rows and spans, say what they should, and stay small."""

from __future__ import annotations

import builtins
import re
import struct
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tailrace.obs.plots import draw
from tailrace.obs.plots_picture import GRAINS, MARKS, REPLICAS, Mark, compose, log_ticks, merge, spread, ticks

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


def svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


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
def test_a_page_shows_every_schedule_and_needs_nothing_from_elsewhere(tmp_path, counts):
    page = html(tmp_path, sweep(*counts), {name: spans() for name in SCHEDULES})
    upper, lower = svgs(page)
    for name in SCHEDULES:
        assert name in [text.text for text in upper.iter("text")]
        assert name in [text.text for text in lower.iter("text")]
    assert not re.search(r"https?:|src=|<link|@import|url\(", page)
    assert f"{1000 * counts[-1] * 5:,} (5.0× sync)" in page
    assert ("ideal scaling" in page) == (len(counts) > 1)
    assert page.count("<tr>") == 1 + len(counts) * len(SCHEDULES)
    assert "prefers-color-scheme: dark" in page


def test_the_legend_names_the_states_that_occur_once(tmp_path):
    page = html(tmp_path, [row()], {"trajectory": spans(), "sync": spans(states=("generating", "lost"))})
    legend = re.findall(r'<div class="legend">.*?</div>', page)
    assert len(legend) == 1
    keys = re.findall(r"</i>(.*?)</span>", legend[0])
    assert keys == ["generating", "pulling weights", "emptied by repack", "idle", "lost"]


def test_all_text_is_escaped(tmp_path):
    evil = '"><script>alert(1)</script>&'
    rows = [row(evil, extra=evil), row("sync") | {evil: 1}]
    page = html(tmp_path, rows, {evil: [(0, evil, 0.0, 100.0)]}, evil)
    assert "<script>alert" not in page
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert(1)" in page
    assert len(svgs(page)) == 2  # still well-formed


def test_thousands_of_spans_become_a_bounded_number_of_marks(tmp_path):
    crowd = spans(replicas=200, pieces=3000)
    page = html(tmp_path, [row()], {"trajectory": crowd, "sync": crowd})
    rects = [sum(1 for _ in strip.iter("rect")) for strip in svgs(page)[1].iter("g") if strip.get("class") == "strip"]
    assert len(rects) == 2
    assert all(REPLICAS <= count <= MARKS for count in rects)
    assert page.count("48 of 200") == 2


def test_a_short_pull_between_long_spans_is_kept():
    marks = [Mark("generating", 0.0, 50.0), Mark("pulling", 50.0, 50.01), Mark("generating", 50.01, 100.0)]
    assert merge(marks, 0.1) == marks


def test_short_marks_merge_into_what_prevails_and_cover_the_same_time():
    marks = [Mark("idle" if i % 4 == 0 else "generating", i * 0.01, (i + 1) * 0.01) for i in range(1000)]
    merged = merge(marks, 0.1)
    assert [mark.state for mark in merged] == ["generating"]
    assert (merged[0].start, merged[0].end) == (0.0, 10.0)


def test_replicas_are_chosen_evenly_with_both_ends():
    strip = compose([row()], {"trajectory": spans(replicas=480)}, "").strips[0]
    chosen = [replica for replica, _ in strip.lanes]
    assert (len(chosen), chosen[0], chosen[-1]) == (REPLICAS, 0, 479)
    assert {b - a for a, b in pairwise(chosen)} <= {10, 11}


def test_the_window_is_three_of_the_slowest_steps_at_the_end_of_each_run():
    rows = [row("sync", step_s=20.0, virtual_s=200.0), row(step_s=10.0, virtual_s=100.0)]
    picture = compose(rows, {"sync": spans(end=200.0), "trajectory": spans(end=100.0)}, "")
    assert picture.seconds == 60.0
    assert [strip.begins for strip in picture.strips] == [140.0, 40.0]
    assert picture.caption == "What each replica does on 64 GPUs, last 60 s of each run"
    assert max(mark.end for _, lane in picture.strips[0].lanes for mark in lane) == 60.0


def test_a_short_run_is_shown_whole():
    picture = compose([row(step_s=60.0)], {"trajectory": spans()}, "")
    assert (picture.seconds, picture.strips[0].begins) == (100.0, 0.0)
    assert picture.caption.endswith("whole run")


def test_a_strip_is_annotated_by_the_result_of_its_own_run():
    rows = [row(gpus=32, rate=1.0, virtual_s=300.0), row(gpus=64, rate=200_000.0)]
    picture = compose(rows, {"trajectory": spans(), "sync": spans(end=77.0)}, "")
    assert picture.strips[0].notes[0] == "200,000 tokens/s"
    assert picture.strips[1].notes == []


def test_runs_with_and_without_repack_are_two_lines():
    picture = compose([row(), row(repack=False)], {}, "")
    assert [line.name for line in picture.series] == ["trajectory", "trajectory, no repack"]
    assert len({line.colours for line in picture.series}) == 2


@pytest.mark.parametrize(("counts", "logarithmic"), [((64,), False), ((64, 128), False), ((32, 64, 128), True)])
def test_a_wide_range_is_drawn_on_logarithmic_axes(counts, logarithmic):
    assert compose(sweep(*counts), {}, "").logarithmic == logarithmic


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

    monkeypatch.delitem(sys.modules, "tailrace.obs.plots_png", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"needs matplotlib; install tailrace\[plot\], or write --plot out\.html"):
        draw(tmp_path / "out.png", [row()], {}, "")
    draw(tmp_path / "out.html", [row()], {}, "")
