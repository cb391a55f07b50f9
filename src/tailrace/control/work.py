"""Who gets which samples: new groups as far as admission goes, and first of all the samples that lost their replica."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from math import ceil

from tailrace.control import checks, filters, updates, weights
from tailrace.control.fleet import Replica, roomiest
from tailrace.control.ledger import NONE
from tailrace.control.quota import quota
from tailrace.control.state import Context
from tailrace.protocol import FetchPrompts, Generate
from tailrace.types import ReplicaId, TrajectoryId, Version


def settle(context: Context, replica: Replica) -> None:
    """A replica pulls when there is something newer for it, else takes more work."""
    if replica.state != "ready" or replica.resting:
        return
    if replica.checks:
        checks.settle(context, replica)
        return
    version = weights.wanted(context, replica)
    if version > replica.version and not replica.evaluating and _renews(context, replica, version):
        return
    if replica.version != NONE:
        _feed(context, replica)


def _renews(context: Context, replica: Replica, version: Version) -> bool:
    """Whether a newer version keeps it from taking more work: it pulls, or runs out before it does.

    What only waits for its score is no work of its: that goes on beside the pull. Where versions come about as fast as
    it can pull, it uses each that it has pulled: it would do nothing but pull otherwise.
    """
    if replica.use_first and _feed(context, replica):
        return True
    if replica.unfinished and replica.worker:
        return True  # a stranger's sample keeps its version: it is checked under one
    if replica.unfinished and not context.traits.interrupts:
        choice = updates.choose(context, replica, version)
        if choice != "take_along":
            return choice == "drain"
    if not weights.pull(context, replica, version):
        return False
    context.ledger.mix(context.ledger.samples[id] for id in replica.to_generate())
    return True


def _feed(context: Context, replica: Replica) -> bool:
    """Give a replica what it has room for: first what waits, then new groups. False: there was nothing to give."""
    whole = quota(context, replica.kind)
    room = whole - len(replica.assigned)
    given: list[TrajectoryId] = []
    if context.ledger.waiting and room > 0:
        given = _unbegun(context, room) if replica.worker else _longest_waiting(context, room)
    if _has_room(context, room - len(given), whole) and not updates.fresher_is_coming(context, replica):
        given += _open_groups(context, replica, room - len(given), whole)
    if _could_take_more(context, replica, room - len(given), bool(given)):
        context.fleet.hungry[replica.id] = None
    else:
        context.fleet.hungry.pop(replica.id, None)
    if given:
        replica.batch = len(given) + len(replica.assigned)
        generate(context, replica, given)
    return bool(given)


def _unbegun(context: Context, most: int) -> list[TrajectoryId]:
    """What waits and has no token yet: a stranger gets nothing that others have generated."""
    unbegun = (id for id in context.ledger.waiting if context.ledger.samples[id].oldest == NONE)
    return list(islice(unbegun, most))


def _longest_waiting(context: Context, most: int) -> list[TrajectoryId]:
    """Where not all that waits can go on, what is expected to take longest does: its group waits for it."""
    waiting = context.ledger.waiting
    if most >= len(waiting):
        return list(waiting)
    return nlargest(most, waiting, key=lambda id: expected_left(context, id))


def _could_take_more(context: Context, replica: Replica, room: int, was_given: bool) -> bool:
    """With work in hand, a replica is worth asking again once it has room for half a group."""
    if was_given or replica.assigned:
        return 2 * room >= context.config.first_samples
    return room > 0


def _has_room(context: Context, room: int, whole: int) -> bool:
    """For half a group, or half of what a replica takes that cannot take a whole one."""
    return room > 0 and 2 * room >= min(context.config.first_samples, whole)


def _open_groups(context: Context, replica: Replica, room: int, whole: int) -> list[TrajectoryId]:
    """Samples of new groups for about `room` samples. A group is split only where a replica cannot take a whole one."""
    size = context.config.first_samples
    admitted = context.admits(context.next_step - replica.version)
    if admitted <= 0:
        return []
    # where work is short, everybody gets some of it
    fair = ceil(admitted * context.fleet.pace(replica) / context.fleet.hungry_pace(replica))
    count = min(max(1, round(room / size)), fair, len(context.ledger.pool))
    samples = [id for group in filters.open_groups(context, count) for id in group.samples]
    return samples if whole >= size else samples[:room]


def assign_waiting(context: Context) -> None:
    """Samples that lost their replica go on, if possible, on one that has the same version; others wait to be fed."""
    by_version: dict[Version, list[TrajectoryId]] = {}
    for id in context.ledger.waiting:
        if context.ledger.samples[id].newest != NONE:
            by_version.setdefault(context.ledger.samples[id].newest, []).append(id)
    for version, ids in by_version.items():
        assign(context, ids, peers(context, version))


def peers(context: Context, version: Version) -> list[Replica]:
    """Replicas that are generating under a version, or could."""
    return [r for r in context.fleet.ready() if r.version == version and (r.unfinished or context.traits.interrupts)]


def assign(context: Context, ids: list[TrajectoryId], candidates: list[Replica]) -> None:
    """Each sample to the replica with most KV room for all that it is expected to get; what fits nowhere goes on
    waiting."""
    sizes = [expected_kv(context, id) for id in ids]
    chosen = roomiest(candidates, sizes, context.config.repack.kv_threshold, context.fleet.pace)
    by_replica: dict[ReplicaId, list[TrajectoryId]] = {}
    for id, replica in zip(ids, chosen, strict=True):
        if replica is not None:
            by_replica.setdefault(replica, []).append(id)
    for replica, given in by_replica.items():
        generate(context, context.fleet.replicas[replica], given)


def generate(context: Context, replica: Replica, ids: list[TrajectoryId]) -> None:
    ledger, assigned = context.ledger, replica.assigned
    store = context.stores.near(replica.host)
    steps = context.steps(replica)
    requests = tuple([ledger.assign(id, replica.id, replica.version, store, steps) for id in ids])
    for id in ids:
        assigned[id] = None
    if replica.worker:
        replica.due |= dict.fromkeys(ids, context.now + context.config.strangers.hand_in_s)
    replica.use_first = False
    replica.pledged += sum([ledger.samples[one.trajectory].tokens + one.prompt_tokens for one in requests])
    context.send(Generate(replica.id, replica.incarnation, requests))


def kv_size(context: Context, id: TrajectoryId) -> int:
    sample = context.ledger.samples[id]
    return sample.tokens + context.ledger.groups[sample.group].prompt.tokens


def expected_kv(context: Context, id: TrajectoryId) -> int:
    """What a sample that nobody generates now will have in the end."""
    return kv_size(context, id) + int(expected_left(context, id))


def expected_left(context: Context, id: TrajectoryId) -> float:
    sample = context.ledger.samples[id]
    return context.ledger.expected_left(sample, sample.since, context.config.workload.max_completion_tokens)


def fetch_prompts(context: Context) -> None:
    """Keep at least a step's worth of prompts at hand."""
    wanted = context.config.workload.prompts_per_step
    if not context.state.fetching and not context.state.exhausted and len(context.ledger.pool) < wanted:
        context.state.fetching = True
        context.send(FetchPrompts(context.ledger.received, filters.prompts_to_fetch(context, 2 * wanted)))
