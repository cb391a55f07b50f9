"""What strangers hand in: which checker looks at it, under which version, and what happens to a stranger that lies.

    handed in -> a checker has it -> judged there, and done
                                  \\-> not what its weights and the seed give: the stranger is excluded

A checker is a replica of the run's own machine that does nothing else. All rewards of a stranger's samples are computed
there. It loads the version that a sample says it is of, scores the sample again, and only then judges it.
"""

from __future__ import annotations

from tailrace.control import stores, watch, weights
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NONE, Sample
from tailrace.control.state import Context
from tailrace.control.strangers import Worker
from tailrace.protocol import CheckFailed, Dismiss, Generate, HandedIn, HostLeft, WorkerRefused, WorkerRevoked
from tailrace.types import TrajectoryId

AT_ONCE = 64  # samples that a checker has


def handed_in(context: Context, event: HandedIn) -> None:
    replica = context.fleet.replicas.get(event.replica)
    worker = context.state.strangers.workers.get(replica.worker) if replica is not None else None
    if replica is None or worker is None:
        return
    for meta in event.samples:
        sample = context.ledger.current(meta.id, meta.attempt)
        if sample is not None and sample.replica == replica.id:
            check = worker.check(sample.id, context.config.strangers.check_share)
            replica.drop(sample.id)
            context.ledger.hand_in(sample, meta, check)
            worker.handed_in += 1
            worker.scored += check == "draws"
    context.touch(replica)
    touch_checkers(context)


def touch_checkers(context: Context) -> None:
    for id in range(context.config.strangers.checkers):
        if id in context.fleet.replicas:
            context.touch(context.fleet.replicas[id])


def settle(context: Context, checker: Replica) -> None:
    """Give a checker what it can look at under the version that it has, unless something has waited longer that needs
    another one: then it is given nothing more, and loads that."""
    if checker.version == NONE:
        weights.pull(context, checker, weights.wanted(context, checker))
        return
    _give_up_unscorable(context, checker)
    waiting = _handed_in(context)
    room = AT_ONCE - checker.unfinished
    if waiting and not _can_check(checker, waiting[0]):
        if not checker.unfinished:
            weights.pull(context, checker, waiting[0].newest)
    elif given := [one.id for one in waiting if _can_check(checker, one)][: max(0, room)]:
        _give(context, checker, given)


def _handed_in(context: Context) -> list[Sample]:
    """In the order in which they were."""
    return [context.ledger.samples[id] for id in context.ledger.handed_in]


def _can_check(checker: Replica, sample: Sample) -> bool:
    return sample.check == "turn" or sample.newest == checker.version


def _give(context: Context, checker: Replica, ids: list[TrajectoryId]) -> None:
    ledger = context.ledger
    requests = tuple([ledger.assign(id, checker.id, checker.version, 0, checker.steps) for id in ids])
    checker.assigned |= dict.fromkeys(ids)
    context.send(Generate(checker.id, checker.incarnation, requests))


def _give_up_unscorable(context: Context, checker: Replica) -> None:
    """Where no relay has the version any more, nothing of it can be scored: what cannot be checked does not count."""
    newest = weights.wanted(context, checker)
    others = [one for one in _handed_in(context) if not _can_check(checker, one) and one.newest < newest]
    has = {one.newest: context.relays.source_for(checker.host, one.newest) is not None for one in others}
    stores.generate_anew(context, [one for one in others if not has[one.newest]])


# ------------------------------------------------------------------------------------------------------------ exclusion


def check_failed(context: Context, event: CheckFailed) -> None:
    sample = context.ledger.current(event.trajectory, event.attempt)
    if sample is not None and sample.check and sample.replica == event.replica:
        worker = context.state.strangers.workers[context.fleet.replicas[sample.stranger].worker]
        exclude(context, worker, f"t{sample.id} of version {sample.newest} failed its check: {event.reason}")


def revoked(context: Context, event: WorkerRevoked) -> None:
    worker = context.state.strangers.workers.setdefault(event.worker, Worker(event.worker))
    exclude(context, worker, f"its key was revoked: {event.reason}" if event.reason else "its key was revoked")


def refused(context: Context, event: WorkerRefused) -> None:
    worker = context.state.strangers.workers.setdefault(event.worker, Worker(event.worker))
    exclude(context, worker, f"it sent {event.reason}")


def exclude(context: Context, worker: Worker, reason: str) -> None:
    """Quarantine: it is sent away for good, and whatever it made that is not picked for training is generated anew."""
    if worker.excluded:
        return
    worker.excluded = reason
    context.send(Dismiss(worker.name, reason))
    for host in worker.hosts:
        watch.host_left(context, HostLeft(host, f"quarantined: {reason}"))
    its = {id for host in worker.hosts for id in context.fleet.on_host.get(host, ())}
    made = [one for one in context.ledger.samples.values() if one.stranger in its and one.state != "failed"]
    stores.generate_anew(context, [one for one in made if context.ledger.groups[one.group].state != "training"])
