"""How long samples will become: a pure function of those that have finished.

Lengths are taken as log-normal with two sources of spread: prompts differ from each other, and samples of one prompt
differ among themselves. Both are learned from groups as they close, recent ones counting more. What is known of a
sample is then its prompt's mean, as far as finished siblings and earlier visits of the prompt show it, and that it is
longer than it is now.

How far off this is, is kept beside it: the mean error of a sample's log length, foretold from its siblings, and the
error of foretelling the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import erfc, exp, log, sqrt

import msgspec

from tailrace.types import RowId

MEMORY = 256  # groups that count: a new one has at least this share in what is known
FEWEST = 4  # groups before anything is foretold
EARLIER = 2.0  # samples: for so many counts what is known of a prompt's last visit
MOST_ROWS = 1 << 20  # of the data that have a memory
SQRT_2 = sqrt(2.0)
RESOLUTION = 0.06  # of a mean log length in a byte: up to e^15 tokens
# Gauss-Hermite: where a normal distribution is looked at, and the weight of each point
NORMAL = ((-2.857, 0.01126), (-1.3556, 0.22208), (0.0, 0.53333), (1.3556, 0.22208), (2.857, 0.01126))


class LengthEstimates(msgspec.Struct):
    groups: int = 0
    mean: float = 0.0  # of log lengths
    between: float = 0.0  # variance of the groups' means
    within: float = 0.0  # variance in a group
    size: float = 1.0  # samples of a group
    error: float = 0.0  # mean distance of log lengths from what was foretold
    error_of_mean: float = 0.0  # and from the mean of all

    def note_group(self, logs: Sequence[float]) -> None:
        """The log lengths of all samples of a group that has closed."""
        count = len(logs)
        own = sum(logs) / count
        spread = sum((value - own) ** 2 for value in logs) / (count - 1) if count > 1 else self.within
        self.groups += 1
        share = max(1.0 / self.groups, 1.0 / MEMORY)
        self.between += share * ((own - self.mean) ** 2 * (1.0 - share) - self.between)
        self.mean += share * (own - self.mean)
        self.within += share * (spread - self.within)
        self.size += share * (count - self.size)

    def note_sample(self, value: float, siblings: float, count: float) -> None:
        """A sample has finished with this log length; `count` others that resemble it had this sum."""
        if self.groups >= FEWEST and count:
            share = 1.0 / (16 * MEMORY)
            foretold, _ = self._posterior(siblings, count)
            self.error += share * (abs(value - foretold) - self.error)
            self.error_of_mean += share * (abs(value - self.mean) - self.error_of_mean)

    def residual(self, tokens: int, siblings: float, count: float, most: int) -> float:
        """Tokens that a sample with so many already is expected to get yet, given the log lengths of others that
        resemble it (their sum and number); no sample gets more than `most` in all."""
        left = max(1.0, most - tokens)
        if self.groups < FEWEST:
            return min(left, max(1.0, tokens))  # what has lasted long goes on for long
        mean, variance = self._posterior(siblings, count)
        return min(left, max(1.0, _mean_excess(max(1, tokens), mean, sqrt(variance))))

    def in_flight(self, most: int) -> float:
        """Mean length of the samples that are being generated at one time: long ones are there for longer, and of each
        there is half on average. 0 while nothing is known."""
        if self.groups < FEWEST:
            return 0.0
        return _half_by_length(self.mean, self.between, self.within, self.size, most)

    def useful_share(self, limit: float, size: int, most: int) -> float:
        """Share of the generated tokens that are in groups of this size all of whose samples end within `limit` tokens,
        where the others are cut short there."""
        if limit >= most or limit < 1.0 or self.groups < FEWEST:
            return float(limit >= 1.0)
        spread, sigma = sqrt(self._between), sqrt(max(self.within, 1e-6))
        kept = spent = 0.0
        for point, weight in NORMAL:
            mean = self.mean + point * spread
            z = (log(limit) - mean) / sigma
            ends = 1.0 - _upper(z)
            tokens = exp(mean + sigma * sigma / 2) * (1.0 - _upper(z - sigma))  # of those that do
            kept += weight * tokens * ends ** (size - 1)
            spent += weight * (tokens + limit * (1.0 - ends))
        return kept / spent if spent else 0.0

    @property
    def correlation(self) -> float:
        """Share of the variance of log lengths that is between prompts."""
        between = self._between
        return between / (between + self.within) if between + self.within > 0.0 else 0.0

    @property
    def _between(self) -> float:
        """The means of groups spread even where prompts do not differ."""
        return _apart(self.between, self.within, self.size)

    def _posterior(self, siblings: float, count: float) -> tuple[float, float]:
        """Mean and variance of a sample's log length."""
        between, within = self._between, max(self.within, 1e-6)
        shown = between / (between + within / count) if count else 0.0
        mean = self.mean + (shown * (siblings / count - self.mean) if count else 0.0)
        return mean, within + between * (1.0 - shown)


class EarlierLengths(msgspec.Struct):
    """How long the samples of a prompt became at its last visit, a byte for each row of the data: the mean of their log
    lengths. Rows beyond the bound have none."""

    by_row: bytearray = msgspec.field(default_factory=bytearray)

    def note(self, row: RowId, mean: float) -> None:
        if 0 <= row < MOST_ROWS:
            self.by_row.extend(bytes(max(0, row + 1 - len(self.by_row))))
            self.by_row[row] = min(255, 1 + round(mean / RESOLUTION))

    def mean(self, row: RowId, unknown: float) -> float:
        value = self.by_row[row] if 0 <= row < len(self.by_row) else 0
        return (value - 1) * RESOLUTION if value else unknown

    def evidence(self, row: RowId) -> tuple[float, float]:
        """For so many samples, the sum of their log lengths. The policy has changed since, so they are few."""
        mean = self.mean(row, -1.0)
        return (EARLIER, EARLIER * mean) if mean >= 0.0 else (0.0, 0.0)


@lru_cache(maxsize=16)  # asked for with every sample, and another only when a group has closed
def _apart(between: float, within: float, size: float) -> float:
    return max(0.0, between - within / max(1.0, size))


@lru_cache(maxsize=16)  # likewise
def _half_by_length(mean: float, between: float, within: float, size: float, most: int) -> float:
    """E[L^2] / 2 E[L] of a log-normal length that ends at `most`."""
    sigma = sqrt(_apart(between, within, size) + max(within, 1e-6))
    z = (log(most) - mean) / sigma
    capped = _upper(z)
    first = exp(mean + sigma * sigma / 2) * (1.0 - _upper(z - sigma)) + most * capped
    second = exp(2 * (mean + sigma * sigma)) * (1.0 - _upper(z - 2 * sigma)) + most * most * capped
    return second / (2 * first)


def _mean_excess(tokens: int, mean: float, sigma: float) -> float:
    """E[L - tokens | L > tokens] of a log-normal length."""
    z = (log(tokens) - mean) / sigma
    above = _upper(z)
    if above < 1e-9:  # far beyond what was ever seen: the tail is nearly flat in proportion
        return tokens * sigma / max(1.0, z)
    return exp(mean + sigma * sigma / 2) * _upper(z - sigma) / above - tokens


def _upper(z: float) -> float:
    """P(normal > z)."""
    return 0.5 * erfc(z / SQRT_2)
