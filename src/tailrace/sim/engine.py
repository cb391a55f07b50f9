"""A replica's engine in virtual time: continuous batching with a bounded KV cache, an event per turn, never per token.

All running sequences gain one token per decode step, and the time of a step is linear in the KV tokens that it reads.
So between two changes of the batch the engine's progress is a parabola in time, and the next change (a turn ends, or
the KV cache is full) is found in closed form. A sequence ends at a fixed number of decode steps.

Sequences that do not fit wait. When the cache is full the youngest is preempted: it goes back to the queue and is
recomputed later, as in vLLM. Prefix cache: the samples of a group share their prompt's KV while they are here together,
and the KV of an ended turn stays for the next one as long as nobody needs the room; a tool call holds none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from heapq import heappop, heappush
from math import inf, sqrt

from tailrace.protocol import EngineWork
from tailrace.sim.cost_model import CostModel
from tailrace.sim.episodes import SimTurn
from tailrace.types import GroupId, TrajectoryId, Version

HEADROOM_STEPS = 48  # room for so many decode steps must be left when a sequence is admitted, or it is preempted soon
PREEMPT_STEPS = 16  # and so much is made by preemption when the cache is full


class SimSequence:
    """A trajectory as an engine has it. `tokens` is up to date while it is not running."""

    __slots__ = (
        "attempt",
        "end",
        "failures",
        "group",
        "newest",
        "oldest",
        "prompt",
        "reward",
        "status",
        "stop",
        "tokens",
        "trajectory",
        "turn",
        "turns",
    )

    def __init__(
        self, trajectory: TrajectoryId, group: GroupId, prompt: int, turns: tuple[SimTurn, ...], failures: int = 0
    ) -> None:
        self.trajectory = trajectory
        self.failures = failures  # of its earlier attempts
        self.group = group
        self.prompt = prompt
        self.turns = turns
        self.turn = 0
        self.reward: float | None = None  # that it will get
        self.tokens = 0  # after the prompt, tool output included
        self.stop = turns[0].tokens  # token count at which the present turn ends
        self.end = 0.0  # the engine's decode steps when that will be
        self.attempt = 0
        self.oldest: Version = -1
        self.newest: Version = -1
        self.status = "outside"  # waiting, running, calling (a tool), outside

    @property
    def decoded(self) -> int:
        """Tokens of the whole, without its prompt and what tools return."""
        return sum([turn.tokens for turn in self.turns])


# A trajectory that was moved away and came back may have an old entry that is equal but for the number of its run.
HeapEntry = tuple[float, TrajectoryId, int, SimSequence]


class SimEngine:
    __slots__ = (
        "_base", "_cached_tokens", "_groups", "_heap", "_per_kv", "_prefix_cache", "_runs", "batch", "busy_s",
        "capacity", "costs", "crowding", "decode_s", "decode_steps", "generated", "held", "kv", "kv_read", "kv_seconds",
        "lent_s", "max_running", "prefill_s", "prefilled", "slowdown", "stall_until", "time", "waiting",
    )  # fmt: skip

    def __init__(self, costs: CostModel, now: float) -> None:
        self.costs = costs
        self.capacity = float(costs.kv_capacity)
        self.max_running = costs.config.rollout.max_running
        self._base = costs.decode_base
        self._per_kv = costs.decode_per_kv_token
        self.slowdown = 1.0  # of this replica, by a fault
        self.crowding = 1.0  # and because others want its cores (`cpu_sharing.py`)
        self.time = now
        self.stall_until = now
        self.decode_steps = 0.0
        self.kv = 0.0
        self.held: dict[TrajectoryId, SimSequence] = {}
        self.waiting: deque[SimSequence] = deque()
        self.batch: dict[TrajectoryId, SimSequence] = {}  # what is running, in the order of admission
        self._heap: list[HeapEntry] = []  # by end of turn; entries may be out of date
        self._runs = 0  # entries so far
        self._groups: dict[GroupId, int] = {}  # how many samples of a group have their KV here
        self._prefix_cache: dict[TrajectoryId, int] = {}  # tokens of ended turns, oldest first
        self._cached_tokens = 0
        self.busy_s = 0.0
        self.lent_s = 0.0
        self.kv_seconds = 0.0
        self.generated = 0.0
        self.decode_s = self.prefill_s = 0.0  # what it reports of itself: time in steps and in prefill,
        self.kv_read = self.prefilled = 0.0  # KV tokens over all decode steps, tokens of prefill

    # -------------------------------------------------------------------------------------------------- from outside

    def submit(self, now: float, sequences: list[SimSequence]) -> None:
        self.advance(now)
        for sequence in sequences:
            sequence.status = "waiting"
            self.held[sequence.trajectory] = sequence
        self.waiting.extend(sequences)
        self._admit(now)

    def take_ended(self, sequence: SimSequence) -> None:
        """Its turn was over before it came here: whoever had it was lost while a judge had it."""
        if sequence.turn + 1 < len(sequence.turns):
            sequence.status = "calling"
            self.held[sequence.trajectory] = sequence

    def withdraw(self, now: float, ids: Collection[TrajectoryId] = ()) -> list[SimSequence]:
        """Stop and hand back these, or everything."""
        if ids:
            return [self._take_out(now, self.held[id]) for id in ids if id in self.held]
        self.advance(now)
        sequences = list(self.held.values())
        for sequence in sequences:
            self._note_tokens(sequence)
            sequence.status = "outside"
        for collection in (self.held, self.waiting, self.batch, self._heap, self._groups):
            collection.clear()
        self.kv = 0.0
        self._clear_prefix_cache()
        return sequences

    def cancel(self, now: float, trajectory: TrajectoryId) -> None:
        self._take_out(now, self.held[trajectory])

    def _take_out(self, now: float, sequence: SimSequence) -> SimSequence:
        self.advance(now)
        del self.held[sequence.trajectory]
        if sequence.status == "waiting":
            self.waiting.remove(sequence)
        elif sequence.status == "running":
            self._note_tokens(sequence)
            self._free(sequence)
        self._take_cached(sequence.trajectory)
        sequence.status = "outside"
        self._admit(now)
        return sequence

    def stall(self, now: float, seconds: float) -> None:
        """Do nothing else for so long (a pull, a prefill)."""
        self.advance(now)
        self.stall_until = max(self.stall_until, now) + seconds * self.slowdown * self.crowding

    def share_cores(self, now: float, crowding: float) -> None:
        """From now on everything takes so many times as long as it would alone."""
        self.advance(now)
        if self.stall_until > now:
            self.stall_until = now + (self.stall_until - now) * crowding / self.crowding
        self.crowding = crowding

    def lend(self, now: float, seconds: float) -> None:
        """Stand still while the trainer has these GPUs."""
        self.stall(now, seconds)
        self.lent_s += seconds

    def switch_weights(self, now: float, version: Version, recompute: bool) -> None:
        """What is in flight goes on under other weights; its KV is computed again, or kept as it is."""
        self.advance(now)
        seconds = 0.0
        for sequence in self.held.values():
            self._note_tokens(sequence)
            sequence.newest = version
            if sequence.tokens == 0:
                sequence.oldest = version
            if recompute and sequence.status == "running":
                seconds += self._prefill(sequence.prompt + sequence.tokens, 0)
        if recompute:
            self._clear_prefix_cache()
        self.stall(now, seconds)

    def _prefill(self, tokens: int, context: int) -> float:
        """Seconds, counted as what this engine has done."""
        seconds = self.costs.prefill(tokens, context)
        self.prefilled += tokens
        self.prefill_s += seconds * self.slowdown * self.crowding
        return seconds

    def work(self) -> EngineWork:
        """As an engine counts its own work."""
        return EngineWork(
            self.decode_s + self.prefill_s,
            int(self.decode_steps),
            int(self.generated),
            int(self.kv_read),
            int(self.prefilled),
        )

    def finish_call(self, now: float, sequence: SimSequence) -> None:
        """A tool has answered: the next turn begins as soon as there is room, and reads the tool's output first."""
        turn = sequence.turns[sequence.turn]
        sequence.turn += 1
        sequence.tokens += turn.tool_tokens
        sequence.stop = sequence.tokens + sequence.turns[sequence.turn].tokens
        self.submit(now, [sequence])

    # ----------------------------------------------------------------------------------------------------------- time

    def advance(self, now: float) -> None:
        """Decode up to `now`. The driver wakes the engine at every change, so none lies in between."""
        start = self.time
        if now <= start:
            return
        self.time = now
        if self.stall_until > start:
            stalled = min(self.stall_until, now) - start
            self.busy_s += stalled
            self.kv_seconds += self.kv * stalled
            start += stalled
        elapsed = now - start
        if self.batch and elapsed > 0.0:
            self._decode(elapsed)
        else:
            self.kv_seconds += self.kv * elapsed

    def _decode(self, elapsed: float) -> None:
        running = len(self.batch)
        rate = self._base(running) + self._per_kv * self.kv
        growth = self._per_kv * running
        seconds = elapsed / (self.slowdown * self.crowding)
        steps = (sqrt(rate * rate + 2.0 * growth * seconds) - rate) / growth if growth else seconds / rate
        self.decode_steps += steps
        self.kv += steps * running
        self.generated += steps * running
        self.kv_read += steps * (self.kv - 0.5 * steps * running)
        self.decode_s += elapsed
        self.busy_s += elapsed
        self.kv_seconds += (self.kv - 0.5 * steps * running) * elapsed

    def next_change(self) -> float:
        """When the next turn ends or the cache is full, if nothing happens before."""
        if not self.batch:
            return inf
        heap = self._heap
        end, _, _, sequence = heap[0]
        while sequence.end != end or sequence.status != "running":
            heappop(heap)
            end, _, _, sequence = heap[0]
        running = len(self.batch)
        steps = end - self.decode_steps
        if running > 1:
            steps = min(steps, (self.capacity - self.kv) / running)
        if steps < 0.0:
            steps = 0.0
        seconds = steps * (self._base(running) + self._per_kv * (self.kv + 0.5 * running * steps))
        begin = self.stall_until if self.stall_until > self.time else self.time
        return begin + seconds * self.slowdown * self.crowding

    def ended_turns(self, now: float) -> list[SimSequence]:
        """Advance to `now` and take out the sequences whose turn is over; make room if the cache is full."""
        self.advance(now)
        if self.kv + self._cached_tokens > self.capacity:
            self._evict()
        ended: list[SimSequence] = []
        heap, reached = self._heap, self.decode_steps + 1e-3
        while heap and heap[0][0] <= reached:
            end, _, _, sequence = heappop(heap)
            if sequence.end == end and sequence.status == "running":
                self._end_turn(sequence)
                ended.append(sequence)
        if not ended:
            self._preempt()
        if self.waiting or self._prefix_cache:
            self._admit(now)
        return ended

    # ------------------------------------------------------------------------------------------------------ the batch

    def _admit(self, now: float) -> None:
        """Admit waiting sequences while there is room for them and for everybody's next steps."""
        seconds, waiting, batch, groups = 0.0, self.waiting, self.batch, self._groups
        if self.kv + self._cached_tokens > self.capacity:
            self._evict()
        while waiting and len(batch) < self.max_running:
            sequence = waiting[0]
            members = groups.get(sequence.group, 0)
            shared = sequence.prompt if members else 0
            tokens = sequence.prompt + sequence.tokens - shared
            if batch and self.kv + tokens + HEADROOM_STEPS * len(batch) > self.capacity:
                break
            waiting.popleft()
            self.kv += tokens
            groups[sequence.group] = members + 1
            self._run(sequence)
            cached = max(shared, self._take_cached(sequence.trajectory)) if self._prefix_cache else shared
            seconds += self._prefill(sequence.prompt + sequence.tokens - cached, cached)
        if seconds:
            if self.kv + self._cached_tokens > self.capacity:
                self._evict()
            self.stall(now, seconds)

    def _run(self, sequence: SimSequence) -> None:
        sequence.status = "running"
        sequence.end = self.decode_steps + (sequence.stop - sequence.tokens)
        self.batch[sequence.trajectory] = sequence
        self._runs += 1
        heappush(self._heap, (sequence.end, sequence.trajectory, self._runs, sequence))

    def _note_tokens(self, sequence: SimSequence) -> None:
        if sequence.status == "running":
            sequence.tokens = max(sequence.tokens, int(sequence.stop - max(0.0, sequence.end - self.decode_steps)))

    def _end_turn(self, sequence: SimSequence) -> None:
        """Its KV is kept for the next turn, if there is one and as long as nobody needs the room."""
        self._free(sequence)
        sequence.tokens = sequence.stop
        if sequence.turn + 1 < len(sequence.turns):
            sequence.status = "calling"
            self._prefix_cache[sequence.trajectory] = sequence.prompt + sequence.tokens
            self._cached_tokens += sequence.prompt + sequence.tokens
        else:
            del self.held[sequence.trajectory]
            sequence.status = "outside"

    def _free(self, sequence: SimSequence) -> None:
        """Take the KV of one that is running away; the prompt's goes with the last sample of the group."""
        del self.batch[sequence.trajectory]
        tokens = sequence.stop - (sequence.end - self.decode_steps)
        left = self._groups[sequence.group] - 1
        if left:
            self._groups[sequence.group] = left
        else:
            del self._groups[sequence.group]
            tokens += sequence.prompt
        kept = self.kv - tokens
        self.kv = kept if kept > 0.0 and self._groups else 0.0

    def _take_cached(self, trajectory: TrajectoryId) -> int:
        """The tokens whose KV is still there."""
        tokens = self._prefix_cache.pop(trajectory, 0)
        self._cached_tokens -= tokens
        return tokens

    def _evict(self) -> None:
        while self._prefix_cache and self.kv + self._cached_tokens > self.capacity:
            self._take_cached(next(iter(self._prefix_cache)))

    def _clear_prefix_cache(self) -> None:
        self._prefix_cache.clear()
        self._cached_tokens = 0

    def _preempt(self) -> None:
        """Preemption by recompute: the youngest go back to the queue until there is room for them."""
        while len(self.batch) > 1 and self.kv + PREEMPT_STEPS * len(self.batch) > self.capacity:
            sequence = self.batch[next(reversed(self.batch))]
            self._note_tokens(sequence)
            self._free(sequence)
            sequence.status = "waiting"
            self.waiting.appendleft(sequence)
