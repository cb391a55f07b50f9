"""Why replicas and the trainer were idle: seconds by cause.

Where several causes hold at once, the first in this order counts.

    replica  weights     a newer version was made and is on its way to the relays
             barrier     the schedule works in rounds, and others still generate in this one
             trainer     nothing may start before the trainer has finished a step
             admission   the bounds on staleness and on what is under way let nothing start
    trainer  generation  samples are being generated
             judging     all that is left is with judges or environments
             weights     replicas pull weights
             nothing     no replica has work
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tailrace.obs.fold import Fold

ROUNDS = ("sync", "one_step", "stream")


class _Lane(Protocol):
    state: str


class _Activity(Protocol):
    """What `activity.Activity` has of this."""

    @property
    def fold(self) -> Fold: ...
    @property
    def trainer(self) -> _Lane: ...


class IdleCauses:
    def __init__(self) -> None:
        self.rounds = False  # the schedule has a barrier
        self.replicas: defaultdict[str, float] = defaultdict(float)
        self.trainer: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()  # replicas by state
        self._since = 0.0
        self._causes: tuple[str, str] | None = None  # of replicas and trainer, since then; None: nobody is idle

    def change(self, before: str, after: str) -> None:
        """A replica's state."""
        self._counts[before] -= 1
        self._counts[after] += 1

    def advance(self, now: float) -> None:
        """The time since the last event belongs to what held after that one."""
        seconds, self._since = now - self._since, now
        if self._causes is None:
            return
        of_replicas, of_trainer = self._causes
        if of_replicas:
            self.replicas[of_replicas] += seconds * self._counts["idle"]
        if of_trainer:
            self.trainer[of_trainer] += seconds

    def settle(self, activity: _Activity) -> None:
        """After an event."""
        of_replicas = self._of_replicas(activity) if self._counts["idle"] > 0 else ""
        of_trainer = self._of_trainer() if activity.trainer.state == "idle" else ""
        self._causes = (of_replicas, of_trainer) if of_replicas or of_trainer else None

    def shares(self) -> dict[str, dict[str, float]]:
        """By who was idle: the share of each cause in that time."""
        found = {"replicas": self.replicas, "trainer": self.trainer}
        totals = {who: sum(causes.values()) for who, causes in found.items()}
        return {
            who: {cause: spent / totals[who] for cause, spent in causes.items() if spent > 0}
            for who, causes in found.items()
            if totals[who] > 0
        }

    def _of_replicas(self, activity: _Activity) -> str:
        if len(activity.fold.steps) > max(0, activity.fold.version):
            return "weights"
        if self.rounds and self._counts["generating"] > 0:
            return "barrier"
        if activity.trainer.state == "training" and not self._counts["generating"]:
            return "trainer"
        return "admission"

    def _of_trainer(self) -> str:
        if self._counts["generating"] > 0:
            return "generation"
        if self._counts["scoring"] + self._counts["environment"] > 0:
            return "judging"
        return "weights" if self._counts["pulling"] > 0 else "nothing"
