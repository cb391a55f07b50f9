"""The data of a run's charts, whose size is bounded however long and wide the run is.

`Curve` takes the steps in as they end; `run_charts` puts curves, ranges and timeline together. The page's script and
`png.py` draw what is here and compute nothing themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil, floor, log10

import msgspec

from tailrace.obs.activity import BRIEF, Lane, StateSpan
from tailrace.obs.bounded_series import BoundedSeries
from tailrace.obs.live import LiveRun
from tailrace.obs.trained_steps import StepRecord
from tailrace.types import label

POINTS = 300  # of a curve
SPANS = 240  # of a lane
REPLICAS = 48  # that are shown
MEAN_OF = 9  # points: a centred moving average
STALENESS_TITLE = "Staleness in versions: mean, max shaded"
STATES = {
    "generating": "g",
    "scoring": "c",
    "environment": "e",
    "pulling": "p",
    "repacked": "r",
    "training": "t",
    "idle": "i",
    "lost": "l",
    "starting": "s",
}


class ChartView(msgspec.Struct, frozen=True):
    """One chart over time; `dots`, `area` and `line` are columns of the points."""

    name: str
    title: str
    line: str
    low: float
    high: float
    ticks: list[float]
    dots: str = ""
    area: str = ""


class LaneView(msgspec.Struct, frozen=True):
    """What a process did: a letter per span (see `STATES`), and where each ends; the first begins at `start`."""

    name: str
    start: float
    states: str
    ends: list[float]


class RunCharts(msgspec.Struct, frozen=True):
    seconds: float
    first_sample_at: float
    columns: tuple[str, ...]
    points: list[list[float | None]]
    charts: list[ChartView]
    lanes: list[LaneView]  # the trainer's first
    replicas: int  # all, of which a limited number has a lane


# --------------------------------------------------------------------------------------------------------------- curves

COLUMNS = ("step", "ended", "reward", "rate", "staleness", "max_staleness", "mean_reward", "mean_rate")


class CurvePoint(msgspec.Struct):
    """Some neighbouring steps as one."""

    step: int  # the last of them, counted from 1
    started: float
    ended: float
    tokens: int
    samples: int
    rewards: float  # mean times samples
    rewarded: int
    ages: float  # mean times samples
    max_staleness: int

    def add(self, other: CurvePoint) -> None:
        self.step, self.ended = other.step, other.ended
        self.tokens += other.tokens
        self.samples += other.samples
        self.rewards += other.rewards
        self.rewarded += other.rewarded
        self.ages += other.ages
        self.max_staleness = max(self.max_staleness, other.max_staleness)

    @property
    def seconds(self) -> float:
        return max(self.ended - self.started, 1e-6)

    @property
    def reward(self) -> float | None:
        return self.rewards / self.rewarded if self.rewarded else None

    @property
    def staleness(self) -> float:
        return self.ages / max(1, self.samples)


class Curve:
    """All steps of a run in at most `POINTS` points."""

    def __init__(self) -> None:
        self._series = BoundedSeries[CurvePoint](POINTS)

    @property
    def points(self) -> list[CurvePoint]:
        return self._series.points

    def add(self, step: StepRecord, first_sample_at: float) -> None:
        self._series.add(_point(step, self.points[-1].ended if self.points else first_sample_at))

    def rows(self) -> list[list[float | None]]:
        """The values of `COLUMNS` for each point."""
        return [_row(point, self.points[_window(i)]) for i, point in enumerate(self.points)]


def _point(step: StepRecord, started: float) -> CurvePoint:
    rewarded = 0 if step.reward is None else step.samples
    rewards = (step.reward or 0.0) * rewarded
    ages = step.staleness.mean * step.samples
    sums = (step.tokens, step.samples, rewards, rewarded, ages)
    return CurvePoint(step.step + 1, started, step.ended, *sums, step.staleness.max)


def _window(i: int) -> slice:
    return slice(max(0, i - MEAN_OF // 2), i + MEAN_OF // 2 + 1)


def _row(point: CurvePoint, around: Sequence[CurvePoint]) -> list[float | None]:
    rewards = [each.reward for each in around if each.reward is not None]
    mean_reward = sum(rewards) / len(rewards) if rewards and point.reward is not None else None
    mean_rate = sum(each.tokens for each in around) / sum(each.seconds for each in around)
    rate = point.tokens / point.seconds
    own = (point.step, round(point.ended, 2), point.reward, rate, point.staleness, point.max_staleness)
    return [*own, mean_reward, mean_rate]


def _charts(points: Sequence[CurvePoint]) -> list[ChartView]:
    low, high = _reward_range([point.reward for point in points if point.reward is not None])
    rate = 1.12 * max([1.0, *[point.tokens / point.seconds for point in points]])
    oldest = 1.12 * max([1, *[point.max_staleness for point in points]])
    versions = [tick for tick in ticks(0.0, oldest, 4) if tick == int(tick)]
    return [
        ChartView("reward", "Mean reward per step", "mean_reward", low, high, ticks(low, high, 4), dots="reward"),
        ChartView("rate", "Trained tokens per second", "mean_rate", 0.0, rate, ticks(0.0, rate, 4), area="rate"),
        ChartView("staleness", STALENESS_TITLE, "staleness", 0.0, oldest, versions, area="max_staleness"),
    ]


def _reward_range(values: Sequence[float]) -> tuple[float, float]:
    """From 0 to 1 where all rewards lie there, else a little more than they need."""
    if not values or (min(values) >= 0 and max(values) <= 1):
        return 0.0, 1.04
    margin = 0.08 * (max(values) - min(values) or abs(max(values)) or 1.0)
    return min(0.0, min(values) - margin), max(values) + margin


# ------------------------------------------------------------------------------------------------------------- timeline


def run_charts(live: LiveRun, curve: Curve) -> RunCharts:
    lanes = sorted(live.activity.replicas.items())
    named = [("trainer", live.activity.trainer), *[(label("replica", id), lane) for id, lane in lanes[:REPLICAS]]]
    return RunCharts(
        seconds=live.seconds,
        first_sample_at=round(live.first_sample_at, 2),
        columns=COLUMNS,
        points=curve.rows(),
        charts=_charts(curve.points),
        lanes=[lane_view(name, lane, live.seconds) for name, lane in named],
        replicas=len(lanes),
    )


def lane_view(name: str, lane: Lane, now: float) -> LaneView:
    _bound(lane, now)
    return encode_lane(name, lane.timeline(now), now)


def encode_lane(name: str, spans: Sequence[StateSpan], now: float, digits: int = 2) -> LaneView:
    """Gaps, and states that are not known, are left blank."""
    start = round(spans[0].start if spans else now, digits)
    letters, ends = "", [start]
    for span in spans:
        if round(span.start, digits) > ends[-1]:
            letters += " "
            ends.append(round(span.start, digits))
        letters += STATES.get(span.state, " ")
        ends.append(round(span.end, digits))
    return LaneView(name, start, letters, ends[1:])


def decode_lane(lane: LaneView) -> list[StateSpan]:
    states = {letter: state for state, letter in STATES.items()}
    starts = [lane.start, *lane.ends]
    return [
        StateSpan(states[letter], start, end)
        for letter, start, end in zip(lane.states, starts, lane.ends, strict=False)
        if letter in states
    ]


def _bound(lane: Lane, now: float) -> None:
    """What is too short to be seen is forgotten, so that memory does not grow with the run."""
    spans = lane.spans
    if spans is not None and len(spans) > SPANS:
        grain = 2 * now / SPANS
        spans[:] = merge(spans, grain, keep=BRIEF)
        if len(spans) > SPANS:
            spans[:] = merge(spans, grain)


def merge(spans: Iterable[StateSpan], grain: float, keep: Sequence[str] = ()) -> list[StateSpan]:
    """Join neighbours of one state, and runs of spans shorter than `grain` into one of the state that prevails.
    States in `keep` stay however short they are."""
    merged: list[StateSpan] = []
    short: list[StateSpan] = []
    for span in spans:
        if span.end - span.start >= grain or span.state in keep:
            _join(merged, short)
            _join(merged, [span])
            short = []
            continue
        short.append(span)
        if span.end - short[0].start >= grain:
            _join(merged, short)
            short = []
    _join(merged, short)
    return merged


def _join(merged: list[StateSpan], spans: Sequence[StateSpan]) -> None:
    if not spans:
        return
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.state] += span.end - span.start
    state = max(seconds, key=lambda name: seconds[name])
    start = spans[0].start
    if merged and merged[-1].state == state and start - merged[-1].end <= 1e-9:
        start = merged.pop().start
    merged.append(StateSpan(state, start, spans[-1].end))


# --------------------------------------------------------------------------------------------------------------- scales


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in [low, high], some `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [float(f"{i * step:.12g}") for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
