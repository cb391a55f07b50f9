"""Handlers of what replicas report."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.control import groups, health, steps, weights
from tailrace.control.fleet import Replica
from tailrace.control.ledger import Sample
from tailrace.control.state import Desk
from tailrace.protocol import (
    Assignment,
    Cancel,
    Finished,
    GenerationResumed,
    GiveUp,
    JudgedTurn,
    Progressed,
    PullFailed,
    ReplicaJoined,
    ReplicaLost,
    SampleFailed,
    ScoringStarted,
    WeightsLoaded,
)


def joined(desk: Desk, event: ReplicaJoined) -> None:
    known = desk.fleet.replicas.get(event.replica)
    if known is not None and (known.state == "departed" or event.incarnation <= known.incarnation):
        return
    if known is not None:
        weights.end_pull(desk, known)
    replica = desk.fleet.join(desk.now, event)
    _reconcile(desk, replica, event.held)
    desk.touch(replica)
    desk.more_work = True


def _reconcile(desk: Desk, replica: Replica, held: tuple[Assignment, ...]) -> None:
    """Compare what control believes a replica has with what it says it has; both sides forget the difference."""
    ledger = desk.ledger
    stray = [one for one in held if not _is_assigned(desk, replica, one)]
    if stray:
        desk.send(Cancel(replica.id, replica.incarnation, tuple(stray)))
    kept = {one.trajectory for one in held} - {one.trajectory for one in stray}
    missing = [id for id in replica.holds() if id not in kept]
    for id in missing:
        replica.drop(id)
        ledger.unassign(ledger.samples[id])


def _is_assigned(desk: Desk, replica: Replica, one: Assignment) -> bool:
    sample = desk.ledger.current(one.trajectory, one.attempt)
    return sample is not None and sample.replica == replica.id


def lost(desk: Desk, event: ReplicaLost) -> None:
    replica = desk.fleet.replicas.get(event.replica)
    if replica is None:
        return
    if replica.live and event.incarnation == replica.incarnation:
        lose(desk, replica, event.reason)
    elif replica.state == "lost" and event.incarnation > replica.incarnation:
        health.start_failed(desk.config.health, desk.now, replica, event.incarnation, event.reason)


def lose(desk: Desk, replica: Replica, reason: str) -> None:
    """Its samples wait for another replica; it is started again after a pause."""
    weights.end_pull(desk, replica)
    for id in replica.holds():
        desk.ledger.unassign(desk.ledger.samples[id])
    desk.fleet.lose(desk.now, replica, reason)
    health.plan_restart(desk.config.health, desk.now, replica)
    desk.more_work = True


def progressed(desk: Desk, event: Progressed) -> None:
    replica = desk.fleet.current(event.replica, event.incarnation)
    if replica is not None:
        replica.kv_tokens = event.kv_tokens
        replica.waiting = event.waiting
        replica.pledged = 0


def scoring_started(desk: Desk, event: ScoringStarted) -> None:
    """What a judge has takes no place among what is generated: there is room for more."""
    for replica, sample, one in _turns(desk, event):
        if desk.ledger.start_scoring(sample, one.turn, one.final):
            replica.assigned.pop(sample.id, None)
            replica.scoring[sample.id] = one.final
            desk.touch(replica)


def generation_resumed(desk: Desk, event: GenerationResumed) -> None:
    """Perhaps the replica has more to generate now than its batch: it is given nothing until that is over."""
    for replica, sample, one in _turns(desk, event):
        if desk.ledger.begin_turn(sample, one.turn):
            del replica.scoring[sample.id]
            replica.assigned[sample.id] = None


def _turns(desk: Desk, event: ScoringStarted | GenerationResumed) -> Iterator[tuple[Replica, Sample, JudgedTurn]]:
    """Those of the event that this incarnation of the replica has under these assignments."""
    replica = desk.fleet.current(event.replica, event.incarnation)
    for one in event.samples:
        sample = desk.ledger.current(one.trajectory, one.attempt)
        if replica is not None and sample is not None and sample.replica == replica.id:
            yield replica, sample, one


def finished(desk: Desk, event: Finished) -> None:
    sample = desk.ledger.current(event.meta.id, event.meta.attempt)
    if sample is not None:
        replica = _detach(desk, sample)
        replica.restarts = replica.failures = 0
        replica.finished_at = desk.now
        desk.ledger.finish(sample, event.meta)
        desk.stores.works(sample.store)
        groups.close_if_complete(desk, desk.ledger.groups[sample.group])


def sample_failed(desk: Desk, event: SampleFailed) -> None:
    sample = desk.ledger.current(event.trajectory, event.attempt)
    if sample is not None:
        replica = _detach(desk, sample)
        replica.failing_since = replica.failing_since if replica.failures else desk.now
        replica.failures += 1
        desk.ledger.fail(sample, desk.config.groups.max_failures)
        groups.close_if_complete(desk, desk.ledger.groups[sample.group])
        desk.more_work = True
        if _is_to_blame(desk, replica):
            reason = f"{replica.failures} samples in a row failed here and not elsewhere, the last one: {event.reason}"
            quarantine(desk, replica, reason)


def _is_to_blame(desk: Desk, replica: Replica) -> bool:
    """More went wrong in a row than one bad prompt can cause, and meanwhile others did well."""
    one_prompt = desk.config.workload.group_size * desk.config.groups.max_failures
    if replica.failures <= one_prompt:
        return False
    return any(one.finished_at >= replica.failing_since for one in desk.fleet.replicas.values() if one is not replica)


def quarantine(desk: Desk, replica: Replica, reason: str) -> None:
    """It is left alone from now on; what it had goes elsewhere."""
    desk.send(GiveUp("replica", replica.id, replica.incarnation, f"quarantined: {reason}"))
    if replica.live:
        lose(desk, replica, reason)
    replica.enter("quarantined", desk.now)
    stop_if_none_is_left(desk, reason)


def stop_if_none_is_left(desk: Desk, reason: str) -> None:
    if all(one.given_up for one in desk.fleet.replicas.values()):
        steps.stop(desk, f"no replica is left; the last one was given up because: {reason}", failed=True)


def _detach(desk: Desk, sample: Sample) -> Replica:
    replica = desk.fleet.replicas[sample.replica]
    replica.drop(sample.id)
    desk.touch(replica)
    return replica


def weights_loaded(desk: Desk, event: WeightsLoaded) -> None:
    replica = _pulling(desk, event)
    if replica is not None:
        replica.use_first = 2 * (desk.now - replica.since) > desk.training.pace_s
        weights.end_pull(desk, replica)
        replica.version = event.version
        desk.touch(replica)
        desk.more_work = desk.more_work or bool(desk.ledger.waiting)


def pull_failed(desk: Desk, event: PullFailed) -> None:
    """Whose fault it is, is started afresh: a relay with a damaged copy, or a replica that cannot load a good one."""
    replica = _pulling(desk, event)
    if replica is None:
        return
    relay = desk.relays.relays[replica.source]
    if not event.damaged:
        lose(desk, replica, f"could not load version {event.version}: {event.reason}")
        return
    weights.end_pull(desk, replica)
    desk.touch(replica)
    if relay.live and event.version in relay.versions:
        weights.give_up_relay(desk, relay, f"its copy of version {event.version} cannot be loaded: {event.reason}")


def _pulling(desk: Desk, event: WeightsLoaded | PullFailed) -> Replica | None:
    replica = desk.fleet.current(event.replica, event.incarnation)
    if replica is None or replica.state != "pulling" or replica.target != event.version:
        return None
    return replica
