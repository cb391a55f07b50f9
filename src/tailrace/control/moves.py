"""Repack, carried out: `repack.py` plans; this file orders the releases and reassigns the parked samples."""

from __future__ import annotations

from tailrace.control import repack, work
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NOWHERE
from tailrace.control.state import Context
from tailrace.protocol import Parked, Release
from tailrace.types import ReplicaId, TrajectoryId


def consider(context: Context) -> None:
    """Empty replicas whose work fits elsewhere, if there is other work that they could start instead."""
    ready = list(context.fleet.ready())
    views = [_view(context, replica) for replica in ready if replica.unfinished]
    for replica in ready:
        replica.kv_checked = replica.kv_tokens
    if context.admits() <= 0:
        return
    moves = repack.plan(views)
    context.state.repacks += 1 if moves else 0
    for move in moves:
        source = context.fleet.replicas[move.source]
        source.enter("releasing", context.now)
        context.fleet.moves[source.id] = move.target
        context.send(Release(source.id, source.incarnation))


def _view(context: Context, r: Replica) -> repack.View:
    limit = int(r.kv_capacity * context.config.repack.kv_threshold)
    return repack.View(r.id, r.version, r.kv_load, r.kv_checked, limit, r.unfinished, r.waiting, r.batch, r.roofline)


def parked(context: Context, event: Parked) -> None:
    replica = context.fleet.current(event.replica, event.incarnation)
    if replica is None:
        return
    if replica.state == "releasing":
        replica.enter("ready", context.now)
        replica.kv_tokens = replica.pledged = replica.waiting = 0
    samples: list[TrajectoryId] = []
    for meta in event.samples:
        sample = context.ledger.current(meta.id, meta.attempt)
        if sample is not None and sample.replica == replica.id:
            replica.drop(sample.id)
            context.ledger.keep_prefix(sample, meta)
            context.ledger.unassign(sample)
            samples.append(sample.id)
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
