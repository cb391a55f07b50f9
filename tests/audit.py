"""The promises of the control plane, checked from outside: by the events that go in and the commands that come out."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.control.sampling import mini_batch_sizes
from tailrace.protocol import (
    Activate,
    Command,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    GiveUp,
    HostJoined,
    HostLeft,
    LoadWeights,
    Parked,
    PromptsAdded,
    Publish,
    ReplicaJoined,
    ReplicaLost,
    SampleFailed,
    ScoringStarted,
    SkipPrompts,
    Train,
    Trained,
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
        self.judged: set[int] = set()  # trajectories that judges have there
        self.guests: dict[int, tuple[int, ...]] = {}  # replicas of a host that joined
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

    def listen(self, now: float, event: Event, commands: list[Command]) -> None:
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
        elif isinstance(event, ReplicaLost | ReplicaJoined):
            self._empties(event.replica)
        elif isinstance(event, HostJoined):
            self.guests[event.host] = event.replicas
        elif isinstance(event, HostLeft):
            for replica in self.guests.get(event.host, ()):
                self._empties(replica)
        elif isinstance(event, ScoringStarted):
            self._judged(event)
        elif isinstance(event, GenerationResumed):
            self.judged -= {one.trajectory for one in event.samples}
        elif isinstance(event, Trained) and (event.step, event.mini_batch) > self.trained_until:
            self.trained_until = (event.step, event.mini_batch)
            self.progress_at = now
        for command in commands:
            self._order(command)

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
        if isinstance(command, Generate | LoadWeights):
            assert (command.replica, command.incarnation) not in self.at_home, "who was sent home gets nothing"
        if isinstance(command, Generate):
            for request in command.requests:
                assert request.prompt not in self.skipped, "what is skipped is not generated"
                assert request.attempt > self.attempt.get(request.trajectory, 0), "attempts only grow"
                assert request.trajectory not in self.forgotten, "what is forgotten does not start again"
                assert request.trajectory not in self.judged, "what a judge has is given to nobody else"
                assert not (request.resume and request.trajectory in self.lost), "nothing is left to resume from"
                self.lost.discard(request.trajectory)
                self.place[request.trajectory] = command.replica
                self.attempt[request.trajectory] = request.attempt
                self.prompt_of[request.group] = request.prompt
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
            assert command.version >= self.published, "published versions never go back"
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
