"""The trainer as control sees it: which step and mini-batch it is at, and what it must repeat after a restart.

    trainer:  lost -> idle <-> training

A step is `mini_batches` mini-batches; its last mini-batch makes the next version. What each mini-batch was trained on
is remembered until two checkpoints cover it, so that a trainer that comes back from an older checkpoint, also because
the newest one is damaged, repeats exactly the same mini-batches: versions never go back, and in the history that
survives every group is trained once.
"""

from __future__ import annotations

import msgspec

from tailrace.protocol import Train, TrainGroup
from tailrace.types import GroupId, Prompt, TrajectoryId, Version


class PickedGroup(msgspec.Struct):
    """What would be needed if the group could not be trained after all, and the payloads to free once it is durable."""

    prompt: Prompt
    samples: list[TrajectoryId]  # also those that failed


class PastStep(msgspec.Struct):
    """The mini-batches of a step that is trained or under way."""

    mini_batches: list[tuple[TrainGroup, ...]] = []
    picked: dict[GroupId, PickedGroup] = {}


class Training(msgspec.Struct):
    incarnation: int = 0
    live: bool = False
    busy: bool = False  # a Train command is unanswered
    step: int = 0  # the step that the trainer is at; behind `version` while it repeats
    mini_batch: int = 0  # the mini-batch of that step to train next, or being trained
    version: Version = 0  # complete steps in the surviving history
    made_at: float = 0.0  # when that was
    pace_s: float = 0.0  # between the last two versions
    ordered_at: float = 0.0  # when the unanswered Train command was given
    spent_s: float = 0.0  # on the mini-batches of the present step so far
    train_s: float = 0.0  # on those of the last step
    taken: int = 0  # groups picked for step `version` so far
    saved: int = 0  # steps that the newest checkpoint covers
    durable: int = 0  # steps that the one before it covers too
    past: dict[int, PastStep] = {}
    last_seen: float = 0.0
    restarts: int = 0
    restart_at: float = 0.0
    reason: str = ""

    def join(self, now: float, incarnation: int, step: int, mini_batch: int) -> None:
        self.incarnation = incarnation
        self.live = True
        self.busy = False
        self.step = step
        self.mini_batch = mini_batch
        self.saved = min(self.saved, step)  # if it comes from an older one, the newest was of no use
        self.last_seen = now
        self.reason = ""

    @property
    def waits(self) -> float:
        """Share of the last step in which it had nothing to train on."""
        return max(0.0, 1.0 - self.train_s / self.pace_s) if self.pace_s else 1.0

    @property
    def picked(self) -> tuple[TrainGroup, ...]:
        """What is known of the mini-batch to train next: all of it, if it is a repetition and nothing was lost."""
        past = self.past.get(self.step)
        return (
            past.mini_batches[self.mini_batch] if past is not None and self.mini_batch < len(past.mini_batches) else ()
        )

    def all_picked(self) -> set[TrajectoryId]:
        """All that was trained on or is to be, and may have to be trained on again."""
        return {
            id
            for past in self.past.values()
            for mini_batch in past.mini_batches
            for group in mini_batch
            for id in group.trajectories
        }

    def awaits(self, incarnation: int, step: int, mini_batch: int) -> bool:
        """Whether this is the answer to the unanswered order."""
        return self.busy and (incarnation, step, mini_batch) == (self.incarnation, self.step, self.mini_batch)

    def add(self, groups: tuple[TrainGroup, ...], picked: dict[GroupId, PickedGroup]) -> None:
        """Freshly picked groups for the mini-batch to train next."""
        past = self.past.setdefault(self.step, PastStep())
        past.picked |= picked
        past.mini_batches[self.mini_batch :] = [(*self.picked, *groups), *past.mini_batches[self.mini_batch + 1 :]]
        self.taken += len(groups) if self.step == self.version else 0

    def remove(self, group: TrainGroup) -> PickedGroup:
        """It cannot be trained on any more: another one has to take its place in the mini-batch to train next."""
        past = self.past[self.step]
        past.mini_batches[self.mini_batch] = tuple([one for one in self.picked if one is not group])
        self.taken -= self.step == self.version
        return past.picked.pop(group.group)

    def order(self, now: float, mini_batches_per_step: int) -> Train:
        self.busy, self.ordered_at = True, now
        return Train(
            self.incarnation, self.step, self.mini_batch, self.mini_batch + 1 == mini_batches_per_step, self.picked
        )

    def advance(self, now: float, mini_batches_per_step: int) -> bool:
        """The current mini-batch is trained; True if that completed a step for the first time."""
        self.spent_s += now - self.ordered_at if self.busy else 0.0
        self.busy = False
        self.mini_batch += 1
        if self.mini_batch < mini_batches_per_step:
            return False
        self.step += 1
        self.mini_batch = 0
        if self.step <= self.version:
            return False
        self.version = self.step
        self.pace_s, self.made_at = now - self.made_at, now
        self.train_s, self.spent_s = self.spent_s, 0.0
        self.taken = 0
        return True

    def checkpointed(self, step: int) -> list[TrajectoryId]:
        """Steps before the checkpoint before this one need never be repeated; returns the trajectories to forget."""
        freed: list[TrajectoryId] = []
        previous, self.saved = (self.saved, step) if step > self.saved else (self.durable, self.saved)
        while self.durable < previous:
            past = self.past.pop(self.durable, None)
            freed += [id for one in past.picked.values() for id in one.samples] if past else []
            self.durable += 1
        return freed
