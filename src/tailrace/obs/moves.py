"""Samples that repack moved: when, from which replica to which, and how many at once.

A sample is released by one replica (`Parked`) and goes on at another (`Generate` with `resume`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.protocol import Command, Event, Forget, Generate, Parked
from tailrace.types import ReplicaId, TrajectoryId

KEPT = 20_000  # moves, the newest


class RepackMove(NamedTuple):
    left: float
    arrived: float
    source: ReplicaId
    target: ReplicaId
    samples: int


class Moves:
    def __init__(self) -> None:
        self.all: deque[RepackMove] = deque(maxlen=KEPT)
        self._parked: dict[TrajectoryId, tuple[float, ReplicaId]] = {}

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, Parked):
            self._parked |= {meta.id: (now, event.replica) for meta in event.samples}
        if self._parked:
            for command in commands:
                self._command(now, command)

    def _command(self, now: float, command: Command) -> None:
        if isinstance(command, Forget):
            for id in command.trajectories:
                self._parked.pop(id, None)
        elif isinstance(command, Generate):
            left = [self._parked.pop(one.trajectory) for one in command.requests if one.trajectory in self._parked]
            for (at, source), count in Counter(left).items():
                if source != command.replica:
                    self.all.append(RepackMove(at, now, source, command.replica, count))

    def between(self, begin: float, end: float, most: int) -> list[RepackMove]:
        """Those that touch this window, the largest if they are too many."""
        found = [move for move in self.all if move.left <= end and move.arrived >= begin]
        return sorted(sorted(found, key=lambda move: -move.samples)[:most])
