"""Events and commands as sentences, each about one trajectory, group, prompt, replica, relay or version.

`EventText.describe` is given each event or command before the fold takes it in, so it knows what was true until then:
which replica had a sample, under which version, what was parked. Reports that control ignored (late or doubled) are
described as such. Heartbeats are counted and summed up in one line. `story.py` keeps what is about one subject, the
page what came last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from tailrace.obs.fold import Fold
from tailrace.obs.records import SampleRecord
from tailrace.obs.sentences import Sentences, span, under
from tailrace.obs.weights_text import ABOUT_WEIGHTS
from tailrace.protocol import (
    Activate,
    Cancel,
    CheckFailed,
    Checkpointed,
    Command,
    ControllerRestarted,
    CutOff,
    Dismiss,
    Evaluate,
    Event,
    Explain,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    GiveUp,
    HandedIn,
    HostJoined,
    HostLeft,
    KeepCheckpoints,
    Parked,
    PriceChanged,
    Progressed,
    PromptsAdded,
    RecordEvaluation,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    ScoringStarted,
    SettingsChanged,
    SkipPrompts,
    Start,
    Train,
    Trained,
    TrajectoryMeta,
    UpdateChoice,
    WorkerRefused,
    WorkerRevoked,
)
from tailrace.types import EVALUATION, GroupId, HostId, ReplicaId, TrajectoryId, Version, label
from tailrace.wording import counted

UPDATES: dict[UpdateChoice, Callable[[Explain], str]] = {
    "take_along": lambda one: f"takes {counted(one.samples, 'sample')} along to v{one.version}",
    "drain": lambda one: f"takes no more work before v{one.version}, with {counted(one.samples, 'sample')} in hand",
    "stay": lambda one: f"lets v{one.version} pass, with {counted(one.samples, 'sample')} in hand",
}


def described(event: SettingsChanged) -> str:
    return ", ".join(f"{key} = {value}" for key, value in event.values.items())


class PeakLoad(msgspec.Struct):
    """The most that a replica ever had, each figure by itself."""

    kv_tokens: int = 0
    running: int = 0
    waiting: int = 0


class EventText:
    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self._prompts = 0  # received
        self._joined_hosts: dict[HostId, tuple[ReplicaId, ...]] = {}
        self._peaks: dict[ReplicaId, PeakLoad] = {}
        self._started: Counter[Version] = Counter()  # trajectories by the version that they were started under
        self._handlers: dict[type[Event | Command], Callable[[Any], Sentences]] = {
            HostJoined: self._host_joined,
            HostLeft: self._host_left,
            WorkerRevoked: self._worker_excluded,
            WorkerRefused: self._worker_excluded,
            Dismiss: self._dismiss,
            CutOff: self._cut_off,
            HandedIn: self._handed_in,
            CheckFailed: self._check_failed,
            PromptsAdded: self._prompts_added,
            SkipPrompts: self._skip_prompts,
            ReplicaJoined: self._replica_joined,
            ReplicaLost: self._replica_lost,
            Progressed: self._progressed,
            ScoringStarted: self._scoring_started,
            GenerationResumed: self._generation_resumed,
            Finished: self._finished,
            SampleFailed: self._sample_failed,
            Parked: self._parked,
            Trained: self._trained,
            Checkpointed: self._checkpointed,
            ControllerRestarted: self._controller_restarted,
            SettingsChanged: self._settings_changed,
            Generate: self._generate,
            Evaluate: self._evaluate,
            RecordEvaluation: self._record_evaluation,
            KeepCheckpoints: self._keep_checkpoints,
            Release: self._release,
            Cancel: self._cancel,
            Explain: self._explain,
            Activate: self._activate,
            PriceChanged: self._price_changed,
            Train: self._train,
            Forget: self._forget,
            GiveUp: self._give_up,
            Start: self._start,
            **ABOUT_WEIGHTS,
        }

    def describe(self, message: Event | Command) -> Sentences:
        handler = self._handlers.get(type(message))
        return handler(message) if handler is not None else iter(())

    def totals(self) -> Sentences:
        """What is worth one line at the end rather than one each."""
        for replica, peak in self._peaks.items():
            load = f"{peak.kv_tokens:,} tokens of KV, {peak.running:,} running, {peak.waiting:,} waiting"
            yield ("replica", replica), f"peak load: {load}"
        for version, count in self._started.items():
            yield ("version", version), f"in all {counted(count, 'trajectory')} started under it"

    # ------------------------------------------------------------------------------------------------------ prompts

    def _prompts_added(self, event: PromptsAdded) -> Sentences:
        if event.start != self._prompts:
            return  # a second answer
        self._prompts += len(event.prompts)
        for prompt in event.prompts:
            yield ("prompt", prompt.id), f"p{prompt.id} pooled: {prompt.tokens:,} tokens"

    def _skip_prompts(self, command: SkipPrompts) -> Sentences:
        for prompt, streak in zip(command.prompts, command.streaks, strict=True):
            alike = f"all samples {'right' if streak > 0 else 'wrong'} in the last {counted(abs(streak), 'visit')}"
            yield ("prompt", prompt), f"skipped: {alike if streak else 'a group is under way'} of its row"

    # ------------------------------------------------------------------------------------------------- trajectories

    def _generate(self, command: Generate) -> Sentences:
        replica, version = command.replica, self.fold.replica(command.replica).version
        ids = {request.trajectory for request in command.requests}
        yield ("replica", replica), f"given {counted(len(ids), 'trajectory')} ({span('trajectory', ids)}), v{version}"
        for group, requests in groupby(command.requests, key=lambda request: request.group):
            yield from self._group_given(group, list(requests), replica)
        for request in command.requests:
            yield from self._given(request, replica, version)

    def _group_given(self, id: GroupId, requests: list[Request], replica: ReplicaId) -> Sentences:
        first = requests[0]
        if not self.fold.members(id):
            yield ("group", id), f"g{id} opened for p{first.prompt} ({first.prompt_tokens:,} tokens)"
            yield ("prompt", first.prompt), f"opened as g{id}"
        yield ("group", id), f"{span('trajectory', {r.trajectory for r in requests})} given to r{replica}"

    def _given(self, request: Request, replica: ReplicaId, version: Version) -> Sentences:
        id, before = request.trajectory, self.fold.samples.get(request.trajectory)
        if before is None or not request.resume:
            self._started[version] += 1
        attempt = f"attempt {request.attempt}, version {version}"
        if before is None:
            text = f"t{id} given to r{replica} ({attempt}), a sample of g{request.group} (p{request.prompt})"
        elif before.state == "handed_in":
            how = "scored again and judged" if request.check == "draws" else "judged"
            whose = f"{before.tokens:,} tokens of r{before.replica}"
            text = f"given to the checker r{replica} ({attempt}), to be {how}: {whose}"
        elif before.state == "parked" and before.replica == replica:
            text = f"back on r{replica} after repack found no room for it ({attempt}): {before.tokens:,} tokens kept"
        elif before.state == "parked":
            text = f"moved from r{before.replica} to r{replica} by repack ({attempt}): {before.tokens:,} tokens kept"
        elif before.state == "failed":
            text = f"tried again on r{replica} ({attempt})"
        else:
            text = f"moved from r{before.replica}, which lost it, to r{replica} ({attempt}); {_from_prefix(request)}"
        yield ("trajectory", id), text

    def _scoring_started(self, event: ScoringStarted) -> Sentences:
        turns = [one for _, one in self.fold.turns(event)]
        for one in turns:
            goes_on = "" if one.final else "; more turns may follow"
            yield ("trajectory", one.trajectory), f"with a judge on r{event.replica}{goes_on}"
        yield from _about_several(event.replica, "with a judge", [one.trajectory for one in turns])

    def _generation_resumed(self, event: GenerationResumed) -> Sentences:
        turns = [one for _, one in self.fold.turns(event)]
        for one in turns:
            yield ("trajectory", one.trajectory), f"answered; continues with turn {one.turn + 1}"
        yield from _about_several(event.replica, "answered; generating again", [one.trajectory for one in turns])

    def _evaluate(self, command: Evaluate) -> Sentences:
        ids = {one.trajectory for one in command.requests}
        what = f"{counted(len(ids), 'sample')} of its evaluation"
        yield ("replica", command.replica), f"given {what}, v{command.version}"
        yield ("version", command.version), f"{what} given to r{command.replica}"
        for one in command.requests:
            given = f"given to r{command.replica} (attempt {one.attempt}), to evaluate v{command.version}"
            yield ("trajectory", one.trajectory), f"t{one.trajectory} {given} on p{one.prompt}"

    def _record_evaluation(self, command: RecordEvaluation) -> Sentences:
        for result in command.results:
            yield ("version", command.version), f"evaluated in {command.seconds:,.1f} s: {result}"

    def _keep_checkpoints(self, command: KeepCheckpoints) -> Sentences:
        for version in command.versions:
            yield ("version", version), "one of the best: its checkpoint is kept"

    def _evaluated(self, event: Finished) -> Sentences:
        meta = event.meta
        if self.fold.replica(event.replica).evaluating.get(meta.id) != meta.attempt:
            yield from _ignored(meta.id, meta.attempt, event.replica, "finished")
            return
        reward = f", reward {meta.reward:g}" if meta.reward is not None else ""
        yield ("trajectory", meta.id), f"finished: {_extent(meta)}, {meta.finish}{reward}"

    def _finished(self, event: Finished) -> Sentences:
        meta = event.meta
        if meta.id >= EVALUATION:
            yield from self._evaluated(event)
            return
        sample = self.fold.current(meta.id, meta.attempt)
        if sample is None:
            yield from _ignored(meta.id, meta.attempt, event.replica, "finished")
            return
        text = f"finished: {_extent(meta)}"
        text += f", {meta.finish}" if meta.finish else ""
        text += f", reward {meta.reward:g}" if meta.reward is not None else ""
        yield ("trajectory", meta.id), text
        yield ("replica", event.replica), f"t{meta.id} {text}"
        yield ("group", sample.group), f"t{meta.id} {text}, on r{event.replica}"

    def _sample_failed(self, event: SampleFailed) -> Sentences:
        sample = self.fold.current(event.trajectory, event.attempt)
        if sample is None:
            yield from _ignored(event.trajectory, event.attempt, event.replica, "failed")
            return
        text = f"failed in attempt {event.attempt}: {event.reason}"
        yield ("trajectory", event.trajectory), text
        yield ("replica", event.replica), f"t{event.trajectory} {text}"
        yield ("group", sample.group), f"t{event.trajectory} {text}"

    def _release(self, command: Release) -> Sentences:
        what = counted(len(command.samples), "trajectory") if command.samples else "all its trajectories"
        yield ("replica", command.replica), f"asked to release {what} for repack"

    def _explain(self, command: Explain) -> Sentences:
        yield ("replica", command.replica), f"{UPDATES[command.choice](command)}: {_costs_of_update(command)}"

    def _activate(self, command: Activate) -> Sentences:
        takes = f"the trainer takes {command.needed:,.0f} useful tokens/s" if command.needed else "all are needed"
        cost = f"a million useful tokens cost {command.cost:,.3g} dollars here" if command.cost else "it is free"
        what = "called back" if command.active else "sent home"
        there = f"{command.there:,.0f} of those who generate"
        yield ("replica", command.replica), f"{what}: {cost}, {takes}, and gets {there}"

    def _price_changed(self, event: PriceChanged) -> Sentences:
        for replica in event.replicas:
            yield ("replica", replica), f"costs {event.price:g} dollars an hour from now on"

    def _parked(self, event: Parked) -> Sentences:
        yield ("replica", event.replica), f"released {counted(len(event.samples), 'trajectory')}"
        for meta in event.samples:
            sample = self.fold.current(meta.id, meta.attempt)
            if sample is None or sample.replica != event.replica:
                yield from _ignored(meta.id, meta.attempt, event.replica, "parked")
                continue
            yield ("trajectory", meta.id), f"parked by r{event.replica}: {_extent(meta)}"

    def _handed_in(self, event: HandedIn) -> Sentences:
        for meta in event.samples:
            sample = self.fold.current(meta.id, meta.attempt)
            if sample is None or sample.replica != event.replica:
                yield from _ignored(meta.id, meta.attempt, event.replica, "was handed in")
                continue
            yield ("trajectory", meta.id), f"handed in by r{event.replica}, a stranger's: {_extent(meta)}"
            yield ("replica", event.replica), f"t{meta.id} handed in: {_extent(meta)}"

    def _check_failed(self, event: CheckFailed) -> Sentences:
        if self.fold.current(event.trajectory, event.attempt) is None:
            yield from _ignored(event.trajectory, event.attempt, event.replica, "failed its check")
            return
        yield ("trajectory", event.trajectory), f"failed its check on r{event.replica}: {event.reason}"
        yield ("replica", event.replica), f"t{event.trajectory} failed its check: {event.reason}"

    def _cancel(self, command: Cancel) -> Sentences:
        for one in command.samples:
            sample = self.fold.samples.get(one.trajectory)
            if sample is None or sample.attempt != one.attempt:
                yield ("replica", command.replica), f"told to cancel t{one.trajectory}, an older attempt"
                continue
            yield ("trajectory", one.trajectory), f"cancelled on r{command.replica}"
            yield ("replica", command.replica), f"t{one.trajectory} cancelled"
            yield ("group", sample.group), f"t{one.trajectory} cancelled on r{command.replica}"

    # ------------------------------------------------------------------------------------------- training and endings

    def _train(self, command: Train) -> Sentences:
        again = self.fold.is_pending(command)
        yield from self._mini_batch(command, "given once more to the trainer, for" if again else "picked for")

    def _trained(self, event: Trained) -> Sentences:
        command = self.fold.training
        if command is None or not self.fold.answers(event):
            return
        yield from self._mini_batch(command, "trained in")
        if command.last:
            yield ("version", command.step + 1), f"v{command.step + 1} made by step {command.step}"

    def _mini_batch(self, command: Train, verb: str) -> Sentences:
        samples = self.fold.samples
        for one in command.groups:
            ages = {id: command.step - samples[id].oldest for id in one.trajectories if id in samples}
            members = self.fold.members(one.group)
            again = " once more, after the trainer's loss" if _is_trained(members) else ""
            text = f"{verb} step {command.step}, mini-batch {command.mini_batch}{again}"
            absent = len(members) - len(ages)
            without = f", without {counted(absent, 'sample')}" if absent else ""
            oldest = f"{text} (staleness {max(ages.values(), default=0)})"
            yield ("group", one.group), oldest + without
            for prompt in {sample.prompt for sample in members}:
                yield ("prompt", prompt), f"g{one.group} {oldest}"
            for id, age in ages.items():
                yield ("trajectory", id), f"{text} (staleness {age})"

    def _forget(self, command: Forget) -> Sentences:
        """A group leaves: trained and durable, too stale, filtered, or with too few samples."""
        samples = self.fold.samples
        known = [id for id in command.trajectories if id in samples]
        for group, ids in groupby(known, key=lambda id: samples[id].group):
            members = self.fold.members(group)
            text = _why_forgotten(members, command)
            yield ("group", group), text
            if command.reason != "trained":
                yield ("prompt", members[0].prompt), f"g{group} {text}"
            for id in ids:
                yield ("trajectory", id), text

    def _checkpointed(self, event: Checkpointed) -> Sentences:
        yield ("version", event.step), "checkpointed"

    # ------------------------------------------------------------------------------------------------------ replicas

    def _host_joined(self, event: HostJoined) -> Sentences:
        self._joined_hosts[event.host] = event.replicas
        ranks = [f"{event.ranks} of the trainer's ranks"] if event.ranks else []
        room = " and ".join([*([span("replica", set(event.replicas))] if event.replicas else []), *ranks])
        whose = f" of the stranger {event.worker}" if event.worker else ""
        yield ("relay", event.host), f"host {event.host}{whose} joined from elsewhere, with room for {room}"
        for id in event.replicas:
            yield ("replica", id), f"r{id} is to run on host {event.host}, which joined"

    def _host_left(self, event: HostLeft) -> Sentences:
        yield ("relay", event.host), f"departed with its host: {event.reason}"
        for id in self._joined_hosts.pop(event.host, ()):
            yield ("replica", id), f"departed with host {event.host}: {event.reason}"

    def _worker_excluded(self, event: WorkerRevoked | WorkerRefused) -> Sentences:
        how = "the key was revoked" if isinstance(event, WorkerRevoked) else "it sent what it must not"
        yield from self._of_stranger(event.worker, f"{how}: {event.reason}" if event.reason else how)

    def _dismiss(self, command: Dismiss) -> Sentences:
        yield from self._of_stranger(command.worker, f"{command.worker} is quarantined: {command.reason}")

    def _of_stranger(self, worker: str, text: str) -> Sentences:
        stranger = self.fold.strangers.get(worker)
        for id in stranger.replicas if stranger is not None else ():
            yield ("replica", id), text

    def _cut_off(self, command: CutOff) -> Sentences:
        left = f"what it has is left to it until {command.until:,.1f} s"
        yield (command.role, command.id), f"cut off (incarnation {command.incarnation}): {command.reason}; {left}"

    def _replica_joined(self, event: ReplicaJoined) -> Sentences:
        again = f" again (incarnation {event.incarnation})" if event.incarnation > 1 else ""
        held = f", still holding {counted(len(event.held), 'trajectory')}" if event.held else ""
        at = f"with v{event.version}" if event.version >= 0 else "without weights"
        room = f"room for {event.kv_capacity:,} tokens of KV"
        room += f", {event.price:g} dollars an hour" if event.price else ""
        yield ("replica", event.replica), f"r{event.replica} joined{again} on host {event.host} {at}, {room}{held}"

    def _replica_lost(self, event: ReplicaLost) -> Sentences:
        yield ("replica", event.replica), f"lost (incarnation {event.incarnation}): {event.reason}"
        if event.incarnation == self.fold.replica(event.replica).incarnation:
            yield from self._left_behind(event.replica, event.reason)

    def _left_behind(self, replica: ReplicaId, reason: str) -> Sentences:
        for id in self.fold.replica(replica).assigned:
            yield ("trajectory", id), f"r{replica} lost: {reason}"

    def _progressed(self, event: Progressed) -> Sentences:
        peak = self._peaks.setdefault(event.replica, PeakLoad())
        peak.kv_tokens = max(peak.kv_tokens, event.kv_tokens)
        peak.running = max(peak.running, event.running)
        peak.waiting = max(peak.waiting, event.waiting)
        yield from ()

    def _give_up(self, command: GiveUp) -> Sentences:
        if command.role != "trainer":
            yield (command.role, command.id), f"given up (incarnation {command.incarnation}): {command.reason}"
        if command.role == "replica":
            yield from self._left_behind(command.id, command.reason)

    def _start(self, command: Start) -> Sentences:
        if command.role != "trainer":
            yield (
                (command.role, command.id),
                f"{label(command.role, command.id)} to be started, start {command.restart} in a row",
            )

    def _controller_restarted(self, _: ControllerRestarted) -> Sentences:
        for id in self.fold.replicas:
            yield ("replica", id), "the controller was restored from the journal"

    def _settings_changed(self, event: SettingsChanged) -> Sentences:
        yield ("version", len(self.fold.steps)), f"the run goes on from here with {described(event)}"


def _about_several(replica: ReplicaId, what: str, ids: Sequence[TrajectoryId]) -> Sentences:
    if ids:
        yield ("replica", replica), f"{counted(len(ids), 'trajectory')} ({span('trajectory', ids)}) {what}"


def _ignored(id: TrajectoryId, attempt: int, replica: ReplicaId, what: str) -> Sentences:
    text = f"a late or second report that attempt {attempt} {what} on r{replica} was ignored"
    yield ("trajectory", id), text
    yield ("replica", replica), f"t{id}: {text}"


def _from_prefix(request: Request) -> str:
    return "resumes from its prefix in the sample store" if request.resume else "restarts from its prompt"


def _is_trained(members: Sequence[SampleRecord]) -> bool:
    return any(sample.state == "trained" for sample in members)


def _costs_of_update(command: Explain) -> str:
    """What each choice was expected to cost, the one that was taken first."""
    costs = {
        "take_along": ("recompute", command.recompute_s),
        "drain": ("draining", command.drain_s),
        "stay": ("staleness", command.stay_s),
    }
    chosen, others = costs.pop(command.choice), costs.values()
    against = [f"{seconds:.1f} s of {name}" for name, seconds in others if seconds is not None]
    taken = f"{chosen[0]} {chosen[1]:.1f} s" if chosen[1] is not None else chosen[0]
    return taken + (f" against {' and '.join(against)}" if against else "")


def _why_forgotten(members: Sequence[SampleRecord], command: Forget) -> str:
    if command.reason == "filtered":
        return "filtered: all of its samples got the same reward"
    if command.reason == "stopped":
        got = counted(len(members), "sample")
        return f"stopped early: its first {got} got the same reward, and no more were started"
    if command.reason == "stale":
        oldest = min(sample.oldest for sample in members)
        return f"dropped: its oldest token is of version {oldest}, too stale to train on"
    if command.reason == "failed":
        finished = sum(sample.state == "finished" for sample in members)
        return f"failed: {finished} of {counted(len(members), 'sample')} finished"
    if command.reason in ("lost", "regenerate"):
        again = "generated anew" if command.reason == "regenerate" else "its prompt is opened again"
        return f"what there was of it is gone or does not count: {again}"
    return "freed: a checkpoint covers it"


def _extent(meta: TrajectoryMeta) -> str:
    return f"{counted(meta.tokens, 'token')}, {under(meta.oldest, meta.newest)}"
