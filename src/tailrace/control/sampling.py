"""What may start, and what trains next.

`admits` only saves work: it keeps the fleet from starting what could not be trained in time. `pick` is the one place
that guarantees `max_staleness`: whatever happened before, no group older than the bound leaves it.

Staleness is counted in versions, from the oldest token of a group to the version that trains on it, queue time
included. Two policies keep the bound: `drop` throws away what came too late (and pools its prompt again); `wait`
lets the trainer wait for what is due now, so nothing is thrown away.
"""

from __future__ import annotations

from math import inf

import msgspec

from tailrace.config.tree import Config
from tailrace.control.ledger import Group, Ledger
from tailrace.types import Version


class Picked(msgspec.Struct):
    """`groups` to train on now (empty: not yet), and `stale` ones to drop."""

    groups: list[Group]
    stale: list[Group]


MOST_OPEN = 4  # times as many groups are open as without filters


def admits(config: Config, ledger: Ledger, taken: int, lag: int = 0, paced: int = 0, useful_share: float = 1.0) -> int:
    """How many more groups may be open, ready or in the current step (`taken` of those), by the staleness bound.

    `lag` says how many versions the weights that they would start under are behind the trainer's. What is certain to
    come too late does not start; under `wait` neither does what would come too late in its turn. `paced`: a lower
    bound that is enough for the trainer (`pacing.py`); 0: none. `useful_share`: of the open groups only so many will
    be trained on, because the others will be filtered; so that the trainer does not wait for the ones that replace
    them, more are open. Not under `wait`: if all of them turned out useful, some would come too late.
    """
    if lag > config.schedule.max_staleness:
        return 0
    limit = admission_limit(config, lag)
    waits = config.schedule.staleness_policy == "wait"
    open_groups = ledger.open_groups * (1.0 if waits else max(useful_share, 1 / MOST_OPEN))
    room = int(min(limit, paced or limit) - len(ledger.ready) - taken - open_groups)
    most = config.schedule.max_open
    return min(room, most - ledger.open_groups) if most else room


def admission_limit(config: Config, lag: int = 0) -> int:
    """Groups that may be under way at once: a step's worth, and that again for every step ahead."""
    schedule = config.schedule
    waits = schedule.staleness_policy == "wait"
    ahead = schedule.steps_ahead
    if ahead is None:  # where late work is dropped, starting all that could be in time would waste much of it
        ahead = schedule.max_staleness if waits else schedule.max_staleness / 2
    if waits:
        ahead = min(ahead, schedule.max_staleness - lag)
    return int((ahead + 1) * config.workload.prompts_per_step)


def pick(
    config: Config,
    ledger: Ledger,
    version: Version,
    wanted: int,
    left_in_step: int,
    as_opened: bool = False,
    by_round: bool = False,
) -> Picked:
    """Choose `wanted` groups for a step on top of `version`; `left_in_step` counts the slots that step still has.

    `as_opened`: behind a barrier all of a step's groups are there, so the order in which they finished need not matter,
    and the same run makes the same mini-batches every time. `by_round`: earlier rounds go first, and nothing is taken
    of one as long as an earlier one is not complete, so that each step trains its own.
    """
    bound = version - config.schedule.max_staleness  # the oldest version that may still be trained on
    ready = [ledger.groups[id] for id in (sorted(ledger.ready) if as_opened else ledger.ready)]
    last = ledger.oldest_open_round if by_round else inf
    fresh = [group for group in ready if group.oldest >= bound and group.round <= last]
    stale = [group for group in ready if group.oldest < bound]
    if len(fresh) < wanted:
        return Picked([], stale)
    if config.schedule.picks == "oldest":
        fresh.sort(key=lambda group: group.oldest)  # earliest deadline first
    elif config.schedule.picks == "freshest":
        fresh.sort(key=lambda group: -group.oldest)
    elif by_round:
        fresh.sort(key=lambda group: group.round)
    if config.schedule.staleness_policy == "wait":
        per_step = config.workload.prompts_per_step
        if _must_wait(ledger, fresh[wanted - 1].oldest, bound, left_in_step - wanted, per_step):
            return Picked([], stale)
    return Picked(fresh[:wanted], stale)


def _must_wait(ledger: Ledger, latest: Version, bound: Version, slots: int, per_step: int) -> bool:
    """True if training now, on groups as young as `latest`, would leave too few slots for older ones that are open.

    `slots` is what this step has left after it; a group of version v can be trained until step v + max_staleness.
    Ready groups need no look: the oldest of them are being chosen.
    """
    claimed = 0
    for oldest in sorted(version for version in ledger.open_by_oldest if version < latest):
        claimed += len(ledger.open_by_oldest[oldest])
        if claimed > slots + max(0, oldest - bound) * per_step:
            return True
    return False


def doomed(config: Config, ledger: Ledger, version: Version) -> list[Group]:
    """Open groups that no future step could take: finishing them would be wasted work."""
    if config.schedule.staleness_policy == "wait":
        return []
    bound = version - config.schedule.max_staleness
    late = [oldest for oldest in sorted(ledger.open_by_oldest) if oldest < bound]
    return [ledger.groups[id] for oldest in late for id in ledger.open_by_oldest[oldest]]


def mini_batch_sizes(groups: int, mini_batches: int) -> list[int]:
    """How many groups each mini-batch of a step gets: as even as possible."""
    return [
        groups // mini_batches + (1 if mini_batch < groups % mini_batches else 0) for mini_batch in range(mini_batches)
    ]
