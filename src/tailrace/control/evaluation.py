"""Evaluation while training: which version is evaluated, which replicas generate its samples, and what came of them.

    evaluation:  due -> under way -> recorded        one at a time; the newest version that is due meanwhile waits
    sample:      waiting -> given to a replica -> scored | failed (after its last attempt)
                 given -> waiting                    when its replica is lost: it is generated anew, from its prompt

Every sample of an evaluation is generated under its version, and under no other: only replicas at that version are
given any, and a replica that has some pulls nothing else until they have ended. Meanwhile it goes on with its other
work. Replicas that are behind come through the version on their way to newer ones while there is something left to
give, and relays keep it until the evaluation is over. A version that nobody can get any more, as after a restart of
everything, is given up: the newest one is evaluated in its place, from the beginning.

When the run is to end, its last version is evaluated before (`ending`): training work is put aside, and all replicas
help, those too that were sent home (`activation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil

from tailrace.config.tree import Config
from tailrace.control import weights
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NONE, NOWHERE
from tailrace.control.quota import quota
from tailrace.control.state import Context, EvalSample, RankedVersion
from tailrace.protocol import (
    Assignment,
    Cancel,
    EvalSetsOpened,
    Evaluate,
    Finished,
    Forget,
    KeepCheckpoints,
    RecordEvaluation,
    Request,
    SampleFailed,
)
from tailrace.scoring import EvalResult, PromptScore, summed_up
from tailrace.types import EVALUATION, StoreId, TrajectoryId, Version
from tailrace.wording import counted

BESIDE = 0.25  # share of a replica's batch that evaluation may have beside training work


def is_due(config: Config, version: Version) -> bool:
    """By the settings: the first and the last version too, where `run.evaluate` asks for before and after."""
    if not config.eval.every:
        return False
    if config.run.evaluate and version in (0, config.run.steps):
        return True
    return version > 0 and version % config.eval.every == 0


# ------------------------------------------------------------------------------------------------------ what happened


def opened(context: Context, event: EvalSetsOpened) -> None:
    """At the beginning, and again with every new controller: perhaps with other sets."""
    evaluation = context.evaluation
    if event.sets != evaluation.sets:
        _abandon(context)
        evaluation.sets = event.sets
    if not context.training.version and evaluation.judged == NONE and evaluation.version == NONE:
        made(context, 0)


def made(context: Context, version: Version) -> None:
    """There is a new version, or the first."""
    if context.evaluation.sets and is_due(context.config, version):
        context.evaluation.due = version
        context.more_work = True


def ends_after(context: Context, reason: str) -> bool:
    """Whether the end of the run has to wait until its last version is evaluated."""
    evaluation, last = context.evaluation, _publishable(context)
    wanted = evaluation.sets and context.config.eval.every and context.config.run.evaluate
    if wanted and last not in (evaluation.judged, evaluation.version, evaluation.due):
        evaluation.due = last
    if evaluation.version == NONE and evaluation.due == NONE:
        return False
    evaluation.ending = reason
    _put_work_aside(context)
    context.fleet_changed = context.more_work = True
    return True


def _put_work_aside(context: Context) -> None:
    """Nobody will train on it. Should the run be extended, it goes on from where it is."""
    for replica in context.fleet.replicas.values():
        held = [context.ledger.samples[id] for id in replica.holds()]
        if held:
            stopped = tuple([Assignment(one.id, one.attempt) for one in held])
            context.send(Cancel(replica.id, replica.incarnation, stopped))
        for sample in held:
            replica.drop(sample.id)
            context.ledger.take_back(sample.id, anew=bool(replica.worker))


def restarted(context: Context) -> None:
    """Somebody may have resumed it with more steps."""
    if context.training.version < context.config.run.steps and not context.state.exhausted:
        context.evaluation.ending = ""


def finished(context: Context, event: Finished) -> None:
    meta, evaluation = event.meta, context.evaluation
    sample = evaluation.current(meta.id, meta.attempt)
    if sample is None:
        return
    replica = _detach(context, sample)
    replica.restarts = replica.failures = 0
    replica.finished_at = context.now
    if meta.oldest == meta.newest == evaluation.version:
        _end_sample(context, sample, meta.reward, meta.tokens, meta.finish)
    else:
        evaluation.waiting[sample.id] = None  # whoever generated it has mixed versions: it does not count


def sample_failed(context: Context, event: SampleFailed) -> None:
    sample = context.evaluation.current(event.trajectory, event.attempt)
    if sample is None:
        return
    _detach(context, sample)
    sample.failures += 1
    if sample.failures >= context.config.groups.max_failures:
        _end_sample(context, sample, None)
    else:
        context.evaluation.waiting[sample.id] = None


def _detach(context: Context, sample: EvalSample) -> Replica:
    replica = context.fleet.replicas[sample.replica]
    del replica.evaluating[sample.id]
    sample.replica = NOWHERE
    context.touch(replica)
    return replica


def _end_sample(context: Context, sample: EvalSample, reward: float | None, tokens: int = 0, finish: str = "") -> None:
    evaluation = context.evaluation
    del evaluation.samples[sample.id]
    score = evaluation.scores[sample.prompt]
    score.add(reward, tokens, finish)
    if score.samples == evaluation.each:
        context.send(Forget(tuple(range(sample.group, sample.group + evaluation.each)), "evaluated"))


def lose(context: Context, replica: Replica) -> None:
    """What it had is generated anew by others."""
    for id in replica.evaluating:
        context.evaluation.samples[id].replica = NOWHERE
        context.evaluation.waiting[id] = None
    replica.evaluating = {}


def parked(context: Context, replica: Replica, ids: Iterable[TrajectoryId]) -> None:
    """It was told to hand back everything: others begin these anew."""
    for id in [id for id in ids if id in replica.evaluating]:
        _detach(context, context.evaluation.samples[id])
        context.evaluation.waiting[id] = None
        context.more_work = True


def keep_only(context: Context, replica: Replica, held: Iterable[Assignment]) -> set[TrajectoryId]:
    """A replica has joined, and says what it still has. Returns what of that is still wanted."""
    evaluation = context.evaluation
    samples = {one.trajectory: evaluation.current(one.trajectory, one.attempt) for one in held}
    same = replica.version == evaluation.version
    kept = {id for id, sample in samples.items() if sample is not None and sample.replica == replica.id and same}
    for id in [id for id in replica.evaluating if id not in kept]:
        del replica.evaluating[id]
        evaluation.samples[id].replica = NOWHERE
        evaluation.waiting[id] = None
    return kept


def store_departed(context: Context, store: StoreId) -> None:
    """Nobody can write there any more: what is under way goes elsewhere."""
    given = [one for one in context.evaluation.samples.values() if one.store == store and one.replica != NOWHERE]
    for sample in given:
        replica = _detach(context, sample)
        context.send(Cancel(replica.id, replica.incarnation, (Assignment(sample.id, sample.attempt),)))
        context.evaluation.waiting[sample.id] = None


# ---------------------------------------------------------------------------------------------------------- decisions


def advance(context: Context) -> str:
    """Begin what is due, give samples to replicas that can take some, record what is complete. Returns why the run is
    to end now, if it is."""
    evaluation = context.evaluation
    if evaluation.version == NONE and evaluation.due != NONE:
        _begin(context, evaluation.due)
    if evaluation.version != NONE:
        if context.more_work and evaluation.left and not _is_within_reach(context):
            _begin_anew(context)
        _deal(context)
        if evaluation.complete:
            _record(context)
    return _why_end(context)


def _begin(context: Context, version: Version) -> None:
    evaluation = context.evaluation
    evaluation.version, evaluation.began_at = version, context.now
    evaluation.due = NONE if evaluation.due <= version else evaluation.due
    evaluation.first += evaluation.begun
    evaluation.begun, evaluation.each = 0, context.config.eval.samples
    evaluation.scores = [PromptScore() for one in evaluation.sets for _ in range(one.prompts)]
    context.more_work = True


def _begin_anew(context: Context) -> None:
    newest = _publishable(context)
    if newest > context.evaluation.version:
        _abandon(context)
        _begin(context, newest)
        tell_trainer(context)


def _abandon(context: Context) -> None:
    """What there is of the present evaluation counts no more."""
    evaluation, each = context.evaluation, context.evaluation.each
    for replica in context.fleet.replicas.values():
        if replica.evaluating:
            held = [Assignment(id, evaluation.samples[id].attempt) for id in replica.evaluating]
            context.send(Cancel(replica.id, replica.incarnation, tuple(held)))
            replica.evaluating = {}
    begun = range(evaluation.begun if evaluation.version != NONE else 0)
    kept = [evaluation.first + i for i in begun if evaluation.scores[i // each].samples < each]
    if kept:
        context.send(Forget(tuple(kept), "evaluated"))
    evaluation.samples, evaluation.waiting, evaluation.version = {}, {}, NONE


def _publishable(context: Context) -> Version:
    """The newest version that replicas can ever get."""
    return context.training.version - context.training.version % context.config.schedule.publish_every


def _is_within_reach(context: Context) -> bool:
    """Somebody has the version and can generate under it, or will come through it."""
    version, replicas = context.evaluation.version, _evaluators(context)
    if any(one.version == version and one.state in ("ready", "releasing") and not one.resting for one in replicas):
        return True
    if any(one.state == "pulling" and one.target == version for one in replicas):
        return True
    there = version in context.relays.holders or version == _publishable(context)
    return there and any(not one.given_up and (not one.live or one.version < version) for one in replicas)


def _deal(context: Context) -> None:
    evaluation = context.evaluation
    candidates = list(context.fleet.ready()) if context.more_work else list(context.touched.values())
    for replica in candidates:
        if replica.state != "ready" or replica.resting or not replica.own:
            continue
        if replica.version == evaluation.version and evaluation.left:
            _give(context, replica, _room(context, replica))
        elif (
            evaluation.ending
            and not (replica.evaluating or replica.unfinished)
            and replica.version < evaluation.version
        ):
            weights.pull(context, replica, evaluation.version)


def _room(context: Context, replica: Replica) -> int:
    """A replica takes no more than its even share at a time, whoever else is there yet; beside training work, a part of
    its batch."""
    evaluators = _evaluators(context)
    live = sum(one.live for one in evaluators)
    full = max(quota(context), ceil(context.config.workload.trajectories_per_step / max(1, live)))
    most = max(1, int(BESIDE * full)) if replica.unfinished else full
    others = sum(not one.given_up and not one.resting for one in evaluators)
    return min(most, ceil(context.evaluation.total / others)) - len(replica.evaluating)


def _evaluators(context: Context) -> list[Replica]:
    """Strangers are not believed, and checkers have other things to do."""
    return [one for one in context.fleet.replicas.values() if one.own]


def _give(context: Context, replica: Replica, room: int) -> None:
    samples = [_assign(context, replica, sample) for sample in _next_samples(context, room)]
    if samples:
        evaluation = context.evaluation
        context.send(Evaluate(replica.id, replica.incarnation, evaluation.version, tuple(samples)))


def _next_samples(context: Context, room: int) -> Iterator[EvalSample]:
    """What lost its replica first; then the samples of one prompt after the other, so that they share its KV."""
    evaluation, each = context.evaluation, context.evaluation.each
    for id in list(evaluation.waiting)[: max(0, room)]:
        del evaluation.waiting[id]
        room -= 1
        yield evaluation.samples[id]
    for index in range(evaluation.begun, min(evaluation.total, evaluation.begun + max(0, room))):
        group = evaluation.first + index // each * each
        sample = EvalSample(evaluation.first + index, group, index // each)
        evaluation.samples[sample.id] = sample
        evaluation.begun += 1
        yield sample


def _assign(context: Context, replica: Replica, sample: EvalSample) -> Request:
    sample.replica = replica.id
    sample.store = context.stores.near(replica.host)
    sample.attempt += 1
    replica.evaluating[sample.id] = None
    prompt = EVALUATION + sample.prompt
    return Request(sample.id, sample.attempt, sample.group, prompt, 0, failures=sample.failures, store=sample.store)


def _record(context: Context) -> None:
    evaluation, settings = context.evaluation, context.config.eval
    results = tuple(_results(context))
    deciding = next((one for one in results if one.name == settings.by), results[0])
    _rank(context, deciding.accuracy)
    best = tuple([one.version for one in evaluation.best[: max(1, settings.keep_best)]])
    context.send(RecordEvaluation(evaluation.version, results, context.now - evaluation.began_at, best))
    evaluation.judged, evaluation.version = evaluation.version, NONE
    tell_trainer(context)
    context.more_work = True  # whoever has waited with it may pull now
    for replica in context.fleet.ready():
        context.touch(replica)
    if evaluation.due != NONE:
        _begin(context, evaluation.due)
        _deal(context)


def _results(context: Context) -> Iterator[EvalResult]:
    start = 0
    for one in context.evaluation.sets:
        scores = context.evaluation.scores[start : start + one.prompts]
        yield summed_up(one.name, scores, context.evaluation.each)
        start += one.prompts


def _rank(context: Context, score: float) -> None:
    """Of equals the earlier one counts as better."""
    evaluation = context.evaluation
    better = not evaluation.best or score > evaluation.best[0].score
    evaluation.without_gain = 0 if better else evaluation.without_gain + 1
    ranked = sorted([*evaluation.best, RankedVersion(score, evaluation.version)], key=lambda one: -one.score)
    evaluation.best = ranked[: max(1, context.config.eval.keep_best)]


def tell_trainer(context: Context) -> None:
    """Which checkpoints must not be pruned; again with every new trainer. It does not know of a version that is
    evaluated out of turn, and that may be one of the best."""
    evaluation, training = context.evaluation, context.training
    out_of_turn = evaluation.version != NONE and not is_due(context.config, evaluation.version)
    if context.config.eval.keep_best and training.live and (evaluation.judged != NONE or out_of_turn):
        best = [one.version for one in evaluation.best]
        versions = tuple([*best, evaluation.version] if out_of_turn else best)
        context.send(KeepCheckpoints(training.incarnation, versions, evaluation.judged))


def _why_end(context: Context) -> str:
    evaluation, patience = context.evaluation, context.config.eval.patience
    if evaluation.ending and evaluation.version == NONE:
        return evaluation.ending
    if patience and evaluation.without_gain >= patience:
        best, number = evaluation.best[0], evaluation.without_gain
        found = f"{counted(number, 'evaluation')} in a row {'was' if number == 1 else 'were'}"
        return f"stopped early: {found} no better than v{best.version} ({best.score:.3f}; eval.patience)"
    return ""
