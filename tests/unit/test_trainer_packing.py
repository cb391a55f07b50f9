"""Packs: nothing lost, nothing twice, nothing too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.tree import Trainer
from tailrace.trainer.batch import MiniBatch, plan_mini_batch, rank_share, read_packs, worth_a_pass
from tailrace.trainer.packing import Pack, deal, read
from tailrace.trainer.reader import in_memory
from tailrace.types import Segment, Trajectory
from trainer_cases import Watched

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Every token of all of them is another number, so that each can be followed."""
    fresh, made = iter(range(1, 10**6)), []
    for i in range(draw(st.integers(1, 12))):
        segments = [Segment.of(None, (next(fresh),)), Segment.of(0, (next(fresh),), (-1.0,))]
        for count in draw(COUNTS):
            tokens = tuple(next(fresh) for _ in range(count))
            version = draw(st.sampled_from([None, 0, 3]))
            segments.append(Segment.of(version, tokens, None if version is None else tuple(-float(t) for t in tokens)))
        made.append(Trajectory(i, 0, 0, tuple(segments), "stop", float(i)))
    return made


def batch_of(given_trajectories: list[Trajectory]) -> MiniBatch:
    return plan_mini_batch(*in_memory([given_trajectories]), Trainer())


def packs_of(batch: MiniBatch, budget: int, rank: int = 0, ranks: int = 1, switch: int | None = None) -> list[Pack]:
    share = rank_share(batch, range(len(batch.samples)), rank, ranks, switch)
    return list(read_packs(batch, share, budget, switch=switch))


@given(trajectories(), st.integers(1, 80), st.integers(1, 3))
def test_every_sampled_token_is_in_exactly_one_pack_behind_the_token_before_it(given_trajectories, budget, ranks):
    batch = batch_of(given_trajectories)
    packs = [p for rank in range(ranks) for p in packs_of(batch, budget, rank, ranks)]
    seen = Counter(int(t) for p in packs for t in p.targets)
    wanted = [t for x in given_trajectories for s in x.segments if s.version is not None for t in s.ids.tolist()]
    assert seen == Counter(wanted)
    for p in packs:
        assert np.array_equal(p.inputs[p.positions], p.targets - 1)  # tokens were numbered in order
        assert sum(p.lengths) <= budget or len(p.lengths) == 1


@given(trajectories(), st.integers(1, 80))
def test_filled_packs_hold_every_sample_once_and_no_two_of_them_would_fit_into_one(given_trajectories, budget):
    packs = packs_of(batch_of(given_trajectories), budget)
    assert sorted(i for p in packs for i in p.members) == list(range(len(given_trajectories)))
    sizes = [sum(p.lengths) for p in packs]
    assert all(size <= budget or len(p.lengths) == 1 for size, p in zip(sizes, packs, strict=True))
    assert len(packs) < 2 or sum(sorted(sizes)[:2]) > budget


# ------------------------------------------------------------------------------------------ packing, token by token


class Plain(NamedTuple):
    """A pack, or a sample, made without haste: what `Pack` has to be."""

    members: list[int]
    lengths: list[int]
    inputs: list[int]
    paths: list[int]
    positions: list[int]
    targets: list[int]
    logprobs: list[float]


def plainly_read(trajectory: Trajectory, switch: int | None) -> Plain:
    tokens = [(t, s.version, p) for s in trajectory.segments for t, p in zip(s.ids, values(s), strict=True)]
    last = max(i for i, (_, version, _) in enumerate(tokens) if version is not None)
    inputs = [t for t, _, _ in tokens[:last]]
    sampled = [i for i, (_, version, _) in enumerate(tokens) if version is not None]
    positions, lengths = [i - 1 for i in sampled], [len(inputs)]
    if switch is not None and len(inputs) > switch and positions[0] < switch:
        positions = [p if p < switch else p + switch for p in positions]
        inputs, lengths = inputs[:switch] + inputs, [switch, len(inputs)]
    return Plain([], lengths, inputs, [], positions, [tokens[i][0] for i in sampled], [tokens[i][2] for i in sampled])


def values(segment: Segment) -> list[float]:
    return [0.0] * len(segment) if segment.version is None else segment.logprob_values.tolist()


def plainly_packed(samples: list[Plain], budget: int, switch: int | None) -> Iterator[Plain]:
    packs: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(samples)), key=lambda i: (-len(samples[i].inputs), i)):
        size = len(samples[i].inputs)
        at = next((at for at, room in enumerate(rooms) if room >= size), len(packs))
        if at == len(packs):
            packs.append([])
            rooms.append(budget)
        packs[at].append(i)
        rooms[at] -= size
    for members in packs:
        yield plainly_laid_out([samples[i] for i in members], members, switch)


def plainly_laid_out(samples: list[Plain], members: list[int], switch: int | None) -> Plain:
    tree: dict[tuple[int, int], int] = {}  # from the place of the token before and the token itself to its own place
    paths, positions = [], []
    for sample in samples:
        begun, rest = len(paths), iter(sample.inputs)
        for length in sample.lengths:
            at = -2 if switch is not None and length > switch else -1
            for token in islice(rest, length):
                at = tree.setdefault((at, token), len(tree))
                paths.append(at)
        positions += [paths[begun + p] for p in sample.positions]
    lengths = [length for s in samples for length in s.lengths]
    targets, logprobs = [t for s in samples for t in s.targets], [p for s in samples for p in s.logprobs]
    return Plain(members, lengths, [token for _, token in tree], paths, positions, targets, logprobs)


@st.composite
def alike(draw: st.DrawFn) -> list[Trajectory]:
    """Few different tokens, so that prompts and answers have a lot in common."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3))
    made = []
    for i in range(draw(st.integers(1, 10))):
        segments = [Segment.of(None, draw(st.sampled_from(prompts)))]
        for version in (0, *draw(st.lists(st.sampled_from([None, 0, 1]), max_size=2))):
            ids = draw(st.lists(st.integers(0, 2), min_size=version == 0, max_size=5))
            segments.append(Segment.of(version, ids, None if version is None else [-i - t / 8 for t in ids]))
        made.append(Trajectory(i, 0, 0, tuple(segments), "stop", float(i)))
    return made


@given(alike(), st.integers(1, 60), st.sampled_from([None, 2, 5]))
def test_packs_are_those_of_a_trie_of_tokens(given_trajectories, budget, switch):
    wanted = plainly_packed([plainly_read(t, switch) for t in given_trajectories], budget, switch)
    for mine, theirs in zip(packs_of(batch_of(given_trajectories), budget, switch=switch), wanted, strict=True):
        assert (list(mine.members), list(mine.lengths)) == (theirs.members, theirs.lengths)
        assert mine.paths is not None
        found = (mine.inputs, mine.paths, mine.positions, mine.targets, mine.behavior_logprobs)
        assert [each.tolist() for each in found] == list(theirs[2:])
        assert {each.dtype.itemsize for each in found} == {4}


def test_a_rank_reads_the_samples_of_its_own_share_and_none_without_advantage():
    one, same = [[sample(10 * g + i, g, float(i == 1) if g == 0 else 1.0) for i in range(4)] for g in range(2)]
    infos, reader = in_memory([one, same])
    asked = []
    for rank in range(2):
        watched = Watched(reader)
        batch = plan_mini_batch(infos, watched, Trainer())
        chosen = worth_a_pass(batch, Trainer())
        list(read_packs(batch, rank_share(batch, chosen, rank, 2), 100))
        asked.append(watched.asked)
    assert sorted(asked[0] + asked[1]) == [0, 1, 2, 3]
    assert all(asked)


def sample(id: int, group: int, reward: float, tokens: int = 3) -> Trajectory:
    answer = Segment.of(0, range(tokens), [-1.0] * tokens)
    return Trajectory(id, group, group, (Segment.of(None, (7,)), answer), "stop", reward)


def test_what_is_read_has_to_be_what_was_planned():
    infos, _ = in_memory([[sample(0, 0, 1.0), sample(1, 0, 0.0)]])
    _, other = in_memory([[sample(0, 0, 1.0), sample(1, 0, 0.0, tokens=4)]])
    with pytest.raises(
        ValueError, match="t1 was planned with 4 tokens, 3 of them sampled, but what was read is t1 with 5"
    ):
        packs_of(plan_mini_batch(infos, other, Trainer()), 100)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_ranks_get_whole_sequences_and_about_as_many_tokens(lengths, ranks):
    shares = deal(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_masks_and_log_probs_come_from_the_segments():
    parts = (
        Segment.of(None, (10, 11)),
        Segment.of(4, (12, 13), (-0.5, -0.25)),
        Segment.of(None, (14,)),
        Segment.of(5, (15,), (-2.0,)),
        Segment.of(None, (16, 17)),
    )
    sample = read(Trajectory(0, 0, 0, parts))
    assert sample.inputs.tolist() == [10, 11, 12, 13, 14]  # what follows the last sampled token predicts nothing
    assert sample.positions.tolist() == [1, 2, 4]
    assert sample.targets.tolist() == [12, 13, 15]
    assert sample.behavior_logprobs.tolist() == [-0.5, -0.25, -2.0]


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ((Segment.of(None, (1,)),), "no sampled token"),
        ((Segment.of(0, (1,), (-1.0,)),), "starts with a sampled token"),
        ((Segment.of(None, (1,)), Segment.of(0, (1, 2), (-1.0,))), "without the log-probs"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_refused(segments, reason):
    with pytest.raises(ValueError, match=reason):
        read(Trajectory(3, 0, 0, segments))
