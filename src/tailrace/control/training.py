"""The trainer as control sees it: which step and part it is at, and what it must repeat after a restart.

    trainer:  lost -> idle <-> training

A step is `mini_batches` parts; its last part makes the next version. What each part was trained on is remembered until
two checkpoints cover it, so that a trainer that comes back from an older checkpoint, also because the newest one is
damaged, repeats exactly the same parts: versions never go back, and in the history that survives every group is trained
once.
"""

from __future__ import annotations

import msgspec

from tailrace.protocol import Train, TrainGroup
from tailrace.types import TrajectoryId, Version


class PastStep(msgspec.Struct):
    """The parts of a step that is trained or under way, and the payloads that can be freed once it is durable."""

    parts: list[tuple[TrainGroup, ...]] = []
    trajectories: list[TrajectoryId] = []


class Training(msgspec.Struct):
    incarnation: int = 0
    live: bool = False
    busy: bool = False  # a Train command is unanswered
    step: int = 0  # the step that the trainer is at; behind `version` while it repeats
    part: int = 0  # the part of that step to train next, or being trained
    version: Version = 0  # complete steps in the surviving history
    made_at: float = 0.0  # when that was
    pace_s: float = 0.0  # between the last two versions
    taken: int = 0  # groups picked for step `version` so far
    saved: int = 0  # steps that the newest checkpoint covers
    durable: int = 0  # steps that the one before it covers too
    past: dict[int, PastStep] = {}
    last_seen: float = 0.0
    restarts: int = 0
    restart_at: float = 0.0
    reason: str = ""

    def join(self, now: float, incarnation: int, step: int, part: int) -> None:
        self.incarnation = incarnation
        self.live = True
        self.busy = False
        self.step = step
        self.part = part
        self.saved = min(self.saved, step)  # if it comes from an older one, the newest was of no use
        self.last_seen = now
        self.reason = ""

    def awaits(self, incarnation: int, step: int, part: int) -> bool:
        """Whether this is the answer to the unanswered order."""
        return self.busy and (incarnation, step, part) == (self.incarnation, self.step, self.part)

    @property
    def repeating(self) -> bool:
        """The part to train next has been picked before."""
        past = self.past.get(self.step)
        return past is not None and self.part < len(past.parts)

    def repeat(self, parts_per_step: int) -> Train:
        return self._command(self.past[self.step].parts[self.part], parts_per_step)

    def begin(self, groups: tuple[TrainGroup, ...], trajectories: list[TrajectoryId], parts_per_step: int) -> Train:
        """Train the next part of the newest step on freshly picked groups."""
        past = self.past.setdefault(self.step, PastStep())
        past.parts.append(groups)
        past.trajectories.extend(trajectories)
        self.taken += len(groups)
        return self._command(groups, parts_per_step)

    def _command(self, groups: tuple[TrainGroup, ...], parts_per_step: int) -> Train:
        self.busy = True
        return Train(self.incarnation, self.step, self.part, self.part + 1 == parts_per_step, groups)

    def advance(self, now: float, parts_per_step: int) -> bool:
        """The current part is trained; True if that completed a step for the first time."""
        self.busy = False
        self.part += 1
        if self.part < parts_per_step:
            return False
        self.step += 1
        self.part = 0
        if self.step <= self.version:
            return False
        self.version = self.step
        self.pace_s, self.made_at = now - self.made_at, now
        self.taken = 0
        return True

    def checkpointed(self, step: int) -> list[TrajectoryId]:
        """Steps before the checkpoint before this one need never be repeated; returns the trajectories to forget."""
        freed: list[TrajectoryId] = []
        previous, self.saved = (self.saved, step) if step > self.saved else (self.durable, self.saved)
        while self.durable < previous:
            past = self.past.pop(self.durable, None)
            freed += past.trajectories if past else []
            self.durable += 1
        return freed
