"""A `Picture` as a bitmap, by matplotlib. Import this module only when a bitmap is wanted."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tailrace.obs.plots_picture import (
    CALM,
    GRAINS,
    Picture,
    Series,
    Strip,
    limits,
    log_ticks,
    spread,
    state_colours,
    state_words,
    ticks,
)

DPI = 180
WIDTH, EDGE = 10.0, 0.3  # inches: the page and its left edge
INK, SOFT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
TITLE, HEADING, BODY, SMALL = 13.0, 10.0, 9.0, 8.0  # points


def save(picture: Picture, path: Path) -> None:
    bars = len(picture.gpus) == 1
    upper = 0.32 * len(picture.series) + 0.1 if bars else 3.0
    heights = [_strip_height(strip) for strip in picture.strips]
    below = 0.8 + sum(heights) + 0.2 * len(heights) + 0.45 if heights else 0.0
    under = 0.2 if bars else 0.5
    height = 0.95 + upper + under + below
    names = max(len(line.name) for line in picture.series)
    left = max(0.95, EDGE + 0.1 + 0.085 * names * bars)
    page = _Page(height, left, right=max(2.85, (_column(picture.series) + 130) / 72))
    page.text(
        EDGE, 0.36, picture.title, fontsize=min(TITLE, TITLE * 88 / max(1, len(picture.title))), fontweight="bold"
    )
    page.text(EDGE, 0.72, _upper_heading(picture), fontsize=HEADING)
    top = 0.95
    axes = page.axes(top, upper)
    (_bars if bars else _lines)(axes, picture)
    top += upper + under
    if heights:
        _legend(page, picture, top + 0.3)
        top += 0.8
        for i, (strip, tall) in enumerate(zip(picture.strips, heights, strict=True)):
            _strip(page.axes(top, tall), strip, picture, tall, last=i == len(heights) - 1)
            top += tall + 0.2
    FigureCanvasAgg(page.figure).print_figure(str(path), dpi=DPI, facecolor="white", format="png")


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
        axes.spines["bottom"].set_color(SOFT)
        axes.tick_params(length=0, labelsize=BODY, colors=SOFT, which="both")
        return axes

    def text(self, x: float, y: float, words: str, **style: Any) -> Any:
        style = {"color": INK, "va": "baseline", "parse_math": False} | style
        return self.figure.text(x / WIDTH, 1 - y / self.height, words, **style)


def _upper_heading(picture: Picture) -> str:
    if len(picture.gpus) == 1:
        return f"Training throughput on {picture.gpus[0]:,} GPUs, tokens per second"
    return "Training throughput, tokens per second"


def _beside(axes: Axes, at: float, points: float, words: str, **style: Any) -> None:
    """Text to the right of the axes, at a height given as a share, `points` away."""
    style = {"fontsize": BODY, "va": "center", "annotation_clip": False, "parse_math": False} | style
    axes.annotate(words, (1.0, at), xycoords="axes fraction", xytext=(points, 0), textcoords="offset points", **style)


def _lines(axes: Axes, picture: Picture) -> None:
    low, high = limits(picture)
    first, last = picture.gpus[0], picture.gpus[-1]
    if picture.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(first / (last / first) ** 0.03, last * (last / first) ** 0.015)
    else:
        axes.set_xlim(first - 0.03 * (last - first), last + 0.015 * (last - first))
    axes.set_ylim(low, high)
    heights = log_ticks(low, high) if picture.logarithmic else ticks(low, high, 5)
    axes.minorticks_off()
    axes.set_yticks(heights, [f"{value:,.0f}" for value in heights])
    axes.set_xticks(picture.gpus, [f"{count:,}" for count in picture.gpus])
    axes.set_xlabel("GPUs", fontsize=BODY, color=SOFT)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if picture.ideal:
        axes.plot(*zip(*picture.ideal, strict=True), color="#b5b5b5", linewidth=1.1, dashes=(4, 3), zorder=1.5)
    for line in picture.series:
        hero = line.name == "trajectory"
        style: dict[str, Any] = {"linewidth": 2.6 if hero else 1.7, "markersize": 6.5 if hero else 5.0}
        style |= {"marker": "o", "markeredgecolor": "white", "markeredgewidth": 0.9, "zorder": 3 if hero else 2}
        axes.plot(*zip(*line.points, strict=True), color=line.colours[0], clip_on=False, **style)
    _line_labels(axes, picture, low, high)


def _line_labels(axes: Axes, picture: Picture, low: float, high: float) -> None:
    def share(value: float) -> float:
        if picture.logarithmic:
            return log10(value / low) / log10(high / low)
        return (value - low) / (high - low)

    ends = [share(line.points[-1][1]) for line in picture.series] + [share(rate) for _, rate in picture.ideal[1:]]
    places = spread(ends, 0.072, 0.02, 0.98)
    column = _column(picture.series)
    for line, at in zip(picture.series, places, strict=False):
        _beside(axes, at, 9, line.name, color=line.colours[0], fontweight="bold")
        _beside(axes, at, column, line.label, color=INK)
    if picture.ideal:
        _beside(axes, places[-1], 9, "ideal scaling", color="#9a9a9a")


def _column(series: list[Series]) -> float:
    """Where values begin, in points: after the longest name."""
    return 16 + 6.1 * max(len(line.name) for line in series)


def _bars(axes: Axes, picture: Picture) -> None:
    values = [line.points[-1][1] for line in picture.series]
    top = max(values) or 1.0
    axes.set_xlim(0, top * 1.02)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.barh(range(len(values)), values, height=0.66, color=[line.colours[0] for line in picture.series])
    axes.set_yticks(range(len(values)), [line.name for line in picture.series])
    for label, line in zip(axes.get_yticklabels(), picture.series, strict=True):
        label.set(color=line.colours[0], fontweight="bold", parse_math=False)
    for i, line in enumerate(picture.series):
        style: dict[str, Any] = {"fontsize": BODY, "va": "center", "color": INK, "annotation_clip": False}
        axes.annotate(line.label, (values[i], i), xytext=(6, 0), textcoords="offset points", **style)


def _strip_height(strip: Strip) -> float:
    return min(1.1, max(0.78, 0.024 * len(strip.lanes)))


def _legend(page: _Page, picture: Picture, y: float) -> None:
    page.text(EDGE, y, picture.caption, fontsize=HEADING)
    x = page.left
    for state in picture.states:
        box = (x / WIDTH, 1 - (y + 0.32) / page.height)
        size = (0.17 / WIDTH, 0.12 / page.height)
        page.figure.add_artist(Rectangle(box, *size, facecolor=state_colours(state)[0], edgecolor="none"))
        page.text(x + 0.23, y + 0.31, state_words(state), fontsize=SMALL, color=SOFT)
        x += 0.45 + 0.066 * len(state_words(state))


def _strip(axes: Axes, strip: Strip, picture: Picture, tall: float, last: bool) -> None:
    gap = 0.14 if tall * DPI / len(strip.lanes) > 6 else 0.0
    hair = picture.seconds / GRAINS  # what is shorter, a pull perhaps, is drawn as wide as this
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for lane, (_, marks) in enumerate(strip.lanes):
        top, bottom = lane + gap / 2, lane + 1 - gap / 2
        for state, start, exact in marks:
            end = max(exact, start + hair)
            boxes.setdefault(state, []).append([(start, top), (end, top), (end, bottom), (start, bottom)])
    for state in sorted(boxes, key=lambda state: state not in CALM):
        face = state_colours(state)[0]
        axes.add_collection(PolyCollection(boxes[state], facecolors=face, linewidths=0, antialiased=False))
    axes.set_xlim(0, picture.seconds)
    axes.set_ylim(len(strip.lanes), 0)
    axes.set_yticks([len(strip.lanes) / 2], [strip.axis], fontsize=SMALL)
    axes.spines["bottom"].set_visible(False)
    marks_at = ticks(0, picture.seconds, 8)
    axes.set_xticks(marks_at if last else [], [f"{at:,.10g}" for at in marks_at] if last else [])
    if last:
        axes.set_xlabel("seconds", fontsize=BODY, color=SOFT)
    step = 13.0 / 72 / tall
    top = 0.5 + step * len(strip.notes) / 2
    _beside(axes, top, 9, strip.name, color=strip.colours[0], fontweight="bold")
    for i, note in enumerate(strip.notes, 1):
        _beside(axes, top - step * i, 9, note, fontsize=SMALL, color=INK if i == 1 else SOFT)
