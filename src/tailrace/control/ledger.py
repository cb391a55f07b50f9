"""Which state every prompt, sample and group is in: the account that must always balance.

    prompt:  pooled -> opened as a group | skipped (its last visits taught nothing)
    sample:  waiting -> running <-> scoring        scoring: nothing of it is generated, a judge has its turn
             running | scoring -> done | failed    failed: after its last attempt
             running | scoring -> waiting          when its replica is lost or releases it
             running -> handed_in -> running       by a stranger; then a checker has it, which judges it
    group:   open -> ready -> training -> trained -> forgotten (once a checkpoint covers it)
                 \\-> dropped (too stale: its prompt is pooled again) | failed (too few samples survived)
                 \\-> filtered (all samples got the same reward: there is nothing to learn from it)
                 \\-> stopped (the same, known before all of its samples were started)

The prompt pool, the partial pool (samples with a prefix) and the experience buffer (ready groups) are views of this.
Owned by the plane; nothing outside `control` writes to it. It promises that a group is trained at most once, and that
`started == trained + dropped_stale + filtered + stopped + failed + lost + in flight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log
from typing import Literal

import msgspec

from tailrace.control.estimates import EarlierLengths, LengthEstimates
from tailrace.control.fifo import Fifo
from tailrace.protocol import Check, Ending, Request, TrainGroup, TrajectoryMeta
from tailrace.types import GroupId, Prompt, ReplicaId, RowId, StoreId, TrajectoryId, Version

NOWHERE: ReplicaId = -1
NONE: Version = -1


class Sample(msgspec.Struct, gc=False):
    """One sample of a group."""

    id: TrajectoryId
    group: GroupId
    state: Literal["waiting", "running", "scoring", "handed_in", "done", "failed"] = "waiting"
    replica: ReplicaId = NOWHERE
    stranger: ReplicaId = NOWHERE  # that has generated it and handed it in
    check: Check = ""  # of what it handed in
    store: StoreId = 0  # that has its tokens
    attempt: int = 0  # grows with every assignment: what older assignments still send is ignored
    began: int = 0  # the newest assignment that began from the prompt: what its store has of earlier ones is void
    turn: int = 0  # the newest that was heard of in this assignment: what is said of earlier ones comes late
    final: bool = False  # scoring: nothing more of it will be generated
    failures: int = 0
    tokens: int = 0  # of the prefix in its store, or in all
    oldest: Version = NONE  # of its tokens; NONE: nothing of it exists
    newest: Version = NONE
    since: int = 0  # decode steps of its replica when it was assigned
    mixed: bool = False  # it was taken along to another version
    reward: float | None = None

    def grown(self, steps: int) -> int:
        """Its length, if it has got a token in every decode step of its replica since it was assigned."""
        return self.tokens + max(0, steps - self.since)


class Group(msgspec.Struct, gc=False):
    """The samples of one prompt, from opening to training."""

    id: GroupId
    prompt: Prompt
    samples: list[TrajectoryId]  # that were started
    unfinished: int
    opened_at: float
    size: int = 0  # as many samples may be started
    state: Literal["open", "ready", "training"] = "open"
    oldest: Version = NONE
    round: int = 0  # of the schedules that have rounds
    known: float = 0.0  # lengths that tell something about its samples: of those that finished, and of earlier visits
    log_tokens: float = 0.0  # sum of their logarithms


class Tally(msgspec.Struct, gc=False):
    """How many groups have come to which end."""

    started: int = 0
    trained: int = 0
    dropped_stale: int = 0
    filtered: int = 0
    stopped: int = 0
    failed: int = 0
    lost: int = 0  # trained, but in a history that the trainer had to repeat after their store was lost

    @property
    def ended(self) -> int:
        return self.trained + self.dropped_stale + self.filtered + self.stopped + self.failed + self.lost


class Ledger(msgspec.Struct):
    pool: Fifo[Prompt] = msgspec.field(default_factory=Fifo[Prompt])
    received: int = 0  # prompts that ever came from the source
    skipped: int = 0  # of these: never opened
    unstarted: int = 0  # samples of stopped groups
    groups: dict[GroupId, Group] = {}
    rows: dict[RowId, int] = {}  # of the data that come up again: how many of these groups each has
    samples: dict[TrajectoryId, Sample] = {}
    waiting: dict[TrajectoryId, None] = {}  # samples without a replica, in the order in which they lost or lack it
    handed_in: dict[TrajectoryId, None] = {}  # by strangers, and no checker has them yet
    ready: dict[GroupId, None] = {}  # the experience buffer, in the order of completion
    open_by_oldest: dict[Version, dict[GroupId, None]] = {}  # open groups whose oldest token is of that version
    by_opening: Fifo[GroupId] = msgspec.field(default_factory=Fifo[GroupId])
    tally: Tally = msgspec.field(default_factory=Tally)
    open_groups: int = 0
    unfinished: int = 0  # samples that wait, run or are being scored
    scoring: int = 0  # samples that judges have
    final: int = 0  # and of which nothing more will be generated
    finished_samples: int = 0
    finished_tokens: int = 0  # prompts included
    finished_prompts: int = 0  # tokens of their prompts
    next_group: GroupId = 0
    next_sample: TrajectoryId = 0
    mixed: int = 0  # samples that were taken along to another version
    lengths: LengthEstimates = msgspec.field(default_factory=LengthEstimates)
    visits: EarlierLengths = msgspec.field(default_factory=EarlierLengths)

    # ------------------------------------------------------------------------------------------------- opening

    def add_prompts(self, prompts: Iterable[Prompt], longest_first: bool = False) -> None:
        """Into the pool. `longest_first`: of those that come together, those whose samples became longest at earlier
        visits are opened first. Nobody waits for prompts that come later, so none is put off for ever."""
        if longest_first:
            prompts = sorted(prompts, key=lambda prompt: -self.visits.mean(prompt.row, self.lengths.mean))
        for prompt in prompts:
            self.pool.push(prompt)
            self.received += 1

    def skip_prompt(self) -> Prompt:
        """The next prompt is not opened this time."""
        self.skipped += 1
        return self.pool.pop()

    def open_group(self, now: float, size: int, round: int = 0, first: int = 0) -> Group:
        """Take the next prompt and make its samples, all or the first few; they wait for a replica. A group has the
        numbers of all its samples for itself, whether they are ever started or not."""
        prompt = self.pool.pop()
        group = Group(self.next_group, prompt, [], 0, now, size, round=round)
        group.known, group.log_tokens = self.visits.evidence(prompt.row)
        self.next_group += 1
        self.next_sample += size
        self.groups[group.id] = group
        self._count_row(prompt.row, 1)
        self.by_opening.push(group.id)
        self.tally.started += 1
        self.open_groups += 1
        self.add_samples(group, first or size)
        return group

    def add_samples(self, group: Group, count: int) -> None:
        """Start so many more samples of a group."""
        first = group.samples[-1] + 1 if group.samples else self.next_sample - group.size
        for id in range(first, first + count):
            self.samples[id] = Sample(id, group.id)
            self.waiting[id] = None
            group.samples.append(id)
        group.unfinished += count
        self.unfinished += count

    # ----------------------------------------------------------------------------------------------- assignment

    def assign(
        self, id: TrajectoryId, replica: ReplicaId, version: Version, store: StoreId = 0, since: int = 0
    ) -> Request:
        """Give a waiting sample to a replica that generates under `version`. One that begins anew goes to `store`."""
        sample = self.samples[id]
        del (self.handed_in if sample.state == "handed_in" else self.waiting)[id]
        sample.state = "running"
        sample.replica = replica
        sample.attempt += 1
        sample.turn = 0
        sample.since = since
        resume = sample.oldest != NONE
        if not resume:
            sample.oldest, sample.store, sample.began = version, store, sample.attempt
        sample.newest = sample.newest if sample.check else version
        group = self.groups[sample.group]
        self._note_oldest(group, sample.oldest)
        prompt = group.prompt
        return Request(
            id,
            sample.attempt,
            group.id,
            prompt.id,
            prompt.tokens,
            resume,
            sample.failures,
            sample.store,
            sample.check,
        )

    def _note_oldest(self, group: Group, version: Version) -> None:
        """Keep the index of open groups by their oldest version: staleness bounds are read off it."""
        if group.oldest != NONE and group.oldest <= version:
            return
        self._unindex(group)
        group.oldest = version
        self.open_by_oldest.setdefault(version, {})[group.id] = None

    def _unindex(self, group: Group) -> None:
        if group.oldest == NONE:
            return
        same = self.open_by_oldest[group.oldest]
        same.pop(group.id, None)
        if not same:
            del self.open_by_oldest[group.oldest]

    def current(self, id: TrajectoryId, attempt: int) -> Sample | None:
        """The sample, if a replica has it under this very assignment; None for anything late or doubled."""
        sample = self.samples.get(id)
        if sample is None or sample.attempt != attempt or sample.state not in ("running", "scoring"):
            return None
        return sample

    def start_scoring(self, sample: Sample, turn: int, final: bool) -> bool:
        """A judge has this turn of a sample that a replica has; False if that is known, or was long ago."""
        if turn < sample.turn or (turn == sample.turn and sample.state == "scoring"):
            return False
        self._stop_scoring(sample, "running")
        sample.state, sample.turn, sample.final = "scoring", turn, final
        self.scoring += 1
        self.final += final
        return True

    def begin_turn(self, sample: Sample, turn: int) -> bool:
        """A sample that a replica has is being generated again; False if no judge was known to have it."""
        if turn <= sample.turn:
            return False
        sample.turn = turn
        return self._stop_scoring(sample, "running")

    def _stop_scoring(
        self, sample: Sample, state: Literal["waiting", "running", "handed_in", "done", "failed"]
    ) -> bool:
        was_scoring = sample.state == "scoring"
        self.scoring -= was_scoring
        self.final -= sample.final
        sample.state, sample.final = state, False
        return was_scoring

    def unassign(self, sample: Sample) -> None:
        """Its replica has it no longer: it waits for another, keeping the prefix that its store has. What a stranger
        has handed in waits for a checker."""
        self._stop_scoring(sample, "handed_in" if sample.check else "waiting")
        sample.replica = NOWHERE
        (self.handed_in if sample.check else self.waiting)[sample.id] = None

    def take_back(self, id: TrajectoryId, anew: bool) -> None:
        """Others go on from what is stored of it; or begin anew, where a stranger had it and nobody has checked it."""
        sample = self.samples[id]
        if anew:
            self.void(sample)
        self.unassign(sample)

    def hand_in(self, sample: Sample, meta: TrajectoryMeta, check: Check) -> None:
        """A stranger has generated a turn of it."""
        self.keep_prefix(sample, meta)
        sample.stranger, sample.check = sample.replica, check
        self.unassign(sample)

    def void(self, sample: Sample) -> None:
        """What there is of it does not count: it is to be generated from its prompt, with the same random numbers."""
        sample.tokens, sample.oldest, sample.newest = 0, NONE, NONE
        sample.stranger, sample.check = NOWHERE, ""

    def keep_prefix(self, sample: Sample, meta: TrajectoryMeta) -> None:
        sample.tokens = meta.tokens
        sample.oldest = meta.oldest
        sample.newest = meta.newest

    # ------------------------------------------------------------------------------------------------ completion

    def finish(self, sample: Sample, meta: TrajectoryMeta) -> None:
        self.keep_prefix(sample, meta)
        sample.reward = meta.reward
        self._end_sample(sample, "done")
        group = self.groups[sample.group]
        self.finished_samples += 1
        self.finished_tokens += meta.tokens + group.prompt.tokens
        self.finished_prompts += group.prompt.tokens
        length = log(max(1, meta.tokens))
        self.lengths.note_sample(length, group.log_tokens, group.known)
        group.known += 1
        group.log_tokens += length

    def expected_left(self, sample: Sample, steps: int, most: int) -> float:
        """Tokens that a sample is expected to get yet, after so many decode steps of its replica."""
        group = self.groups[sample.group]
        return self.lengths.residual(sample.grown(steps), group.log_tokens, group.known, most)

    def mix(self, samples: Iterable[Sample]) -> None:
        """They go on under other weights than they began with."""
        for sample in samples:
            self.mixed += not sample.mixed
            sample.mixed = True

    @property
    def generated(self) -> bool:
        """Nothing that was begun is left to generate, though some of it may not be scored yet."""
        return self.unfinished == self.final

    @property
    def oldest_open_round(self) -> float:
        return min((group.round for group in self.groups.values() if group.state == "open"), default=inf)

    def kv_per_sample(self, most: int) -> float:
        """Tokens that a sample has in its KV on average while it is generated; 0: nothing has finished yet."""
        if not self.finished_samples:
            return 0.0
        grown = self.lengths.in_flight(most) or (self.finished_tokens - self.finished_prompts) / self.finished_samples
        return self.finished_prompts / self.finished_samples + grown

    def fail(self, sample: Sample, max_failures: int) -> None:
        """Try again from the start, or give the sample up after its last attempt."""
        sample.failures += 1
        self.void(sample)
        if sample.failures < max_failures:
            self.unassign(sample)
        else:
            self._end_sample(sample, "failed")

    def _end_sample(self, sample: Sample, state: Literal["done", "failed"]) -> None:
        self._stop_scoring(sample, state)
        if sample.replica == NOWHERE:
            self.waiting.pop(sample.id, None)
            self.handed_in.pop(sample.id, None)
        sample.replica = NOWHERE
        self.groups[sample.group].unfinished -= 1
        self.unfinished -= 1

    def survivors(self, group: Group) -> list[TrajectoryId]:
        return [id for id in group.samples if self.samples[id].state == "done"]

    def close(self, group: Group, min_survivors: int) -> bool:
        """Move a group without unfinished samples to the buffer; False if too few survived: it has failed."""
        survivors = self.survivors(group)
        if len(survivors) < min_survivors:
            return False
        self._unindex(group)
        group.oldest = min(self.samples[id].oldest for id in survivors)
        self.lengths.note_group(logs := [log(max(1, self.samples[id].tokens)) for id in survivors])
        self.visits.note(group.prompt.row, sum(logs) / len(logs))
        group.state = "ready"
        self.open_groups -= 1
        self.ready[group.id] = None
        return True

    def rewards(self, group: Group) -> list[float | None]:
        """Of its survivors; simulated samples have none."""
        return [self.samples[id].reward for id in self.survivors(group)]

    def cut_short(self, group: Group) -> None:
        """End every unfinished sample of a group; no more of it are started."""
        group.size = len(group.samples)
        for id in group.samples:
            if self.samples[id].state in ("running", "scoring", "waiting", "handed_in"):
                self._end_sample(self.samples[id], "failed")

    def regenerate(self, sample: Sample) -> None:
        """All that there was of a sample is lost: it waits to be generated anew, and its group is open again."""
        group, state, tokens = self.groups[sample.group], sample.state, sample.tokens
        self.void(sample)
        self.handed_in.pop(sample.id, None)
        if state in ("running", "scoring", "handed_in"):
            self.unassign(sample)
        elif state == "done":
            sample.state = "waiting"
            self.waiting[sample.id] = None
            group.unfinished += 1
            self.unfinished += 1
            group.known -= 1
            group.log_tokens -= log(max(1, tokens))
        sample.reward = None
        self._reopen(group)

    def _reopen(self, group: Group) -> None:
        if group.state == "open":
            self._unindex(group)
        else:
            self.ready.pop(group.id, None)
            self.open_groups += 1
            self.by_opening.push(group.id)
            group.state = "open"
        begun = [self.samples[id].oldest for id in group.samples if self.samples[id].state != "failed"]
        group.oldest = min((oldest for oldest in begun if oldest != NONE), default=NONE)
        if group.oldest != NONE:
            self.open_by_oldest.setdefault(group.oldest, {})[group.id] = None

    # ---------------------------------------------------------------------------------------------------- endings

    def take(self, group: Group, left_out: frozenset[TrajectoryId] = frozenset()) -> TrainGroup:
        """Hand a ready group to the trainer, without some of its samples: from here it is never picked again."""
        del self.ready[group.id]
        group.state = "training"
        survivors = tuple([id for id in self.survivors(group) if id not in left_out])
        stores = tuple([self.samples[id].store for id in survivors])
        rewards = tuple([self.samples[id].reward or 0.0 for id in sorted(left_out)])
        return TrainGroup(group.id, survivors, stores if any(stores) else (), rewards)

    def put_back(self, group: Group) -> None:
        """A group that was handed to the trainer is ready again: it was not trained."""
        group.state = "ready"
        self.ready[group.id] = None

    def retire(self, group_id: GroupId) -> tuple[TrajectoryId, ...]:
        """A group is trained: it leaves the account. Returns its trajectories, whose payloads can be freed later."""
        assert self.groups[group_id].state == "training", group_id
        self.tally.trained += 1
        return self._remove(self.groups[group_id])

    def lose_trained(self, prompt: Prompt) -> None:
        """A group that was trained has to be trained again, and cannot: its prompt goes back to the pool."""
        self.tally.trained -= 1
        self.tally.lost += 1
        self.pool.push(prompt)

    def end(self, group: Group, how: Ending) -> tuple[TrajectoryId, ...]:
        """A group leaves without being trained. Was it only too old, its prompt goes back to the pool."""
        if how == "stale":
            self.tally.dropped_stale += 1
            self.pool.push(group.prompt)
        elif how == "filtered":
            self.tally.filtered += 1
        elif how == "stopped":
            self.tally.stopped += 1
            self.unstarted += group.size - len(group.samples)
        else:
            self.tally.failed += 1
        return self._remove(group)

    def _remove(self, group: Group) -> tuple[TrajectoryId, ...]:
        if group.state == "open":
            self._unindex(group)
            self.open_groups -= 1
        self.ready.pop(group.id, None)
        for id in group.samples:
            del self.samples[id]
        del self.groups[group.id]
        self._count_row(group.prompt.row, -1)
        return tuple(group.samples)

    def _count_row(self, row: RowId, change: int) -> None:
        count = self.rows.pop(row, 0) + change
        if row >= 0 and count > 0:  # it is less in a run that began before rows were counted
            self.rows[row] = count

    def overdue(self, opened_before: float) -> list[Group]:
        """Open groups that were opened before that moment; each is reported once."""
        late: dict[GroupId, Group] = {}  # one that was opened again is in the list twice
        while len(self.by_opening):
            group = self.groups.get(self.by_opening.first())
            if group is not None and group.state == "open":
                if group.opened_at > opened_before:
                    break
                late[group.id] = group
            self.by_opening.pop()
        return list(late.values())
