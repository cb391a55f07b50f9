"""How often strangers may speak: what they say goes to the journal, which must not be filled by it."""

from __future__ import annotations

RATE = 100.0  # messages a second, in the long run
BURST = 2000  # at once: after a cut all that was made meanwhile


class Allowance:
    """`spend` one for every message of a component, by its name."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # messages, and when that was so

    def spend(self, name: str, now: float) -> bool:
        """False: it has none left."""
        left, at = self._left.get(name, (float(BURST), now))
        left = min(float(BURST), left + RATE * (now - at)) - 1.0
        self._left[name] = (left, now)
        return left >= 0.0
