"""Which replicas hand their long tail to which others.

A pure function over a few numbers per replica. It follows Laminar's best-fit consolidation: replicas that are past
their peak and share a version are sorted by KV use; each gives all its work to the fullest other one that it still
fits into, so that a few replicas end up full and the rest are free to pull newer weights and start afresh.

Traps handled here: a lone straggler's KV never falls, so having finished half its batch counts as past the peak too; a
replica that is planned to receive is not emptied later; loads include the plan so far. The plane handles the others:
replicas in the middle of a pull are not offered, and the fit is checked again when the work has been handed back.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec

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

    @property
    def past_peak(self) -> bool:
        if not 0 < self.requests < self.roofline or self.kv >= self.kv_limit or self.waiting:
            return False
        return self.kv < self.kv_before or 2 * self.requests <= self.batch


class Move(msgspec.Struct, frozen=True, gc=False):
    source: ReplicaId
    target: ReplicaId


def plan(views: list[View]) -> list[Move]:
    """Moves for all versions; every source is emptied, no target is a source."""
    by_version: dict[Version, list[View]] = {}
    for view in views:
        if view.past_peak:
            by_version.setdefault(view.version, []).append(view)
    return [move for version in sorted(by_version) for move in _consolidate(by_version[version])]


def _consolidate(candidates: list[View]) -> list[Move]:
    """Best fit, smallest source first."""
    plan = _Plan(candidates)
    for source in [id for _, id in plan.loads]:
        if source not in plan.receiving:
            plan.empty(source)
    return plan.moves


class _Plan:
    """The loads as they will be. `loads` holds (KV, id), sorted, of all that can still give or take."""

    def __init__(self, candidates: list[View]) -> None:
        self.views = {view.id: view for view in candidates}
        self.requests = {view.id: view.requests for view in candidates}
        self.loads = sorted((view.kv, view.id) for view in candidates)
        self.largest_limit = max(view.kv_limit for view in candidates)
        self.fewest_requests = min(view.requests for view in candidates)
        self.receiving: set[ReplicaId] = set()
        self.moves: list[Move] = []

    def empty(self, source: ReplicaId) -> None:
        """Give all of `source` to the replica that becomes most packed by it, if there is one."""
        view = self.views[source]
        index = self._best_fit(view)
        if index is None:
            return
        kv, target = self.loads[index]
        self.moves.append(Move(source, target))
        self.receiving.add(target)
        self.requests[target] += view.requests
        del self.loads[index]
        del self.loads[bisect_left(self.loads, (view.kv, source))]
        if self.requests[target] + self.fewest_requests <= self.views[target].roofline:
            insort(self.loads, (kv + view.kv, target))  # else nothing fits any more, and later searches skip it

    def _best_fit(self, source: View) -> int | None:
        start = bisect_left(self.loads, (self.largest_limit - source.kv + 1, -1))
        for index in range(start - 1, -1, -1):
            kv, target = self.loads[index]
            view = self.views[target]
            fits = kv + source.kv <= view.kv_limit and self.requests[target] + source.requests <= view.roofline
            if fits and target != source.id:
                return index
        return None
