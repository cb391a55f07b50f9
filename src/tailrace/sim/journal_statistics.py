"""Statistics of the journal of a recorded run: prompt lengths, correlation of lengths within groups, scoring times, and
the smallest replica.

`fit.py` makes settings of it. The lengths themselves stay in the journal, which the empirical law of lengths reads.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist, mean
from typing import NamedTuple

import numpy as np

from tailrace.errors import TailraceError
from tailrace.protocol import SCORING_S, Finished, PromptsAdded, ReplicaJoined, ScoringStarted
from tailrace.store.journal import Journal


class FitError(TailraceError):
    """Why nothing can be fitted to a run, for the person who named it."""


class JournalStatistics(NamedTuple):
    prompt_tokens: float  # mean
    correlation: float  # of lengths within a group
    kv_tokens: int  # of the smallest replica
    roofline: int
    reward_s: float  # mean time to score a sample; what is too quick to be in the journal counts as none


def journal_statistics(run: Path) -> JournalStatistics:
    journal = Journal(run)
    lengths: dict[int, int] = {}
    prompts: list[int] = []
    joined: list[ReplicaJoined] = []
    scoring: dict[tuple[int, int], float] = {}  # since when, by trajectory and attempt
    scored_s = 0.0
    for entry in journal.entries():
        match entry.event:
            case Finished(meta=meta):
                lengths[meta.id] = meta.tokens
                since = scoring.pop((meta.id, meta.attempt), None)
                scored_s += entry.now - since + SCORING_S if since is not None else 0.0
            case ScoringStarted(samples=samples):
                scoring |= {(one.trajectory, one.attempt): entry.now for one in samples if one.final}
            case PromptsAdded(prompts=added):
                prompts += [prompt.tokens for prompt in added]
            case ReplicaJoined():
                joined.append(entry.event)
            case _:
                pass
    if not lengths:
        raise FitError(f"{run} has finished no trajectory, so its work is not known; name a run that went further")
    return JournalStatistics(
        mean(prompts) if prompts else 0.0,
        _group_correlation(lengths, journal.config.workload.group_size),
        min((one.kv_capacity for one in joined), default=0),
        min((one.roofline for one in joined), default=0),
        scored_s / len(lengths),
    )


def _group_correlation(lengths: dict[int, int], group_size: int) -> float:
    """Intraclass correlation of lengths within groups, on the normal scale that the law of lengths uses."""
    ids = sorted(lengths)
    scores = _normal_scores(np.array([lengths[id] for id in ids], float))
    spread = float(scores.var())
    if spread == 0.0:
        return 0.0
    groups: dict[int, list[float]] = {}
    for id, score in zip(ids, scores.tolist(), strict=True):
        groups.setdefault(id // group_size, []).append(score)
    products = sum(sum(group) ** 2 - sum(score * score for score in group) for group in groups.values())
    pairs = sum(len(group) * (len(group) - 1) for group in groups.values())
    return min(1.0, max(0.0, products / pairs / spread)) if pairs else 0.0


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Normal scores: where each value would lie if the values were normal; equal values lie together."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values)
    normal = NormalDist()
    return np.array([normal.inv_cdf(share) for share in middles.tolist()])[inverse]
