"""What a sample store is told of the assignments that control has made."""

from __future__ import annotations

from tailrace.control.ledger import NONE, Ledger, Sample
from tailrace.control.state import State
from tailrace.control.training import Training
from tailrace.protocol import Request
from tailrace.types import ReplicaId, StoreId, TrajectoryId
from tailrace.wire.messages import Grant, Reconcile


def granted(replica: ReplicaId, request: Request) -> Grant:
    one = request
    return Grant(replica, one.trajectory, one.epoch, one.group, one.prompt, one.resume)


def reconciliation(state: State, store: StoreId) -> Reconcile:
    """All that this store has to know after it was away: who writes what, and what may still be read."""
    mine = [sample for sample in state.ledger.samples.values() if sample.store == store]
    running = [_grant(state.ledger, sample) for sample in mine if sample.state in ("running", "scoring")]
    begun = {sample.id for sample in mine if sample.oldest != NONE}
    return Reconcile(tuple(running), tuple(sorted(begun | _picked(state.training, store))))


def _picked(training: Training, store: StoreId) -> set[TrajectoryId]:
    """What the trainer may have to repeat."""
    groups = [group for past in training.past.values() for part in past.parts for group in part]
    return {id for group in groups for id, where in group.located() if where == store}


def _grant(ledger: Ledger, sample: Sample) -> Grant:
    prompt = ledger.groups[sample.group].prompt.id
    return Grant(sample.replica, sample.id, sample.epoch, sample.group, prompt, sample.resumed)
