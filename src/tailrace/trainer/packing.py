"""Trajectories as arrays, and sequences packed to a budget of tokens. No tensors here.

The loss mask, the behaviour log-probs and the versions are read off the segments: what has no version was not sampled
and is not trained on. A sampled token is predicted by the token before it, so a pack has a row of input tokens, and for
every sampled token the place in that row that predicts it. What follows the last sampled token is left out.

`batch.py` calls `read`, `deal` and `fill`. Every sampled token is in exactly one pack of one rank; the sequences of a
pack have no more tokens than the budget, unless it is one sequence alone. What a token's hidden state is depends on the
tokens before it and on nothing else, so the samples of a prompt need its hidden states only once: packs are folded.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.types import Segment, Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Sample(NamedTuple):
    """One trajectory as arrays."""

    inputs: Ints  # what the model reads: one sequence, or two end to end
    lengths: tuple[int, ...]  # of these
    places: Ints  # in `inputs`, of the token before each sampled one
    targets: Ints  # the sampled tokens
    behaviour: Floats  # their log-probs when they were sampled
    versions: Ints  # the weights they were sampled with


class Pack(NamedTuple):
    """Sequences laid end to end, or folded: what they begin with in common is there once. The last five have one entry
    per sampled token."""

    members: tuple[int, ...]  # which samples these are
    lengths: tuple[int, ...]  # of the sequences, of which a sample may have two
    inputs: Ints
    paths: Ints | None  # of a folded pack: where in `inputs` the tokens of each sequence are
    places: Ints
    targets: Ints
    behaviour: Floats
    versions: Ints
    sequence: Ints  # which sample each belongs to


def read(trajectory: Trajectory, switch: int | None = None) -> Sample:
    """The arrays of a trajectory. `switch`: where the model goes over to other rotary frequencies (`longrope.py`)."""
    segments = _trained_part(trajectory)
    tokens = np.concatenate([s.ids for s in segments], dtype=np.int64)
    versions = np.concatenate([np.full(len(s), -1 if s.version is None else s.version) for s in segments])
    behaviour = np.concatenate([_logprobs(trajectory, s) for s in segments])
    sampled = np.flatnonzero(versions >= 0)
    read_as = _as_it_grew(tokens[:-1], sampled - 1, switch)
    return Sample(*read_as, tokens[sampled], behaviour[sampled], versions[sampled])


def _as_it_grew(inputs: Ints, places: Ints, switch: int | None) -> tuple[Ints, tuple[int, ...], Ints]:
    """Inputs, lengths and places. What was sampled before its sequence crossed the switch is predicted by the sequence
    as it was then, what was sampled later by the whole of it."""
    before = places < (len(inputs) if switch is None else switch)
    if switch is None or len(inputs) <= switch or not before.any():
        return inputs, (len(inputs),), places
    both = np.concatenate([inputs[:switch], inputs])
    return both, (switch, len(inputs)), np.where(before, places, places + switch)


def fill(
    samples: Sequence[Sample], chosen: Sequence[int], budget: int, fold: bool = True, switch: int | None = None
) -> list[Pack]:
    """The `chosen` samples in few packs, nearly all of them full: each goes, the longest first, where there is room."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(chosen, key=lambda i: (-len(samples[i].inputs), i)):
        size = len(samples[i].inputs)
        at = next((at for at, room in enumerate(rooms) if room >= size), len(packs))
        if at == len(packs):
            packs.append([])
            rooms.append(budget)
        packs[at].append(i)
        rooms[at] -= size
    return [_lay_out(samples, members, fold, switch) for members in packs]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole sequences to ranks, so that all have about as many tokens: the next longest goes to who has least."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        hands[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rank))
    return hands


def filler(token: int = 0) -> Pack:
    """A pack of nothing, for a rank that has run out while others go on: a pass over sharded weights takes them all."""
    nothing = np.zeros(0, np.int64)
    return Pack((), (1,), np.array([token]), None, nothing, nothing, nothing.astype(np.float32), nothing, nothing)


def _trained_part(trajectory: Trajectory) -> tuple[Segment, ...]:
    """The segments up to the last sampled one."""
    sampled = [i for i, s in enumerate(trajectory.segments) if s.version is not None and s.tokens]
    if not sampled:
        raise ValueError(f"trajectory t{trajectory.id} has no sampled token to train on")
    if not any(s.tokens for s in trajectory.segments[: sampled[0]]):
        raise ValueError(f"trajectory t{trajectory.id} starts with a sampled token; give its prompt at least one token")
    return trajectory.segments[: sampled[-1] + 1]


def _logprobs(trajectory: Trajectory, segment: Segment) -> Floats:
    if segment.version is None:
        return np.zeros(len(segment), np.float32)
    if segment.logprobs is None or len(segment.logprobs) != len(segment.tokens):
        raise ValueError(f"trajectory t{trajectory.id} has sampled tokens without the log-probs they were sampled with")
    return segment.logprob_values


def _lay_out(samples: Sequence[Sample], members: list[int], fold: bool, switch: int | None) -> Pack:
    mine = [samples[i] for i in members]
    lengths = tuple(length for s in mine for length in s.lengths)
    starts = np.cumsum([0, *(len(s.inputs) for s in mine[:-1])])
    inputs, paths = np.concatenate([s.inputs for s in mine]), None
    places = np.concatenate([s.places + start for s, start in zip(mine, starts, strict=True)])
    if fold:
        inputs, paths = _folded(np.split(inputs, np.cumsum(lengths)[:-1]), switch)
        places = paths[places]
    return Pack(
        members=tuple(members),
        lengths=lengths,
        inputs=inputs,
        paths=paths,
        places=places,
        targets=np.concatenate([s.targets for s in mine]),
        behaviour=np.concatenate([s.behaviour for s in mine]),
        versions=np.concatenate([s.versions for s in mine]),
        sequence=np.repeat(members, [len(s.targets) for s in mine]),
    )


def _folded(sequences: list[Ints], switch: int | None) -> tuple[Ints, Ints]:
    """The tokens of a tree whose branches are the sequences, and the place in it of every token of each. What is
    rotated otherwise has a root of its own."""
    tree: dict[tuple[int, int], int] = {}  # from the place of the token before and the token itself to its own place
    paths: list[int] = []
    for sequence in sequences:
        at = -2 if switch is not None and len(sequence) > switch else -1
        for token in sequence.tolist():
            at = tree.setdefault((at, token), len(tree))
            paths.append(at)
    return np.array([token for _, token in tree]), np.array(paths)
