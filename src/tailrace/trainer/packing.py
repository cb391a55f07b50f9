"""Trajectories as arrays, and sequences packed to a budget of tokens. No tensors here.

The loss mask and the behavior log-probs are read off the segments: what has no version was not sampled and is not
trained on. A sampled token is predicted by the token before it, so a pack has a row of input tokens, and for every
sampled token the position in that row that predicts it. What follows the last sampled token is left out.

`batch.py` deals samples to ranks and assigns them to packs by their sizes alone, then calls `read` and `lay_out`. Every
sampled token is in exactly one pack of one rank; the sequences of a pack have no more tokens than the budget, unless it
is one sequence alone. A token's hidden state depends on the tokens before it and on nothing else, so the samples of a
prompt need its hidden states only once: packs are folded into a prefix tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.types import Segment, Trajectory

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Number = TypeVar("Number", np.int32, np.float32)


class SampleArrays(NamedTuple):
    """One trajectory as arrays."""

    inputs: Ints  # what the model reads: one sequence, or two end to end
    lengths: tuple[int, ...]  # of these
    positions: Ints  # in `inputs`, of the token before each sampled one
    targets: Ints  # the sampled tokens
    behavior_logprobs: Floats  # when they were sampled


class Pack(NamedTuple):
    """Sequences laid end to end, or folded: what they begin with in common is there once."""

    members: tuple[int, ...]  # which samples these are
    counts: tuple[int, ...]  # sampled tokens of each
    lengths: tuple[int, ...]  # of the sequences, of which a sample may have two
    inputs: Ints
    paths: Ints | None  # of a folded pack: where in `inputs` the tokens of each sequence are
    positions: Ints  # of every sampled token, sample by sample, as are the next two
    targets: Ints
    behavior_logprobs: Floats

    @property
    def sequence(self) -> NDArray[np.int64]:
        """Which sample each sampled token belongs to."""
        return np.repeat(np.array(self.members, np.int64), self.counts)


def read(trajectory: Trajectory, switch: int | None = None) -> SampleArrays:
    """The arrays of a trajectory. `switch`: where the model goes over to other rotary frequencies (`longrope.py`)."""
    segments = _trained_part(trajectory)
    tokens, ends = _joined([s.ids for s in segments]), np.cumsum([len(s) for s in segments])
    sampled = [(s, int(end)) for s, end in zip(segments, ends, strict=True) if s.version is not None]
    positions = _joined([np.arange(end - len(s) - 1, end - 1, dtype=np.int32) for s, end in sampled])
    targets, logprobs = _joined([s.ids for s, _ in sampled]), _joined([_logprobs(trajectory, s) for s, _ in sampled])
    return SampleArrays(*_as_it_grew(tokens[:-1], positions, switch), targets, logprobs)


def input_tokens(length: int, prompt: int, switch: int | None) -> int:
    """How many tokens `read` makes of a trajectory with so many up to the last sampled one, `prompt` of them given."""
    inputs = length - 1
    return inputs if switch is None or inputs <= switch or prompt > switch else inputs + switch


def _as_it_grew(inputs: Ints, positions: Ints, switch: int | None) -> tuple[Ints, tuple[int, ...], Ints]:
    """Inputs, lengths and positions. What was sampled before its sequence crossed the switch is predicted by the
    sequence as it was then, what was sampled later by the whole of it."""
    before = positions < (len(inputs) if switch is None else switch)
    if switch is None or len(inputs) <= switch or not before.any():
        return inputs, (len(inputs),), positions
    both = np.concatenate([inputs[:switch], inputs])
    return both, (switch, len(inputs)), np.where(before, positions, positions + switch)


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole samples to ranks, so that all have about as many tokens: the next longest goes to who has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + sizes[i], rank))
    return shares


def assign(sizes: Sequence[int], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: the `chosen` samples in few packs, nearly all of them full. Each goes, the longest first,
    where there is room."""
    packs: list[list[int]] = []
    rooms = np.full(len(chosen), budget)
    for i in sorted(chosen, key=lambda i: (-sizes[i], i)):
        fits = rooms[: len(packs)] >= sizes[i]
        at = int(fits.argmax()) if fits.any() else len(packs)
        if at == len(packs):
            packs.append([])
        packs[at].append(i)
        rooms[at] -= sizes[i]
    return packs


def filler(token: int = 0) -> Pack:
    """A pack of nothing, for a rank that has run out while others go on: a pass over sharded weights takes them all."""
    nothing = np.zeros(0, np.int32)
    return Pack((), (), (1,), np.array([token], np.int32), None, nothing, nothing, nothing.astype(np.float32))


def lay_out(
    samples: Sequence[SampleArrays], members: Sequence[int], fold: bool = True, switch: int | None = None
) -> Pack:
    """One pack of these samples, which the mini-batch knows as `members`."""
    lengths = tuple([length for s in samples for length in s.lengths])
    starts = np.cumsum([0, *(len(s.inputs) for s in samples[:-1])], dtype=np.int32)
    inputs, paths = _joined([s.inputs for s in samples]), None
    positions = _joined([s.positions + start for s, start in zip(samples, starts, strict=True)])
    if fold:
        inputs, paths = _folded(np.split(inputs, np.cumsum(lengths)[:-1]), switch)
        positions = paths[positions]
    return Pack(
        members=tuple(members),
        counts=tuple([len(s.targets) for s in samples]),
        lengths=lengths,
        inputs=inputs,
        paths=paths,
        positions=positions,
        targets=_joined([s.targets for s in samples]),
        behavior_logprobs=_joined([s.behavior_logprobs for s in samples]),
    )


def _trained_part(trajectory: Trajectory) -> tuple[Segment, ...]:
    """The segments up to the last sampled one."""
    sampled = [i for i, s in enumerate(trajectory.segments) if s.version is not None and s.tokens]
    if not sampled:
        raise ValueError(f"trajectory t{trajectory.id} has no sampled token to train on")
    if not any(s.tokens for s in trajectory.segments[: sampled[0]]):
        raise ValueError(f"trajectory t{trajectory.id} starts with a sampled token; give its prompt at least one token")
    return trajectory.segments[: sampled[-1] + 1]


def _logprobs(trajectory: Trajectory, segment: Segment) -> Floats:
    if segment.logprobs is None or len(segment.logprobs) != len(segment.tokens):
        raise ValueError(f"trajectory t{trajectory.id} has sampled tokens without the log-probs they were sampled with")
    return segment.logprob_values


def _joined(arrays: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """End to end; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _folded(sequences: list[Ints], switch: int | None) -> tuple[Ints, Ints]:
    """The tokens of a prefix tree whose branches are the sequences, and the position in it of every token of each."""
    fresh: list[Ints] = []
    paths: list[Ints] = []
    size = 0
    for sequence, (earlier, shared) in zip(sequences, _shared_prefixes(sequences, switch), strict=True):
        grown = size + len(sequence) - shared
        own = np.arange(size, grown, dtype=np.int32)
        paths.append(np.concatenate([paths[earlier][:shared], own]) if shared else own)
        fresh.append(sequence[shared:])
        size = grown
    return np.concatenate(fresh), np.concatenate(paths)


def _shared_prefixes(sequences: list[Ints], switch: int | None) -> list[tuple[int, int]]:
    """For every sequence, the earlier one that it has the longest prefix in common with, and how long that is. What is
    rotated otherwise has no prefix in common.

    In alphabetical order the longest common prefix is that with a neighbour. So the last sequence is compared with its
    neighbours and taken out of the order, then the last but one, and so on: those left are the earlier ones.
    """
    end = len(sequences)  # stands for both ends of the order, which is a ring
    far = [switch is not None and len(s) > switch for s in sequences]
    order = sorted(range(end), key=lambda i: (far[i], sequences[i].astype(">u4").tobytes()))
    after = dict(zip([end, *order], [*order, end], strict=True))
    before = {following: one for one, following in after.items()}
    pairs = ((one, other) for one, other in pairwise(order) if far[one] == far[other])
    common = dict.fromkeys(after, 0) | {one: _common_prefix(sequences[one], sequences[other]) for one, other in pairs}
    found: list[tuple[int, int]] = []
    for i in reversed(range(end)):
        left, right = before[i], after[i]
        found.append(max((common[left], left), (common[i], right)))
        after[left], before[right], common[left] = right, left, min(common[left], common[i])
    return [(earlier, shared) for shared, earlier in reversed(found)]


def _common_prefix(one: Ints, other: Ints) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
