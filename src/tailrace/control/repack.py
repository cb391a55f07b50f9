"""Which replicas hand work to which others: their long tail, where that frees a replica that has better things to do,
or half of what they have, where another one has nothing to do.

Pure functions over a few numbers per replica. `plan` is Laminar's consolidation: replicas that are past their peak and
share a version are sorted by KV use, and each gives all its work to another one, until enough are free to pull newer
weights and start afresh. Laminar takes the fullest that fits (best fit), to free as many as possible; here no more are
freed than can be put to use, so the emptiest is taken, and the smallest tails meet: that costs the least prefill, and
nobody's steps become long. Where replicas differ, a tail goes to those that decode a small batch fastest, which is a
matter of memory bandwidth. `spread` is the opposite: an idle replica takes a part of the largest batch.

Traps handled here: a lone straggler's KV never falls, so having finished half its batch counts as past the peak too; a
replica that is planned to receive is not emptied later; loads include the plan so far. The plane handles the others:
replicas in the middle of a pull are not offered, and the fit is checked again when the work has been handed back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

import msgspec

from tailrace.control.kinds import ALIKE
from tailrace.types import ReplicaId, Version


class View(msgspec.Struct, frozen=True, gc=False):
    """What the planner sees of a replica. `kv_limit` is C_max in tokens, `roofline` the B of the paper."""

    id: ReplicaId
    version: Version
    kv: int
    kv_before: int  # at the previous look
    kv_limit: int
    requests: int
    waiting: int
    batch: int
    roofline: int
    tail_s: float = 1.0  # a decode step of a lone sample, where replicas differ in that; else the same for all

    @property
    def past_peak(self) -> bool:
        if not 0 < self.requests < self.roofline or self.kv >= self.kv_limit or self.waiting:
            return False
        return self.kv < self.kv_before or 2 * self.requests <= self.batch


class Move(msgspec.Struct, frozen=True, gc=False):
    source: ReplicaId
    target: ReplicaId


def plan(views: list[View], most: int, is_worthwhile: Callable[[ReplicaId], bool]) -> list[Move]:
    """Moves for all versions, at most so many; every source is emptied, no target is a source. `is_worthwhile`: moving
    the work of a replica costs less than waiting for its end."""
    moves: list[Move] = []
    for _, candidates in sorted(_by_version(view for view in views if view.past_peak).items()):
        moves += _consolidate(candidates, most - len(moves), is_worthwhile)
    return moves


def spread(views: list[View]) -> list[Move]:
    """A part of the largest batches to replicas of their version that have nothing, the fastest first; each source and
    target once."""
    moves: list[Move] = []
    for _, peers in sorted(_by_version(views).items()):
        idle = sorted((view for view in peers if not view.requests), key=lambda view: view.tail_s)
        loaded = sorted(
            (view for view in peers if view.requests > 1), key=lambda one: (-one.requests * one.tail_s, one.id)
        )
        moves += [Move(source.id, target.id) for source, target in zip(loaded, idle, strict=False)]
    return moves


def _by_version(views: Iterable[View]) -> dict[Version, list[View]]:
    by_version: dict[Version, list[View]] = {}
    for view in views:
        by_version.setdefault(view.version, []).append(view)
    return by_version


def _consolidate(candidates: list[View], most: int, is_worthwhile: Callable[[ReplicaId], bool]) -> list[Move]:
    """Smallest source first, of the slowest replicas first."""
    plan = _Plan(candidates)
    for source in sorted([id for _, id in plan.loads], key=lambda id: -plan.views[id].tail_s):
        if len(plan.moves) >= most:
            break
        target = plan.emptiest(source) if source not in plan.receiving else None
        if target is not None and is_worthwhile(source):  # asked last: it looks at every sample
            plan.empty(source, target)
    return plan.moves


class _Plan:
    """The loads as they will be. `loads` holds (KV, id), sorted, of all that can still give or take."""

    def __init__(self, candidates: list[View]) -> None:
        self.views = {view.id: view for view in candidates}
        self.requests = {view.id: view.requests for view in candidates}
        self.loads = sorted((view.kv, view.id) for view in candidates)
        self.largest_limit = max(view.kv_limit for view in candidates)
        self.fastest = min(view.tail_s for view in candidates)
        self.fewest_requests = min(view.requests for view in candidates)
        self.receiving: set[ReplicaId] = set()
        self.moves: list[Move] = []

    def empty(self, source: ReplicaId, index: int) -> None:
        """Give all of `source` to the replica at this place of `loads`."""
        view = self.views[source]
        kv, target = self.loads[index]
        self.moves.append(Move(source, target))
        self.receiving.add(target)
        self.requests[target] += view.requests
        del self.loads[index]
        del self.loads[bisect_left(self.loads, (view.kv, source))]
        if self.requests[target] + self.fewest_requests <= self.views[target].roofline:
            insort(self.loads, (kv + view.kv, target))  # else nothing fits any more, and later searches skip it

    def emptiest(self, id: ReplicaId) -> int | None:
        """The place of the emptiest replica that this one's work fits into and that is not slower, if there is one; of
        several the fastest, because a tail ends when its last sample does."""
        source = self.views[id]
        start = bisect_left(self.loads, (self.largest_limit - source.kv + 1, -1))
        best: tuple[float, int] | None = None
        for index in range(start):
            view = self.views[self.loads[index][1]]
            better = view.tail_s <= ALIKE * source.tail_s and (best is None or ALIKE * view.tail_s < best[0])
            if better and self._fits(source, index):
                best = view.tail_s, index
                if view.tail_s <= ALIKE * self.fastest:
                    break
        return best[1] if best else None

    def _fits(self, source: View, index: int) -> bool:
        kv, target = self.loads[index]
        view = self.views[target]
        fits = kv + source.kv <= view.kv_limit and self.requests[target] + source.requests <= view.roofline
        return fits and target != source.id
