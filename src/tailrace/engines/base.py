"""The contract between a rollout worker and whatever generates tokens for it.

An engine is a plain synchronous object in the worker's own loop: `submit` sequences, call `step` again and again, take
what each step added. It holds no trajectory: everything it has sampled has been handed out, so an unfinished sequence
can be withdrawn here and submitted anywhere else, and goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.types import TOKEN_BYTES, GroupId, Struct, TrajectoryId, Version

Finish = Literal["", "stop", "length"]  # "": it goes on


class Job(Struct):
    """A sequence to go on with until its turn ends."""

    id: TrajectoryId
    group: GroupId
    tokens: bytes | bytearray  # the prompt and everything after it so far, as int32; `submit` makes a copy of its own
    prompt_tokens: int  # the first so many are the prompt, which the group's samples share
    max_tokens: int  # most tokens to sample now
    failures: int = 0  # of this sample: each gives it other random numbers
    temperature: float | None = None  # 0: greedy; None: the run's (`[sampling]`)

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stream(self) -> int:
        """Names its random numbers, in 63 bits. Only its failures change them: a move or a restart does not."""
        if not self.failures:
            return self.id
        return int.from_bytes(blake2b(f"{self.id} {self.failures}".encode(), digest_size=8).digest()) >> 1


class StepOutput(NamedTuple):
    """What one engine step added to its sequences: the tokens of all of them in one array, and their log-probs."""

    ids: list[TrajectoryId]
    counts: list[int]  # tokens of each; none for a sequence that had no room for any
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # of what was really sampled from: after temperature, top-k and top-p
    finish: list[Finish]  # "stop": a stop token or string was sampled; "length": max_tokens or the context is used up
    version: Version | None = None  # of the weights that sampled them; None: the engine's present ones

    def additions(self) -> Iterator[tuple[TrajectoryId, bytes, bytes, Finish]]:
        """Sequence by sequence: its id, tokens, log-probs and why it ended."""
        bounds = [TOKEN_BYTES * end for end in accumulate(self.counts, initial=0)]
        tokens, logprobs = self.tokens.tobytes(), self.logprobs.tobytes()
        for id, start, end, finish in zip(self.ids, bounds, bounds[1:], self.finish, strict=False):
            yield id, tokens[start:end], logprobs[start:end], finish


class EngineStats(Struct):
    """How full an engine is."""

    kv_tokens: int  # in blocks that some sequence needs, shared blocks counted once
    running: int
    waiting: int


class Counters(msgspec.Struct):
    """Sums over an engine's life."""

    busy_s: float = 0.0
    steps: int = 0
    decoded: int = 0  # sequences, over all decode steps
    kv_read: int = 0  # KV tokens, over all decode steps
    prefilled: int = 0  # tokens
    load_s: float = 0.0
    loads: int = 0

    def named(self) -> dict[str, float]:
        return msgspec.structs.asdict(self)


class Checking(Protocol):
    """An engine that can tell whether another one has drawn what it should have."""

    def complaint_about(self, job: Job, logprobs: NDArray[np.float32], draws: bool) -> str:
        """What is wrong with the tokens after the prompt of `job`, a turn that is said to be complete, and with their
        log-probs, under the present weights; empty: nothing. `draws`: they are scored again, token by token; else only
        what needs no model is looked at."""
        ...


class Engine(Protocol):
    version: Version  # of the weights that it generates with; -1 before the first
    kv_capacity: int  # tokens
    roofline: int  # largest batch whose decode step is still flat

    def submit(self, job: Job) -> None:
        """Take a sequence; one with the id of an earlier turn goes on from the KV that is still there."""
        ...

    def step(self) -> StepOutput:
        """One iteration: some prefill, one token for every running sequence. Empty when there is nothing to do."""
        ...

    def withdraw(self, ids: Iterable[TrajectoryId]) -> list[Job]:
        """Stop these and free what they hold. Returns the unfinished ones, with every token so far."""
        ...

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """No further turn of these will come: what was kept of them can go."""
        ...

    def load_weights(self, version: Version, tensors: Mapping[str, Any], keep_kv: bool = False) -> None:
        """Replace the weights in place, between steps. KV of other versions is dropped (and recomputed for running
        sequences) unless `keep_kv`."""
        ...

    def stats(self) -> EngineStats: ...

    def counters(self) -> dict[str, float]:
        """`Counters` by name. The simulator's costs are fitted to them."""
        ...
