"""A part of a run's timeline, as closely as the screen can show it: some of the lanes, between two moments.

What is narrower than a `GRAIN`-th of the window becomes one with its neighbours. So the answer is bounded, whatever the
run; the lanes that are not on the screen are not asked for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tailrace.obs.activity import BRIEF, Lane, StateSpan
from tailrace.obs.charts import STATES, merge
from tailrace.obs.live import LiveRun
from tailrace.obs.moves import RepackMove
from tailrace.types import label

GRAIN = 400  # spans of a lane, about
MOVES = 400  # that are drawn at once
DIGITS = 3

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]


class TimelineQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    begin: Seconds = 0.0
    end: Seconds = 0.0  # 0: now
    first: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # lane; 0 is the trainer
    count: Annotated[int, Meta(ge=1, le=128)] = 64


class LaneWindow(msgspec.Struct, frozen=True):
    """A letter per span (see `charts.STATES`), its version, and where it ends; the first begins at `start`."""

    name: str
    start: float
    states: str
    versions: list[int]
    ends: list[float]


class TimelineView(msgspec.Struct, frozen=True):
    seconds: float  # of the whole run so far
    begin: float
    end: float
    first: int
    total: int  # lanes
    lanes: list[LaneWindow]
    moves: list[RepackMove]  # by lane instead of by replica


def timeline(live: LiveRun, asked: TimelineQuery) -> TimelineView:
    now = max(live.seconds, 1e-6)
    end = min(asked.end or now, now)
    begin = min(asked.begin, end)
    lanes = [("trainer", live.activity.trainer)]
    ids = sorted(live.activity.replicas)
    lanes += [(label("replica", id), live.activity.replicas[id]) for id in ids]
    shown = lanes[asked.first : asked.first + asked.count]
    place = {id: number for number, id in enumerate(ids, start=1)}
    moves = [_by_lane(move, place) for move in live.moves.between(begin, end, MOVES)]
    windows = [_window(name, lane, begin, end, now) for name, lane in shown]
    return TimelineView(now, begin, end, asked.first, len(lanes), windows, moves)


def _by_lane(move: RepackMove, place: dict[int, int]) -> RepackMove:
    left, arrived = round(move.left, DIGITS), round(move.arrived, DIGITS)
    return RepackMove(left, arrived, place.get(move.source, 0), place.get(move.target, 0), move.samples)


def _window(name: str, lane: Lane, begin: float, end: float, now: float) -> LaneWindow:
    found = lane.log.window(begin, end, now) if lane.log is not None else []
    spans = [
        StateSpan(f"{STATES.get(state, ' ')}{version}", max(start, begin), min(stop, end))
        for state, version, start, stop in found
    ]
    brief = {span.state for span in spans if span.state[0] in {STATES[state] for state in BRIEF}}
    merged = merge(spans, (end - begin) / GRAIN, keep=tuple(brief))
    if len(merged) > 2 * GRAIN:
        merged = merge(merged, (end - begin) / GRAIN)
    return LaneWindow(
        name,
        round(merged[0].start if merged else begin, DIGITS),
        "".join(span.state[0] for span in merged),
        [int(span.state[1:]) for span in merged],
        [round(span.end, DIGITS) for span in merged],
    )
