"""How much strangers may say: it takes the controller's time and goes to the journal, which nobody must fill."""

from __future__ import annotations

import msgspec

from tailrace.wire.messages import FromComponent, Garbled, Reported

RATE = 100.0  # messages a second, in the long run
BURST = 2000  # at once: after a cut all that was made meanwhile
PER_SAMPLE = 4  # more for each sample that it is given: a fast replica has more to say
REMEMBERED = 4096  # names; a stranger may call its machines anything


class Allowance:
    """`spend` for every message of a component or machine, by its name; `give` for the samples that it is given."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # messages, and when that was so

    def spend(self, name: str, now: float, messages: int = 1) -> bool:
        """False: it has none left."""
        left = self._at(name, now) - messages
        self._left[name] = (left, now)
        if len(self._left) > REMEMBERED:
            self._left = {one: known for one, known in self._left.items() if self._at(one, now) != BURST}
        return left >= 0.0

    def give(self, name: str, now: float, samples: int) -> None:
        self._left[name] = (self._at(name, now) + PER_SAMPLE * samples, now)

    def _at(self, name: str, now: float) -> float:
        left, at = self._left.get(name, (float(BURST), now))
        return max(left, min(float(BURST), left + RATE * (now - at)))


def messages_in(message: FromComponent | Garbled) -> int:
    """As how many it counts: whoever says much at once takes as much time as with many messages."""
    if not isinstance(message, Reported):
        return 1
    return max(1, sum([len(value) for value in msgspec.structs.astuple(message.event) if isinstance(value, tuple)]))
