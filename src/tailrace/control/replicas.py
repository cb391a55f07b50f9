"""Handlers of what replicas report."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.control import evaluation, groups, health, steps, weights
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NOWHERE, Sample
from tailrace.control.speed import OWN_MEMORY, Interval
from tailrace.control.state import Context
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
from tailrace.types import EVALUATION


def joined(context: Context, event: ReplicaJoined) -> None:
    known = context.fleet.replicas.get(event.replica)
    if known is not None and (known.state == "departed" or event.incarnation <= known.incarnation):
        return
    if known is not None:
        weights.end_pull(context, known)
    replica = context.fleet.join(context.now, event)
    _reconcile(context, replica, event.held)
    context.fleet_changed = True
    context.touch(replica)
    context.more_work = True


def _reconcile(context: Context, replica: Replica, held: tuple[Assignment, ...]) -> None:
    """Compare what control believes a replica has with what it says it has; both sides forget the difference."""
    evaluated = evaluation.keep_only(context, replica, held)
    stray = [one for one in held if one.trajectory not in evaluated and not _is_assigned(context, replica, one)]
    if stray:
        context.send(Cancel(replica.id, replica.incarnation, tuple(stray)))
    kept = {one.trajectory for one in held} - {one.trajectory for one in stray}
    missing = [id for id in replica.holds() if id not in kept]
    for id in missing:
        replica.drop(id)
        context.ledger.take_back(id, anew=bool(replica.worker))


def _is_assigned(context: Context, replica: Replica, one: Assignment) -> bool:
    sample = context.ledger.current(one.trajectory, one.attempt)
    return sample is not None and sample.replica == replica.id


def lost(context: Context, event: ReplicaLost) -> None:
    replica = context.fleet.replicas.get(event.replica)
    if replica is None:
        return
    if replica.live and event.incarnation == replica.incarnation:
        lose(context, replica, event.reason)
    elif replica.state == "lost" and event.incarnation > replica.incarnation:
        health.start_failed(context.config.health, context.now, replica, event.incarnation, event.reason)


def lose(context: Context, replica: Replica, reason: str) -> None:
    """Its samples wait for another replica; it is started again after a pause."""
    weights.end_pull(context, replica)
    evaluation.lose(context, replica)
    for id in replica.holds():
        context.ledger.take_back(id, anew=bool(replica.worker))
    context.fleet.lose(context.now, replica, reason)
    context.fleet_changed = True
    health.plan_restart(context.config.health, context.now, replica)
    context.more_work = True


def progressed(context: Context, event: Progressed) -> None:
    replica = context.fleet.current(event.replica, event.incarnation)
    if replica is not None:
        replica.kv_tokens = event.kv_tokens
        replica.waiting = event.waiting
        replica.pledged = 0
        replica.reported_at = context.now
        if event.work is not None:
            _note_speed(context, replica, Interval.between(replica.work, event.work))
            replica.work = event.work


def _note_speed(context: Context, replica: Replica, interval: Interval | None) -> None:
    """What strangers say of themselves counts for them alone."""
    if interval is not None:
        replica.speed.add(interval, OWN_MEMORY)
        if not replica.worker:
            context.fleet.speed.add(interval)


def scoring_started(context: Context, event: ScoringStarted) -> None:
    """What a judge has takes no place among what is generated: there is room for more."""
    for replica, sample, one in _turns(context, event):
        if context.ledger.start_scoring(sample, one.turn, one.final):
            replica.assigned.pop(sample.id, None)
            replica.scoring[sample.id] = one.final
            context.touch(replica)


def generation_resumed(context: Context, event: GenerationResumed) -> None:
    """Perhaps the replica has more to generate now than its batch: it is given nothing until that is over."""
    for replica, sample, one in _turns(context, event):
        if context.ledger.begin_turn(sample, one.turn):
            del replica.scoring[sample.id]
            replica.assigned[sample.id] = None


def _turns(context: Context, event: ScoringStarted | GenerationResumed) -> Iterator[tuple[Replica, Sample, JudgedTurn]]:
    """Those of the event that this incarnation of the replica has under these assignments."""
    replica = context.fleet.current(event.replica, event.incarnation)
    for one in event.samples:
        sample = context.ledger.current(one.trajectory, one.attempt)
        if replica is not None and sample is not None and sample.replica == replica.id:
            yield replica, sample, one


def finished(context: Context, event: Finished) -> None:
    if event.meta.id >= EVALUATION:
        evaluation.finished(context, event)
        return
    sample = context.ledger.current(event.meta.id, event.meta.attempt)
    if sample is not None:
        replica = _detach(context, sample)
        replica.restarts = replica.failures = 0
        replica.finished_at = context.now
        context.ledger.finish(sample, event.meta)
        if sample.stranger != NOWHERE:
            context.state.strangers.passed(context.fleet, sample)
        context.stores.works(sample.store)
        groups.close_if_complete(context, context.ledger.groups[sample.group])


def sample_failed(context: Context, event: SampleFailed) -> None:
    if event.trajectory >= EVALUATION:
        evaluation.sample_failed(context, event)
        return
    sample = context.ledger.current(event.trajectory, event.attempt)
    if sample is not None:
        replica = _maker(context, sample, _detach(context, sample))
        replica.failing_since = replica.failing_since if replica.failures else context.now
        replica.failures += 1
        context.ledger.fail(sample, context.config.groups.max_failures)
        groups.close_if_complete(context, context.ledger.groups[sample.group])
        context.more_work = True
        if _is_to_blame(context, replica):
            reason = f"{replica.failures} samples in a row failed here and not elsewhere, the last one: {event.reason}"
            quarantine(context, replica, reason)


def _maker(context: Context, sample: Sample, judged_by: Replica) -> Replica:
    """Who has generated a sample: what a stranger hands in may be made so that its judge fails."""
    stranger = context.fleet.replicas.get(sample.stranger)
    return stranger if stranger is not None and stranger.live else judged_by


def _is_to_blame(context: Context, replica: Replica) -> bool:
    """More went wrong in a row than one bad prompt can cause, and meanwhile others did well."""
    one_prompt = context.config.workload.group_size * context.config.groups.max_failures
    if replica.failures <= one_prompt:
        return False
    return any(
        one.finished_at >= replica.failing_since for one in context.fleet.replicas.values() if one is not replica
    )


def quarantine(context: Context, replica: Replica, reason: str) -> None:
    """It is left alone from now on; what it had goes elsewhere."""
    context.send(GiveUp("replica", replica.id, replica.incarnation, f"quarantined: {reason}"))
    if replica.live:
        lose(context, replica, reason)
    replica.enter("quarantined", context.now)
    stop_if_none_is_left(context, reason)


def stop_if_none_is_left(context: Context, reason: str) -> None:
    """A run that has none of its own waits for machines that bring some."""
    if context.config.local.replicas and all(one.given_up for one in context.fleet.replicas.values()):
        steps.stop(context, f"no replica is left; the last one was given up because: {reason}", failed=True)


def _detach(context: Context, sample: Sample) -> Replica:
    replica = context.fleet.replicas[sample.replica]
    replica.drop(sample.id)
    context.touch(replica)
    return replica


def weights_loaded(context: Context, event: WeightsLoaded) -> None:
    replica = _pulling(context, event)
    if replica is not None:
        replica.use_first = 2 * (context.now - replica.since) > context.training.pace_s
        weights.end_pull(context, replica)
        replica.version = event.version
        context.touch(replica)
        context.more_work = context.more_work or bool(context.ledger.waiting)


def pull_failed(context: Context, event: PullFailed) -> None:
    """Whose fault it is, is started afresh: a relay with a damaged copy, or a replica that cannot load a good one. If
    the relay has gone meanwhile, the replica pulls again from where it can."""
    replica = _pulling(context, event)
    if replica is None:
        return
    relay = context.relays.relays[replica.source]
    gone = not relay.live or relay.incarnation != replica.source_incarnation
    if not event.damaged and not gone:
        lose(context, replica, f"could not load version {event.version}: {event.reason}")
        return
    weights.end_pull(context, replica)
    context.touch(replica)
    if not gone and event.version in relay.versions:
        weights.give_up_relay(context, relay, f"its copy of version {event.version} cannot be loaded: {event.reason}")


def _pulling(context: Context, event: WeightsLoaded | PullFailed) -> Replica | None:
    replica = context.fleet.current(event.replica, event.incarnation)
    if replica is None or replica.state != "pulling" or replica.target != event.version:
        return None
    return replica
