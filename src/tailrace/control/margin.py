"""How much more generation is asked for than the trainer takes: more after it had to wait, less while it does not."""

from __future__ import annotations

import msgspec

LEAST, MOST = 1.05, 4.0  # times what the trainer takes
WAITED = 0.05  # share of a step that it may wait
CALM = 0.99  # of the margin is left after a step in which it did not
SETTLED = 3  # steps until a change shows


class Margin(msgspec.Struct):
    """How much more than the trainer takes is asked for."""

    value: float = LEAST
    settled_at: int = 0  # the step from which on the last raise shows

    def step_made(self, step: int, waited: float) -> None:
        """The trainer had nothing to do for this share of it."""
        if waited <= WAITED:
            self.value = max(LEAST, CALM * self.value)
        elif step >= self.settled_at:
            self.value = min(MOST, self.value * (1.0 + waited))
            self.settled_at = step + SETTLED
