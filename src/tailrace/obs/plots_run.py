"""The picture of a run, by matplotlib: reward, throughput and staleness over time, above what everybody did meanwhile.

All panels share one time axis, so that a dip in the throughput stands above its cause. `summary` calls `save`; import
this module only when a picture is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tailrace.obs.activity import BRIEF, Span, coarse
from tailrace.obs.plots_picture import REPLICAS, STATE_COLOURS, ticks
from tailrace.types import RIGHT_ABOVE

if TYPE_CHECKING:
    from tailrace.obs.account import StepRecord
    from tailrace.obs.summary import History, Summary

DPI = 180
WIDTH, LEFT, RIGHT, EDGE = 10.0, 0.95, 1.75, 0.3  # inches
INK, SOFT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
TITLE, HEADING, BODY, SMALL = 13.0, 10.0, 9.0, 8.0  # points
REWARD, RATE, AGE = "#d55e00", "#00866a", "#7a5195"
PANEL, GAP, LANE, TRAINER_LANE = 1.25, 0.52, 0.2, 0.24
COLOURS = {state: pair[0] for state, pair in STATE_COLOURS.items()} | {"starting": "#f7f5f1", "training": "#6fa287"}
LEGEND = ("generating", "scoring", "pulling", "training", "idle", "lost", "starting")
WORDS = {"pulling": "pulling weights", "idle": "idle", "starting": "starting"}
HAIRS = 1200  # the width of a lane in hairs
SMOOTH = 8  # steps


def save(history: History, summary: Summary, path: Path) -> None:
    lanes = list(history.replicas.items())[:REPLICAS]
    strip = TRAINER_LANE + 0.08 + max(0.3, min(3.2, LANE * len(lanes)))
    top, panels = 1.28, 3
    height = top + panels * (PANEL + GAP) + 0.5 + strip + 0.55
    page = _Page(height, history.seconds)
    page.text(EDGE, 0.4, history.name, fontsize=TITLE, fontweight="bold")
    page.text(EDGE, 0.68, _subtitle(history, summary), fontsize=BODY, color=SOFT)
    for panel in (_reward, _rate, _staleness):
        panel(page, top, history.steps, history, summary)
        top += PANEL + GAP
    _timeline(page, top, strip, lanes, history, summary)
    FigureCanvasAgg(page.figure).print_figure(str(path), dpi=DPI, facecolor="white", format="png")


class _Page:
    """A figure addressed in inches from the top left; every axes spans the whole time."""

    def __init__(self, height: float, seconds: float) -> None:
        self.height = height
        self.seconds = max(seconds, 1e-6)
        self.figure = Figure(figsize=(WIDTH, height))

    def axes(self, top: float, tall: float) -> Axes:
        bottom = 1 - (top + tall) / self.height
        box = (LEFT / WIDTH, bottom, (WIDTH - LEFT - RIGHT) / WIDTH, tall / self.height)
        axes = self.figure.add_axes(box)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0, labelsize=BODY, colors=SOFT, which="both")
        axes.set_xlim(0, self.seconds)
        axes.set_xticks([])
        return axes

    def panel(self, top: float, heading: str, high: float, low: float = 0.0, whole: bool = False) -> Axes:
        self.text(LEFT, top - 0.11, heading, fontsize=HEADING)
        axes = self.axes(top, PANEL)
        axes.set_ylim(low, high)
        marks = [mark for mark in ticks(low, high, 4) if mark == int(mark) or not whole]
        axes.set_yticks(marks, [f"{mark:,.10g}" for mark in marks])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        return axes

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        style = {"color": INK, "va": "baseline", "parse_math": False} | style
        self.figure.text(x / WIDTH, 1 - y / self.height, words, **style)

    def beside(self, top: float, words: Iterable[tuple[str, str]]) -> None:
        """Lines to the right of a panel: the figure that people look for, then what it is."""
        for place, (text, colour) in enumerate(words):
            style = {"fontsize": HEADING + 3, "fontweight": "bold"} if place == 0 else {"fontsize": SMALL}
            self.text(
                WIDTH - RIGHT + 0.16, top + (0.2 if place == 0 else 0.22 + 0.17 * place), text, color=colour, **style
            )


def _subtitle(history: History, summary: Summary) -> str:
    before, after = summary.accuracy.before, summary.accuracy.after
    words = [f"schedule {history.schedule}", f"{summary.steps:,} steps in {_duration(summary.wall_s)}"]
    if before is not None and after is not None:
        words.append(f"held-out accuracy (rewards above {RIGHT_ABOVE:g}) {before:.2f} → {after:.2f}")
    words.append(f"{summary.trained_samples:,} samples trained")
    words.append(f"{summary.moved:,} moved in {summary.repacks:,} repacks")
    return "   ·   ".join(words)


# ---------------------------------------------------------------------------------------------------------- the panels


def _reward(page: _Page, top: float, steps: Sequence[StepRecord], history: History, summary: Summary) -> None:
    points = [(step.ended, step.reward) for step in steps if step.reward is not None]
    values = [value for _, value in points]
    low, high = _range(values)
    axes = page.panel(top, "Mean reward of the samples of each step", high, low)
    if not points:
        _nothing(axes, "no step has been trained on rewards")
        return
    smooth = _smoothed(values)
    times = [at for at, _ in points]
    axes.plot(times, values, "o", color=REWARD, alpha=0.3, markersize=3.2, markeredgewidth=0)
    axes.plot(times, smooth, color=REWARD, linewidth=2.2)
    axes.plot(times[-1:], smooth[-1:], "o", color=REWARD, markersize=6, markeredgecolor="white", clip_on=False)
    last = min(SMOOTH // 2 + 1, len(values))
    page.beside(top, [(f"{smooth[-1]:.2f}", REWARD), (f"mean of the last {last} steps", SOFT)])


def _rate(page: _Page, top: float, steps: Sequence[StepRecord], history: History, summary: Summary) -> None:
    edges = [history.began, *[step.ended for step in steps]]
    lengths = [max(end - start, 1e-6) for start, end in pairwise(edges)]
    rates = [step.tokens / length for step, length in zip(steps, lengths, strict=True)]
    axes = page.panel(top, "Throughput: trained tokens per second", 1.15 * max(rates, default=1.0))
    if not rates:
        _nothing(axes, "no step has been trained")
        return
    axes.stairs(rates, edges, color=RATE, fill=True, alpha=0.16, linewidth=0)
    axes.plot([step.ended for step in steps], _smoothed_rate(steps, lengths), color=RATE, linewidth=2.2)
    page.beside(top, [(f"{summary.tokens_per_s:,.0f}", RATE), ("from the first sample on", SOFT)])


def _staleness(page: _Page, top: float, steps: Sequence[StepRecord], history: History, summary: Summary) -> None:
    most = max([step.staleness.max for step in steps], default=1)
    heading = "Staleness: versions between a sample's oldest token and its step"
    axes = page.panel(top, heading, 1.15 * max(1, most), whole=True)
    if not steps:
        _nothing(axes, "no step has been trained")
        return
    edges = [history.began, *[step.ended for step in steps]]
    axes.stairs([step.staleness.max for step in steps], edges, color=AGE, fill=True, alpha=0.13, linewidth=0)
    axes.plot([step.ended for step in steps], [step.staleness.mean for step in steps], color=AGE, linewidth=1.8)
    ages = summary.staleness
    words = [(f"{ages.mean:.2f}", AGE), (f"mean; p95 {ages.p95:.0f}, max {ages.max}", SOFT)]
    page.beside(top, [*words, ("shaded: maximum", SOFT), (f"allowed: {history.max_staleness}", SOFT)])


def _nothing(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=SOFT, fontsize=BODY)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From 0 to 1 where all rewards lie there, else a little more than they need."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.04
    spare = 0.08 * (max(values) - min(values) or abs(max(values)) or 1.0)
    return min(0.0, min(values) - spare), max(values) + spare


def _smoothed(values: Sequence[float]) -> list[float]:
    windows = [values[first:end] for first, end in _around(len(values))]
    return [sum(window) / len(window) for window in windows]


def _smoothed_rate(steps: Sequence[StepRecord], lengths: Sequence[float]) -> list[float]:
    """Tokens over seconds of a few steps, so that a short step weighs little."""
    places = _around(len(steps))
    return [sum(step.tokens for step in steps[first:end]) / sum(lengths[first:end]) for first, end in places]


def _around(count: int) -> list[tuple[int, int]]:
    """The steps on either side of each."""
    return [(max(0, place - SMOOTH // 2), place + SMOOTH // 2 + 1) for place in range(count)]


# --------------------------------------------------------------------------------------------------------- the timeline


def _timeline(
    page: _Page, top: float, tall: float, lanes: list[tuple[int, list[Span]]], history: History, summary: Summary
) -> None:
    states = {span.state for _, spans in [(0, history.trainer), *lanes] for span in spans}
    page.text(LEFT, top - 0.11, "What everybody did", fontsize=HEADING)
    _legend(page, top + 0.16, [state for state in LEGEND if state in states])
    top += 0.34
    below = max(1, len(lanes))
    room = tall - TRAINER_LANE - 0.08
    trainer = page.axes(top, TRAINER_LANE)
    _fill(trainer, [history.trainer], page.seconds)
    trainer.spines["bottom"].set_visible(False)
    trainer.set_yticks([0.5], ["trainer"])
    axes = page.axes(top + TRAINER_LANE + 0.08, room)
    _fill(axes, [spans for _, spans in lanes], page.seconds)
    axes.spines["bottom"].set_visible(False)
    _name_lanes(axes, [id for id, _ in lanes], len(history.replicas), room / below)
    marks = _time_marks(page.seconds)
    axes.set_xticks(marks, [_duration(mark) for mark in marks])
    idle = f"{100 * summary.trainer_idle:.0f} % idle"
    page.text(WIDTH - RIGHT + 0.16, top + 0.16, idle, fontsize=BODY, color=INK)
    page.text(WIDTH - RIGHT + 0.16, top + 0.48, f"{100 * summary.rollout_idle:.0f} % idle", fontsize=BODY, color=INK)


def _name_lanes(axes: Axes, ids: list[int], there: int, tall: float) -> None:
    if tall >= 0.15:
        axes.set_yticks([place + 0.5 for place in range(len(ids))], [f"r{id}" for id in ids])
    else:
        shown = f"{len(ids)} of {there}" if len(ids) < there else f"{there}"
        axes.set_yticks([len(ids) / 2], [f"{shown}\nreplicas"])


def _legend(page: _Page, y: float, states: Iterable[str]) -> None:
    x = LEFT
    for state in states:
        box, size = (x / WIDTH, 1 - y / page.height), (0.17 / WIDTH, 0.12 / page.height)
        edge = GRID if state == "starting" else "none"
        page.figure.add_artist(Rectangle(box, *size, facecolor=COLOURS[state], edgecolor=edge, linewidth=0.6))
        words = WORDS.get(state, state)
        page.text(x + 0.23, y - 0.005, words, fontsize=SMALL, color=SOFT)
        x += 0.48 + 0.066 * len(words)


def _fill(axes: Axes, lanes: Sequence[Sequence[Span]], seconds: float) -> None:
    """A lane per part. What is shorter than a hair is drawn only where it is brief by nature."""
    hair = seconds / HAIRS
    gap = 0.07 if len(lanes) <= 16 else 0.0
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for lane, spans in enumerate(lanes):
        low, high = lane + gap, lane + 1 - gap
        for span in coarse(spans, hair):
            end = max(span.end, span.start + hair) if span.state in BRIEF else span.end
            corners = [(span.start, low), (end, low), (end, high), (span.start, high)]
            boxes.setdefault(span.state, []).append(corners)
    for state in sorted(boxes, key=lambda state: state in BRIEF):
        colour = COLOURS.get(state, "#9a9a9a")
        axes.add_collection(PolyCollection(boxes[state], facecolors=colour, linewidths=0, antialiased=False))
    axes.set_ylim(max(1, len(lanes)), 0)


def _time_marks(seconds: float) -> list[float]:
    """Round moments, at most nine of them."""
    rounds = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)
    step = next((each for each in rounds if seconds / each <= 9), 86400.0 * max(1, seconds // 777600))
    return [step * place for place in range(int(seconds / step) + 1)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
