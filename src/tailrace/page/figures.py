"""What the page shows, as one JSON object whose size is bounded however long and wide a run is.

`Figures` is folded from the journal entry by entry, on top of `obs`: `LiveRun` for every number, `Chronicle` for the
sentences. It adds what a browser needs and a terminal does not: curves and lanes with a bounded number of points.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.account import StepRecord
from tailrace.obs.activity import Lane, coarse
from tailrace.obs.chronicle import Chronicle, Told
from tailrace.obs.ending import Ending
from tailrace.obs.live import LiveRun, RunView
from tailrace.obs.summary import HeldOut, LedgerCounts
from tailrace.protocol import Forget
from tailrace.store.journal import Entry
from tailrace.store.metrics import Measurement
from tailrace.types import label

POINTS = 300  # of a curve
SPANS = 240  # of a lane
LANES = 48  # replicas that are shown
SENTENCES = 60
LONGEST_SENTENCE = 300  # a reason may be a whole trace
TOLD = ("replica", "relay", "version")  # whose sentences make the list of events
LETTERS = {"scoring": "c"}  # of states whose first letter stands for another one


class Point(msgspec.Struct):
    """Some neighbouring steps as one."""

    step: int  # the last of them
    began: float
    ended: float
    tokens: int
    samples: int
    rewards: float  # mean times samples
    rewarded: int
    ages: float  # mean times samples
    oldest: int

    def add(self, other: Point) -> None:
        self.step, self.ended = other.step, other.ended
        self.tokens += other.tokens
        self.samples += other.samples
        self.rewards += other.rewards
        self.rewarded += other.rewarded
        self.ages += other.ages
        self.oldest = max(self.oldest, other.oldest)

    def row(self) -> list[float | None]:
        """step, end, reward, tokens per second, staleness (mean, max)."""
        reward = self.rewards / self.rewarded if self.rewarded else None
        rate = self.tokens / max(self.ended - self.began, 1e-6)
        return [self.step, _round(self.ended), reward, rate, self.ages / max(1, self.samples), self.oldest]


class Curve:
    """All steps of a run in at most `POINTS` points: when there are too many, neighbours become one."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._width = 1  # steps per point
        self._in_last = 0

    def add(self, step: StepRecord, began: float) -> None:
        point = _point(step, self.points[-1].ended if self.points else began)
        if self.points and self._in_last < self._width:
            self.points[-1].add(point)
            self._in_last += 1
        else:
            self.points.append(point)
            self._in_last = 1
        if len(self.points) > POINTS:
            self._halve()

    def _halve(self) -> None:
        pairs = [self.points[place : place + 2] for place in range(0, len(self.points), 2)]
        self._in_last += self._width if len(pairs[-1]) == 2 else 0
        self._width *= 2
        for pair in pairs:
            if len(pair) == 2:
                pair[0].add(pair[1])
        self.points = [pair[0] for pair in pairs]


def _point(step: StepRecord, began: float) -> Point:
    rewarded = 0 if step.reward is None else step.samples
    rewards = (step.reward or 0.0) * rewarded
    ages = step.staleness.mean * step.samples
    oldest = step.staleness.max
    return Point(step.step + 1, began, step.ended, step.tokens, step.samples, rewards, rewarded, ages, oldest)


class LaneView(msgspec.Struct, frozen=True):
    """What a part did: a letter per span (see `LETTERS`), and where each ends; the first begins at `start`."""

    name: str
    start: float
    states: str
    ends: list[float]


class Sentence(msgspec.Struct, frozen=True):
    at: float
    who: str
    text: str


class RunState(msgspec.Struct, frozen=True):
    """What is known of a run beside its events."""

    name: str
    created: str
    ended: Ending
    accuracy: HeldOut
    mean_reward: HeldOut
    right_above: float  # the reward from which on an answer counts as right in the accuracy
    behind: bool  # a long history is still being gone through
    trouble: str = ""  # why it cannot be read any further


class Shown(msgspec.Struct, frozen=True):
    """What the browser gets."""

    about: RunState
    schedule: str
    max_staleness: int
    read: int  # events so far
    began: float  # when the first sample was given to a replica
    run: RunView
    ledger: LedgerCounts
    faults: int
    replicas: int  # all, of which a limited number is listed
    curve: list[list[float | None]]
    lanes: list[LaneView]
    sentences: list[Sentence]


class Figures:
    def __init__(self, config: Config) -> None:
        self.live = LiveRun(config, timeline=True)
        self.read = 0
        self.faults = 0
        self._curve = Curve()
        self._chronicle = Chronicle()
        self._sentences: deque[Sentence] = deque(maxlen=SENTENCES)

    def see(self, entry: Entry) -> None:
        live, steps, happened = self.live, len(self.live.account.steps), self.live.happened
        live.see(entry.now, entry.event, entry.commands)
        self.read = entry.seq
        for step in live.account.steps[steps:]:
            self._curve.add(step, live.began)
        self._count_faults(happened)
        self._tell(entry)

    def measure(self, one: Measurement) -> None:
        happened = self.live.happened
        if one.value is not None:
            self.live.measure(one.now, one.step, one.source, {one.name: one.value})
        self._count_faults(happened)

    def _count_faults(self, before: int) -> None:
        new = min(self.live.happened - before, len(self.live.happenings))
        self.faults += sum(self.live.happenings[-1 - place].weight == "alarming" for place in range(new))

    def _tell(self, entry: Entry) -> None:
        self._list(self._chronicle.hear(entry.event))
        for command in entry.commands:
            self._list(self._chronicle.obey(command, entry.event))
            if isinstance(command, Forget):
                self._let_go(command)

    def _list(self, told: Told) -> None:
        """What is said of several kinds of parts is one thing: those of the first kind are enough."""
        found = [one for one in told if one[0][0] in TOLD]
        first = min((TOLD.index(kind) for (kind, _), _ in found), default=0)
        for (kind, number), text in found:
            if kind == TOLD[first]:
                self._sentences.append(
                    Sentence(_round(self.live.seconds), label(kind, number), text[:LONGEST_SENTENCE])
                )

    def _let_go(self, command: Forget) -> None:
        """Nothing more happens to these: memory follows what is in flight, not the length of the run."""
        for id in command.trajectories:
            sample = self._chronicle.samples.pop(id, None)
            if sample is not None:
                self._chronicle.groups.pop(sample.group, None)

    def shown(self, about: RunState) -> Shown:
        live, view = self.live, self.live.view()
        if about.ended.state != "running":
            view = view.over()
        lanes = sorted(live.activity.replicas.items())[:LANES]
        named = [("trainer", live.activity.trainer), *[(label("replica", id), lane) for id, lane in lanes]]
        told = [one._replace(at=_round(one.at), text=one.text[:LONGEST_SENTENCE]) for one in view.happenings]
        return Shown(
            about=about,
            schedule=live.config.schedule.kind,
            max_staleness=live.config.schedule.max_staleness,
            read=self.read,
            began=_round(live.began),
            run=msgspec.structs.replace(view, replicas=view.replicas[:LANES], happenings=tuple(told)),
            ledger=_counts(live),
            faults=self.faults,
            replicas=len(view.replicas),
            curve=[point.row() for point in self._curve.points],
            lanes=[_lane_view(name, lane, live.seconds) for name, lane in named],
            sentences=list(self._sentences),
        )


def _counts(live: LiveRun) -> LedgerCounts:
    tally = live.account.tally
    ends = (tally.trained, tally.dropped_stale, tally.filtered, tally.failed)
    return LedgerCounts(tally.started, *ends, tally.in_flight)


def _lane_view(name: str, lane: Lane, now: float) -> LaneView:
    _thin(lane, now)
    spans = lane.timeline(now)
    start = spans[0].start if spans else now
    letters = [LETTERS.get(span.state, span.state[0]) for span in spans]
    return LaneView(name, _round(start), "".join(letters), [_round(span.end) for span in spans])


def _thin(lane: Lane, now: float) -> None:
    """What is too short to be seen is forgotten, also by us: a lane has a bounded number of spans."""
    spans = lane.spans
    if spans is not None and len(spans) > SPANS:
        hair = 2 * now / SPANS
        spans[:] = coarse(spans, hair)
        if len(spans) > SPANS:
            spans[:] = coarse(spans, hair, brief=())


def _round(seconds: float) -> float:
    return round(seconds, 2)
