"""Repack, carried out: `repack.py` plans; this file orders the releases and reassigns the parked samples."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import ceil

from tailrace.control import evaluation, relief, repack, updates, weights, work
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NOWHERE, Sample
from tailrace.control.quota import quota
from tailrace.control.state import Context
from tailrace.protocol import Assignment, Parked, Release
from tailrace.types import ReplicaId, TrajectoryId


def consider(context: Context) -> None:
    """Where more may start than replicas can take, empty some whose work fits elsewhere; where nothing may start, let
    idle replicas take over a part of what others have."""
    ready = [one for one in context.fleet.ready() if not one.evaluating]
    startable = max(0, context.admits()) * context.config.workload.group_size + len(context.ledger.waiting)
    moves = _relieve(context, ready) if context.relieves else []
    if context.repacks:
        left = [one for one in ready if one.state == "ready"]
        moves += _hand_over(context, left, startable) if startable else _spread(context, left)
    context.state.repacks += 1 if moves else 0
    for replica in ready:
        replica.kv_checked = replica.kv_tokens


def _relieve(context: Context, ready: list[Replica]) -> list[repack.Move]:
    """Each slow replica hands what it would bring too late to one that is faster, each of which takes it once."""
    moves: list[repack.Move] = []
    targets = context.fleet.fastest_first(ready)
    for source in reversed(targets):
        if not any(relief.is_faster(context, fastest, source) for fastest in targets[:1]):
            break  # nobody who is left is faster than this one, nor than those that come after it
        late = relief.late_samples(context, source, relief.round_ends_s(context, ready, source))
        if not late:
            continue
        target = next((one for one in targets if relief.may_take(context, one, source)), None)
        if target is None:
            continue
        sizes = _sizes(context, source, late)
        late = late[: _fitting(context, sizes, target)]
        if late:
            targets = [one for one in targets if one is not target]
            moves.append(repack.Move(source.id, target.id))
            _release(context, moves[-1], tuple([Assignment(one.id, one.attempt) for one in late]))
    return moves


def _hand_over(context: Context, ready: list[Replica], startable: int) -> list[repack.Move]:
    """No more are emptied than what may start can fill, beyond the room that others have."""
    draining = {one.id: one for one in ready if _is_stuck(context, one)}
    if not draining:
        return []
    quotas = [quota(context, kind) for kind in range(len(context.fleet.kinds))]
    full = sum(quotas[one.kind] for one in draining.values()) / len(draining)
    room = sum(max(0, quotas[one.kind] - len(one.assigned)) for one in ready if one.id not in draining)
    needed = ceil((startable - room) / full)
    if needed <= 0:
        return []
    views = [_view(context, one) for one in draining.values()]
    moves = repack.plan(views, needed, lambda id: updates.is_worth_moving(context, context.fleet.replicas[id]))
    for move in moves:
        _release(context, move, ())
    return moves


def _is_stuck(context: Context, replica: Replica) -> bool:
    """There is a newer version for it, and it may not take its work along."""
    outdated = replica.version < weights.wanted(context, replica)
    return outdated and bool(replica.unfinished) and not updates.may_mix(context, replica)


def _spread(context: Context, ready: list[Replica]) -> list[repack.Move]:
    views = [_view(context, one) for one in ready]
    return [move for move in repack.spread(views) if _gives_part(context, move)]


def _gives_part(context: Context, move: repack.Move) -> bool:
    """Whether that is worth it; if so, it is ordered: as many of its part as the target has room for."""
    source, target = context.fleet.replicas[move.source], context.fleet.replicas[move.target]
    samples = [context.ledger.samples[id] for id in _part(context, source, target)]
    samples = samples[: _fitting(context, _sizes(context, source, samples), target)]
    if len(source.assigned) < 2 or not samples or not updates.gains_by_spreading(context, source, target, len(samples)):
        return False
    _release(context, move, tuple([Assignment(one.id, one.attempt) for one in samples]))
    return True


def _sizes(context: Context, source: Replica, samples: list[Sample]) -> list[int]:
    """Tokens of KV that each has by now."""
    steps, groups = context.steps(source), context.ledger.groups
    return [one.grown(steps) + groups[one.group].prompt.tokens for one in samples]


def _part(context: Context, source: Replica, target: Replica) -> list[TrajectoryId]:
    """Every other sample, or by speed: to a faster replica the longer ones. What tools have is not divided."""
    ids, here, there = list(source.assigned), context.fleet.pace(source), context.fleet.pace(target)
    if here == there:
        return ids[::2]
    ids.sort(key=lambda id: work.expected_left(context, id), reverse=there > here)
    return ids[: round(len(ids) * there / (here + there))]


def _release(context: Context, move: repack.Move, samples: tuple[Assignment, ...]) -> None:
    source = context.fleet.replicas[move.source]
    source.enter("releasing", context.now)
    context.fleet.moves[source.id] = move.target
    context.send(Release(source.id, source.incarnation, samples))


def _view(context: Context, r: Replica) -> repack.View:
    limit = int(r.kv_capacity * context.config.repack.kv_threshold)
    load = (r.kv_load, r.kv_checked, limit, r.unfinished, r.waiting, r.batch, r.roofline)
    return repack.View(r.id, r.version, *load, context.fleet.tail_s(r))


def parked(context: Context, event: Parked) -> None:
    replica = context.fleet.current(event.replica, event.incarnation)
    if replica is None:
        return
    was_releasing = replica.state == "releasing"
    if was_releasing:
        replica.enter("ready", context.now)
    evaluation.parked(context, replica, [meta.id for meta in event.samples])
    samples: list[TrajectoryId] = []
    for meta in event.samples:
        sample = context.ledger.current(meta.id, meta.attempt)
        if sample is not None and sample.replica == replica.id:
            replica.drop(sample.id)
            context.ledger.keep_prefix(sample, meta)
            context.ledger.unassign(sample)
            samples.append(sample.id)
    if was_releasing and not replica.assigned:
        replica.kv_tokens = replica.pledged = replica.waiting = 0
    context.state.moved += len(samples)
    _reassign(context, samples, context.fleet.moves.pop(replica.id, NOWHERE), replica)
    context.touch(replica)


def _reassign(context: Context, ids: list[TrajectoryId], target: ReplicaId, source: Replica) -> None:
    """To the planned replica what fits there by now, and the others back where they came from: the next look will find
    another place for them."""
    replica = context.fleet.replicas.get(target)
    if replica is None or replica.state != "ready" or replica.resting or not _may_go_on(context, ids, source, replica):
        replica = source
    count = len(ids) if replica is source else _fitting(context, [work.kv_size(context, id) for id in ids], replica)
    for taker, taken in ((replica, ids[:count]), (source, ids[count:])):
        if taken and not taker.resting:  # else they wait for somebody else
            if taker.version != source.version:
                context.ledger.mix(context.ledger.samples[id] for id in taken)
            work.generate(context, taker, taken)


def _may_go_on(context: Context, ids: list[TrajectoryId], source: Replica, target: Replica) -> bool:
    """Under the version of the target, if that is another one."""
    if target.version == source.version:
        return True
    return relief.may_take(context, target, source) and updates.may_mix_samples(context, ids)


def _fitting(context: Context, sizes: list[int], replica: Replica) -> int:
    """How many samples of these sizes, the first ones, a replica has room for beside what it has."""
    room = replica.kv_capacity * context.config.repack.kv_threshold - replica.kv_load
    count = bisect_right(list(accumulate(sizes)), room)
    return max(0, min(count, replica.roofline - replica.unfinished))
