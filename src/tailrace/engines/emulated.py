"""An engine without a model: it takes the time that `[costs]` says and ends sequences where the law of lengths says.

For fleets larger than this machine: everything around it is real (processes, wire, relays, stores), and a replica costs
next to no processor time because it sleeps. The promises: a trajectory has the same tokens and the same length wherever
and how often it is moved, and over a busy stretch the engine is as fast as the model, however long Python takes between
the calls. Sequences that do not fit wait, the youngest goes back when the KV pool is full, and the samples of a group
share their prompt, as in a real engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.engines.base import Counters, EngineStats, Finish, Job, StepOutput
from tailrace.lengths import LengthLaw
from tailrace.types import TOKEN_BYTES, GroupId, TrajectoryId, Version, token_ids

SLICE_S = 0.02  # modelled time of one call, unless a single decode step takes longer: many replicas share few cores
CATCH_UP_S = 0.25  # time lost between calls is made good up to here; more was a stop, not overhead
HEADROOM_STEPS = 48  # room for so many decode steps must be left when a sequence is let in, or it is sent back soon
MAKE_ROOM_STEPS = 16  # and so much is made when the pool is full
LOGPROB = -0.01
LETTERS = 26


class EmulatedEngine:
    def __init__(
        self,
        config: Config,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _refuse(config)
        self.version: Version = -1
        self.kv_capacity = config.rollout.kv_tokens or config.costs.kv_tokens
        self.roofline = config.rollout.roofline_batch or config.costs.flat_batch or config.rollout.max_running
        self._costs = config.costs
        self._max_running = config.rollout.max_running
        self._group_size = config.workload.group_size
        self._lengths = LengthLaw(config.workload, seed, Path())
        self._seed = seed
        self._clock, self._sleep = clock, sleep
        self._due: float | None = None  # when the work so far would be done by the model; None: there was nothing to do
        self._waiting: deque[_Sequence] = deque()
        self._batch: dict[TrajectoryId, _Sequence] = {}  # in the order of admission
        self._groups: dict[GroupId, int] = {}  # how many samples of a group have their KV here
        self._kept: dict[TrajectoryId, int] = {}  # KV of finished turns, oldest first, while nobody needs the room
        # were complete when they came: whoever had them was lost before they were scored
        self._ended: dict[TrajectoryId, Finish] = {}
        self._kv = 0
        self._counters = Counters()

    # ----------------------------------------------------------------------------------------------------- the contract

    def submit(self, job: Job) -> None:
        assert job.id not in self._batch, "a sequence is submitted once, until it has finished or is withdrawn"
        tokens, finish = self._end_of_turn(job)
        if tokens:
            self._waiting.append(_Sequence(job, tokens, finish))
        else:
            self._ended[job.id] = finish

    def step(self) -> StepOutput:
        self._make_room()
        seconds = self._admit()
        if not self._batch:
            return self._output([], 0)
        steps = self._steps_within(SLICE_S - seconds)
        self._take(seconds + self._decode_seconds(steps))
        return self._output(list(self._batch.values()), steps)

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Job]:
        wanted = set(ids)
        self._ended = {id: finish for id, finish in self._ended.items() if id not in wanted}
        running = [sequence for id, sequence in self._batch.items() if id in wanted]
        for sequence in running:
            self._free(sequence)
        stopped = running + [sequence for sequence in self._waiting if sequence.job.id in wanted]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.job.id not in wanted)
        self.forget(wanted)
        self._rest_if_idle()
        return [self._job_so_far(sequence) for sequence in stopped]

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self._kept.pop(id, None)

    def load_weights(self, version: Version, tensors: Mapping[str, Any], keep_kv: bool = False) -> None:
        self._take(self._costs.load, "load_s")
        self._counters.loads += 1
        self.version = version
        if not keep_kv:
            self._waiting.extendleft(reversed(self._batch.values()))  # all are read again, in their old order
            for collection in (self._batch, self._groups, self._kept):
                collection.clear()
            self._kv = 0
        self._rest_if_idle()

    def stats(self) -> EngineStats:
        return EngineStats(self._kv, len(self._batch), len(self._waiting))

    def counters(self) -> dict[str, float]:
        """What was done since the start, as `sim/fit.py` reads it from a run's metrics."""
        return self._counters.named()

    def complaint_about(self, job: Job, logprobs: NDArray[np.float32], draws: bool) -> str:
        """See `base.Checking`."""
        prompt = msgspec.structs.replace(job, tokens=bytes(job.tokens[: TOKEN_BYTES * job.prompt_tokens]))
        count, _ = self._end_of_turn(prompt)
        if job.length - job.prompt_tokens != count:
            return f"it has {job.length - job.prompt_tokens} tokens, where its length is {count}"
        sampled = token_ids(job.tokens)[job.prompt_tokens :]
        if draws and (sampled != self._tokens([prompt], [job.prompt_tokens], count)).any():
            return "its tokens are not those that the seed draws"
        return "it has other log-probs" if draws and (logprobs != np.float32(LOGPROB)).any() else ""

    # ------------------------------------------------------------------------------------------------------------- time

    def _take(self, seconds: float, counter: str = "busy_s") -> None:
        """Sleep until the model would be done, counted from when it was done with what came before."""
        now = self._clock()
        start = now if self._due is None else max(self._due, now - CATCH_UP_S)
        self._due = start + seconds
        if self._due > now:
            self._sleep(self._due - now)
        setattr(self._counters, counter, getattr(self._counters, counter) + seconds)

    def _rest_if_idle(self) -> None:
        if not self._batch and not self._waiting:
            self._due = None

    def _steps_within(self, seconds: float) -> int:
        """Decode steps until the time is up, a turn ends or the pool is full, whatever comes first."""
        running = len(self._batch)
        until_end = min(sequence.left for sequence in self._batch.values())
        room = (self.kv_capacity - self._kv) // running
        return max(1, min(until_end, room, int(seconds / self._decode_seconds(1))))

    def _decode_seconds(self, steps: int) -> float:
        costs = self._costs
        per_step = costs.decode_step + costs.decode_sequence * len(self._batch)
        return steps * per_step + costs.decode_kv_token * self._kv_read(steps)

    def _kv_read(self, steps: int) -> int:
        """KV tokens that so many steps read: every step finds one more for each running sequence."""
        return steps * self._kv + len(self._batch) * steps * (steps - 1) // 2

    # -------------------------------------------------------------------------------------------------------- the batch

    def _admit(self) -> float:
        """Let waiting sequences in while there is room for them and for everybody's next steps; the time it takes."""
        seconds = 0.0
        while self._waiting and len(self._batch) < self._max_running and seconds < SLICE_S:
            sequence = self._waiting[0]
            shared = sequence.job.prompt_tokens if sequence.job.group in self._groups else 0
            needs = sequence.tokens - shared
            if self._batch and self._kv + needs + HEADROOM_STEPS * len(self._batch) > self.kv_capacity:
                break
            self._waiting.popleft()
            self._run(sequence, needs)
            seconds += self._prefill(sequence.tokens - max(shared, self._kept.pop(sequence.job.id, 0)))
        self._shrink_kept()
        return seconds

    def _run(self, sequence: _Sequence, needs: int) -> None:
        self._kv += needs
        self._groups[sequence.job.group] = self._groups.get(sequence.job.group, 0) + 1
        self._batch[sequence.job.id] = sequence

    def _prefill(self, tokens: int) -> float:
        self._counters.prefilled += tokens
        return tokens * self._costs.prefill_token

    def _shrink_kept(self) -> None:
        while self._kept and self._kv + sum(self._kept.values()) > self.kv_capacity:
            del self._kept[next(iter(self._kept))]

    def _make_room(self) -> None:
        """When the next step does not fit, the youngest go back to the queue, to be read again later."""
        if self._kv + len(self._batch) <= self.kv_capacity:
            return
        while len(self._batch) > 1 and self._kv + MAKE_ROOM_STEPS * len(self._batch) > self.kv_capacity:
            sequence = self._batch[next(reversed(self._batch))]
            self._free(sequence)
            self._waiting.appendleft(sequence)

    def _free(self, sequence: _Sequence) -> None:
        """Take its KV away; the prompt's goes with the last sample of the group."""
        group = sequence.job.group
        del self._batch[sequence.job.id]
        self._groups[group] -= 1
        self._kv -= sequence.tokens - sequence.job.prompt_tokens
        if not self._groups[group]:
            del self._groups[group]
            self._kv -= sequence.job.prompt_tokens

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _output(self, running: list[_Sequence], steps: int) -> StepOutput:
        """Every running sequence grows by so many tokens; and what had ended before it came."""
        ended, self._ended = self._ended, {}
        tokens = self._tokens([one.job for one in running], [one.tokens for one in running], steps)
        self._count(steps)
        self._kv += steps * len(running)
        finish: list[Finish] = [*ended.values(), *[self._grow(sequence, steps) for sequence in running]]
        ids, counts = [*ended, *[one.job.id for one in running]], [0] * len(ended) + [steps] * len(running)
        return StepOutput(ids, counts, tokens, np.full(len(tokens), LOGPROB, np.float32), finish)

    def _count(self, steps: int) -> None:
        self._counters.steps += steps
        self._counters.decoded += steps * len(self._batch)
        self._counters.kv_read += self._kv_read(steps)

    def _grow(self, sequence: _Sequence, steps: int) -> Finish:
        sequence.sampled += steps
        finish = self._finish(sequence)
        if finish:
            self._free(sequence)
            self._kept[sequence.job.id] = sequence.tokens
            self._rest_if_idle()
        return finish

    def _finish(self, sequence: _Sequence) -> Finish:
        if sequence.left <= 0:
            return sequence.finish
        alone_in_full_pool = len(self._batch) == 1 and self._kv >= self.kv_capacity
        return "length" if alone_in_full_pool else ""

    def _tokens(self, jobs: Sequence[Job], starts: Sequence[int], steps: int) -> NDArray[np.int32]:
        """The next tokens of each: codes of small letters, by seed, trajectory, failures and position alone, which many
        a tokenizer can show."""
        positions = np.array(starts, np.int64)[:, None] + np.arange(steps)
        failures = np.array([job.failures for job in jobs], np.int64)[:, None]
        first = np.array([(self._seed * 40503 + job.id * 2654435761) % LETTERS for job in jobs], np.int64)[:, None]
        return (ord("a") + (first + positions * (positions * 7 + failures)) % LETTERS).astype(np.int32).ravel()

    def _end_of_turn(self, job: Job) -> tuple[int, Finish]:
        """How many tokens are to be sampled now, and why no more."""
        length = self._lengths.sample(job.group, job.id % self._group_size, job.failures)
        left = length - (job.length - job.prompt_tokens)
        return (job.max_tokens, "length") if job.max_tokens < left else (max(0, left), "stop")

    def _job_so_far(self, sequence: _Sequence) -> Job:
        job = sequence.job
        tokens = job.tokens + self._tokens([job], [job.length], sequence.sampled).tobytes()
        return msgspec.structs.replace(job, tokens=tokens, max_tokens=job.max_tokens - sequence.sampled)


class _Sequence:
    """A job and how far it has come."""

    __slots__ = ("_end", "_start", "finish", "job", "sampled")

    def __init__(self, job: Job, end: int, finish: Finish) -> None:
        self.job = msgspec.structs.replace(job, tokens=bytes(job.tokens))
        self.sampled = 0
        self._start, self._end = job.length, end
        self.finish: Finish = finish

    @property
    def tokens(self) -> int:
        return self._start + self.sampled

    @property
    def left(self) -> int:
        return self._end - self.sampled


def _refuse(config: Config) -> None:
    """What cannot be emulated, before anything starts."""
    if not config.costs.measured:
        raise ConfigError(
            "the emulated engine takes its time from [costs], which is empty; write costs.decode_step, "
            "or take [costs] from a real run with 'tailrace fit RUN'"
        )
    if not (config.rollout.kv_tokens or config.costs.kv_tokens):
        raise ConfigError("the emulated engine has no memory to look at; write rollout.kv_tokens, such as 100000")
    if config.workload.lengths.drift_per_step:
        raise ConfigError(
            "an emulated trajectory has one length wherever it is moved; leave out workload.lengths.drift_per_step"
        )
