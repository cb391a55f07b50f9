"""Repack, carried out: `repack.py` plans; this file orders the releases and reassigns the parked samples."""

from __future__ import annotations

from math import ceil

from tailrace.control import repack, updates, weights, work
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NOWHERE
from tailrace.control.quota import quota
from tailrace.control.state import Context
from tailrace.protocol import Assignment, Parked, Release
from tailrace.types import ReplicaId, TrajectoryId


def consider(context: Context) -> None:
    """Where more may start than replicas can take, empty some whose work fits elsewhere; where nothing may start, let
    idle replicas take over a part of what others have."""
    ready = list(context.fleet.ready())
    startable = max(0, context.admits()) * context.config.workload.group_size + len(context.ledger.waiting)
    moves = _hand_over(context, ready, startable) if startable else _spread(context, ready)
    context.state.repacks += 1 if moves else 0
    for replica in ready:
        replica.kv_checked = replica.kv_tokens


def _hand_over(context: Context, ready: list[Replica], startable: int) -> list[repack.Move]:
    """No more are emptied than what may start can fill, beyond the room that others have."""
    draining = {one.id: one for one in ready if _is_stuck(context, one)}
    full = quota(context)
    room = sum(max(0, full - len(one.assigned)) for one in ready if one.id not in draining)
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
    return [move for move in repack.spread(views) if _gives_half(context, move)]


def _gives_half(context: Context, move: repack.Move) -> bool:
    """Whether that is worth it; if so, it is ordered."""
    source = context.fleet.replicas[move.source]
    half = list(source.assigned)[::2]  # what tools have is not divided
    if len(source.assigned) < 2 or not updates.gains_by_spreading(context, source, len(half)):
        return False
    samples = [context.ledger.samples[id] for id in half]
    _release(context, move, tuple([Assignment(one.id, one.attempt) for one in samples]))
    return True


def _release(context: Context, move: repack.Move, samples: tuple[Assignment, ...]) -> None:
    source = context.fleet.replicas[move.source]
    source.enter("releasing", context.now)
    context.fleet.moves[source.id] = move.target
    context.send(Release(source.id, source.incarnation, samples))


def _view(context: Context, r: Replica) -> repack.View:
    limit = int(r.kv_capacity * context.config.repack.kv_threshold)
    load = (r.kv_load, r.kv_checked, limit, r.unfinished, r.waiting, r.batch, r.roofline)
    return repack.View(r.id, r.version, *load)


def parked(context: Context, event: Parked) -> None:
    replica = context.fleet.current(event.replica, event.incarnation)
    if replica is None:
        return
    was_releasing = replica.state == "releasing"
    if was_releasing:
        replica.enter("ready", context.now)
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
    """To the planned replica if it still fits there, else back where it came from: the next look will find another."""
    replica = context.fleet.replicas.get(target)
    if replica is None or not _fits(context, ids, replica, source):
        replica = source
    if ids:
        work.generate(context, replica, ids)


def _fits(context: Context, ids: list[TrajectoryId], replica: Replica, source: Replica) -> bool:
    """The planned move may have become impossible while the source was stopping."""
    if replica.state != "ready" or replica.version != source.version or not ids:
        return False
    kv = replica.kv_load + sum(work.kv_size(context, id) for id in ids)
    room = kv <= replica.kv_capacity * context.config.repack.kv_threshold
    return room and replica.unfinished + len(ids) <= replica.roofline
