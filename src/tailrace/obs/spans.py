"""All states of one process over a run, in arrays: 20 bytes for each, and no more than `MOST` of them.

`Lane` keeps what a picture of the whole run needs; this keeps what somebody sees who looks closely. When there are too
many, the shorter ones become one with their neighbours, so that a long run is blurred rather than cut.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

MOST = 4000


class SpanLog:
    def __init__(self, start: float) -> None:
        self.starts = array("d", [start])
        self.states: list[str] = ["starting"]  # names are shared: a pointer for each
        self.versions = array("i", [-1])

    def enter(self, state: str, version: int, now: float) -> None:
        if state == self.states[-1] and version == self.versions[-1]:
            return
        if now <= self.starts[-1]:  # it took no time
            self.states[-1], self.versions[-1] = state, version
            return
        self.starts.append(now)
        self.states.append(state)
        self.versions.append(version)
        if len(self.starts) > MOST:
            self._blur(now)

    def window(self, begin: float, end: float, now: float) -> list[tuple[str, int, float, float]]:
        """State, version, start and end of all spans that touch this window; the last one goes on until `now`."""
        first = max(0, bisect_right(self.starts, begin) - 1)
        last = bisect_right(self.starts, end)
        ends = [*self.starts[first + 1 : last + 1]]
        ends += [now] * (last - first - len(ends))
        return list(zip(self.states[first:last], self.versions[first:last], self.starts[first:last], ends, strict=True))

    def _blur(self, now: float) -> None:
        """Drop the beginnings of spans that are too short to be seen on their own: the one before them goes on."""
        grain = 4 * (now - self.starts[0]) / MOST
        kept = [0]
        for place in range(1, len(self.starts)):
            if self.starts[place] - self.starts[kept[-1]] >= grain or place == len(self.starts) - 1:
                kept.append(place)
        self.starts = array("d", [self.starts[place] for place in kept])
        self.states = [self.states[place] for place in kept]
        self.versions = array("i", [self.versions[place] for place in kept])
