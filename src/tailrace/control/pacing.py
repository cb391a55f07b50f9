"""How much is kept under way: no more than the trainer needs.

Admission bounds what may be started ahead of the trainer. Where the trainer is the limit, filling that bound only lets
finished groups grow stale in the buffer. So the limit is lowered while every pick of the last steps left groups over
in the buffer, and raised when the trainer had to wait. A change shows only once what was under way before it is
trained: so many steps are looked back on, a lowering is small against what it answers to, and a raise is given that
time before the next one.
"""

from __future__ import annotations

import msgspec

RESERVE = 2  # mini-batches that are left in the buffer on purpose
FEWEST = 4  # steps that are looked back on at least
RECENT = 0.25  # weight of the newest step in what is known of late groups


class Pacing(msgspec.Struct):
    limit: float = 0.0  # groups under way; 0: what admission allows
    spare: int | None = None  # fewest groups that a pick of this step left in the buffer
    starved: bool = False  # the trainer had to wait in this step
    spares: list[int] = []  # the same of the last steps; 0 where it had to wait
    settled_at: int = 0  # the step from which on the last raise shows
    late: float = 0.0  # share of the groups that were dropped for their age, of late
    dropped: int = 0  # of all steps so far

    def picked(self, left: int) -> None:
        self.spare = left if self.spare is None else min(self.spare, left)

    def note_dropped(self, dropped: int, per_step: int) -> None:
        """So many in all, after another step."""
        new = dropped - self.dropped
        self.late += RECENT * (new / (new + per_step) - self.late)
        self.dropped = dropped

    def step_made(self, step: int, most: int, per_step: int, per_mini_batch: int) -> None:
        """Correct the limit by what this step showed."""
        limit, under_way = self.limit or most, 1.0 + (self.limit or most) / per_step
        self.spares.append(0 if self.starved else self.spare or 0)
        del self.spares[: -max(FEWEST, round(under_way) + 1)]
        if self.starved and step >= self.settled_at:
            limit += max(per_step / 2, limit / 4)
            self.settled_at = step + round(under_way)
        elif len(self.spares) >= FEWEST:
            limit -= max(0, min(self.spares) - RESERVE * per_mini_batch) / under_way
        self.limit = min(float(most), max(float(per_step), limit))
        self.spare, self.starved = None, False
