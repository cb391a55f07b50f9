"""What an engine computes in its next step: plain integers, no tensors.

The native engine asks for a plan, computes it, and reports back. Sequences wait in order of arrival, run once their
blocks are there, and are decoded together; what is not yet in the cache is prefilled in chunks, oldest first. When the
pool is full, caches that nobody needs go first, then the youngest running sequence loses its KV and waits again.

The first sample of a group to run leads: it prefills the prompt, all but the last token, and the others start from
that. Whole blocks are shared; the block where the prompt ends is copied, so nobody ever writes into a shared block.
Prompts of different groups share the whole blocks that they begin with, such as those of a system message.

A model may have other keys for sequences beyond some length (`model/longrope.py`). One that grows beyond it loses its
KV and begins anew; near and far sequences share nothing.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from tailrace.engines.base import EngineStats, Job
from tailrace.engines.paged import BlockPool
from tailrace.types import GroupId, TrajectoryId

SEEN = 4096  # prefixes that are remembered, not kept


class Sequence:
    """A submitted job while it waits or runs. `cached` tokens have their KV in `blocks`."""

    __slots__ = (
        "blocks",
        "cached",
        "end",
        "failures",
        "far",
        "group",
        "id",
        "prompt",
        "stream",
        "temperature",
        "tokens",
    )

    def __init__(self, job: Job, end: int) -> None:
        self.id = job.id
        self.group = job.group
        self.failures, self.stream = job.failures, job.stream
        self.temperature = job.temperature
        self.tokens = array("i", job.tokens)
        self.prompt = job.prompt_tokens
        self.end = end  # as long as it may become
        self.blocks: list[int] = []
        self.cached = 0
        self.far = False  # its KV is that of a sequence beyond the switch

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    def shared_tokens(self) -> array[int]:
        """What the group has in common and can be prefilled once: the last prompt token is each sample's own."""
        return self.tokens[: max(0, self.prompt - 1)]


class Chunk(NamedTuple):
    """Tokens of one sequence, from `start` on, to be computed now."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        return self.length == 1 and self.samples


class BatchPlan(NamedTuple):
    """What to compute at once. `copies`: (from, to) blocks to copy before anything is written. Single tokens come
    first; those may go on for `steps` tokens, as far as their blocks reach."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    steps: int = 1


class Draft:
    """A plan in the making, with what is left of the step's prefill budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.single: list[Chunk] = []
        self.longer: list[Chunk] = []
        self.copies: list[tuple[int, int]] = []

    def add(self, sequence: Sequence) -> None:
        pending = sequence.pending
        if pending == 1:
            self.single.append(Chunk(sequence, sequence.cached, 1))
            return
        count = min(pending, self.budget)
        self.budget -= count
        if count:
            (self.single if count == 1 else self.longer).append(Chunk(sequence, sequence.cached, count))


class Kept(NamedTuple):
    """KV that outlives its sequence: of a group's prompt, or of an ended turn."""

    tokens: array[int]
    blocks: list[int]
    far: bool


Sharing = tuple[GroupId, bool]  # a group's near, or its far, sequences


class Scheduler:
    def __init__(
        self, blocks: int, block_tokens: int, prefill_tokens: int, max_running: int, switch: int = sys.maxsize
    ) -> None:
        """`switch`: sequences of more tokens are far."""
        self.block_tokens = block_tokens
        self.switch = switch
        self.prefill_tokens = prefill_tokens
        self.max_running = max_running
        self.pool = BlockPool(blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.turns: dict[TrajectoryId, Kept] = {}  # of ended turns, least recently ended first
        self.prompts: dict[Sharing, Kept] = {}
        self.prefix_cache: dict[bytes, int] = {}  # whole blocks that prompts begin with, least recently used first
        self._seen_prefixes: dict[bytes, None] = {}  # digests of prefixes that some prompt had
        self._leaders: dict[Sharing, Sequence] = {}  # who is prefilling a prompt that is not yet kept
        self._group_of: dict[TrajectoryId, GroupId] = {}

    # ------------------------------------------------------------------------------------------ what callers do

    def submit(self, sequence: Sequence) -> None:
        assert self._active(sequence.id) is None, f"sequence {sequence.id} is here already"
        self._group_of[sequence.id] = sequence.group
        self.waiting.append(sequence)

    def withdraw(self, id: TrajectoryId) -> Sequence | None:
        """Take it out, with all that is kept of it; None if it is not there or its turn has ended."""
        sequence = self._active(id)
        if sequence is not None:
            self._remove(sequence)
        self.forget(id)
        return sequence

    def forget(self, id: TrajectoryId) -> None:
        """Nothing needs to be kept of its ended turns. With a group's last sample goes its prompt."""
        kept = self.turns.pop(id, None)
        if kept is not None:
            self.pool.drop(kept.blocks)
        if id in self._group_of and self._active(id) is None:
            group = self._group_of.pop(id)
            if group not in self._group_of.values():
                self._drop_prompt((group, False))
                self._drop_prompt((group, True))

    def drop_kv(self) -> None:
        """All KV is void: what runs waits again, in the same order, and nothing is kept."""
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)
        while self._evict():
            pass

    def stats(self) -> EngineStats:
        return EngineStats(self.pool.needed * self.block_tokens, len(self.running), len(self.waiting))

    # ------------------------------------------------------------------------------------------ a step

    def plan(self, steps: int = 1) -> BatchPlan:
        """The chunks to compute now. Blocks are taken for them; nothing else changes until `computed`.

        Whoever decodes up to `steps` tokens at once gets blocks for all of them as far as there are some. While there
        is more to prefill than fits, it takes one step only: the others will soon come along for little more.
        """
        draft = Draft(self.prefill_tokens)
        if self.switch < sys.maxsize:
            self._preempt_grown()
        index = 0
        while index < len(self.running):  # it may get shorter meanwhile, from its end
            if self._grow(self.running[index]):
                draft.add(self.running[index])
            index += 1
        decoding = len(draft.single)
        self._reserve(draft.single, steps)
        self._admit_waiting(draft)
        self._reserve(draft.single[decoding:], steps)
        return BatchPlan(draft.single + draft.longer, draft.copies, steps if draft.budget else 1)

    def shrink(self, plan: BatchPlan) -> BatchPlan | None:
        """What to compute instead of a plan that found no memory, with half the prefill budget from now on; None if
        prefill is not to blame. The blocks stay taken: what is left out comes with the next plans."""
        least = self.block_tokens
        if self.prefill_tokens <= least or all(chunk.decodes for chunk in plan.chunks):
            return None
        self.prefill_tokens = max(least, self.prefill_tokens // 2)
        draft = Draft(self.prefill_tokens)
        for chunk in plan.chunks:
            draft.add(chunk.sequence)
        return BatchPlan(draft.single + draft.longer, plan.copies, plan.steps if draft.budget else 1)

    def grew(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """These were sampled. The KV of all but the last is in the pool, or there would be no last one."""
        sequence.tokens.extend(tokens)
        sequence.cached = len(sequence.tokens) - 1

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pool."""
        sequence = chunk.sequence
        sequence.cached = chunk.end
        if not self._leaders:  # in most steps
            return
        if self._leaders.get(self._sharing(sequence)) is sequence and sequence.cached >= sequence.prompt - 1:
            del self._leaders[self._sharing(sequence)]
            self._keep_prompt(sequence)

    def finished(self, sequence: Sequence) -> None:
        """Its turn is over: its KV stays, for the next one, as long as nobody needs the room."""
        self.running.remove(sequence)
        self._lead_no_more(sequence)
        self.pool.keep(sequence.blocks)
        self.pool.release(sequence.blocks)
        self.turns[sequence.id] = Kept(sequence.tokens[: sequence.cached], sequence.blocks, sequence.far)

    # ------------------------------------------------------------------------------------------ who runs

    def _grow(self, sequence: Sequence) -> bool:
        """A block for its next token, at the cost of caches, then of the youngest; False when that is itself."""
        while len(sequence.blocks) < self._blocks_for(len(sequence.tokens)):
            if self.pool.free or self._evict():
                sequence.blocks += self.pool.take(min(1, self.pool.free))
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _reserve(self, decoding: list[Chunk], steps: int) -> None:
        """Blocks for the tokens after the next one: only free ones, or of caches that nobody waits for."""
        for sequence, *_ in decoding:
            last = min(len(sequence.tokens) + steps, sequence.end) - 1  # the very last token needs no KV
            missing = self._blocks_for(last) - len(sequence.blocks)
            while missing > self.pool.free and self._evict_unwanted():
                pass
            if missing > 0 < self.pool.free:
                sequence.blocks += self.pool.take(min(missing, self.pool.free))

    def _admit_waiting(self, draft: Draft) -> None:
        passed: list[Sequence] = []  # followers whose leader is not there yet
        while self.waiting and draft.budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            if not self._must_follow(sequence):
                if not self._admit(sequence, draft.copies):
                    self.waiting.appendleft(sequence)
                    break
                draft.add(sequence)
            else:
                passed.append(sequence)
        self.waiting.extendleft(reversed(passed))

    def _preempt_grown(self) -> None:
        """Those that have become far begin anew."""
        for sequence in reversed([one for one in self.running if one.far != self._is_far(one)]):
            self._preempt(sequence)

    def _must_follow(self, sequence: Sequence) -> bool:
        return self._sharing(sequence) in self._leaders and sequence.id not in self.turns

    def _is_far(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) > self.switch

    def _sharing(self, sequence: Sequence) -> Sharing:
        return sequence.group, self._is_far(sequence)

    def _admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        sequence.far = self._is_far(sequence)
        blocks, cached, copied = self._inherit(sequence)
        self.pool.need(blocks)
        spare = 1 if self.running else 0  # or the first token would at once preempt somebody
        wanted = self._blocks_for(len(sequence.tokens)) - len(blocks)
        while self.pool.free < wanted + spare and self._evict():
            pass
        if self.pool.free < wanted + spare:
            self.pool.release(blocks)
            return False
        sequence.blocks = blocks + self.pool.take(wanted)
        sequence.cached = cached
        if copied is not None:
            copies.append((copied, sequence.blocks[len(blocks)]))
        self._start(sequence)
        return True

    def _inherit(self, sequence: Sequence) -> tuple[list[int], int, int | None]:
        """What is there already: blocks to go on with, tokens in the cache, a block to copy from."""
        turn = self.turns.get(sequence.id)
        if (
            turn is not None
            and turn.far == sequence.far
            and turn.tokens == sequence.tokens[: len(turn.tokens)]
            and len(turn.tokens) >= sequence.prompt
        ):
            cached = min(len(turn.tokens), len(sequence.tokens) - 1)
            return turn.blocks[: self._blocks_for(cached)], cached, None
        prompt = self.prompts.get(self._sharing(sequence))
        if prompt is not None and prompt.tokens == sequence.shared_tokens():
            whole = len(prompt.tokens) // self.block_tokens
            return prompt.blocks[:whole], len(prompt.tokens), prompt.blocks[-1] if whole < len(prompt.blocks) else None
        blocks = self._cached_prefix(sequence)
        return blocks, len(blocks) * self.block_tokens, None

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that other prompts began with in the same way: a system message, worked examples."""
        blocks: list[int] = []
        for digest in self._digests(sequence.shared_tokens(), sequence.far):
            block = self.prefix_cache.pop(digest, None)
            if block is None:
                break
            self.prefix_cache[digest] = block  # the most recently used now
            blocks.append(block)
        return blocks

    def _digests(self, tokens: array[int], far: bool) -> Iterator[bytes]:
        """Of everything up to the end of each whole block: the same digest is the same prefix."""
        running = blake2b(digest_size=16, person=b"far" if far else b"")
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            running.update(tokens[end - self.block_tokens : end])
            yield running.digest()

    def _start(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        turn = self.turns.pop(sequence.id, None)
        if turn is not None:
            self.pool.drop(turn.blocks)
        if sequence.cached < sequence.prompt - 1 and self._sharing(sequence) not in self.prompts:
            self._leaders.setdefault(self._sharing(sequence), sequence)

    # ------------------------------------------------------------------------------------------ who goes

    def _active(self, id: TrajectoryId) -> Sequence | None:
        return next((s for s in chain(self.running, self.waiting) if s.id == id), None)

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._lead_no_more(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.cached = 0

    def _lead_no_more(self, sequence: Sequence) -> None:
        if self._leaders.get(self._sharing(sequence)) is sequence:
            del self._leaders[self._sharing(sequence)]

    def _evict(self) -> bool:
        """Give up one cache: one that nobody wants, or else any prompt."""
        if self._evict_unwanted():
            return True
        sharing = next(iter(self.prompts), None)
        if sharing is not None:
            self._drop_prompt(sharing)
        return sharing is not None

    def _evict_unwanted(self) -> bool:
        """Give up a prompt that nobody waits for or runs on, or the oldest ended turn, or the oldest cached prefix."""
        sharing = next(self._idle_prompts(), None)
        if sharing is not None:
            self._drop_prompt(sharing)
        elif self.turns:
            self.pool.drop(self.turns.pop(next(iter(self.turns))).blocks)
        elif self.prefix_cache:
            self.pool.drop([self.prefix_cache.pop(next(iter(self.prefix_cache)))])
        else:
            return False
        return True

    def _idle_prompts(self) -> Iterator[Sharing]:
        wanted = {self._sharing(sequence) for sequence in self.waiting} if self.prompts else set()
        for sharing, kept in self.prompts.items():
            if sharing not in wanted and not self.pool.is_needed(kept.blocks[0]):
                yield sharing

    def _keep_prompt(self, sequence: Sequence) -> None:
        tokens = sequence.shared_tokens()
        kept = Kept(tokens, sequence.blocks[: self._blocks_for(len(tokens))], sequence.far)
        self.pool.keep(kept.blocks)
        self.prompts[self._sharing(sequence)] = kept
        self._cache_prefix(kept)

    def _cache_prefix(self, prompt: Kept) -> None:
        """Keep the blocks that a second prompt begins with: those of one alone would only scatter the pool."""
        for digest, block in zip(self._digests(prompt.tokens, prompt.far), prompt.blocks, strict=False):
            if digest in self._seen_prefixes and digest not in self.prefix_cache:
                self.prefix_cache[digest] = block
                self.pool.keep([block])
            self._seen_prefixes[digest] = None
        while len(self._seen_prefixes) > SEEN:
            del self._seen_prefixes[next(iter(self._seen_prefixes))]

    def _drop_prompt(self, sharing: Sharing) -> None:
        kept = self.prompts.pop(sharing, None)
        if kept is not None:
            self.pool.drop(kept.blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def check(self) -> None:
        """The pool's books agree with ours. For tests, and cheap enough to call between any two steps."""
        needs = Counter(block for s in self.running for block in s.blocks)
        keeps = Counter(b for kept in (*self.turns.values(), *self.prompts.values()) for b in kept.blocks)
        keeps.update(self.prefix_cache.values())
        self.pool.check(dict(needs), dict(keeps))
        assert not any(s.blocks for s in self.waiting)
