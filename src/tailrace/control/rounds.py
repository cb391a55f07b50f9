"""Schedules with a barrier (`sync`, `one_step`, `stream`): the whole fleet generates one step's groups at a time.

round:  all replicas pull -> groups opened and shared evenly -> all generated -> next round
        next round -> this one again    where generated samples are lost with their store

The barrier is one of generation: what judges still have of a round does not keep replicas from the next one. A step
waits for the whole of its own round (`sampling.pick`), so where the next round needs that step, it waits for the judges
as well.
"""

from __future__ import annotations

from tailrace.control import filters, weights, work
from tailrace.control.kinds import shares
from tailrace.control.state import Context
from tailrace.types import Version


def advance(context: Context) -> None:
    """Finish the round, bring all replicas to the next version, begin the next round; as far as possible now."""
    round = context.state.round
    _end_or_reopen(context)
    if not round.running and _fleet_is_at(context, _version(context, round.number)):
        round.running = True
        round.to_open += context.config.workload.prompts_per_step
    elif _is_generated(context) and _fleet_is_at(context, _version(context, round.number + 1)):
        round.number += 1
        round.to_open += context.config.workload.prompts_per_step
    if round.running:
        round.to_open -= len(filters.open_groups(context, round.to_open, round.number))
        _spread_waiting(context)


def _end_or_reopen(context: Context) -> None:
    """A round is over when nothing of it is left to do. It goes on if its groups are open again, because a sample store
    was lost, and the weights that the next round needs are those of a step that waits for them."""
    round = context.state.round
    unfinished = bool(round.to_open or context.ledger.open_groups)
    if round.running and not unfinished:
        round.running, round.number = False, round.number + 1
    elif unfinished and not round.running and context.training.step < _version(context, round.number):
        round.running, round.number = True, round.number - 1


def _is_generated(context: Context) -> bool:
    """Of the round that is running, only judges still have something."""
    return context.state.round.running and not context.state.round.to_open and context.ledger.generated


def _version(context: Context, number: int) -> Version:
    """The oldest version that this round may be generated under."""
    wanted = max(0, number - context.traits.behind)
    return wanted - wanted % context.config.schedule.publish_every


def _fleet_is_at(context: Context, version: Version) -> bool:
    """The barrier: every live replica generates under this version or a newer one. Orders the pulls if not."""
    if context.relays.newest_everywhere < version or context.state.pulling or not context.fleet.live:
        return False
    targets = [(one, weights.newest_together(context, one)) for one in context.fleet.ready() if not one.evaluating]
    outdated = [(one, target) for one, target in targets if one.version < target]
    ordered = [weights.pull(context, one, weights.on_the_way(context, one, target)) for one, target in outdated]
    if any(ordered):
        return False
    return all(replica.version >= version for replica in context.fleet.ready())


def _spread_waiting(context: Context) -> None:
    """Share all waiting samples between the replicas that are at the round's version, by their speed."""
    waiting = list(context.ledger.waiting)
    if not waiting:
        return
    number = context.state.round.number
    version = _version(context, min(number, context.training.step) if context.repeats_short else number)
    _bring_up(context, version)
    ready = [replica for replica in context.fleet.ready() if replica.version >= version]
    total = len(waiting) + sum(len(replica.assigned) for replica in ready)
    start = 0
    for replica, share in zip(ready, shares(total, [context.fleet.pace(one) for one in ready]), strict=True):
        given = waiting[start : start + max(0, share - len(replica.assigned))]
        start += len(given)
        if given:
            work.generate(context, replica, given)


def _bring_up(context: Context, version: Version) -> None:
    """A replica that joined in the middle of a round pulls at once, so that it can help."""
    for replica in list(context.fleet.ready()):
        if replica.version < version and not replica.evaluating:
            weights.pull(context, replica, weights.newest_together(context, replica))
