"""Schedules with a barrier (`sync`, `one_step`, `stream`): the whole fleet generates one step's groups at a time.

round:  all replicas pull -> groups opened and shared evenly -> all generated -> next round

The barrier is one of generation: what judges still have of a round does not keep replicas from the next one. A step
waits for the whole of its own round (`sampling.pick`), so where the next round needs that step, it waits for the judges
as well.
"""

from __future__ import annotations

from tailrace.control import weights, work
from tailrace.control.state import Desk
from tailrace.types import Version


def advance(desk: Desk) -> None:
    """Finish the round, bring all replicas to the next version, begin the next round; as far as possible now."""
    round, ledger = desk.state.round, desk.ledger
    if round.running and not round.to_open and not ledger.open_groups:
        round.running = False
        round.number += 1
    if not round.running and _fleet_is_at(desk, _version(desk, round.number)):
        round.running = True
        round.to_open += desk.config.workload.prompts_per_step
    elif _is_generated(desk) and _fleet_is_at(desk, _version(desk, round.number + 1)):
        round.number += 1
        round.to_open += desk.config.workload.prompts_per_step
    if round.running:
        while round.to_open and len(ledger.pool):
            ledger.open_group(desk.now, desk.config.workload.group_size, round.number)
            round.to_open -= 1
        _spread_waiting(desk)


def _is_generated(desk: Desk) -> bool:
    """Of the round that is running, only judges still have something."""
    return desk.state.round.running and not desk.state.round.to_open and desk.ledger.generated


def _version(desk: Desk, number: int) -> Version:
    """The oldest version that this round may be generated under."""
    wanted = max(0, number - desk.traits.behind)
    return wanted - wanted % desk.config.schedule.publish_every


def _fleet_is_at(desk: Desk, version: Version) -> bool:
    """The barrier: every live replica generates under this version or a newer one. Orders the pulls if not."""
    target = desk.relays.newest_everywhere
    if target < version or desk.state.pulling or not desk.fleet.live:
        return False
    outdated = [replica for replica in desk.fleet.ready() if replica.version < target]
    ordered = [weights.pull(desk, replica, target) for replica in outdated]
    if any(ordered):
        return False
    return all(replica.version >= version for replica in desk.fleet.ready())


def _spread_waiting(desk: Desk) -> None:
    """Share all waiting samples evenly between the replicas that are at the round's version."""
    waiting = list(desk.ledger.waiting)
    if not waiting:
        return
    version = _version(desk, desk.state.round.number)
    _bring_up(desk, version)
    ready = [replica for replica in desk.fleet.ready() if replica.version >= version]
    total = len(waiting) + sum(len(replica.assigned) for replica in ready)
    start = 0
    for index, replica in enumerate(ready):
        share = total // len(ready) + (1 if index < total % len(ready) else 0)
        given = waiting[start : start + max(0, share - len(replica.assigned))]
        start += len(given)
        if given:
            work.generate(desk, replica, given)


def _bring_up(desk: Desk, version: Version) -> None:
    """A replica that joined in the middle of a round pulls at once, so that it can help."""
    for replica in list(desk.fleet.ready()):
        if replica.version < version:
            weights.pull(desk, replica, desk.relays.newest_everywhere)
