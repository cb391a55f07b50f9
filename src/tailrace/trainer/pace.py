"""When a checkpoint is due where `trainer.checkpoint_every` is 0: seldom enough to cost little, often enough to lose
little.

A checkpoint may take a share of the time (`SHARE`) and of the disk's attention (`BYTES_PER_S`), and training that a
restart would repeat may not grow beyond `LONGEST_S`, nor what is kept for that beyond the size of a checkpoint. A model
of a few megabytes is saved after nearly every step, one of 7B parameters every half hour. The worker and the simulator
ask the same object, each with its own clock.
"""

from __future__ import annotations

from math import lcm

BYTES_PER_PARAMETER = 12  # weights and two moments, in float32
SHARE = 0.05  # of the time that writing may take
BYTES_PER_S = 10e6  # written on average
LONGEST_S = 1800.0  # between two checkpoints, if writing them is quick enough
BYTES_PER_TOKEN = 8  # of run.db, until a checkpoint covers it
MOST_TRAJECTORIES = 100_000  # that the controller has to remember


def interval_s(size: float) -> float:
    """The least time between two checkpoints of so many bytes, by their size alone."""
    return min(size / BYTES_PER_S, LONGEST_S)


class CheckpointPace:
    def __init__(self, every: int, publish_every: int, size: float, now: float) -> None:
        self._published = publish_every
        self._every = lcm(every or 1, publish_every)
        self._automatic = not every
        self._size = size
        self._since = now
        self._seconds = 0.0  # that the last one took
        self._trajectories = 0
        self._tokens = 0

    def trained(self, trajectories: int, tokens: int) -> None:
        """So much more would have to be repeated."""
        self._trajectories += trajectories
        self._tokens += tokens

    def saved(self, now: float, seconds: float) -> None:
        self._since, self._seconds = now, seconds
        self._trajectories = self._tokens = 0

    def may_save(self, step: int) -> bool:
        """A restored trainer must be able to publish what control asks for, so only such versions are saved."""
        return step % self._published == 0

    def is_due(self, step: int, now: float) -> bool:
        return step % self._every == 0 and (not self._automatic or self._is_worth_it(now - self._since))

    def _is_worth_it(self, seconds: float) -> bool:
        kept = self._tokens * BYTES_PER_TOKEN >= self._size or self._trajectories >= MOST_TRAJECTORIES
        return seconds >= self._seconds / SHARE and (kept or seconds >= interval_s(self._size))
