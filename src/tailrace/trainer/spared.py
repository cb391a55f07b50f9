"""Which checkpoints are not pruned because of evaluations: the best ones, and those that may still become one.

A checkpoint is written at every step that is evaluated, and its evaluation ends later. Until then, and while nothing
has been heard of evaluations, as after a restart, it is kept.
"""

from __future__ import annotations

from typing import NamedTuple


class SparedSteps(NamedTuple):
    every: int = 0  # steps between two evaluations; 0: none is spared
    best: tuple[int, ...] = ()
    judged: int = -1  # the newest that was evaluated

    def judge(self, best: tuple[int, ...], judged: int) -> SparedSteps:
        return SparedSteps(self.every, best, judged)

    def is_candidate(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def spares(self, step: int) -> bool:
        return step in self.best or (self.is_candidate(step) and step > self.judged)


NONE_SPARED = SparedSteps()
