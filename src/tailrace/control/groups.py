"""How a group comes to its end, other than by being trained: complete, stopped, cut short, dropped or failed."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from tailrace.control import filters, sampling
from tailrace.control.ledger import NOWHERE, Group, Sample
from tailrace.control.state import Context
from tailrace.protocol import Assignment, Cancel, Ending, Forget
from tailrace.types import ReplicaId


def close_if_complete(context: Context, group: Group) -> None:
    """Without unfinished samples a group goes to the buffer, unless more are needed, too few survived or they teach
    nothing."""
    if len(group.samples) < group.size:
        filters.extend(context, group)
    if group.unfinished:
        return
    if not context.ledger.close(group, context.config.groups.min_survivors):
        end(context, group, "failed")
    elif context.config.groups.filter != "none" and not filters.teaches(context, group):
        end(context, group, "stopped" if len(group.samples) < group.size else "filtered")


def end(context: Context, group: Group, how: Ending) -> None:
    """A group leaves without being trained."""
    context.send(Forget(context.ledger.end(group, how), how))
    context.lose_place()


def drop_doomed(context: Context) -> None:
    for group in sampling.doomed(context.config, context.ledger, context.training.version):
        _learn_lengths(context, group)
        filters.note_dropped(context, group)
        _cut_short(context, group)
        end(context, group, "stale")


def _learn_lengths(context: Context, group: Group) -> None:
    """A group that is dropped because it takes long counts with what was to be expected of it: or only short ones
    would."""
    ledger, most = context.ledger, context.config.workload.max_completion_tokens
    lengths: list[float] = []
    for sample in [ledger.samples[id] for id in group.samples]:
        if sample.state == "done":
            lengths.append(max(1, sample.tokens))
        elif sample.replica != NOWHERE:
            steps = context.steps(context.fleet.replicas[sample.replica])
            lengths.append(sample.grown(steps) + ledger.expected_left(sample, steps, most))
    if lengths:
        ledger.lengths.note_group([log(length) for length in lengths])


def deliver_overdue(context: Context) -> None:
    """Past its deadline a group goes on with the samples that are done, or not at all."""
    for group in context.ledger.overdue(context.now - context.config.groups.deadline_s):
        _cut_short(context, group)
        close_if_complete(context, group)


def _cut_short(context: Context, group: Group) -> None:
    """Stop what replicas still have of a group."""
    cancel(context, [context.ledger.samples[id] for id in group.samples])
    context.ledger.cut_short(group)


def cancel(context: Context, samples: Iterable[Sample]) -> None:
    """Have replicas stop whatever they have of these."""
    by_replica: dict[ReplicaId, list[Assignment]] = {}
    for sample in samples:
        if sample.replica != NOWHERE:
            by_replica.setdefault(sample.replica, []).append(Assignment(sample.id, sample.attempt))
    for id, assignments in by_replica.items():
        replica = context.fleet.replicas[id]
        for one in assignments:
            replica.drop(one.trajectory)
        context.send(Cancel(id, replica.incarnation, tuple(assignments)))
        context.touch(replica)
