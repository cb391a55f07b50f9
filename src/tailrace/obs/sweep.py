"""The data of the charts of `tailrace simulate`: throughput by schedule and GPUs, and what the replicas did.

The page's script and `png.py` draw the same `SweepCharts`, so they agree. Spans too short to be seen are merged here,
which bounds the number of marks whatever the length of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

import msgspec

from tailrace.obs.activity import StateSpan
from tailrace.obs.charts import REPLICAS, LaneView, encode_lane, merge, ticks
from tailrace.obs.tables import result_cells
from tailrace.wording import counted

Result = Mapping[str, Any]
ReplicaSpans = Sequence[tuple[int, str, float, float]]

MARKS = 6000  # per strip
GRAINS = 1000  # a strip is about this many pixels wide
STEPS = 3  # of the slowest schedule
SCHEDULES = ("sync", "one_step", "stream", "partial", "trajectory", "adaptive")


class SeriesView(msgspec.Struct, frozen=True):
    """Throughput of one schedule, by number of GPUs."""

    name: str
    kind: str  # class of its colour
    points: list[tuple[int, float]]
    label: str  # the value at the line's end
    label_at: float = 0.0  # where the label stands, as a share of the height


class StripView(msgspec.Struct, frozen=True):
    """What some replicas of one schedule did in the window."""

    name: str
    kind: str
    lanes: list[LaneView]
    replicas: str  # how many there were, and are shown
    begins: float  # of the window, in the run's time
    notes: list[str]


class SweepCharts(msgspec.Struct, frozen=True):
    title: str
    heading: str
    series: list[SeriesView]
    gpus: list[int]
    ideal: list[tuple[int, float]]  # the ends of the dashed line; empty: none
    ideal_at: float
    log: bool
    low: float
    high: float
    ticks: list[float]
    strips: list[StripView]
    seconds: float  # of the window
    caption: str  # over the strips
    columns: list[str]  # of the results
    rows: list[list[str]]


def sweep_charts(rows: Sequence[Result], timelines: Mapping[str, ReplicaSpans], title: str) -> SweepCharts:
    series = _series(rows)
    gpus = sorted({count for line in series for count, _ in line.points})
    ideal = _ideal(series, gpus)
    log = len(gpus) > 1 and gpus[0] > 0 and gpus[-1] >= 4 * gpus[0] and _all_positive(series)
    low, high = _limits([rate for line in series for _, rate in line.points] + [rate for _, rate in ideal], log)
    *labels, ideal_at = _label_places(series, ideal, low, high, log)
    spans_of = {name: sorted(spans, key=lambda span: (span[0], span[2])) for name, spans in timelines.items() if spans}
    results = {name: _result_of(rows, name, spans) for name, spans in spans_of.items()}
    seconds = _window(spans_of, results)
    columns, cells = result_cells(rows)
    return SweepCharts(
        title=title,
        heading=f"Training throughput{f' on {gpus[0]:,} GPUs' if len(gpus) == 1 else ''}, tokens per second",
        series=[msgspec.structs.replace(line, label_at=at) for line, at in zip(series, labels, strict=True)],
        gpus=gpus,
        ideal=ideal,
        ideal_at=ideal_at,
        log=log,
        low=low,
        high=high,
        ticks=log_ticks(low, high) if log else ticks(low, high, 5),
        strips=[_strip(name, spans, results[name], seconds) for name, spans in spans_of.items()],
        seconds=seconds,
        caption=_caption(spans_of, results, seconds),
        columns=columns,
        rows=cells,
    )


# ------------------------------------------------------------------------------------------------------------- series


def _series(rows: Sequence[Result]) -> list[SeriesView]:
    """Lines in the order in which schedules first occur; repeated runs of one point are averaged."""
    both = {bool(row.get("repack")) for row in rows if row["schedule"] == "trajectory"} == {True, False}
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[_name(row, both)][int(row["gpus"])].append(float(row["tokens_per_s"]))
    lines = {name: {gpus: sum(v) / len(v) for gpus, v in sorted(at.items())} for name, at in values.items()}
    sync = lines.get("sync", {})
    return [SeriesView(name, _kind(name), list(at.items()), _label(name, at, sync)) for name, at in lines.items()]


def _name(row: Result, name_repack: bool) -> str:
    bare = name_repack and row["schedule"] == "trajectory" and not row.get("repack")
    return f"{row['schedule']}, no repack" if bare else str(row["schedule"])


def _kind(name: str) -> str:
    if name == "trajectory, no repack":
        return "no_repack"
    return name if name in SCHEDULES else "other"


def _label(name: str, at: Mapping[int, float], sync: Mapping[int, float]) -> str:
    last = max(at)
    ratio = f" ({at[last] / sync[last]:.1f}× sync)" if name != "sync" and sync.get(last, 0.0) > 0 else ""
    return f"{at[last]:,.0f}{ratio}"


def _ideal(series: Sequence[SeriesView], gpus: Sequence[int]) -> list[tuple[int, float]]:
    """Throughput in proportion to GPUs, through the best point on the fewest: no line begins above it."""
    first = [line.points[0][1] for line in series if line.points[0][0] == gpus[0]]
    if len(gpus) < 2 or gpus[0] <= 0 or max(first) <= 0:
        return []
    return [(gpus[0], max(first)), (gpus[-1], max(first) * gpus[-1] / gpus[0])]


def _all_positive(series: Sequence[SeriesView]) -> bool:
    return all(rate > 0 for line in series for _, rate in line.points)


def _limits(rates: Sequence[float], log: bool) -> tuple[float, float]:
    return (min(rates) / 1.15, max(rates) * 1.12) if log else (0.0, (max(rates) * 1.08) or 1.0)


def _label_places(
    series: Sequence[SeriesView], ideal: Sequence[tuple[int, float]], low: float, high: float, log: bool
) -> list[float]:
    """Where the labels of the lines, and then of the ideal, stand beside the chart."""

    def share(value: float) -> float:
        return log10(value / low) / log10(high / low) if log else (value - low) / (high - low)

    ends = [line.points[-1][1] for line in series] + [rate for _, rate in ideal[1:]]
    return [*spread([share(end) for end in ends], 0.072, 0.02, 0.98), 0.0][: len(series) + 1]


# ------------------------------------------------------------------------------------------------------------- strips


def _result_of(rows: Sequence[Result], name: str, spans: ReplicaSpans) -> Result | None:
    """The result of the run a timeline belongs to: the one that ended when the timeline does."""
    end = max(span[3] for span in spans)
    same = [row for row in rows if abs(float(row.get("virtual_s", -1.0)) - end) <= 1e-6 * max(1.0, end)]
    return next((row for row in same if name.startswith(str(row["schedule"]))), None)


def _window(spans_of: Mapping[str, ReplicaSpans], results: Mapping[str, Result | None]) -> float:
    """Seconds shown of every run: the same for all, three of the slowest's steps, and no start-up if possible."""
    if not spans_of:
        return 0.0
    lengths = [max(span[3] for span in spans) for spans in spans_of.values()]
    steps = [float(row["step_s"]) for row in results.values() if row is not None and row.get("step_s")]
    if not steps or max(lengths) <= STEPS * max(steps):
        return max(lengths)
    return min(STEPS * max(steps), max(1.5 * max(steps), min(lengths) * 2 / 3))


def _strip(name: str, spans: ReplicaSpans, row: Result | None, seconds: float) -> StripView:
    begins = max(0.0, max(span[3] for span in spans) - seconds)
    replicas = sorted({span[0] for span in spans})
    lanes: dict[int, list[StateSpan]] = {replica: [] for replica in _evenly(replicas, REPLICAS)}
    for replica, state, start, end in spans:
        if replica in lanes and end > begins and end > start:
            lanes[replica].append(StateSpan(state, max(0.0, start - begins), end - begins))
    views = [encode_lane(f"r{replica}", marks, seconds, digits=3) for replica, marks in _fitted(lanes, seconds)]
    return StripView(name, _kind(name), views, _count(len(views), len(replicas)), begins, _notes(row))


def _count(shown: int, there: int) -> str:
    return f"{shown:,} of {there:,} replicas" if shown < there else counted(there, "replica")


def _evenly(items: Sequence[int], most: int) -> list[int]:
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def _fitted(lanes: Mapping[int, Sequence[StateSpan]], seconds: float) -> list[tuple[int, list[StateSpan]]]:
    """Merge at pixel size, and coarser where that still leaves too many marks."""
    grain = seconds / GRAINS
    while True:
        merged = [(replica, merge(marks, grain)) for replica, marks in lanes.items()]
        if sum(len(marks) for _, marks in merged) <= MARKS or grain > seconds:
            return merged
        grain *= 2


def _notes(row: Result | None) -> list[str]:
    if row is None:
        return []
    notes = [f"{row['tokens_per_s']:,.0f} tokens/s"]
    if "rollout_idle" in row and "trainer_idle" in row:
        notes.append(f"idle: rollout {row['rollout_idle']:.0%}, trainer {row['trainer_idle']:.0%}")
    age = row.get("staleness")
    if isinstance(age, Mapping):
        notes.append(f"staleness: mean {age['mean']:.1f}, max {age['max']:,}")
    return notes


def _caption(spans_of: Mapping[str, ReplicaSpans], results: Mapping[str, Result | None], seconds: float) -> str:
    gpus = {int(row["gpus"]) for row in results.values() if row is not None}
    whole = all(max(span[3] for span in spans) <= seconds for spans in spans_of.values())
    where = f" on {gpus.pop():,} GPUs" if len(gpus) == 1 and None not in results.values() else ""
    return f"Timeline of the replicas{where}, {'whole run' if whole else f'last {seconds:,.0f} s of each run'}"


# ------------------------------------------------------------------------------------------------------------- scales


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in [low, high], about evenly spread over a logarithmic scale."""
    tens = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    if len(tens) > 5:
        return [ten for ten in tens if low <= ten <= high]
    for digits in ((1, 2, 5), (1, 2, 3, 5, 7)):
        found = [ten * digit for ten in tens for digit in digits if low <= ten * digit <= high]
        if len(found) >= 4:
            return found
    return ticks(low, high, 4)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart to `gap`, inside [low, high]: those that touch stand around their common middle."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    stacks: list[tuple[list[int], float]] = []  # members from below, and the lowest one's position
    for i in order:
        members, base = [i], min(max(positions[i], low), high)
        while stacks and stacks[-1][1] + gap * len(stacks[-1][0]) > base:
            members = stacks.pop()[0] + members
            middle = sum(positions[j] for j in members) / len(members)
            reach = gap * (len(members) - 1)
            base = max(low, min(middle - reach / 2, high - reach))
        stacks.append((members, base))
    spread_to = {i: base + gap * nth for members, base in stacks for nth, i in enumerate(members)}
    return [spread_to[i] for i in range(len(positions))]
