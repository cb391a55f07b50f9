"""The promises of the control plane, checked from outside: by the events that go in and the commands that come out."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.control.sampling import mini_batch_sizes
from tailrace.protocol import (
    Activate,
    Cancel,
    Command,
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
    LoadWeights,
    Parked,
    PromptsAdded,
    Publish,
    RecordEvaluation,
    ReplicaJoined,
    ReplicaLost,
    SampleFailed,
    ScoringStarted,
    SkipPrompts,
    Train,
    Trained,
    TrainerJoined,
)


class Audit:
    """The promises, kept by listening alone."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.received: dict[int, None] = {}
        self.prompt_of: dict[int, int] = {}  # of a group
        self.attempt: dict[int, int] = {}  # newest assignment of a trajectory
        self.oldest: dict[tuple[int, int], int] = {}  # as reported for a trajectory under an attempt
        self.place: dict[int, int] = {}  # the replica that has a trajectory, as far as is known
        self.given_to: dict[int, int] = {}  # the replica that was last told to generate a trajectory
        self.judged: set[int] = set()  # trajectories that judges have there
        self.guests: dict[int, tuple[int, ...]] = {}  # replicas of a host that joined
        self.strangers: dict[str, set[int]] = {}  # the replicas of each
        self.made_by: dict[int, int] = {}  # the stranger's replica that has handed a trajectory in
        self.excluded: set[int] = set()  # replicas of strangers that were sent away
        self.failures: Counter[int] = Counter()
        self.mini_batches: dict[tuple[int, int], Train] = {}  # first order to train (step, mini-batch)
        self.step_of: dict[int, int] = {}  # of a group, once it is trained on
        self.forgotten: set[int] = set()
        self.skipped: set[int] = set()  # prompts
        self.lost: set[int] = set()  # payloads that went with their store; the sample may be generated anew
        self.at_home: set[tuple[int, int]] = set()  # replicas that were sent there, with their incarnations
        self.sent_home = 0
        self.published = -1
        self.trained_until = (-1, -1)
        self.progress_at = 0.0
        self.evaluated: dict[int, Evaluate] = {}  # the order that each sample of an evaluation was last given with
        self.evaluations: dict[tuple[int, int], int] = {}  # version that a sample was given out for, under an attempt
        self.verdicts: dict[int, set[int]] = {}  # samples that have ended, by the version that they are wholly of
        self.recorded: list[RecordEvaluation] = []

    def listen(self, now: float, event: Event, commands: list[Command]) -> None:
        self._hear_evaluation(event)
        if isinstance(event, PromptsAdded) and event.start == len(self.received):
            self.received.update({prompt.id: None for prompt in event.prompts})
        elif isinstance(event, Finished):
            if event.meta.attempt == self.attempt.get(event.meta.id):
                self.oldest.setdefault((event.meta.id, event.meta.attempt), event.meta.oldest)
                self._leaves(event.meta.id)
        elif isinstance(event, SampleFailed):
            self.failures[event.trajectory] += 1
            if event.attempt == self.attempt.get(event.trajectory):
                self._leaves(event.trajectory)
        elif isinstance(event, Parked):
            for meta in event.samples:
                self._leaves(meta.id)
        elif isinstance(event, HandedIn):
            self._handed_in(event)
        elif isinstance(event, ReplicaLost | ReplicaJoined):
            self._empties(event.replica)
        elif isinstance(event, HostJoined):
            self.guests[event.host] = event.replicas
            self.strangers.setdefault(event.worker, set()).update(event.replicas if event.worker else ())
        elif isinstance(event, HostLeft):
            for replica in self.guests.get(event.host, ()):
                self._empties(replica)
        elif isinstance(event, ScoringStarted):
            self._judged(event)
        elif isinstance(event, GenerationResumed):
            self.judged -= {one.trajectory for one in event.samples}
        elif isinstance(event, TrainerJoined):
            self.published = min(self.published, event.step)  # if need be, it publishes again what it has
        elif isinstance(event, Trained) and (event.step, event.mini_batch) > self.trained_until:
            self.trained_until = (event.step, event.mini_batch)
            self.progress_at = now
        for command in commands:
            self._order(command)

    def _handed_in(self, event: HandedIn) -> None:
        for meta in event.samples:
            given = self.given_to.get(meta.id) == event.replica and meta.attempt == self.attempt[meta.id]
            if given and any(event.replica in replicas for replicas in self.strangers.values()):
                self._leaves(meta.id)
                self.made_by[meta.id] = event.replica

    def _hear_evaluation(self, event: Event) -> None:
        """Whoever is lost, or joins anew, may have lost what it had: its order is not taken as one that still holds."""
        if isinstance(event, Finished):
            meta = event.meta
            version = self.evaluations.get((meta.id, meta.attempt))
            if version is not None and meta.oldest == meta.newest == version:
                self.verdicts.setdefault(version, set()).add(meta.id)
                self.evaluated.pop(meta.id, None)
        elif isinstance(event, SampleFailed):
            self.evaluated.pop(event.trajectory, None)
        elif isinstance(event, ReplicaLost | ReplicaJoined):
            self._evaluates_nothing(event.replica)
        elif isinstance(event, HostLeft):
            for replica in self.guests.get(event.host, ()):
                self._evaluates_nothing(replica)

    def _evaluates_nothing(self, replica: int) -> None:
        self.evaluated = {id: order for id, order in self.evaluated.items() if order.replica != replica}

    def _order_evaluation(self, command: Command) -> None:
        if isinstance(command, Evaluate):
            assert all(one.trajectory not in self.forgotten for one in command.requests), "what has ended has ended"
            assert not any(one.resume for one in command.requests), "a sample of an evaluation begins with its prompt"
            self.evaluated |= {one.trajectory: command for one in command.requests}
            self.evaluations |= {(one.trajectory, one.attempt): command.version for one in command.requests}
        elif isinstance(command, Cancel):
            for one in command.samples:
                self.evaluated.pop(one.trajectory, None)
        elif isinstance(command, GiveUp) and command.role == "replica":
            self._evaluates_nothing(command.id)
        elif isinstance(command, LoadWeights):
            busy = [id for id, order in self.evaluated.items() if order.replica == command.replica]
            assert not busy, "a replica keeps its version while it has samples of an evaluation"
        elif isinstance(command, RecordEvaluation):
            versions = [one.version for one in self.recorded]
            assert command.version > max(versions, default=-1), "a version is evaluated once, and later ones later"
            self.recorded.append(command)
            judged = sum(one.prompts * one.samples - one.failed for one in command.results)
            assert judged <= len(self.verdicts.get(command.version, ())), "every verdict is of that version"

    def _leaves(self, trajectory: int) -> None:
        self.place.pop(trajectory, None)
        self.judged.discard(trajectory)

    def _empties(self, replica: int) -> None:
        for trajectory in [id for id, place in self.place.items() if place == replica]:
            self._leaves(trajectory)

    def _judged(self, event: ScoringStarted) -> None:
        for one in event.samples:
            known = self.place.get(one.trajectory) == event.replica
            if known and self.attempt[one.trajectory] == one.attempt:
                self.judged.add(one.trajectory)

    def _order(self, command: Command) -> None:
        self._order_evaluation(command)
        if isinstance(command, Generate | LoadWeights):
            assert (command.replica, command.incarnation) not in self.at_home, "who was sent home gets nothing"
        if isinstance(command, Generate):
            for request in command.requests:
                assert request.prompt not in self.skipped, "what is skipped is not generated"
                assert request.attempt > self.attempt.get(request.trajectory, 0), "attempts only grow"
                assert request.trajectory not in self.forgotten, "what is forgotten does not start again"
                assert request.trajectory not in self.judged, "what a judge has is given to nobody else"
                assert not (request.resume and request.trajectory in self.lost), "nothing is left to resume from"
                foreign = any(command.replica in replicas for replicas in self.strangers.values())
                assert not (foreign and request.resume), "a stranger sees what nobody else has generated"
                assert command.replica not in self.excluded, "and nothing any more, once it is excluded"
                assert bool(request.check) == (request.trajectory in self.made_by and request.resume), "it is checked"
                if not request.resume:
                    self.made_by.pop(request.trajectory, None)
                self.lost.discard(request.trajectory)
                self.place[request.trajectory] = self.given_to[request.trajectory] = command.replica
                self.attempt[request.trajectory] = request.attempt
                self.prompt_of[request.group] = request.prompt
        elif isinstance(command, Dismiss):
            self.excluded |= self.strangers.get(command.worker, set())
            for replica in self.excluded:
                self._empties(replica)
        elif isinstance(command, Activate):
            who = (command.replica, command.incarnation)
            assert command.active == (who in self.at_home), "who is called back was sent home"
            self.sent_home += not command.active
            self.at_home ^= {who}
        elif isinstance(command, Train):
            self._train(command)
        elif isinstance(command, GiveUp) and command.role == "replica":
            self._empties(command.id)
        elif isinstance(command, Forget):
            assert self.forgotten.isdisjoint(command.trajectories), "a payload is freed once"
            if command.reason == "stopped":
                assert self.place.keys().isdisjoint(command.trajectories), "what was started of it is finished"
            gone = command.reason in ("lost", "regenerate")
            (self.lost if gone else self.forgotten).update(command.trajectories)
            if gone:
                self._drop(set(command.trajectories))
        elif isinstance(command, SkipPrompts):
            assert self.skipped.isdisjoint(command.prompts), "a visit is skipped once"
            self.skipped.update(command.prompts)
        elif isinstance(command, Publish):
            assert command.version >= self.published, "published versions never go back, but with the trainer"
            self.published = command.version

    def _drop(self, lost: set[int]) -> None:
        """What was lost with a store leaves the history, and may be generated and trained again."""
        for trajectory in lost:
            self._leaves(trajectory)
        for at, order in self.mini_batches.items():
            gone = [group for group in order.groups if not lost.isdisjoint(group.trajectories)]
            for group in gone:
                self.step_of.pop(group.group, None)
            self.mini_batches[at] = replace(order, groups=tuple(group for group in order.groups if group not in gone))

    def _train(self, command: Train) -> None:
        at = command.step, command.mini_batch
        first = self.mini_batches.get(at, command)
        if at not in self.mini_batches:
            made = {self.made_by.get(id) for group in command.groups for id in group.trajectories}
            assert made.isdisjoint(self.excluded), "nothing that an excluded stranger made is picked"
        kept = command.groups[: len(first.groups)]
        assert (first.groups, first.last) == (kept, command.last), "a repetition is the same as the first time"
        size = mini_batch_sizes(self.config.workload.prompts_per_step, self.config.trainer.mini_batches)[
            command.mini_batch
        ]
        assert len(command.groups) == size, "what was lost is replaced"
        self.mini_batches[at] = command
        for group in command.groups:
            assert self.step_of.setdefault(group.group, command.step) == command.step, "nothing is trained twice"
            assert len(group.trajectories) >= self.config.groups.min_survivors
            for id in group.trajectories:
                assert id not in self.forgotten | self.lost, "payloads are kept until they are trained on"
                age = command.step - self.oldest[id, self.attempt[id]]
                assert age <= self.config.schedule.max_staleness, f"trajectory {id} is trained {age} versions late"
        trained = [
            group.group for group in command.groups if self.mini_batches[command.step, command.mini_batch] is command
        ]
        assert len(trained) == len(set(trained))

    def finish(self, plane: ControlPlane) -> None:
        """Every prompt and every payload that ever came up is somewhere."""
        ledger, training = plane.state.ledger, plane.state.training
        assert len(self.step_of) == sum(len(one.groups) for one in self.mini_batches.values()), (
            "nothing is trained twice"
        )
        pooled = [prompt.id for prompt in ledger.pool.contents()]
        live = [group.prompt.id for group in ledger.groups.values()]
        trained = [self.prompt_of[group] for group in self.step_of if group not in ledger.groups]
        places = Counter(pooled + live + trained)
        assert max(places.values(), default=1) == 1, "no prompt is in two places"
        assert set(places) <= set(self.received)
        tally, failed = ledger.tally, len(self.received) - len(places) - len(self.skipped)
        assert failed == tally.failed + tally.filtered + tally.stopped, "no prompt is lost"
        assert len(self.skipped) == ledger.skipped
        assert not ledger.tally.failed or self.failures or self.config.groups.deadline_s < 1e9, (
            "nothing fails without a reason"
        )
        assert len(trained) == ledger.tally.trained
        kept = {id for step in training.past.values() for one in step.picked.values() for id in one.samples} | set(
            ledger.samples
        )
        assert set(self.attempt) <= self.forgotten | self.lost | kept, "every payload is freed in the end"
        assert self.forgotten.isdisjoint(kept)
