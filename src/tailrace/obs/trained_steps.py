"""What the trainer was given, added up: mini-batches, and the steps that they make.

`TrainedSteps` is the part of the fold of a journal (`fold.py`) that knows which mini-batches were reported: each counts
once, however often a trainer that came back repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tailrace.obs.records import SampleRecord
from tailrace.protocol import Train
from tailrace.types import Version

MiniBatchId = tuple[int, int]  # step and its mini-batch
LARGEST_REWARD = 1e100  # a larger one counts as this in the means that are shown: their sums stay finite


class CompletionLengths(msgspec.Struct, frozen=True):
    """Of samples, without their prompts: sum, extremes, and how many had no room for more."""

    samples: int = 0
    tokens: int = 0
    shortest: int = 0
    longest: int = 0
    truncated: int = 0

    def __add__(self, other: CompletionLengths) -> CompletionLengths:
        shortest = min([one.shortest for one in (self, other) if one.samples], default=0)
        samples, tokens = self.samples + other.samples, self.tokens + other.tokens
        longest, truncated = max(self.longest, other.longest), self.truncated + other.truncated
        return CompletionLengths(samples, tokens, shortest, longest, truncated)

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.samples)

    @property
    def truncated_share(self) -> float:
        return self.truncated / max(1, self.samples)


class BatchTotals(msgspec.Struct):
    """Sums over what the trainer was given: a mini-batch, or several that add up."""

    groups: int = 0
    tokens: int = 0  # prompts included
    ages: Counter[int] = msgspec.field(default_factory=Counter)  # samples by the staleness of their oldest token
    rewards: float = 0.0
    squared_rewards: float = 0.0
    rewarded: int = 0
    lengths: CompletionLengths = CompletionLengths()
    useful: int = 0  # groups whose rewards differ: the others have no advantage
    mini_batches: int = 1

    def add(self, other: BatchTotals) -> None:
        self.groups += other.groups
        self.tokens += other.tokens
        self.ages += other.ages
        self.rewards += other.rewards
        self.squared_rewards += other.squared_rewards
        self.lengths += other.lengths
        self.rewarded += other.rewarded
        self.useful += other.useful
        self.mini_batches += other.mini_batches

    @property
    def samples(self) -> int:
        return self.ages.total()

    @property
    def reward(self) -> float | None:
        return self.rewards / self.rewarded if self.rewarded else None

    @property
    def reward_std(self) -> float:
        mean = self.reward or 0.0
        return max(0.0, self.squared_rewards / max(1, self.rewarded) - mean**2) ** 0.5


class Staleness(msgspec.Struct, frozen=True):
    mean: float = 0.0
    p95: float = 0.0
    max: int = 0


class StepRecord(msgspec.Struct, frozen=True):
    """One finished step."""

    step: int
    ended: float
    groups: int
    samples: int
    tokens: int
    reward: float | None
    staleness: Staleness
    useful: int = 0  # groups whose rewards differ
    reward_std: float = 0.0
    lengths: CompletionLengths = CompletionLengths()


class TrainedSteps:
    def __init__(self) -> None:
        self.total = BatchTotals(mini_batches=0)  # everything trained
        self.steps: list[StepRecord] = []
        self._given: dict[MiniBatchId, tuple[Train, BatchTotals]] = {}  # to the trainer, which has not reported them
        self._last: MiniBatchId = (-1, 0)  # the newest that is trained
        self._step = BatchTotals(mini_batches=0)  # what is trained of the present step

    def is_pending(self, command: Train) -> bool:
        """The trainer was given this mini-batch before and has not reported it."""
        return (command.step, command.mini_batch) in self._given

    def is_repeated(self, command: Train) -> bool:
        return (command.step, command.mini_batch) <= self._last or self.is_pending(command)

    def give(self, command: Train, batch: BatchTotals) -> None:
        self._given[command.step, command.mini_batch] = command, batch

    def given_before(self, position: MiniBatchId) -> list[MiniBatchId]:
        return [id for id in sorted(self._given) if id < position]

    def complete(self, id: MiniBatchId) -> tuple[Train, BatchTotals] | None:
        """It is trained; None: it was before."""
        given = self._given.pop(id, None)
        if given is not None:
            self._last = id
            self.total.add(given[1])
            self._step.add(given[1])
        return given

    def end_step(self, step: int, now: float) -> None:
        batch = self._step
        if not batch.groups or self._last[0] != step:
            return  # it ended before; the trainer has repeated it
        figures = (batch.groups, batch.samples, batch.tokens, batch.reward, staleness(batch.ages), batch.useful)
        self.steps.append(StepRecord(step, now, *figures, batch.reward_std, batch.lengths))
        self._step = BatchTotals(mini_batches=0)


def totals(groups: int, useful: int, version: Version, samples: Sequence[SampleRecord]) -> BatchTotals:
    """Of a mini-batch that is trained on top of a version, and of whose groups so many have rewards that differ."""
    batch = BatchTotals(groups, useful=useful, lengths=_lengths_of(samples))
    batch.tokens = sum([sample.prompt_tokens + sample.tokens for sample in samples])
    batch.ages = Counter([version - sample.oldest for sample in samples])
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    bounded = [max(-LARGEST_REWARD, min(LARGEST_REWARD, reward)) for reward in rewards]
    batch.rewards, batch.squared_rewards = sum(bounded), sum([reward * reward for reward in bounded])
    batch.rewarded = len(rewards)
    return batch


def _lengths_of(samples: Sequence[SampleRecord]) -> CompletionLengths:
    tokens = [sample.tokens for sample in samples]
    extremes = (min(tokens, default=0), max(tokens, default=0))
    return CompletionLengths(len(tokens), sum(tokens), *extremes, sum([sample.truncated for sample in samples]))


def staleness(ages: Counter[int]) -> Staleness:
    """Mean, 95th percentile and maximum of a count of ages."""
    total = ages.total()
    if not total:
        return Staleness()
    mean = sum(age * count for age, count in ages.items()) / total
    seen = 0
    for age in sorted(ages):
        seen += ages[age]
        if seen >= 0.95 * total:
            return Staleness(mean, float(age), max(ages))
    raise AssertionError("unreachable: the ages add up to their total")
