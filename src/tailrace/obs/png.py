"""The charts of a run and of simulations as bitmaps, by matplotlib. Import this module only when a bitmap is wanted.

It draws the same data as the page's script, in the colours of the light page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tailrace.obs.activity import BRIEF
from tailrace.obs.charts import STATES, ChartView, LaneView, RunCharts, decode_lane, ticks
from tailrace.obs.html import asset
from tailrace.obs.sweep import SeriesView, StripView, SweepCharts

DPI = 180
WIDTH, EDGE = 10.0, 0.3  # inches: the page and its left edge
INK, SOFT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
TITLE, HEADING, BODY, SMALL = 13.0, 10.0, 9.0, 8.0  # points
PANEL, GAP, LANE = 1.25, 0.52, 0.2  # inches
COLOURS = dict(re.findall(r"--(\w+): (#\w{6})", asset("page.css").partition("@media")[0]))
STATE_WORDS = {"pulling": "pulling weights", "repacked": "emptied by repack"}
PIXELS = 1200  # the width of a lane: what is shorter than one, a pull perhaps, is drawn as wide


class _Page:
    """A figure addressed in inches from the top left."""

    def __init__(self, height: float, left: float, right: float) -> None:
        self.height = height
        self.left, self.right = left, right  # margins of the axes
        self.figure = Figure(figsize=(WIDTH, height))

    def axes(self, top: float, tall: float) -> Axes:
        wide = WIDTH - self.left - self.right
        bottom = 1 - (top + tall) / self.height
        axes = self.figure.add_axes((self.left / WIDTH, bottom, wide / WIDTH, tall / self.height))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0, labelsize=BODY, colors=SOFT, which="both")
        axes.set_xticks([])
        return axes

    def grid(self, axes: Axes, low: float, high: float, values: Sequence[float]) -> None:
        axes.set_ylim(low, high)
        axes.set_yticks(values, [f"{value:,.10g}" for value in values])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        style = {"color": INK, "va": "baseline", "parse_math": False} | style
        self.figure.text(x / WIDTH, 1 - y / self.height, words, **style)

    def beside(self, y: float, words: str, **style: Any) -> None:
        """To the right of the axes."""
        self.text(WIDTH - self.right + 0.16, y, words, **style)

    def legend(self, y: float, lanes: Iterable[LaneView]) -> None:
        seen = {letter for lane in lanes for letter in lane.states}
        x = self.left
        for state in [state for state, letter in STATES.items() if letter in seen]:
            box, size = (x / WIDTH, 1 - y / self.height), (0.17 / WIDTH, 0.12 / self.height)
            edge = {"edgecolor": GRID if state == "starting" else "none", "linewidth": 0.6}
            self.figure.add_artist(Rectangle(box, *size, facecolor=COLOURS[state], **edge))
            words = STATE_WORDS.get(state, state)
            self.text(x + 0.23, y - 0.005, words, fontsize=SMALL, color=SOFT)
            x += 0.48 + 0.066 * len(words)

    def save(self, path: Path) -> None:
        FigureCanvasAgg(self.figure).print_figure(str(path), dpi=DPI, facecolor="white", format="png")


def _draw_lanes(axes: Axes, lanes: Sequence[LaneView], seconds: float, gap: float) -> None:
    pixel = seconds / PIXELS
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for row, lane in enumerate(lanes):
        top, bottom = row + gap, row + 1 - gap
        for state, start, exact in decode_lane(lane):
            end = max(exact, start + pixel)
            boxes.setdefault(state, []).append([(start, top), (end, top), (end, bottom), (start, bottom)])
    for state in sorted(boxes, key=lambda state: state in (*BRIEF, "repacked")):
        axes.add_collection(PolyCollection(boxes[state], facecolors=COLOURS[state], linewidths=0, antialiased=False))
    axes.set_xlim(0, seconds)
    axes.set_ylim(max(1, len(lanes)), 0)
    axes.spines["bottom"].set_visible(False)


# --------------------------------------------------------------------------------------------------------------- a run


class RunPicture(NamedTuple):
    charts: RunCharts
    title: str
    subtitle: str
    notes: dict[str, list[str]]  # beside each chart, by its name, and beside the `timeline`


def save_run(picture: RunPicture, path: Path) -> None:
    """Reward, throughput and staleness above the timeline, with one time axis."""
    charts, top = picture.charts, 1.28
    tall = max(0.5, min(3.4, LANE * len(charts.lanes)))
    page = _Page(top + len(charts.charts) * (PANEL + GAP) + 0.9 + tall, left=0.95, right=1.75)
    page.text(EDGE, 0.4, picture.title, fontsize=TITLE, fontweight="bold")
    page.text(EDGE, 0.68, picture.subtitle, fontsize=BODY, color=SOFT)
    for view in charts.charts:
        _panel(page, top, view, charts)
        _notes(page, top, picture.notes.get(view.name, []), COLOURS[view.name])
        top += PANEL + GAP
    _timeline(page, top, tall, picture)
    page.save(path)


def _panel(page: _Page, top: float, view: ChartView, charts: RunCharts) -> None:
    page.text(page.left, top - 0.11, view.title, fontsize=HEADING)
    axes, colour = page.axes(top, PANEL), COLOURS[view.name]
    axes.set_xlim(0, max(charts.seconds, 1e-6))
    page.grid(axes, view.low, view.high, view.ticks)
    line = _column(charts, view.line)
    if not line:
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", color=SOFT, fontsize=BODY)
        return
    if view.area:
        ended, values = zip(*_column(charts, view.area), strict=True)
        axes.stairs(values, [charts.first_sample_at, *ended], color=colour, fill=True, alpha=0.16, linewidth=0)
    if view.dots:
        axes.plot(*zip(*_column(charts, view.dots), strict=True), "o", color=colour, alpha=0.3, markersize=3.2, mew=0)
    axes.plot(*zip(*line, strict=True), color=colour, linewidth=2.2)


def _column(charts: RunCharts, name: str) -> list[tuple[float, float]]:
    x, y = charts.columns.index("ended"), charts.columns.index(name)
    return [(point[x] or 0.0, value) for point in charts.points if (value := point[y]) is not None]


def _notes(page: _Page, top: float, notes: Sequence[str], colour: str) -> None:
    """The figure that people look for, then what it is."""
    for number, text in enumerate(notes):
        large = {"color": colour, "fontsize": HEADING + 3, "fontweight": "bold"}
        style = {"color": SOFT, "fontsize": SMALL} if number else large
        page.beside(top + (0.22 + 0.17 * number if number else 0.2), text, **style)


def _timeline(page: _Page, top: float, tall: float, picture: RunPicture) -> None:
    charts, lanes = picture.charts, picture.charts.lanes
    page.text(page.left, top - 0.11, "Timeline", fontsize=HEADING)
    page.legend(top + 0.16, lanes)
    top += 0.34
    axes = page.axes(top, tall)
    _draw_lanes(axes, lanes, max(charts.seconds, 1e-6), gap=0.07 if len(lanes) <= 17 else 0.0)
    every = max(1, -(-len(lanes) // int(tall / 0.15)))
    named = range(0, len(lanes), every)
    axes.set_yticks([row + 0.5 for row in named], [lanes[row].name for row in named])
    marks = _time_ticks(charts.seconds)
    axes.set_xticks(marks, [_duration(mark) for mark in marks])
    for number, text in enumerate(picture.notes.get("timeline", [])):
        page.beside(top + 0.16 + 0.22 * number, text, fontsize=BODY)


def _time_ticks(seconds: float) -> list[float]:
    """Round moments, at most nine of them."""
    rounds = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)
    step = next((each for each in rounds if seconds / each <= 9), 86400.0 * max(1, seconds // 777600))
    return [step * number for number in range(int(seconds / step) + 1)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------------------------- simulations


def save_sweep(charts: SweepCharts, path: Path) -> None:
    """Throughput by schedule above the timelines of the replicas."""
    bars = len(charts.gpus) == 1
    upper, under = (0.32 * len(charts.series) + 0.1, 0.2) if bars else (3.0, 0.5)
    heights = [min(1.1, max(0.78, 0.024 * len(strip.lanes))) for strip in charts.strips]
    below = 0.8 + sum(heights) + 0.2 * len(heights) + 0.45 if heights else 0.0
    names = max(len(series.name) for series in charts.series)
    left = max(0.95, EDGE + 0.1 + 0.085 * names * bars)
    page = _Page(0.95 + upper + under + below, left, right=max(2.85, (_label_column(charts.series) + 130) / 72))
    size = min(TITLE, TITLE * 88 / max(1, len(charts.title)))
    page.text(EDGE, 0.36, charts.title, fontsize=size, fontweight="bold")
    page.text(EDGE, 0.72, charts.heading, fontsize=HEADING)
    (_bars if bars else _lines)(page, page.axes(0.95, upper), charts)
    if heights:
        _strips(page, 0.95 + upper + under, charts, heights)
    page.save(path)


def _beside(axes: Axes, at: float, points: float, words: str, **style: Any) -> None:
    """Text to the right of the axes, at a height given as a share, `points` away."""
    style = {"fontsize": BODY, "va": "center", "annotation_clip": False, "parse_math": False} | style
    axes.annotate(words, (1.0, at), xycoords="axes fraction", xytext=(points, 0), textcoords="offset points", **style)


def _label_column(series: Sequence[SeriesView]) -> float:
    """Where values begin, in points: after the longest name."""
    return 16 + 6.1 * max(len(line.name) for line in series)


def _lines(page: _Page, axes: Axes, charts: SweepCharts) -> None:
    first, last = charts.gpus[0], charts.gpus[-1]
    if charts.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(first / (last / first) ** 0.03, last * (last / first) ** 0.015)
    else:
        axes.set_xlim(first - 0.03 * (last - first), last + 0.015 * (last - first))
    axes.minorticks_off()
    page.grid(axes, charts.low, charts.high, charts.ticks)
    axes.set_xticks(charts.gpus, [f"{count:,}" for count in charts.gpus])
    axes.set_xlabel("GPUs", fontsize=BODY, color=SOFT)
    if charts.ideal:
        style: dict[str, Any] = {"color": COLOURS["ideal"], "linewidth": 1.1, "dashes": (4, 3), "zorder": 1.5}
        axes.plot(*zip(*charts.ideal, strict=True), **style)
        _beside(axes, charts.ideal_at, 9, "ideal scaling", color="#9a9a9a")
    for series in charts.series:
        _line(axes, series, _label_column(charts.series))


def _line(axes: Axes, series: SeriesView, column: float) -> None:
    hero, colour = series.kind == "trajectory", COLOURS[series.kind]
    style: dict[str, Any] = {"linewidth": 2.6 if hero else 1.7, "markersize": 6.5 if hero else 5.0}
    style |= {"marker": "o", "markeredgecolor": "white", "markeredgewidth": 0.9, "zorder": 3 if hero else 2}
    axes.plot(*zip(*series.points, strict=True), color=colour, clip_on=False, **style)
    _beside(axes, series.label_at, 9, series.name, color=colour, fontweight="bold")
    _beside(axes, series.label_at, column, series.label, color=INK)


def _bars(page: _Page, axes: Axes, charts: SweepCharts) -> None:
    values = [series.points[-1][1] for series in charts.series]
    colours = [COLOURS[series.kind] for series in charts.series]
    axes.set_xlim(0, (max(values) or 1.0) * 1.02)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.barh(range(len(values)), values, height=0.66, color=colours)
    axes.set_yticks(range(len(values)), [series.name for series in charts.series])
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set(color=colour, fontweight="bold", parse_math=False)
    for i, series in enumerate(charts.series):
        style: dict[str, Any] = {"fontsize": BODY, "va": "center", "color": INK, "annotation_clip": False}
        axes.annotate(series.label, (values[i], i), xytext=(6, 0), textcoords="offset points", **style)


def _strips(page: _Page, top: float, charts: SweepCharts, heights: Sequence[float]) -> None:
    page.text(EDGE, top + 0.3, charts.caption, fontsize=HEADING)
    page.legend(top + 0.62, [lane for strip in charts.strips for lane in strip.lanes])
    top += 0.8
    for strip, tall in zip(charts.strips, heights, strict=True):
        axes = page.axes(top, tall)
        _draw_lanes(axes, strip.lanes, charts.seconds, gap=0.07 if tall * DPI / len(strip.lanes) > 6 else 0.0)
        _strip_notes(axes, strip, tall)
        if strip is charts.strips[-1]:
            marks = ticks(0, charts.seconds, 8)
            axes.set_xticks(marks, [f"{mark:,.10g}" for mark in marks])
            axes.set_xlabel("seconds", fontsize=BODY, color=SOFT)
        top += tall + 0.2


def _strip_notes(axes: Axes, strip: StripView, tall: float) -> None:
    axes.set_yticks([len(strip.lanes) / 2], [strip.replicas.replace(" replicas", "\nreplicas")], fontsize=SMALL)
    step = 13.0 / 72 / tall
    top = 0.5 + step * len(strip.notes) / 2
    _beside(axes, top, 9, strip.name, color=COLOURS[strip.kind], fontweight="bold")
    for i, note in enumerate(strip.notes, 1):
        _beside(axes, top - step * i, 9, note, fontsize=SMALL, color=INK if i == 1 else SOFT)
