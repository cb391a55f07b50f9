"""Everything that happens in a run, in words: one sentence per event or command, said of whomever it happens to.

The `Chronicle` reads events and commands in order and remembers just enough to name causes: who had a sample, under
which version, what was parked. Reports that control ignored (late or doubled) are told as such. Heartbeats are counted
and told in one line at the end. `story.py` keeps what is about one subject, the page what came last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from tailrace.protocol import (
    Cancel,
    Checkpointed,
    Command,
    ControllerRestarted,
    Drop,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    GiveUp,
    HostJoined,
    HostLeft,
    LinkFailed,
    LoadWeights,
    Parked,
    Progressed,
    PromptsAdded,
    Publish,
    PublishFailed,
    PullFailed,
    RelayJoined,
    RelayLost,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Request,
    Route,
    SampleFailed,
    ScoringStarted,
    Start,
    Train,
    Trained,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.types import GroupId, HostId, PromptId, ReplicaId, TrajectoryId, Version, label

HELD = ("running", "scoring")  # states in which a replica has a sample

Subject = tuple[str, int]
Told = Iterator[tuple[Subject, str]]


class Sample(msgspec.Struct):
    """What has become of a trajectory so far."""

    group: GroupId
    epoch: int
    replica: ReplicaId
    state: str = "running"  # running, scoring, parked, failed, finished, cancelled
    tokens: int = 0
    oldest: Version = 0
    turn: int = 0


class Group(msgspec.Struct):
    prompt: PromptId
    trajectories: list[TrajectoryId] = []
    trained: bool = False


class PeakLoad(msgspec.Struct):
    """The most that a replica ever had, each figure by itself."""

    kv_tokens: int = 0
    running: int = 0
    waiting: int = 0


class Chronicle:
    """Reads the journal in order and tells what happens to whom."""

    def __init__(self) -> None:
        self.received = 0  # prompts
        self.samples: dict[TrajectoryId, Sample] = {}
        self.groups: dict[GroupId, Group] = {}
        self.versions: dict[ReplicaId, Version] = {}  # what each replica generates under
        self.guests: dict[HostId, tuple[ReplicaId, ...]] = {}  # on the machines that joined
        self.training: Train | None = None  # the unanswered one
        self.peaks: dict[ReplicaId, PeakLoad] = {}
        self.began: dict[Version, int] = {}  # trajectories begun under a version
        self._events: dict[type[Event], Callable[[Any], Told]] = {
            HostJoined: self._host_joined,
            HostLeft: self._host_left,
            PromptsAdded: self._prompts_added,
            ReplicaJoined: self._replica_joined,
            ReplicaLost: self._replica_lost,
            Progressed: self._progressed,
            ScoringStarted: self._scoring_started,
            GenerationResumed: self._generation_resumed,
            Finished: self._finished,
            SampleFailed: self._sample_failed,
            Parked: self._parked,
            WeightsLoaded: self._weights_loaded,
            PullFailed: self._pull_failed,
            RelayJoined: self._relay_joined,
            RelayLost: self._relay_lost,
            LinkFailed: self._link_failed,
            PublishFailed: self._publish_failed,
            VersionStored: self._version_stored,
            Trained: self._trained,
            Checkpointed: self._checkpointed,
            ControllerRestarted: self._controller_restarted,
        }
        self._commands: dict[type[Command], Callable[[Any], Told]] = {
            Generate: self._generate,
            Release: self._release,
            Cancel: self._cancel,
            LoadWeights: self._load_weights,
            Train: self._train,
            Publish: self._publish,
            Route: self._route,
            Drop: self._drop,
            GiveUp: self._give_up,
            Start: self._start,
        }

    def tell(self, event: Event, commands: Sequence[Command]) -> Told:
        yield from self.hear(event)
        for command in commands:
            yield from self.obey(command, event)

    def hear(self, event: Event) -> Told:
        if type(event) in self._events:
            yield from self._events[type(event)](event)

    def obey(self, command: Command, cause: Event) -> Told:
        if isinstance(command, Forget):
            yield from self._forget(command, cause)
        elif type(command) in self._commands:
            yield from self._commands[type(command)](command)

    def summary(self) -> Told:
        """What is worth one line at the end rather than one each."""
        for replica, peak in self.peaks.items():
            load = f"{peak.kv_tokens:,} tokens of KV, {peak.running:,} running, {peak.waiting:,} waiting"
            yield ("replica", replica), f"peak load: {load}"
        for version, count in self.began.items():
            yield ("version", version), f"in all {counted(count, 'trajectory')} begun under it"

    # ------------------------------------------------------------------------------------------------------ prompts

    def _prompts_added(self, event: PromptsAdded) -> Told:
        if event.start != self.received:
            return  # a second answer
        self.received += len(event.prompts)
        for prompt in event.prompts:
            yield ("prompt", prompt.id), f"p{prompt.id} pooled: {prompt.tokens:,} tokens"

    # ------------------------------------------------------------------------------------------------- trajectories

    def _generate(self, command: Generate) -> Told:
        replica, version = command.replica, self.versions.get(command.replica, -1)
        ids = {request.trajectory for request in command.requests}
        yield ("replica", replica), f"given {counted(len(ids), 'trajectory')} ({span('trajectory', ids)}), v{version}"
        for group, requests in groupby(command.requests, key=lambda request: request.group):
            yield from self._group_given(group, list(requests), replica)
        for request in command.requests:
            yield from self._given(request, replica, version)

    def _group_given(self, id: GroupId, requests: list[Request], replica: ReplicaId) -> Told:
        first = requests[0]
        if id not in self.groups:
            self.groups[id] = Group(first.prompt)
            yield ("group", id), f"g{id} opened for p{first.prompt} ({first.prompt_tokens:,} tokens)"
            yield ("prompt", first.prompt), f"opened as g{id}"
        group = self.groups[id]
        group.trajectories += [r.trajectory for r in requests if r.trajectory not in self.samples]
        yield ("group", id), f"{span('trajectory', {r.trajectory for r in requests})} given to r{replica}"

    def _given(self, request: Request, replica: ReplicaId, version: Version) -> Told:
        id, before = request.trajectory, self.samples.get(request.trajectory)
        sample = Sample(request.group, request.epoch, replica, oldest=version)
        if before is None or not request.resume:
            self.began[version] = self.began.get(version, 0) + 1
        if before is not None and request.resume:
            sample.tokens, sample.oldest = before.tokens, before.oldest
        self.samples[id] = sample
        attempt = f"attempt {request.epoch}, version {version}"
        if before is None:
            text = f"t{id} given to r{replica} ({attempt}), a sample of g{request.group} (p{request.prompt})"
        elif before.state == "parked" and before.replica == replica:
            text = f"back on r{replica} after repack found no room for it ({attempt}): {sample.tokens:,} tokens kept"
        elif before.state == "parked":
            text = f"moved from r{before.replica} to r{replica} by repack ({attempt}): {sample.tokens:,} tokens kept"
        elif before.state == "failed":
            text = f"tried again on r{replica} ({attempt})"
        else:
            text = f"moved from r{before.replica}, which lost it, to r{replica} ({attempt}); {_from_prefix(request)}"
        yield ("trajectory", id), text

    def _current(self, id: TrajectoryId, epoch: int) -> Sample | None:
        """The sample if a report about it counts; control ignores those of older attempts and second ones."""
        sample = self.samples.get(id)
        return sample if sample is not None and sample.epoch == epoch and sample.state in HELD else None

    def _scoring_started(self, event: ScoringStarted) -> Told:
        known = [(one, self._current(one.trajectory, one.epoch)) for one in event.samples]
        news = [(one, sample) for one, sample in known if sample is not None and one.turn >= sample.turn]
        for one, sample in news:
            sample.state, sample.turn = "scoring", one.turn
            goes_on = "" if one.final else "; it may go on after that"
            yield ("trajectory", one.trajectory), f"with a judge on r{event.replica}{goes_on}"
        yield from _told_of(event.replica, "with a judge", [one.trajectory for one, _ in news])

    def _generation_resumed(self, event: GenerationResumed) -> Told:
        known = [(one, self._current(one.trajectory, one.epoch)) for one in event.samples]
        news = [(one, sample) for one, sample in known if sample is not None and one.turn > sample.turn]
        for one, sample in news:
            sample.state, sample.turn = "running", one.turn
            yield ("trajectory", one.trajectory), f"answered, and goes on with turn {one.turn + 1}"
        yield from _told_of(event.replica, "answered, and generated again", [one.trajectory for one, _ in news])

    def _finished(self, event: Finished) -> Told:
        meta = event.meta
        sample = self._current(meta.id, meta.epoch)
        if sample is None:
            yield from _ignored(meta.id, meta.epoch, event.replica, "finished")
            return
        sample.state, sample.tokens, sample.oldest = "finished", meta.tokens, meta.oldest
        text = f"finished: {_extent(meta)}"
        text += f", {meta.finish}" if meta.finish else ""
        text += f", reward {meta.reward:g}" if meta.reward is not None else ""
        yield ("trajectory", meta.id), text
        yield ("replica", event.replica), f"t{meta.id} {text}"
        yield ("group", sample.group), f"t{meta.id} {text}, on r{event.replica}"

    def _sample_failed(self, event: SampleFailed) -> Told:
        sample = self._current(event.trajectory, event.epoch)
        if sample is None:
            yield from _ignored(event.trajectory, event.epoch, event.replica, "failed")
            return
        sample.state = "failed"
        text = f"failed in attempt {event.epoch}: {event.reason}"
        yield ("trajectory", event.trajectory), text
        yield ("replica", event.replica), f"t{event.trajectory} {text}"
        yield ("group", sample.group), f"t{event.trajectory} {text}"

    def _release(self, command: Release) -> Told:
        yield ("replica", command.replica), "asked to hand back all it has, so that repack can place it elsewhere"

    def _parked(self, event: Parked) -> Told:
        yield ("replica", event.replica), f"handed back {counted(len(event.samples), 'trajectory')}"
        for meta in event.samples:
            sample = self._current(meta.id, meta.epoch)
            if sample is None or sample.replica != event.replica:
                yield from _ignored(meta.id, meta.epoch, event.replica, "parked")
                continue
            sample.state, sample.tokens, sample.oldest = "parked", meta.tokens, meta.oldest
            yield ("trajectory", meta.id), f"parked by r{event.replica}: {_extent(meta)}"

    def _cancel(self, command: Cancel) -> Told:
        for one in command.samples:
            sample = self.samples.get(one.trajectory)
            if sample is None or sample.epoch != one.epoch:
                yield ("replica", command.replica), f"told to forget t{one.trajectory}, an older attempt"
                continue
            sample.state = "cancelled"
            yield ("trajectory", one.trajectory), f"cancelled on r{command.replica}"
            yield ("replica", command.replica), f"t{one.trajectory} cancelled"
            yield ("group", sample.group), f"t{one.trajectory} cancelled on r{command.replica}"

    # ------------------------------------------------------------------------------------------- training and endings

    def _train(self, command: Train) -> Told:
        before, self.training = self.training, command
        again = before is not None and (before.step, before.part) == (command.step, command.part)
        yield from self._of_part(command, "given once more to the trainer, for" if again else "picked for")

    def _trained(self, event: Trained) -> Told:
        command = self.training
        asked = (command.incarnation, command.step, command.part) if command else None
        if command is None or asked != (event.incarnation, event.step, event.part):
            return
        self.training = None
        yield from self._of_part(command, "trained in")
        if command.last:
            yield ("version", command.step + 1), f"v{command.step + 1} made by step {command.step}"
        for one in command.groups:
            self.groups[one.group].trained = True

    def _of_part(self, command: Train, verb: str) -> Told:
        part = f"step {command.step}, part {command.part}"
        for one in command.groups:
            group = self.groups[one.group]
            ages = {id: command.step - self.samples[id].oldest for id in one.trajectories}
            again = " once more, after the trainer's loss" if group.trained else ""
            text = f"{verb} {part}{again} (staleness {max(ages.values(), default=0)})"
            absent = len(group.trajectories) - len(ages)
            yield ("group", one.group), text + (f", without {counted(absent, 'sample')}" if absent else "")
            yield ("prompt", group.prompt), f"g{one.group} {text}"
            for id, age in ages.items():
                yield ("trajectory", id), f"{verb} {part}{again} (staleness {age})"

    def _forget(self, command: Forget, cause: Event) -> Told:
        """A group leaves: trained and durable, too stale, or with too few samples."""
        known = [id for id in command.trajectories if id in self.samples]
        for group_id, ids in groupby(known, key=lambda id: self.samples[id].group):
            group, members = self.groups[group_id], list(ids)
            if command.reason == "filtered":
                text = "filtered: all of its samples got the same reward"
            else:
                text = "freed: a checkpoint covers it" if group.trained else self._why_dropped(group, cause)
            yield ("group", group_id), text
            if not group.trained:
                yield ("prompt", group.prompt), f"g{group_id} {text}"
            for id in members:
                yield ("trajectory", id), text

    def _why_dropped(self, group: Group, cause: Event) -> str:
        samples = [self.samples[id] for id in group.trajectories]
        oldest = min(sample.oldest for sample in samples)
        if isinstance(cause, Trained) or all(sample.state == "finished" for sample in samples):
            return f"dropped: its oldest token is of version {oldest}, too stale to train on"
        done = sum(sample.state == "finished" for sample in samples)
        return f"given up: {done} of {counted(len(samples), 'sample')} came to a good end"

    def _checkpointed(self, event: Checkpointed) -> Told:
        yield ("version", event.step), "checkpointed"

    # ------------------------------------------------------------------------------------------------------ replicas

    def _host_joined(self, event: HostJoined) -> Told:
        self.guests[event.host] = event.replicas
        room = span("replica", set(event.replicas))
        yield ("relay", event.host), f"host {event.host} joined from elsewhere, with room for {room}"
        for id in event.replicas:
            yield ("replica", id), f"r{id} is to run on host {event.host}, which joined"

    def _host_left(self, event: HostLeft) -> Told:
        yield ("relay", event.host), f"departed with its host: {event.reason}"
        for id in self.guests.pop(event.host, ()):
            yield ("replica", id), f"departed with host {event.host}: {event.reason}"

    def _replica_joined(self, event: ReplicaJoined) -> Told:
        self.versions[event.replica] = event.version
        again = f" again (incarnation {event.incarnation})" if event.incarnation > 1 else ""
        held = f", still holding {counted(len(event.held), 'trajectory')}" if event.held else ""
        at = f"with v{event.version}" if event.version >= 0 else "without weights"
        room = f"room for {event.kv_capacity:,} tokens of KV"
        yield ("replica", event.replica), f"r{event.replica} joined{again} on host {event.host} {at}, {room}{held}"

    def _replica_lost(self, event: ReplicaLost) -> Told:
        yield ("replica", event.replica), f"lost (incarnation {event.incarnation}): {event.reason}"
        yield from self._left_behind(event.replica, event.reason)

    def _left_behind(self, replica: ReplicaId, reason: str) -> Told:
        for id, sample in self.samples.items():
            if sample.replica == replica and sample.state in HELD:
                yield ("trajectory", id), f"r{replica} lost: {reason}"

    def _progressed(self, event: Progressed) -> Told:
        peak = self.peaks.setdefault(event.replica, PeakLoad())
        peak.kv_tokens = max(peak.kv_tokens, event.kv_tokens)
        peak.running = max(peak.running, event.running)
        peak.waiting = max(peak.waiting, event.waiting)
        yield from ()

    def _give_up(self, command: GiveUp) -> Told:
        if command.part != "trainer":
            yield (command.part, command.id), f"given up (incarnation {command.incarnation}): {command.reason}"
        if command.part == "replica":
            yield from self._left_behind(command.id, command.reason)

    def _start(self, command: Start) -> Told:
        if command.part != "trainer":
            yield (
                (command.part, command.id),
                f"{label(command.part, command.id)} to be started, attempt {command.attempt}",
            )

    def _controller_restarted(self, _: ControllerRestarted) -> Told:
        for id in self.versions:
            yield ("replica", id), "the controller was restored from its journal"

    # ------------------------------------------------------------------------------------------------------- weights

    def _publish(self, command: Publish) -> Told:
        made = "the first weights, " if command.version == 0 else ""
        yield ("version", command.version), f"{made}on the way from the trainer to h{command.relay}"
        yield ("relay", command.relay), f"gets v{command.version} from the trainer, as the master"

    def _version_stored(self, event: VersionStored) -> Told:
        yield ("version", event.version), f"stored on h{event.relay}"
        yield ("relay", event.relay), f"v{event.version} stored"

    def _load_weights(self, command: LoadWeights) -> Told:
        yield ("replica", command.replica), f"pulls v{command.version} from h{command.relay}"
        yield ("relay", command.relay), f"r{command.replica} pulls v{command.version} from it"
        yield ("version", command.version), f"r{command.replica} pulls it from h{command.relay}"

    def _weights_loaded(self, event: WeightsLoaded) -> Told:
        self.versions[event.replica] = event.version
        yield ("replica", event.replica), f"v{event.version} loaded"
        yield ("version", event.version), f"loaded by r{event.replica}"

    def _pull_failed(self, event: PullFailed) -> Told:
        yield ("replica", event.replica), f"could not load v{event.version}: {event.reason}"
        yield ("version", event.version), f"r{event.replica} could not load it: {event.reason}"

    def _drop(self, command: Drop) -> Told:
        yield ("relay", command.relay), f"told to drop v{command.version}, which nobody reads"
        yield ("version", command.version), f"dropped from h{command.relay}"

    def _route(self, command: Route) -> Told:
        targets = ", ".join(f"h{id}" for id in command.targets) or "nobody"
        yield ("relay", command.relay), f"told to forward to {targets} (route {command.epoch})"

    def _relay_joined(self, event: RelayJoined) -> Told:
        again = f" again (incarnation {event.incarnation})" if event.incarnation > 1 else ""
        held = ", ".join(f"v{version}" for version in event.versions) or "nothing"
        yield ("relay", event.relay), f"h{event.relay} joined{again}, holding {held}"

    def _relay_lost(self, event: RelayLost) -> Told:
        yield ("relay", event.relay), f"lost (incarnation {event.incarnation}): {event.reason}"

    def _link_failed(self, event: LinkFailed) -> Told:
        yield ("relay", event.relay), f"cannot reach h{event.target}: {event.reason}"
        yield ("relay", event.target), f"cannot be reached from h{event.relay}: {event.reason}"

    def _publish_failed(self, event: PublishFailed) -> Told:
        text = f"did not get from the trainer to h{event.relay}: {event.reason}"
        yield ("version", event.version), text
        yield ("relay", event.relay), f"v{event.version} {text}"


def _told_of(replica: ReplicaId, what: str, ids: Sequence[TrajectoryId]) -> Told:
    if ids:
        yield ("replica", replica), f"{counted(len(ids), 'trajectory')} ({span('trajectory', ids)}) {what}"


def _ignored(id: TrajectoryId, epoch: int, replica: ReplicaId, what: str) -> Told:
    text = f"a late or second report that attempt {epoch} {what} on r{replica} was ignored"
    yield ("trajectory", id), text
    yield ("replica", replica), f"t{id}: {text}"


def _from_prefix(request: Request) -> str:
    return "goes on from what the vault has of it" if request.resume else "begins anew"


def _extent(meta: TrajectoryMeta) -> str:
    return f"{counted(meta.tokens, 'token')}, {under(meta.oldest, meta.newest)}"


def under(oldest: Version, newest: Version) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    return "trajectories" if noun == "trajectory" else f"{noun}s"


def span(kind: str, numbers: Iterable[int]) -> str:
    """`t3`, `t0 to t9`, or `t0 to t90, 12 in all` where some between are missing."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return label(kind, ordered[0])
    ends = f"{label(kind, ordered[0])} to {label(kind, ordered[-1])}"
    return ends if ordered[-1] - ordered[0] + 1 == len(ordered) else f"{ends}, {len(ordered):,} in all"
