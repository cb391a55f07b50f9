"""What a plot shows, before anybody draws it: lines, strips, the window of time, colours, ticks.

Both drawings are made from the same `Picture`, so they agree. Spans too short to be seen are merged here, which
bounds the number of marks whatever the length of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Spans = Sequence[tuple[int, str, float, float]]

REPLICAS = 48  # per strip
MARKS = 6000  # per strip
GRAINS = 1000  # a strip is about this many pixels wide
STEPS = 3  # of the slowest schedule

# Schedules are warm and states are cold, so that no colour means two things. Both sets stay apart for colour-blind
# readers, and states also differ in lightness. Each pair is for a light and for a dark page.
SCHEDULE_COLOURS = {
    "sync": ("#6f6f6f", "#a6a6a6"),
    "one_step": ("#b08900", "#d9b43a"),
    "stream": ("#00866a", "#35b894"),
    "partial": ("#a6498b", "#d583bd"),
    "trajectory": ("#d55e00", "#f58a3c"),
    "trajectory, no repack": ("#e8a475", "#b9774a"),
}
OTHER_COLOURS = (("#7a4a1e", "#c79a6b"), ("#3d3d3d", "#d8d8d8"), ("#8c2d2d", "#e07a7a"), ("#5b6b1f", "#a9bd5b"))
STATE_COLOURS = {
    "generating": ("#7eaad0", "#4f86b8"),
    "scoring": ("#7f6fb3", "#a99bd8"),
    "pulling": ("#17365c", "#dcecfb"),
    "repacked": ("#f2c744", "#e3b93a"),
    "training": ("#a9c7a0", "#5f8a57"),
    "idle": ("#ebe8e1", "#2b2f36"),
    "lost": ("#c2297a", "#f0569f"),
}
CALM = ("idle", "scoring", "generating", "training")  # long states, drawn under the short ones
UNKNOWN_STATE = ("#9a9a9a", "#808080")
STATE_WORDS = {"training": "lent to the trainer", "pulling": "pulling weights", "repacked": "emptied by repack"}


class Series(NamedTuple):
    """Throughput of one schedule, by number of GPUs."""

    name: str
    colours: tuple[str, str]
    points: list[tuple[int, float]]
    ratio: float | None  # of the last point to the schedule `sync` there

    @property
    def label(self) -> str:
        """The value at the line's end."""
        value = f"{self.points[-1][1]:,.0f}"
        return value if self.ratio is None else f"{value} ({self.ratio:.1f}× sync)"


class Mark(NamedTuple):
    """One piece of a lane, in seconds since the strip's window began."""

    state: str
    start: float
    end: float


class Strip(NamedTuple):
    """What some replicas of one schedule did in the window."""

    name: str
    colours: tuple[str, str]
    lanes: list[tuple[int, list[Mark]]]  # by replica
    replicas: int  # that there were; more than the lanes if some were left out
    begins: float  # of the window, in the run's time
    notes: list[str]

    @property
    def axis(self) -> str:
        shown, there = len(self.lanes), self.replicas
        if shown < there:
            return f"{shown:,} of {there:,}\nreplicas"
        return f"{there:,} replica{'s' * (there != 1)}"


class Picture(NamedTuple):
    title: str
    series: list[Series]
    gpus: list[int]
    ideal: list[tuple[int, float]]  # the ends of the dashed line; empty: none
    logarithmic: bool
    strips: list[Strip]
    seconds: float  # of the window
    caption: str  # over the strips
    states: list[str]  # that occur, in the legend's order


def compose(rows: Sequence[Row], timelines: Mapping[str, Spans], title: str) -> Picture:
    series = _series(rows)
    gpus = sorted({count for line in series for count, _ in line.points})
    told = {name: sorted(spans, key=lambda span: (span[0], span[2])) for name, spans in timelines.items() if spans}
    of = {name: _row_of(rows, name, spans) for name, spans in told.items()}
    seconds = _window(told, of)
    strips = [_strip(name, spans, of[name], seconds) for name, spans in told.items()]
    seen = {mark.state for strip in strips for _, lane in strip.lanes for mark in lane}
    return Picture(
        title=title,
        series=series,
        gpus=gpus,
        ideal=_ideal(series, gpus),
        logarithmic=len(gpus) > 1 and gpus[0] > 0 and gpus[-1] >= 4 * gpus[0] and _positive(series),
        strips=strips,
        seconds=seconds,
        caption=_caption(told, of, seconds),
        states=[s for s in STATE_COLOURS if s in seen] + sorted(seen - STATE_COLOURS.keys()),
    )


def colours_of(name: str) -> tuple[str, str]:
    known = SCHEDULE_COLOURS.get(name)
    return known or OTHER_COLOURS[sum(name.encode()) % len(OTHER_COLOURS)]


def state_colours(state: str) -> tuple[str, str]:
    return STATE_COLOURS.get(state, UNKNOWN_STATE)


def state_words(state: str) -> str:
    return STATE_WORDS.get(state, state)


# ------------------------------------------------------------------------------------------------------------- lines


def _series(rows: Sequence[Row]) -> list[Series]:
    """Lines in the order in which schedules first occur; repeated runs of one point are averaged."""
    both = {bool(row.get("repack")) for row in rows if row["schedule"] == "trajectory"} == {True, False}
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[_name(row, both)][int(row["gpus"])].append(float(row["tokens_per_s"]))
    lines = {name: {gpus: sum(v) / len(v) for gpus, v in sorted(at.items())} for name, at in values.items()}
    sync = lines.get("sync", {})
    return [Series(name, colours_of(name), list(at.items()), _ratio(name, at, sync)) for name, at in lines.items()]


def _name(row: Row, tell_repack: bool) -> str:
    bare = tell_repack and row["schedule"] == "trajectory" and not row.get("repack")
    return f"{row['schedule']}, no repack" if bare else str(row["schedule"])


def _ratio(name: str, at: Mapping[int, float], sync: Mapping[int, float]) -> float | None:
    last = max(at)
    return at[last] / sync[last] if name != "sync" and sync.get(last, 0.0) > 0 else None


def _ideal(series: Sequence[Series], gpus: Sequence[int]) -> list[tuple[int, float]]:
    """Throughput in proportion to GPUs, through the best point on the fewest: no line begins above it."""
    begun = [line.points[0][1] for line in series if line.points[0][0] == gpus[0]]
    if len(gpus) < 2 or gpus[0] <= 0 or max(begun) <= 0:
        return []
    return [(gpus[0], max(begun)), (gpus[-1], max(begun) * gpus[-1] / gpus[0])]


def _positive(series: Sequence[Series]) -> bool:
    return all(rate > 0 for line in series for _, rate in line.points)


# ------------------------------------------------------------------------------------------------------------ strips


def _row_of(rows: Sequence[Row], name: str, spans: Spans) -> Row | None:
    """The result of the run a timeline belongs to: the one that ended when the timeline does."""
    end = max(span[3] for span in spans)
    same = [row for row in rows if abs(float(row.get("virtual_s", -1.0)) - end) <= 1e-6 * max(1.0, end)]
    return next((row for row in same if name.startswith(str(row["schedule"]))), None)


def _window(told: Mapping[str, Spans], of: Mapping[str, Row | None]) -> float:
    """Seconds shown of every run: the same for all, three of the slowest's steps, and no start-up if possible."""
    if not told:
        return 0.0
    lengths = [max(span[3] for span in spans) for spans in told.values()]
    steps = [float(row["step_s"]) for row in of.values() if row is not None and row.get("step_s")]
    if not steps or max(lengths) <= STEPS * max(steps):
        return max(lengths)
    return min(STEPS * max(steps), max(1.5 * max(steps), min(lengths) * 2 / 3))


def _strip(name: str, spans: Spans, row: Row | None, seconds: float) -> Strip:
    begins = max(0.0, max(span[3] for span in spans) - seconds)
    replicas = sorted({span[0] for span in spans})
    lanes: dict[int, list[Mark]] = {replica: [] for replica in _evenly(replicas, REPLICAS)}
    for replica, state, start, end in spans:
        if replica in lanes and end > begins and end > start:
            lanes[replica].append(Mark(state, max(0.0, start - begins), end - begins))
    return Strip(name, colours_of(name), _fitted(lanes, seconds), len(replicas), begins, _notes(row))


def _evenly(items: Sequence[int], most: int) -> list[int]:
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def _fitted(lanes: Mapping[int, Sequence[Mark]], seconds: float) -> list[tuple[int, list[Mark]]]:
    """Merge at pixel size, and coarser where that still leaves too many marks."""
    grain = seconds / GRAINS
    while True:
        merged = [(replica, merge(marks, grain)) for replica, marks in lanes.items()]
        if sum(len(marks) for _, marks in merged) <= MARKS or grain > seconds:
            return merged
        grain *= 2


def merge(marks: Iterable[Mark], grain: float) -> list[Mark]:
    """Join neighbours of one state, and runs of marks shorter than `grain` into one of the state that prevails."""
    merged: list[Mark] = []
    short: list[Mark] = []
    for mark in marks:
        if mark.end - mark.start >= grain:
            _join(merged, short)
            short = []
            _join(merged, [mark])
            continue
        short.append(mark)
        if mark.end - short[0].start >= grain:
            _join(merged, short)
            short = []
    _join(merged, short)
    return merged


def _join(merged: list[Mark], marks: Sequence[Mark]) -> None:
    if not marks:
        return
    share: dict[str, float] = defaultdict(float)
    for mark in marks:
        share[mark.state] += mark.end - mark.start
    state = max(share, key=lambda name: share[name])
    start, end = marks[0].start, marks[-1].end
    if merged and merged[-1].state == state and start - merged[-1].end <= 1e-9:
        start = merged.pop().start
    merged.append(Mark(state, start, end))


def _notes(row: Row | None) -> list[str]:
    if row is None:
        return []
    notes = [f"{row['tokens_per_s']:,.0f} tokens/s"]
    if "rollout_idle" in row and "trainer_idle" in row:
        notes.append(f"idle: rollout {row['rollout_idle']:.0%}, trainer {row['trainer_idle']:.0%}")
    age = row.get("staleness")
    if isinstance(age, Mapping):
        notes.append(f"staleness: mean {age['mean']:.1f}, max {age['max']:,}")
    return notes


def _caption(told: Mapping[str, Spans], of: Mapping[str, Row | None], seconds: float) -> str:
    gpus = {int(row["gpus"]) for row in of.values() if row is not None}
    whole = all(max(span[3] for span in spans) <= seconds for spans in told.values())
    where = f" on {gpus.pop():,} GPUs" if len(gpus) == 1 and None not in of.values() else ""
    return f"What each replica does{where}, {'whole run' if whole else f'last {seconds:,.0f} s of each run'}"


# ------------------------------------------------------------------------------------------------------------- scales


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in [low, high], some `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [i * step for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


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


def limits(picture: Picture) -> tuple[float, float]:
    """The vertical range of the upper part."""
    rates = [rate for line in picture.series for _, rate in line.points] + [rate for _, rate in picture.ideal]
    top = max(rates)
    if picture.logarithmic:
        return min(rates) / 1.15, top * 1.12
    return 0.0, (top * 1.08) or 1.0


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart to `gap`, inside [low, high]: those that touch stand around their common middle."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    stacks: list[tuple[list[int], float]] = []  # members from below, and the lowest one's place
    for i in order:
        members, base = [i], min(max(places[i], low), high)
        while stacks and stacks[-1][1] + gap * len(stacks[-1][0]) > base:
            members = stacks.pop()[0] + members
            middle = sum(places[j] for j in members) / len(members)
            reach = gap * (len(members) - 1)
            base = max(low, min(middle - reach / 2, high - reach))
        stacks.append((members, base))
    place = {i: base + gap * nth for members, base in stacks for nth, i in enumerate(members)}
    return [place[i] for i in range(len(places))]
