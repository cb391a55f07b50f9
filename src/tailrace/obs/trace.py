"""What every process did, as a trace that Perfetto and chrome://tracing open (Trace Event Format, JSON).

Processes of the run are threads: the trainer first, then the replicas. Spans are their states, with the version of the
weights; arrows are samples that repack moved; counters are reward, staleness and trained tokens per second by step.
Times are microseconds of running time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tailrace.obs.activity import Lane
from tailrace.obs.live import LiveRun
from tailrace.obs.moves import RepackMove
from tailrace.types import label

RUN, TRAINER = 1, 0  # ids of the process and of the trainer's thread
NAMES = {"scoring": "judging", "environment": "waiting for the environment", "pulling": "pulling weights"}
SHOWN_S = 1e-6  # of an arrow's ends, which have to lie in a span

TraceEvent = dict[str, Any]


def trace_events(live: LiveRun, name: str) -> Iterator[TraceEvent]:
    yield _named("process_name", TRAINER, name)
    lanes = [(TRAINER, "trainer", live.activity.trainer)]
    lanes += [(id + 1, label("replica", id), lane) for id, lane in sorted(live.activity.replicas.items())]
    for thread, title, lane in lanes:
        yield _named("thread_name", thread, title)
        yield {**_named("thread_sort_index", thread, title), "args": {"sort_index": thread}}
        yield from _spans(thread, lane, live.seconds)
    for number, move in enumerate(live.moves.all):
        yield from _arrow(number, move)
    yield from _counters(live)


def _named(kind: str, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": RUN, "tid": thread, "args": {"name": name}}


def _spans(thread: int, lane: Lane, now: float) -> Iterator[TraceEvent]:
    for state, version, start, end in lane.log.window(0.0, now, now) if lane.log is not None else []:
        if state != "idle" and end > start:
            span = {"ph": "X", "name": NAMES.get(state, state), "cat": "state", "pid": RUN, "tid": thread}
            yield {**span, "ts": _micro(start), "dur": _micro(end) - _micro(start), "args": {"version": version}}


def _arrow(number: int, move: RepackMove) -> Iterator[TraceEvent]:
    """A short span at both ends, which the arrow binds to."""
    ends = ((move.source + 1, move.left, "s"), (move.target + 1, max(move.arrived, move.left + SHOWN_S), "f"))
    about = {"cat": "repack", "pid": RUN, "args": {"samples": move.samples}}
    for thread, at, phase in ends:
        yield {**about, "ph": "X", "name": "repack", "tid": thread, "ts": _micro(at), "dur": 1}
        yield {**about, "ph": phase, "name": "repack", "tid": thread, "ts": _micro(at), "id": number, "bp": "e"}


def _counters(live: LiveRun) -> Iterator[TraceEvent]:
    before = live.first_sample_at
    for step in live.fold.steps:
        seconds, before = max(step.ended - before, 1e-6), step.ended
        values = {"tokens per s": step.tokens / seconds, "staleness": step.staleness.mean, "reward": step.reward}
        for name, value in values.items():
            if value is not None:
                yield {"ph": "C", "name": name, "pid": RUN, "ts": _micro(step.ended), "args": {name: round(value, 4)}}


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
