"""Packs: nothing lost, nothing twice, nothing too large."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.trainer.batch import rank_packs
from tailrace.trainer.packing import deal, fill, read
from tailrace.types import Segment, Trajectory

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
        made.append(Trajectory(i, 0, 0, tuple(segments)))
    return made


@given(trajectories(), st.integers(1, 80), st.integers(1, 3))
def test_every_sampled_token_is_in_exactly_one_pack_behind_the_token_before_it(given_trajectories, budget, ranks):
    samples = [read(t) for t in given_trajectories]
    packs = [p for rank in range(ranks) for p in rank_packs(samples, range(len(samples)), budget, rank, ranks)]
    seen = Counter(int(t) for p in packs for t in p.targets)
    wanted = [t for x in given_trajectories for s in x.segments if s.version is not None for t in s.ids]
    assert seen == Counter(wanted)
    for p in packs:
        assert np.array_equal(p.inputs[p.places], p.targets - 1)  # tokens were numbered in order
        assert sum(p.lengths) <= budget or len(p.lengths) == 1


@given(trajectories(), st.integers(1, 80))
def test_filled_packs_hold_every_sample_once_and_no_two_of_them_would_fit_into_one(given_trajectories, budget):
    samples = [read(t) for t in given_trajectories]
    packs = fill(samples, range(len(samples)), budget)
    assert sorted(i for p in packs for i in p.members) == list(range(len(samples)))
    sizes = [sum(p.lengths) for p in packs]
    assert all(size <= budget or len(p.lengths) == 1 for size, p in zip(sizes, packs, strict=True))
    assert len(packs) < 2 or sum(sorted(sizes)[:2]) > budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_ranks_get_whole_sequences_and_about_as_many_tokens(lengths, ranks):
    hands = deal(lengths, ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(lengths)


def test_masks_log_probs_and_versions_come_from_the_segments():
    parts = (
        Segment.of(None, (10, 11)),
        Segment.of(4, (12, 13), (-0.5, -0.25)),
        Segment.of(None, (14,)),
        Segment.of(5, (15,), (-2.0,)),
        Segment.of(None, (16, 17)),
    )
    sample = read(Trajectory(0, 0, 0, parts))
    assert sample.inputs.tolist() == [10, 11, 12, 13, 14]  # what follows the last sampled token predicts nothing
    assert sample.places.tolist() == [1, 2, 4]
    assert sample.targets.tolist() == [12, 13, 15]
    assert sample.behaviour.tolist() == [-0.5, -0.25, -2.0]
    assert sample.versions.tolist() == [4, 4, 5]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_a_folded_pack_has_every_beginning_once_and_every_sequence_in_full(sequences):
    samples = [
        read(Trajectory(0, 0, 0, (Segment.of(None, (7,)), Segment.of(0, (*s, 9), (-1.0,) * (len(s) + 1)))))
        for s in sequences
    ]
    [folded] = fill(samples, range(len(samples)), 1000)
    assert folded.paths is not None
    rows = np.split(folded.inputs[folded.paths], np.cumsum(folded.lengths[:-1]))
    assert [row.tolist() for row in rows] == [[7, *sequences[i]] for i in folded.members]
    assert len(folded.inputs) == len({(7, *s[:end]) for s in sequences for end in range(len(s) + 1)})
    assert np.array_equal(folded.places, folded.paths)  # here every token predicts a sampled one


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
