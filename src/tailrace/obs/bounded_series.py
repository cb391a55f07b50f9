"""A curve that grows for as long as a run does, in a bounded number of points."""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar


class JoinedPoint(Protocol):
    """A point that its later neighbour can be made a part of."""

    def add(self, other: Self, /) -> None: ...


P = TypeVar("P", bound=JoinedPoint)


class BoundedSeries(Generic[P]):
    """Points in the order in which they come; when there are too many, pairs become one."""

    def __init__(self, most: int) -> None:
        self.points: list[P] = []
        self._most = most
        self._width = 1  # that have come, for each point
        self._in_last = 0

    def add(self, point: P) -> None:
        if self.points and self._in_last < self._width:
            self.points[-1].add(point)
            self._in_last += 1
            return
        self.points.append(point)
        self._in_last = 1
        if len(self.points) > self._most:
            self._join_pairs()

    def _join_pairs(self) -> None:
        pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
        self._in_last += self._width if len(pairs[-1]) == 2 else 0
        self._width *= 2
        for first, *second in pairs:
            for point in second:
                first.add(point)
        self.points = [pair[0] for pair in pairs]
