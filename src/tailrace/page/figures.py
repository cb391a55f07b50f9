"""What the page shows, as one JSON object whose size is bounded however long and wide a run is.

`Figures` is folded from the journal entry by entry, on top of `obs`: `LiveRun` for every number, `charts` for curves
and timeline, `EventText` for the sentences about the last events.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.charts import REPLICAS, Curve, RunCharts, run_charts
from tailrace.obs.ending import RunEnding
from tailrace.obs.eval_curves import EvalCurves, eval_curves
from tailrace.obs.event_text import EventText
from tailrace.obs.live import LiveRun, RunView
from tailrace.obs.summary import HeldOut
from tailrace.protocol import Command, Event
from tailrace.store.journal import Entry
from tailrace.store.metrics import Measurement
from tailrace.types import label

SENTENCES = 60
LONGEST_SENTENCE = 300  # a reason may be a whole trace
LISTED = ("replica", "relay", "version")  # the subjects whose sentences are listed


class Sentence(msgspec.Struct, frozen=True):
    at: float
    subject: str
    text: str


class RunState(msgspec.Struct, frozen=True):
    """What is known of a run beside its events."""

    name: str
    created: str
    ended: RunEnding
    accuracy: HeldOut
    mean_reward: HeldOut
    right_above: float  # the reward from which on an answer counts as right in the accuracy
    behind: bool  # a long history is still being read
    trouble: str = ""  # why it cannot be read any further


class PageData(msgspec.Struct, frozen=True):
    """What the browser gets."""

    about: RunState
    schedule: str
    max_staleness: int
    read: int  # events so far
    run: RunView
    faults: int
    charts: RunCharts
    evaluations: EvalCurves
    sentences: list[Sentence]


class Figures:
    def __init__(self, config: Config) -> None:
        self.live = LiveRun(config, timeline=True, keep_trained=True, log=True)
        self.live.fold.before = self._describe
        self.read = 0
        self._curve = Curve()
        self._text = EventText(self.live.fold)
        self._sentences: deque[Sentence] = deque(maxlen=SENTENCES)

    def see(self, entry: Entry) -> None:
        live, steps = self.live, len(self.live.fold.steps)
        live.see(entry.now, entry.event, entry.commands)
        self.read = entry.seq
        for step in live.fold.steps[steps:]:
            self._curve.add(step, live.first_sample_at)

    def measure(self, one: Measurement) -> None:
        if one.value is not None:
            self.live.measure(one.now, one.step, one.source, {one.name: one.value})

    def _describe(self, message: Event | Command) -> None:
        """What is said of several kinds of subjects is one thing: those of the first kind are enough."""
        found = [one for one in self._text.describe(message) if one[0][0] in LISTED]
        first = min((LISTED.index(kind) for (kind, _), _ in found), default=0)
        now = round(self.live.seconds, 2)
        for (kind, number), text in found:
            if kind == LISTED[first]:
                self._sentences.append(Sentence(now, label(kind, number), text[:LONGEST_SENTENCE]))

    def shown(self, about: RunState) -> PageData:
        live, view = self.live, self.live.view()
        if about.ended.state != "running":
            view = view.after_end()
        notices = [one._replace(at=round(one.at, 2), text=one.text[:LONGEST_SENTENCE]) for one in view.notices]
        return PageData(
            about=about,
            schedule=live.config.schedule.kind,
            max_staleness=live.config.schedule.max_staleness,
            read=self.read,
            run=msgspec.structs.replace(view, replicas=view.replicas[:REPLICAS], notices=tuple(notices)),
            faults=live.noticed["warning"],
            charts=run_charts(live, self._curve),
            evaluations=eval_curves(live.fold.evaluations),
            sentences=list(self._sentences),
        )
