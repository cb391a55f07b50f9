"""The trainer's side: which mini-batch is next, what a restart repeats, and when a version is made."""

from __future__ import annotations

from math import inf

from tailrace.control import activation, evaluation, filters, groups, health, sampling, stores
from tailrace.control.ledger import NONE
from tailrace.control.state import Context
from tailrace.control.training import PickedGroup
from tailrace.protocol import (
    Checkpointed,
    Forget,
    SettingsChanged,
    Stop,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrainerWaits,
    TrainFailed,
)
from tailrace.wording import counted


def train(context: Context) -> None:
    """Give the trainer its next mini-batch: one that it must repeat, or a newly picked one. What was lost of one that
    it must repeat is picked anew."""
    training = context.training
    if not training.live or training.busy or (context.evaluation.ending and training.step == training.version):
        return
    if training.picked:
        stores.remove_lost(context)
    wanted = context.mini_batch_sizes[training.mini_batch] - len(training.picked)
    if not wanted:
        context.send(training.order(context.now, len(context.mini_batch_sizes)))
        return
    left = context.config.workload.prompts_per_step - training.taken if training.step == training.version else wanted
    if len(context.ledger.ready) >= min(left, _required(context, wanted)):
        _train_on_picked(context, wanted, left)
        return
    context.state.pacing.starved = True
    if context.state.exhausted and not len(context.ledger.pool) and not context.ledger.open_groups:
        _ran_out(context)
    elif why := filters.why_hopeless(context):
        stop(context, why, failed=True)


def _required(context: Context, wanted: int) -> int:
    """Groups that have to be ready before the trainer goes on, if the step still lacks as many."""
    training, settings = context.training, context.config.trainer
    if not context.traits.streams:
        return context.config.workload.prompts_per_step
    if training.mini_batch % settings.require_batches:
        return wanted
    first = training.mini_batch + 1
    return wanted + sum(context.mini_batch_sizes[first : first + settings.require_batches - 1])


def _ran_out(context: Context) -> None:
    """What is left cannot fill a step. A run that has not trained a single one has failed."""
    training, prompts = context.training, context.config.workload.prompts_per_step
    left = len(context.ledger.ready) + training.taken
    partly = f", {training.taken} of them trained for a step that is not complete" if training.taken else ""
    _end(
        context,
        f"the prompts ran out after {counted(training.version, 'step')}: {counted(left, 'group')} left over, too few "
        f"for one more of {prompts}{partly}",
        failed=training.version == 0,
    )


def _train_on_picked(context: Context, wanted: int, left: int) -> None:
    ledger, training = context.ledger, context.training
    as_opened, by_round = not context.traits.streams, context.traits.rounds
    picked = sampling.pick(context.config, ledger, training.step, wanted, left, as_opened, by_round)
    for group in picked.stale:
        groups.end(context, group, "stale")
    if picked.groups:
        taken = tuple([ledger.take(group, filters.left_out(context, group)) for group in picked.groups])
        training.add(taken, {group.id: PickedGroup(group.prompt, group.samples) for group in picked.groups})
        context.state.pacing.picked(len(ledger.ready))
        context.send(training.order(context.now, len(context.mini_batch_sizes)))


def joined(context: Context, event: TrainerJoined) -> None:
    training = context.training
    if event.incarnation <= training.incarnation:
        return
    if event.step < training.durable:
        gone = f"its checkpoints of step {training.durable} and later are gone"
        stop(context, f"the trainer came back at step {event.step}; {gone}", True)
        return
    if not _catch_up(context, event):
        stop(
            context,
            f"the trainer came with step {event.step}, mini-batch {event.mini_batch}, which it was never told to train",
            True,
        )
    elif not context.state.stopped:
        training.join(context.now, event.incarnation, event.step, event.mini_batch)
        context.state.pushing = NONE
        evaluation.tell_trainer(context)


def _catch_up(context: Context, event: TrainerJoined) -> bool:
    """Record the mini-batches that are in its weights though the report was lost; False if it has more than was
    ordered."""
    training = context.training
    while (training.step, training.mini_batch) < (event.step, event.mini_batch) and training.picked:
        _mini_batch_trained(context)
    has_no_more = (training.step, training.mini_batch) >= (event.step, event.mini_batch)
    return has_no_more and event.mini_batch < len(context.mini_batch_sizes)


def lost(context: Context, event: TrainerLost) -> None:
    training = context.training
    if training.live and event.incarnation == training.incarnation:
        lose(context, event.reason)
    elif not training.live and event.incarnation > training.incarnation:
        health.start_failed(context.config.health, context.now, training, event.incarnation, event.reason)


def waits(context: Context, event: TrainerWaits) -> None:
    """Nothing is wrong with it: the start that was ordered does not count, and no other one is."""
    training = context.training
    if not training.live:
        training.reason = event.reason
        training.restarts -= training.restart_at < inf and training.restarts > 0
        training.restart_at = inf


def lose(context: Context, reason: str) -> None:
    context.training.live = context.training.busy = False
    context.more_work = True  # what is under way is not limited by its need any more
    context.training.reason = reason
    health.plan_restart(context.config.health, context.now, context.training)


def trained(context: Context, event: Trained) -> None:
    training = context.training
    if not training.awaits(event.incarnation, event.step, event.mini_batch):
        return
    training.restarts = 0
    _mini_batch_trained(context)


def train_failed(context: Context, event: TrainFailed) -> None:
    """What its store has is ordered again; what was lost with a store is replaced."""
    if context.training.awaits(event.incarnation, event.step, event.mini_batch):
        context.training.last_seen = context.now
        context.training.busy = False


def _mini_batch_trained(context: Context) -> None:
    training = context.training
    for one in training.past[training.step].mini_batches[training.mini_batch]:
        if one.group in context.ledger.groups:  # not there if this mini-batch is a repetition
            context.ledger.retire(one.group)
    if training.advance(context.now, len(context.mini_batch_sizes)):
        _version_made(context)


def _version_made(context: Context) -> None:
    evaluation.made(context, context.training.version)
    if context.training.version >= context.config.run.steps:
        _end(context, "all steps are done")
        return
    _begin_next(context)


def _begin_next(context: Context) -> None:
    sizes = context.mini_batch_sizes
    most = sampling.admission_limit(context.config)
    context.state.pacing.step_made(context.training.version, most, context.config.workload.prompts_per_step, max(sizes))
    context.state.history.tune(context.config.filters)
    _measure(context)
    activation.step_made(context)
    groups.drop_doomed(context)
    context.state.pacing.note_dropped(context.ledger.tally.dropped_stale, context.config.workload.prompts_per_step)
    context.more_work = True
    context.repack_due = True


def _end(context: Context, reason: str, failed: bool = False) -> None:
    """Now, or once the last version is evaluated."""
    if failed or not evaluation.ends_after(context, reason):
        stop(context, reason, failed)


def settings_changed(context: Context, event: SettingsChanged) -> None:
    """A run that had come to its end goes on if it may have more steps now."""
    context.reconfigure(event.values)
    state = context.state
    if "task.epochs" in event.values:
        state.exhausted = False  # whether there are more prompts is asked again
    ended = state.stopped or state.evaluation.ending
    if ended and not state.failed and context.training.version < context.config.run.steps:
        state.stopped = state.evaluation.ending = ""
        _begin_next(context)


def _measure(context: Context) -> None:
    """How fast replicas are, each with its share of a step."""
    workload = context.config.workload
    kv = context.ledger.kv_per_sample(workload.max_completion_tokens)
    context.fleet.measure(workload.trajectories_per_step, kv)
    if context.relieves and "repack" not in context.state.timers:
        context.set_timer("repack", context.now + context.config.repack.every_s)


def checkpointed(context: Context, event: Checkpointed) -> None:
    if event.incarnation == context.training.incarnation:
        freed = context.training.checkpointed(min(event.step, context.training.step))  # it may overtake `Trained`
        if freed:
            context.send(Forget(tuple(freed)))


def stop(context: Context, reason: str, failed: bool = False) -> None:
    """The first reason is the one that counts."""
    if context.state.stopped:
        return
    context.state.stopped = reason
    context.state.failed = failed
    context.send(Stop(reason, failed))
