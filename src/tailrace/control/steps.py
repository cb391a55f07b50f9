"""The trainer's side: which mini-batch is next, what a restart repeats, and when a version is made."""

from __future__ import annotations

from tailrace.control import groups, health, sampling, stores
from tailrace.control.ledger import NONE
from tailrace.control.state import Desk
from tailrace.control.training import PickedGroup
from tailrace.protocol import Checkpointed, Forget, Stop, Trained, TrainerJoined, TrainerLost, TrainFailed


def train(desk: Desk) -> None:
    """Give the trainer its next mini-batch: one that it must repeat, or a newly picked one. What was lost of one that
    it must repeat is picked anew."""
    training = desk.training
    if not training.live or training.busy:
        return
    stores.remove_lost(desk)
    wanted = desk.mini_batch_sizes[training.mini_batch] - len(training.picked)
    if not wanted:
        desk.send(training.order(len(desk.mini_batch_sizes)))
        return
    left = desk.config.workload.prompts_per_step - training.taken if training.step == training.version else wanted
    if len(desk.ledger.ready) >= (wanted if desk.traits.streams else left):
        _train_on_picked(desk, wanted, left)
    elif desk.state.exhausted and not len(desk.ledger.pool) and not desk.ledger.open_groups:
        _ran_out(desk)


def _ran_out(desk: Desk) -> None:
    """What is left cannot fill a step. A run that has not trained a single one has failed."""
    training, prompts = desk.training, desk.config.workload.prompts_per_step
    left = len(desk.ledger.ready) + training.taken
    partly = f", {training.taken} of them trained for a step that is not complete" if training.taken else ""
    stop(
        desk,
        f"the prompts ran out after {_counted(training.version, 'step')}: {_counted(left, 'group')} left over, too few "
        f"for one more of {prompts}{partly}",
        failed=training.version == 0,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _train_on_picked(desk: Desk, wanted: int, left: int) -> None:
    ledger, training = desk.ledger, desk.training
    as_opened, by_round = not desk.traits.streams, desk.traits.rounds
    picked = sampling.pick(desk.config, ledger, training.version, wanted, left, as_opened, by_round)
    for group in picked.stale:
        groups.end(desk, group, "stale")
    if picked.groups:
        taken = tuple([ledger.take(group) for group in picked.groups])
        training.add(taken, {group.id: PickedGroup(group.prompt, group.samples) for group in picked.groups})
        desk.send(training.order(len(desk.mini_batch_sizes)))


def joined(desk: Desk, event: TrainerJoined) -> None:
    training = desk.training
    if event.incarnation <= training.incarnation:
        return
    if event.step < training.durable:
        gone = f"its checkpoints of step {training.durable} and later are gone"
        stop(desk, f"the trainer came back at step {event.step}; {gone}", True)
        return
    if not _catch_up(desk, event):
        stop(
            desk,
            f"the trainer came with step {event.step}, mini-batch {event.mini_batch}, which it was never told to train",
            True,
        )
    elif not desk.state.stopped:
        training.join(desk.now, event.incarnation, event.step, event.mini_batch)
        desk.state.pushing = NONE


def _catch_up(desk: Desk, event: TrainerJoined) -> bool:
    """Record the mini-batches that are in its weights though the report was lost; False if it has more than was
    ordered."""
    training = desk.training
    while (training.step, training.mini_batch) < (event.step, event.mini_batch) and training.picked:
        _mini_batch_trained(desk)
    has_no_more = (training.step, training.mini_batch) >= (event.step, event.mini_batch)
    return has_no_more and event.mini_batch < len(desk.mini_batch_sizes)


def lost(desk: Desk, event: TrainerLost) -> None:
    training = desk.training
    if training.live and event.incarnation == training.incarnation:
        lose(desk, event.reason)
    elif not training.live and event.incarnation > training.incarnation:
        health.start_failed(desk.config.health, desk.now, training, event.incarnation, event.reason)


def lose(desk: Desk, reason: str) -> None:
    desk.training.live = desk.training.busy = False
    desk.training.reason = reason
    health.plan_restart(desk.config.health, desk.now, desk.training)


def trained(desk: Desk, event: Trained) -> None:
    training = desk.training
    if not training.awaits(event.incarnation, event.step, event.mini_batch):
        return
    training.restarts = 0
    _mini_batch_trained(desk)


def train_failed(desk: Desk, event: TrainFailed) -> None:
    """What its store has is ordered again; what was lost with a store is replaced."""
    if desk.training.awaits(event.incarnation, event.step, event.mini_batch):
        desk.training.last_seen = desk.now
        desk.training.busy = False


def _mini_batch_trained(desk: Desk) -> None:
    training = desk.training
    for one in training.past[training.step].mini_batches[training.mini_batch]:
        if one.group in desk.ledger.groups:  # not there if this mini-batch is a repetition
            desk.ledger.retire(one.group)
    if training.advance(desk.now, len(desk.mini_batch_sizes)):
        _version_made(desk)


def _version_made(desk: Desk) -> None:
    if desk.training.version >= desk.config.run.steps:
        stop(desk, "all steps are done")
        return
    groups.drop_doomed(desk)
    desk.more_work = True
    desk.repack_due = True


def checkpointed(desk: Desk, event: Checkpointed) -> None:
    if event.incarnation == desk.training.incarnation:
        freed = desk.training.checkpointed(min(event.step, desk.training.step))  # it may overtake `Trained`
        if freed:
            desk.send(Forget(tuple(freed)))


def stop(desk: Desk, reason: str, failed: bool = False) -> None:
    """The first reason is the one that counts."""
    if desk.state.stopped:
        return
    desk.state.stopped = reason
    desk.state.failed = failed
    desk.send(Stop(reason, failed))
