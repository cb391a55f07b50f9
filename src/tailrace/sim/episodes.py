"""The turns of a trajectory: how its tokens are divided and how long the environment takes in between.

Owns the draw of turns. As with lengths, the episode of a sample depends on the seed, its group's index and its index in
the group alone, so every schedule meets the same episodes. Callers skip all of it when `single` is true.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Turns, Workload

BLOCK = 256  # groups drawn together
_STREAM = 2  # keeps these draws apart from others made from the same seed


class SimTurn(NamedTuple):
    """Tokens to generate, then an environment call. The last turn has no call."""

    tokens: int
    latency_s: float
    tool_tokens: int


class _Column(NamedTuple):
    """The episodes of one index in the groups of a block, turn after turn; `starts` says where each group's begin."""

    starts: list[int]
    parts: list[float]  # uneven shares of the tokens, positive, not normalised
    latencies: list[float]


class Episodes:
    """The turns of every trajectory of a run."""

    def __init__(self, workload: Workload, seed: int) -> None:
        turns = workload.turns
        if turns.mean > turns.maximum:
            raise ConfigError(
                f"turns.mean = {turns.mean:g} is above turns.maximum = {turns.maximum}: "
                "raise turns.maximum, or lower the mean."
            )
        self.single = turns.mean == 1
        self._turns = turns
        self._seed = seed
        self._go_on = _chance_to_go_on(turns)
        self._columns: dict[tuple[int, int], _Column] = {}
        self._columns_kept = 4 * workload.group_size

    def split(self, index: int, sample: int, tokens: int) -> tuple[SimTurn, ...]:
        """The turns of one sample of a group. Together they have all its tokens, and each has at least one."""
        if self.single:
            return (SimTurn(tokens, 0.0, 0),)
        block, row = divmod(index, BLOCK)
        column = self._columns.get((block, sample)) or self._draw(block, sample)
        start = column.starts[row]
        count = max(1, min(column.starts[row + 1] - start, tokens))
        shares = _divide(tokens, column.parts[start : start + count])
        latencies = column.latencies[start : start + count - 1]
        tool_tokens = self._turns.tool_tokens
        before_last = [
            SimTurn(share, latency, tool_tokens) for share, latency in zip(shares[:-1], latencies, strict=True)
        ]
        return (*before_last, SimTurn(shares[-1], 0.0, 0))

    def _draw(self, block: int, sample: int) -> _Column:
        source = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, block, sample))
        rng = np.random.Generator(np.random.Philox(source))
        counts = self._counts(rng)
        total = int(counts.sum())
        parts = rng.standard_gamma(2.0, total)  # uneven, yet seldom next to nothing
        sigma = self._turns.latency_sigma
        latencies = self._turns.latency_s * np.exp(sigma * rng.standard_normal(total) - sigma * sigma / 2)
        starts = np.concatenate(([0], np.cumsum(counts)))
        if len(self._columns) >= self._columns_kept:
            del self._columns[next(iter(self._columns))]
        column = self._columns[block, sample] = _Column(starts.tolist(), parts.tolist(), latencies.tolist())
        return column

    def _counts(self, rng: np.random.Generator) -> np.ndarray:
        if self._go_on == 1:
            return np.full(BLOCK, self._turns.maximum)
        further = np.floor(rng.standard_exponential(BLOCK) / -math.log(self._go_on))
        return 1 + np.minimum(further, self._turns.maximum - 1).astype(np.int64)


def _chance_to_go_on(turns: Turns) -> float:
    """The chance of a further turn that gives the mean, when the environment stops everyone at the maximum.

    With chance q the mean is 1 + q + q^2 + ... up to maximum terms, which grows with q: bisection finds it.
    """
    if turns.mean == turns.maximum:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 - middle**turns.maximum) / (1 - middle)
        low, high = (middle, high) if mean < turns.mean else (low, middle)
    return low


def _divide(tokens: int, parts: list[float]) -> list[int]:
    """Whole numbers in proportion to the parts, none below one (while there are tokens enough), with the exact sum."""
    spare = max(0, tokens - len(parts))
    scale = spare / sum(parts)
    shares = []
    reached, given = 0.0, 0
    for part in parts[:-1]:
        reached += part
        share = int(reached * scale) - given
        given += share
        shares.append(share + 1)
    shares.append(tokens - given - len(shares))
    return shares
