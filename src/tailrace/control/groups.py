"""How a group comes to its end, other than by being trained: complete, cut short, dropped or failed."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.control import sampling
from tailrace.control.ledger import NOWHERE, Group, Sample
from tailrace.control.state import Desk
from tailrace.protocol import Assignment, Cancel, Ending, Forget
from tailrace.types import ReplicaId


def close_if_complete(desk: Desk, group: Group) -> None:
    """Without unfinished samples a group goes to the buffer, unless too few survived or they teach nothing."""
    if group.unfinished:
        return
    if not desk.ledger.close(group, desk.config.groups.min_survivors):
        end(desk, group, "failed")
    elif desk.config.groups.filter == "zero_advantage" and _teaches_nothing(desk, group):
        end(desk, group, "filtered")


def _teaches_nothing(desk: Desk, group: Group) -> bool:
    """All survivors got the same reward, so none of them is better than the others."""
    rewards = desk.ledger.rewards(group)
    given = [reward for reward in rewards if reward is not None]
    return len(given) == len(rewards) and desk.config.groups.same(given)


def end(desk: Desk, group: Group, how: Ending) -> None:
    """A group leaves without being trained. In a round another one takes its place."""
    desk.send(Forget(desk.ledger.end(group, how), how))
    desk.more_work = True
    if desk.traits.rounds:
        desk.state.round.to_open += 1


def drop_doomed(desk: Desk) -> None:
    for group in sampling.doomed(desk.config, desk.ledger, desk.training.version):
        _cut_short(desk, group)
        end(desk, group, "stale")


def deliver_overdue(desk: Desk) -> None:
    """Past its deadline a group goes on with the samples that are done, or not at all."""
    for group in desk.ledger.overdue(desk.now - desk.config.groups.deadline_s):
        _cut_short(desk, group)
        close_if_complete(desk, group)


def _cut_short(desk: Desk, group: Group) -> None:
    """Stop what replicas still have of a group."""
    cancel(desk, [desk.ledger.samples[id] for id in group.samples])
    desk.ledger.cut_short(group)


def cancel(desk: Desk, samples: Iterable[Sample]) -> None:
    """Have replicas stop whatever they have of these."""
    by_replica: dict[ReplicaId, list[Assignment]] = {}
    for sample in samples:
        if sample.replica != NOWHERE:
            by_replica.setdefault(sample.replica, []).append(Assignment(sample.id, sample.attempt))
    for id, assignments in by_replica.items():
        replica = desk.fleet.replicas[id]
        for one in assignments:
            replica.drop(one.trajectory)
        desk.send(Cancel(id, replica.incarnation, tuple(assignments)))
        desk.touch(replica)
