"""What became of every sample and group, told by events and commands alone: the figures of a run's account.

`Account.see` reads what control handled and what came of it, in order, live or from a journal. Reports that control
ignored (late, doubled) change nothing here either, so the counts are the ledger's own. A sample is remembered until it
is given to the trainer or forgotten: memory follows what is in flight, not the length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tailrace.protocol import (
    Cancel,
    Command,
    Ending,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    JudgedTurn,
    Parked,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    ScoringStarted,
    Train,
    Trained,
    TrainerJoined,
)
from tailrace.types import GroupId, ReplicaId, TrajectoryId, Version

Place = tuple[int, int]  # step and part
LARGEST = 1e100  # a larger reward counts as this in the means that are shown: their sums stay finite


class Sample(msgspec.Struct, gc=False):
    group: GroupId
    epoch: int
    replica: ReplicaId
    prompt_tokens: int
    failures: int = 0  # of earlier attempts
    running: bool = True  # a replica has it
    scoring: bool = False  # and its judge does
    turn: int = 0
    tokens: int = 0
    oldest: Version = 0
    reward: float | None = None


class Batch(msgspec.Struct):
    """What the trainer was given at once: a part of a step, or several that add up."""

    groups: int = 0
    tokens: int = 0  # prompts included
    ages: Counter[int] = msgspec.field(default_factory=Counter)  # samples by the age of their oldest token
    rewards: float = 0.0
    rewarded: int = 0

    def add(self, other: Batch) -> None:
        self.groups += other.groups
        self.tokens += other.tokens
        self.ages += other.ages
        self.rewards += other.rewards
        self.rewarded += other.rewarded

    @property
    def samples(self) -> int:
        return self.ages.total()

    @property
    def reward(self) -> float | None:
        return self.rewards / self.rewarded if self.rewarded else None


class Tally(msgspec.Struct):
    """Groups by what became of them."""

    started: int = 0
    trained: int = 0
    dropped_stale: int = 0
    filtered: int = 0
    failed: int = 0

    @property
    def in_flight(self) -> int:
        return self.started - self.trained - self.dropped_stale - self.filtered - self.failed


class Staleness(msgspec.Struct, frozen=True):
    mean: float = 0.0
    p95: float = 0.0
    max: int = 0


class StepRecord(msgspec.Struct, frozen=True):
    """One finished step."""

    step: int
    ended: float
    groups: int
    samples: int
    tokens: int
    reward: float | None
    staleness: Staleness


class Load(NamedTuple):
    """Samples that a replica has."""

    generating: int  # waiting ones included
    scoring: int  # with a judge


class Account:
    def __init__(self, group_size: int, attempts: int) -> None:
        self.group_size = group_size
        self.attempts = attempts
        self.tally = Tally()
        self.total = Batch()  # everything trained
        self.steps: list[StepRecord] = []
        self.repacks = 0
        self.moved = 0
        self.failures = 0  # attempts at samples that failed
        self.failed_samples = 0  # those whose last attempt did
        self.finished_tokens = 0  # of finished samples, prompts included, as everywhere
        self._generating: Counter[ReplicaId] = Counter()
        self._scoring: Counter[ReplicaId] = Counter()
        self.touched: set[ReplicaId] = set()  # whose load the last event changed
        self._samples: dict[TrajectoryId, Sample] = {}
        self._given: dict[Place, Batch] = {}  # to the trainer, which has not reported them
        self._done: Place = (-1, 0)  # the last part that was reported
        self._step = Batch()  # what is trained of the present step
        self._asked: tuple[int, int, int, bool] | None = None  # incarnation, step, part, last
        self._trainer = 0  # incarnation
        self._incarnations: dict[ReplicaId, int] = {}
        self._handlers: dict[type[Event | Command], Callable[[Any], None]] = {
            ReplicaJoined: self._replica_joined,
            ReplicaLost: self._replica_lost,
            ScoringStarted: self._scoring_started,
            GenerationResumed: self._generation_resumed,
            Finished: self._finished,
            SampleFailed: self._sample_failed,
            Parked: self._parked,
            Generate: self._generate,
            Cancel: self._cancel,
            Train: self._train,
            Forget: self._forget,
        }

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.touched.clear()
        for word in (event, *commands):
            handler = self._handlers.get(type(word))
            if handler:
                handler(word)
            elif isinstance(word, Trained):
                self._trained(now, word)
            elif isinstance(word, TrainerJoined):
                self._trainer_joined(now, word)
        if any(type(command) is Release for command in commands):
            self.repacks += 1

    # ------------------------------------------------------------------------------------------------------ samples

    def _generate(self, command: Generate) -> None:
        for request in command.requests:
            self._detach(self._samples.get(request.trajectory))
            self._samples[request.trajectory] = _sample(request, command.replica)
            self._started(request.group)
        self._generating[command.replica] += len(command.requests)
        self.touched.add(command.replica)

    def load(self, replica: ReplicaId) -> Load:
        return Load(self._generating[replica], self._scoring[replica])

    def _started(self, group: GroupId) -> None:
        self.tally.started = max(self.tally.started, group + 1)

    def _detach(self, sample: Sample | None) -> None:
        """It runs nowhere now."""
        if sample is not None and sample.running:
            self._set_scoring(sample, False)
            sample.running = False
            self._generating[sample.replica] -= 1
            self.touched.add(sample.replica)

    def _set_scoring(self, sample: Sample, scoring: bool) -> None:
        change = scoring - sample.scoring
        sample.scoring = scoring
        self._scoring[sample.replica] += change
        self._generating[sample.replica] -= change
        self.touched.add(sample.replica)

    def _scoring_started(self, event: ScoringStarted) -> None:
        for sample, one in self._turns(event):
            if one.turn >= sample.turn:
                sample.turn = one.turn
                self._set_scoring(sample, True)

    def _generation_resumed(self, event: GenerationResumed) -> None:
        for sample, one in self._turns(event):
            if one.turn > sample.turn:
                sample.turn = one.turn
                self._set_scoring(sample, False)

    def _turns(self, event: ScoringStarted | GenerationResumed) -> Iterator[tuple[Sample, JudgedTurn]]:
        if event.incarnation != self._incarnations.get(event.replica):
            return
        for one in event.samples:
            sample = self._current(one.trajectory, one.epoch)
            if sample is not None and sample.replica == event.replica:
                yield sample, one

    def _current(self, id: TrajectoryId, epoch: int) -> Sample | None:
        sample = self._samples.get(id)
        return sample if sample is not None and sample.running and sample.epoch == epoch else None

    def _finished(self, event: Finished) -> None:
        meta = event.meta
        sample = self._current(meta.id, meta.epoch)
        if sample is not None:
            self._detach(sample)
            sample.tokens, sample.oldest, sample.reward = meta.tokens, meta.oldest, meta.reward
            self.finished_tokens += sample.prompt_tokens + meta.tokens

    def _sample_failed(self, event: SampleFailed) -> None:
        sample = self._current(event.trajectory, event.epoch)
        if sample is not None:
            self._detach(sample)
            self.failures += 1
            self.failed_samples += sample.failures + 1 >= self.attempts

    def _parked(self, event: Parked) -> None:
        for meta in event.samples:
            sample = self._current(meta.id, meta.epoch)
            if sample is not None and sample.replica == event.replica:
                self._detach(sample)
                self.moved += 1

    def _cancel(self, command: Cancel) -> None:
        for one in command.samples:
            self._detach(self._current(one.trajectory, one.epoch))

    def _replica_joined(self, event: ReplicaJoined) -> None:
        if event.incarnation > self._incarnations.get(event.replica, 0):
            self._incarnations[event.replica] = event.incarnation
            self._keep_only(event.replica, {one.trajectory for one in event.held})

    def _replica_lost(self, event: ReplicaLost) -> None:
        if event.incarnation == self._incarnations.get(event.replica):
            self._keep_only(event.replica, set())

    def _keep_only(self, replica: ReplicaId, held: set[TrajectoryId]) -> None:
        for id, sample in self._samples.items():
            if sample.replica == replica and id not in held:
                self._detach(sample)

    # ----------------------------------------------------------------------------------------------------- endings

    def _train(self, command: Train) -> None:
        place = (command.step, command.part)
        self._asked = (command.incarnation, *place, command.last)
        if place > self._done and place not in self._given:  # else the trainer repeats it
            ids = [id for group in command.groups for id in group.trajectories]
            self._given[place] = self._batch(command.step, len(command.groups), ids)

    def _batch(self, step: int, groups: int, ids: Iterable[TrajectoryId]) -> Batch:
        batch = Batch(groups)
        for id in ids:
            sample = self._samples.pop(id, None)
            if sample is None:
                continue  # this account began after the run did
            batch.tokens += sample.prompt_tokens + sample.tokens
            batch.ages[step - sample.oldest] += 1
            if sample.reward is not None:
                batch.rewards += max(-LARGEST, min(LARGEST, sample.reward))
                batch.rewarded += 1
        return batch

    def _trained(self, now: float, event: Trained) -> None:
        if self._asked and self._asked[:3] == (event.incarnation, event.step, event.part):
            self._complete((event.step, event.part))
            if self._asked[3]:
                self._end_step(now, event.step)

    def _trainer_joined(self, now: float, event: TrainerJoined) -> None:
        """What is in its weights counts as trained, though the report was lost."""
        if event.incarnation <= self._trainer:
            return
        self._trainer = event.incarnation
        for place in sorted(self._given):
            if place < (event.step, event.part):
                self._complete(place)
        if event.step > 0:
            self._end_step(now, event.step - 1)

    def _complete(self, place: Place) -> None:
        batch = self._given.pop(place, None)
        if batch is not None:
            self._done = place
            self.tally.trained += batch.groups
            self.total.add(batch)
            self._step.add(batch)

    def _end_step(self, now: float, step: int) -> None:
        batch = self._step
        if not batch.groups or self._done[0] != step:
            return  # it ended before; the trainer has repeated it
        figures = (batch.groups, batch.samples, batch.tokens, batch.reward, staleness(batch.ages))
        self.steps.append(StepRecord(step, now, *figures))
        self._step = Batch()

    def _forget(self, command: Forget) -> None:
        for id in command.trajectories:
            self._started(id // self.group_size)  # it may have gone before any sample of it was given to a replica
            self._detach(self._samples.pop(id, None))
        self._ended(command.reason)

    def _ended(self, how: Ending) -> None:
        tally = self.tally
        tally.dropped_stale += how == "stale"
        tally.filtered += how == "filtered"
        tally.failed += how == "failed"


def _sample(request: Request, replica: ReplicaId) -> Sample:
    return Sample(request.group, request.epoch, replica, request.prompt_tokens, request.failures)


def staleness(ages: Counter[int]) -> Staleness:
    """Mean, 95th percentile and maximum of a count of ages."""
    total = ages.total()
    if not total:
        return Staleness()
    mean = sum(age * count for age, count in ages.items()) / total
    seen = 0
    for age in sorted(ages):
        seen += ages[age]
        if seen >= 0.95 * total:
            return Staleness(mean, float(age), max(ages))
    raise AssertionError("unreachable: the ages add up to their total")
