"""Repack, carried out: `repack.py` plans; this file orders the releases and reassigns the parked samples."""

from __future__ import annotations

from tailrace.control import repack, work
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NOWHERE
from tailrace.control.state import Desk
from tailrace.protocol import Parked, Release
from tailrace.types import ReplicaId, TrajectoryId


def consider(desk: Desk) -> None:
    """Empty replicas whose work fits elsewhere, if there is other work that they could start instead."""
    ready = list(desk.fleet.ready())
    views = [_view(desk, replica) for replica in ready if replica.unfinished]
    for replica in ready:
        replica.kv_checked = replica.kv_tokens
    if desk.admits() <= 0:
        return
    moves = repack.plan(views)
    desk.state.repacks += 1 if moves else 0
    for move in moves:
        source = desk.fleet.replicas[move.source]
        source.enter("releasing", desk.now)
        desk.fleet.moves[source.id] = move.target
        desk.send(Release(source.id, source.incarnation))


def _view(desk: Desk, r: Replica) -> repack.View:
    limit = int(r.kv_capacity * desk.config.repack.kv_threshold)
    return repack.View(r.id, r.version, r.kv_load, r.kv_checked, limit, r.unfinished, r.waiting, r.batch, r.roofline)


def parked(desk: Desk, event: Parked) -> None:
    replica = desk.fleet.current(event.replica, event.incarnation)
    if replica is None:
        return
    if replica.state == "releasing":
        replica.enter("ready", desk.now)
        replica.kv_tokens = replica.pledged = replica.waiting = 0
    samples: list[TrajectoryId] = []
    for meta in event.samples:
        sample = desk.ledger.current(meta.id, meta.attempt)
        if sample is not None and sample.replica == replica.id:
            replica.drop(sample.id)
            desk.ledger.keep_prefix(sample, meta)
            desk.ledger.unassign(sample)
            samples.append(sample.id)
    desk.state.moved += len(samples)
    _reassign(desk, samples, desk.fleet.moves.pop(replica.id, NOWHERE), replica)
    desk.touch(replica)


def _reassign(desk: Desk, ids: list[TrajectoryId], target: ReplicaId, source: Replica) -> None:
    """To the planned replica if it still fits there, else back where it came from: the next look will find another."""
    replica = desk.fleet.replicas.get(target)
    if replica is None or not _fits(desk, ids, replica, source):
        replica = source
    if ids:
        work.generate(desk, replica, ids)


def _fits(desk: Desk, ids: list[TrajectoryId], replica: Replica, source: Replica) -> bool:
    """The planned move may have become impossible while the source was stopping."""
    if replica.state != "ready" or replica.version != source.version or not ids:
        return False
    kv = replica.kv_load + sum(work.kv_size(desk, id) for id in ids)
    room = kv <= replica.kv_capacity * desk.config.repack.kv_threshold
    return room and replica.unfinished + len(ids) <= replica.roofline
