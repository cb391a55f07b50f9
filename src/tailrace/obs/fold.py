"""The one fold of a run's journal: samples, groups, staleness, versions and tokens, from events and commands alone.

`Fold.see` takes in what control handled and what came of it, in order, live or from a journal. Everything that shows a
run reads it: the terminal, the summary, the page, stories and the simulator's result. Reports that control ignored
(late or doubled) change nothing here either, so the counts are the ledger's own.

A sample is remembered until it is given to the trainer or forgotten, or with `keep_trained` until it is forgotten:
memory follows what is in flight, not the length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.records import ASSIGNED, ReplicaRecord, SampleRecord, StrangerRecord
from tailrace.obs.savings import Savings, SavingsCount
from tailrace.obs.trained_steps import BatchTotals, MiniBatchId, TrainedSteps, totals
from tailrace.protocol import (
    Cancel,
    Command,
    ControllerRestarted,
    Dismiss,
    Evaluate,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    GiveUp,
    HandedIn,
    HostJoined,
    HostLeft,
    JudgedTurn,
    Parked,
    RecordEvaluation,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    ScoringStarted,
    SettingsChanged,
    SkipPrompts,
    Stop,
    Train,
    Trained,
    TrainerJoined,
    TrainerLost,
    VersionStored,
    WeightsLoaded,
)
from tailrace.protocol import Ending as GroupEnd
from tailrace.scoring import TRUNCATED
from tailrace.types import EVALUATION, GroupId, ReplicaId, TrajectoryId, Version

AFTER_THE_END = (ControllerRestarted, SettingsChanged)  # a run that failed is resumed, or one has more to do


class GroupCounts(msgspec.Struct, frozen=True):
    """Groups by what became of them: `started` is the sum of all others."""

    started: int
    trained: int
    dropped_stale: int
    filtered: int  # all of their samples got the same reward
    stopped: int  # the same, known before all of their samples were started
    failed: int
    lost: int  # with their store, when a step that had trained them was to be repeated
    in_flight: int


class Fold:
    def __init__(self, config: Config, keep_trained: bool = False) -> None:
        self.group_size = config.workload.group_size
        self.rules = config.groups
        self.max_failures = config.groups.max_failures
        self.keep_trained = keep_trained
        self.before: Callable[[Event | Command], None] | None = None  # called with each of them before it is taken in
        self.ignored = False  # the last event was late or doubled, and control ignored it
        self.changed: set[ReplicaId] = set()  # whose samples the last event changed
        self.samples: dict[TrajectoryId, SampleRecord] = {}
        self.replicas: dict[ReplicaId, ReplicaRecord] = {}
        self.version: Version = -1  # the newest that a relay has
        self.groups_started = 0
        self.groups_ended: Counter[GroupEnd] = Counter()
        self._trained_steps = TrainedSteps()
        self.total, self.steps = self._trained_steps.total, self._trained_steps.steps
        self.repacks = 0
        self.moved = 0
        self.evaluations: list[RecordEvaluation] = []
        self.failures = 0  # attempts at samples that failed
        self.failed_samples = 0  # those whose last attempt did
        self.finished_tokens = 0  # of finished samples, prompts included
        self.finished_samples = 0
        self._savings = SavingsCount()
        self.strangers: dict[str, StrangerRecord] = {}  # by the names of their keys
        self.training: Train | None = None  # the order that the trainer has not answered
        self.trainer_incarnation = 0
        self._stopped = False
        self._now = 0.0
        self._handlers: dict[type[Event | Command], Callable[[Any], None]] = {
            ReplicaJoined: self._replica_joined,
            ReplicaLost: self._replica_lost,
            HostJoined: self._host_joined,
            HostLeft: self._host_left,
            HandedIn: self._handed_in,
            Dismiss: self._dismiss,
            GiveUp: self._give_up,
            WeightsLoaded: self._weights_loaded,
            VersionStored: self._version_stored,
            ScoringStarted: self._scoring_started,
            GenerationResumed: self._generation_resumed,
            Finished: self._finished,
            SampleFailed: self._sample_failed,
            Parked: self._parked,
            SkipPrompts: self._skip_prompts,
            Generate: self._generate,
            Evaluate: self._evaluate,
            RecordEvaluation: self.evaluations.append,
            Cancel: self._cancel,
            Train: self._train,
            Trained: self._trained,
            TrainerJoined: self._trainer_joined,
            TrainerLost: self._trainer_lost,
            Forget: self._forget,
            Stop: self._stop,
        }

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._now = now
        if isinstance(event, AFTER_THE_END):
            self._stopped = False
        self.ignored = self._stopped
        self.changed.clear()
        if not self._stopped:
            self._take_in(event)
        for command in commands:
            self._take_in(command)
        if commands and Release in map(type, commands):
            self.repacks += 1

    def _take_in(self, message: Event | Command) -> None:
        if self.before is not None:
            self.before(message)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)

    @property
    def groups(self) -> GroupCounts:
        ended = self.groups_ended
        in_flight = self.groups_started - ended.total()
        without = (ended["stale"], ended["filtered"], ended["stopped"], ended["failed"], ended["lost"])
        return GroupCounts(self.groups_started, ended["trained"], *without, in_flight)

    @property
    def savings(self) -> Savings:
        mean = self.finished_tokens / max(1, self.finished_samples)
        return self._savings.so_far(self.groups_ended["stopped"], mean)

    # ------------------------------------------------------------------------------------------------------ samples

    def replica(self, id: ReplicaId) -> ReplicaRecord:
        record = self.replicas.get(id)
        if record is None:
            record = self.replicas[id] = ReplicaRecord()
        return record

    def current(self, id: TrajectoryId, attempt: int) -> SampleRecord | None:
        """The sample, if a replica has it under this very assignment; None for anything late or doubled."""
        sample = self.samples.get(id)
        return sample if sample is not None and sample.attempt == attempt and sample.state in ASSIGNED else None

    def members(self, group: GroupId) -> list[SampleRecord]:
        """The samples of a group that were ever given to a replica."""
        first = group * self.group_size
        return [self.samples[id] for id in range(first, first + self.group_size) if id in self.samples]

    def _generate(self, command: Generate) -> None:
        record = self.replica(command.replica)
        self.changed.add(command.replica)
        samples = self.samples
        for request in command.requests:
            id = request.trajectory
            before = samples.get(id)
            if before is not None:
                self._release(id, before, "lost")
            samples[id] = _assigned(request, command.replica, record.version, before)
            record.assigned[id] = None
            self._note_started(request.group)
            if request.check == "draws" and before is not None and before.state == "handed_in":
                self._stranger_with(before.replica).scored += 1

    def _evaluate(self, command: Evaluate) -> None:
        self.replica(command.replica).evaluating |= {one.trajectory: one.attempt for one in command.requests}
        self.changed.add(command.replica)

    def _end_evaluated(self, replica: ReplicaId, trajectory: TrajectoryId, attempt: int) -> None:
        """A sample of an evaluation; it is ignored unless the replica has it."""
        held = self.replica(replica).evaluating
        self.ignored = held.get(trajectory) != attempt
        if not self.ignored:
            del held[trajectory]
            self.changed.add(replica)

    def _skip_prompts(self, command: SkipPrompts) -> None:
        self._savings.skipped_prompts += len(command.prompts)

    def _note_started(self, group: GroupId) -> None:
        if group >= self.groups_started:
            self.groups_started = group + 1

    def _release(self, id: TrajectoryId, sample: SampleRecord, state: str) -> None:
        """Its replica has it no longer."""
        if sample.state in ASSIGNED:
            record = self.replicas[sample.replica]
            record.scoring -= sample.state == "scoring"
            record.judging -= sample.state == "scoring" and sample.final
            record.assigned.pop(id, None)
            sample.state = state
            self.changed.add(sample.replica)

    def turns(self, event: ScoringStarted | GenerationResumed) -> Iterator[tuple[SampleRecord, JudgedTurn]]:
        """Those that this incarnation of the replica has under these assignments, and that are news."""
        resumed = isinstance(event, GenerationResumed)
        if event.incarnation != self.replica(event.replica).incarnation:
            return
        for one in event.samples:
            sample = self.current(one.trajectory, one.attempt)
            if sample is not None and sample.replica == event.replica and one.turn >= sample.turn + resumed:
                yield sample, one

    def _scoring_started(self, event: ScoringStarted) -> None:
        for sample, one in self.turns(event):
            self._enter_turn(sample, one, "scoring")

    def _generation_resumed(self, event: GenerationResumed) -> None:
        for sample, one in self.turns(event):
            self._enter_turn(sample, one, "running")

    def _enter_turn(self, sample: SampleRecord, one: JudgedTurn, state: str) -> None:
        record, before, now = self.replicas[sample.replica], sample.state == "scoring", state == "scoring"
        record.scoring += now - before
        record.judging += (now and one.final) - (before and sample.final)
        sample.turn, sample.state, sample.final = one.turn, state, one.final
        self.changed.add(sample.replica)

    def _finished(self, event: Finished) -> None:
        meta = event.meta
        if meta.id >= EVALUATION:
            self._end_evaluated(event.replica, meta.id, meta.attempt)
            return
        sample = self.current(meta.id, meta.attempt)
        if sample is None:
            self.ignored = True
            return
        self._release(meta.id, sample, "finished")
        sample.tokens, sample.oldest, sample.reward = meta.tokens, meta.oldest, meta.reward
        sample.truncated = meta.finish == TRUNCATED
        self.finished_tokens += sample.prompt_tokens + meta.tokens
        self.finished_samples += 1

    def _sample_failed(self, event: SampleFailed) -> None:
        if event.trajectory >= EVALUATION:
            self._end_evaluated(event.replica, event.trajectory, event.attempt)
            return
        sample = self.current(event.trajectory, event.attempt)
        if sample is None:
            self.ignored = True
            return
        self._release(event.trajectory, sample, "failed")
        self.failures += 1
        self.failed_samples += sample.failures + 1 >= self.max_failures

    def _parked(self, event: Parked) -> None:
        self.moved += self._given_back(event, "parked")

    def _handed_in(self, event: HandedIn) -> None:
        self._stranger_with(event.replica).handed_in += self._given_back(event, "handed_in")

    def _given_back(self, event: Parked | HandedIn, state: str) -> int:
        """How many of these samples the replica had; it has them no longer."""
        known = [(meta, self.current(meta.id, meta.attempt)) for meta in event.samples]
        held = [(meta, sample) for meta, sample in known if sample is not None and sample.replica == event.replica]
        for meta, sample in held:
            self._release(meta.id, sample, state)
            sample.tokens, sample.oldest = meta.tokens, meta.oldest
        return len(held)

    def _stranger_with(self, replica: ReplicaId) -> StrangerRecord:
        found = [one for one in self.strangers.values() if replica in one.replicas]
        return found[0] if found else StrangerRecord()

    def _cancel(self, command: Cancel) -> None:
        for one in command.samples:
            self.replica(command.replica).evaluating.pop(one.trajectory, None)
            sample = self.current(one.trajectory, one.attempt)
            if sample is not None:
                self._release(one.trajectory, sample, "cancelled")

    # ----------------------------------------------------------------------------------------------------- replicas

    def _replica_joined(self, event: ReplicaJoined) -> None:
        record = self.replica(event.replica)
        if event.incarnation <= record.incarnation:
            self.ignored = True
            return
        record.incarnation, record.host, record.version = event.incarnation, event.host, event.version
        self._keep_only(event.replica, {one.trajectory for one in event.held})

    def _replica_lost(self, event: ReplicaLost) -> None:
        if event.incarnation == self.replica(event.replica).incarnation:
            self._keep_only(event.replica, ())
        else:
            self.ignored = True

    def _give_up(self, command: GiveUp) -> None:
        """Control counts it as lost from here on, whatever it may still report."""
        if command.role == "replica":
            self._keep_only(command.id, ())
        elif command.role == "trainer":
            self.training = None

    def _host_joined(self, event: HostJoined) -> None:
        if event.worker:
            self.strangers.setdefault(event.worker, StrangerRecord()).replicas += event.replicas

    def _dismiss(self, command: Dismiss) -> None:
        stranger = self.strangers.setdefault(command.worker, StrangerRecord())
        stranger.excluded = command.reason
        for id in stranger.replicas:
            self._keep_only(id, ())

    def _host_left(self, event: HostLeft) -> None:
        for id, record in self.replicas.items():
            if record.host == event.host:
                self._keep_only(id, ())

    def _keep_only(self, replica: ReplicaId, kept: set[TrajectoryId] | tuple[()]) -> None:
        record = self.replica(replica)
        for id in [id for id in record.assigned if id not in kept]:
            self._release(id, self.samples[id], "lost")
        record.evaluating = {id: attempt for id, attempt in record.evaluating.items() if id in kept}

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        record = self.replica(event.replica)
        if event.incarnation == record.incarnation:
            record.version = event.version
        else:
            self.ignored = True

    def _version_stored(self, event: VersionStored) -> None:
        self.version = max(self.version, event.version)

    # ----------------------------------------------------------------------------------------------------- training

    def is_pending(self, command: Train) -> bool:
        return self._trained_steps.is_pending(command)

    def answers(self, event: Trained) -> bool:
        order = self.training
        asked = (order.incarnation, order.step, order.mini_batch) if order is not None else None
        return asked == (event.incarnation, event.step, event.mini_batch)

    def _train(self, command: Train) -> None:
        self.training = command
        if not self._trained_steps.is_repeated(command):
            self._trained_steps.give(command, self._totals(command))

    def _totals(self, command: Train) -> BatchTotals:
        self._savings.left_out += sum([self._finished_of(one.group) - len(one.trajectories) for one in command.groups])
        samples = [self.samples.get(id) for group in command.groups for id in group.trajectories]
        known = [sample for sample in samples if sample is not None]  # not all, if this fold began after the run did
        useful = sum([self._is_useful(one.trajectories) for one in command.groups])
        if not self.keep_trained:
            for group in command.groups:
                self._remove(group.trajectories)
        return totals(len(command.groups), useful, command.step, known)

    def _is_useful(self, trajectories: Sequence[TrajectoryId]) -> bool:
        found = [self.samples[id].reward for id in trajectories if id in self.samples]
        rewards = [reward for reward in found if reward is not None]
        return bool(rewards) and not self.rules.same(rewards)

    def _finished_of(self, group: GroupId) -> int:
        return sum(sample.state == "finished" for sample in self.members(group))

    def _trained(self, event: Trained) -> None:
        order = self.training
        if order is None or not self.answers(event):
            self.ignored = True
            return
        self.training = None
        self._complete((event.step, event.mini_batch))
        if order.last:
            self._trained_steps.end_step(event.step, self._now)

    def _trainer_joined(self, event: TrainerJoined) -> None:
        """What is in its weights counts as trained, though the report was lost."""
        if event.incarnation <= self.trainer_incarnation:
            self.ignored = True
            return
        self.trainer_incarnation = event.incarnation
        self.training = None
        for id in self._trained_steps.given_before((event.step, event.mini_batch)):
            self._complete(id)
        if event.step > 0:
            self._trained_steps.end_step(event.step - 1, self._now)

    def _trainer_lost(self, event: TrainerLost) -> None:
        if event.incarnation == self.trainer_incarnation:
            self.training = None
        else:
            self.ignored = True

    def _complete(self, id: MiniBatchId) -> None:
        given = self._trained_steps.complete(id)
        if given is None:
            return
        command, batch = given
        self.groups_ended["trained"] += batch.groups
        if self.keep_trained:
            self._mark_trained(command)

    def _mark_trained(self, command: Train) -> None:
        for group in command.groups:
            for id in group.trajectories:
                if id in self.samples:
                    self.samples[id].state = "trained"

    def _forget(self, command: Forget) -> None:
        if command.reason == "evaluated":
            return
        self._remove(command.trajectories)
        if command.trajectories:  # its group may have gone before any sample of it was given to a replica
            self._note_started(max(command.trajectories) // self.group_size)
        if command.reason == "lost":
            self.groups_ended["trained"] -= 1
        elif command.reason == "stopped":
            self._savings.unstarted += self.group_size - len(command.trajectories)
        if command.reason not in ("trained", "regenerate"):  # counted when it was trained; still in flight
            self.groups_ended[command.reason] += 1

    def _stop(self, command: Stop) -> None:
        """Control ignores whatever comes after it, unless the run goes on."""
        self._stopped = True

    def _remove(self, ids: Sequence[TrajectoryId]) -> None:
        for id in ids:
            sample = self.samples.pop(id, None)
            if sample is not None:
                self._release(id, sample, "cancelled")


def _assigned(request: Request, replica: ReplicaId, version: Version, before: SampleRecord | None) -> SampleRecord:
    """A sample as it is given to a replica: it keeps the prefix that it goes on from."""
    tokens, oldest = (before.tokens, before.oldest) if before is not None and request.resume else (0, version)
    return SampleRecord(
        request.group,
        request.prompt,
        request.attempt,
        replica,
        request.prompt_tokens,
        request.failures,
        tokens=tokens,
        oldest=oldest,
    )
