"""Virtual time: a heap of things to do, in order of time and then of scheduling, so that every run is repeatable."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Kernel:
    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (time if time > self.now else self.now, self._count, action, arguments))

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, action, *arguments)

    def step(self) -> bool:
        """Do the next thing; False when there is nothing left."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heappop(self._heap)
        self.done += 1
        action(*arguments)
        return True
