"""Virtual time: a queue of actions, in order of time and then of scheduling, so that every run is repeatable."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._queue, (time if time > self.now else self.now, self._count, action, arguments))

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._queue, (self.now + max(delay, 0.0), self._count, action, arguments))

    def step(self) -> bool:
        """Run the next action; False when there is none left."""
        if not self._queue:
            return False
        self.now, _, action, arguments = heappop(self._queue)
        action(*arguments)
        return True
