"""What a sample store is told of the assignments that control has made."""

from __future__ import annotations

from tailrace.control.ledger import NONE, NOWHERE, Ledger, Sample
from tailrace.control.state import Evaluation, State
from tailrace.control.storage import FIRST
from tailrace.control.training import Training
from tailrace.protocol import Evaluate, Generate, Request
from tailrace.store.trajectories import TrajectoryTable
from tailrace.types import EVALUATION, PromptId, ReplicaId, StoreId, TrajectoryId
from tailrace.wire.messages import Assigned, Grant, Reconcile


def granted(ledger: Ledger, command: Generate | Evaluate, store: StoreId) -> Assigned:
    """To this store. A sample may have moved on since; what counts is what was ordered."""
    return Assigned(tuple([_ordered(ledger, command.replica, one) for one in command.requests if one.store == store]))


def _ordered(ledger: Ledger, replica: ReplicaId, request: Request) -> Grant:
    one, sample = request, ledger.samples.get(request.trajectory)
    began = sample.began if one.resume and sample is not None else one.attempt
    return Grant(replica, one.trajectory, one.attempt, one.group, one.prompt, one.resume, began)


def reconciliation(state: State, table: TrajectoryTable, store: StoreId) -> Reconcile:
    """All that this store has to know after it was away: who writes what, and what may still be read."""
    mine = [sample for sample in state.ledger.samples.values() if sample.store == store and sample.oldest != NONE]
    grants = [_grant(state.ledger, sample) for sample in mine if sample.state in ("running", "scoring")]
    grants += _of_evaluation(state.evaluation, store)
    done = {sample.id for sample in mine if sample.state == "done"}
    keep = tuple(sorted(done | _picked(state.training, store)))
    prefixes = tuple([sample.id for sample in mine if sample.state in ("waiting", "handed_in")])
    prompts = _needed_prompts(state) if store == FIRST else ()
    return Reconcile(tuple(grants), keep, table.finished(keep), prefixes, prompts)


def _needed_prompts(state: State) -> tuple[PromptId, ...]:
    """Of what may still be generated, now or after a loss."""
    picked = [one.prompt for past in state.training.past.values() for one in past.picked.values()]
    opened = [group.prompt for group in state.ledger.groups.values()]
    return tuple(sorted({prompt.id for prompt in (*state.ledger.pool.contents(), *opened, *picked)}))


def _picked(training: Training, store: StoreId) -> set[TrajectoryId]:
    """What the trainer may have to repeat."""
    groups = [group for past in training.past.values() for mini_batch in past.mini_batches for group in mini_batch]
    return {id for group in groups for id, where in group.located() if where == store}


def _of_evaluation(evaluation: Evaluation, store: StoreId) -> list[Grant]:
    """Its samples are always begun from their prompts."""
    mine = [one for one in evaluation.samples.values() if one.store == store and one.replica != NOWHERE]
    return [
        Grant(one.replica, one.id, one.attempt, one.group, EVALUATION + one.prompt, began=one.attempt) for one in mine
    ]


def _grant(ledger: Ledger, sample: Sample) -> Grant:
    prompt = ledger.groups[sample.group].prompt.id
    resume = sample.began < sample.attempt
    return Grant(sample.replica, sample.id, sample.attempt, sample.group, prompt, resume, sample.began)
