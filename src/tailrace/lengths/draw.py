"""Samples the completion length of every trajectory.

The lengths of a group depend on the seed, the group's index and the step alone: whichever schedule asks, in whatever
order and how often, group 17 is the same group, so schedules are compared on the same work. A smaller group is a prefix
of a larger one.
"""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Workload
from tailrace.lengths import laws

BLOCK = 256  # groups sampled together, which amortizes the cost of a numpy call
BLOCKS_KEPT = 8
_STREAM = 1  # separates these random numbers from others of the same seed


class LengthLaw:
    """The completion lengths of every group of a run."""

    def __init__(self, workload: Workload, seed: int, base: Path = Path(".")) -> None:
        lengths = workload.lengths
        if lengths.drift_per_step <= -1:
            raise ConfigError(
                "lengths.drift_per_step must be above -1: write -0.01 for lengths that shrink by 1 % a step."
            )
        self._seed = seed
        self._cap = workload.max_completion_tokens
        self._group = self._width = workload.group_size
        self._shared = math.sqrt(lengths.correlation)
        self._own = math.sqrt(1 - lengths.correlation)
        self._log_growth = math.log1p(lengths.drift_per_step)
        self._law = _law_of(workload, base)
        self._raw: dict[int, np.ndarray] = {}  # block -> lengths before drift and cap, a row per group
        self._ready: dict[int, list[list[int]]] = {}  # block -> final lengths, where no drift can change them

    def group(self, index: int, size: int, step: int = 0) -> list[int]:
        """The completion lengths of the first `size` samples of a group that starts at a step."""
        if size > self._width:
            self._widen(size)
        block, row = divmod(index, BLOCK)
        if self._log_growth and step:
            return self._final(self._raw_block(block)[row, :size] * self._growth(step))
        ready = self._ready.get(block)
        if ready is None:
            ready = _keep(self._ready, block, self._final(self._raw_block(block)))
        return ready[row][:size]

    def sample(self, index: int, member: int, failures: int = 0, step: int = 0) -> int:
        """The length of one sample of a group. After a failure it is a new one, correlated with the group as before."""
        further = failures * self._group + member
        return self.group(index, max(self._group, further + 1), step)[further]

    @cached_property
    def mean(self) -> float:
        """Mean length after the cap, before any drift."""
        return laws.mean_of(self._law, self._cap)

    @cached_property
    def median(self) -> float:
        return laws.quantile_of(self._law, self._cap, 0.0)

    @cached_property
    def p99(self) -> float:
        return laws.quantile_of(self._law, self._cap, laws.Z_P99)

    def _widen(self, size: int) -> None:
        """Sample blocks with more members from now on; the first ones get the same lengths again."""
        self._width = size
        self._raw.clear()
        self._ready.clear()

    def _growth(self, step: int) -> float:
        return math.exp(min(self._log_growth * step, 100.0))  # everything is at the cap long before

    def _final(self, raw: np.ndarray) -> list:
        return np.clip(np.rint(raw), 1, self._cap).astype(np.int64).tolist()

    def _raw_block(self, block: int) -> np.ndarray:
        raw = self._raw.get(block)
        return _keep(self._raw, block, self._draw(block)) if raw is None else raw

    def _draw(self, block: int) -> np.ndarray:
        """A row of normals that a group shares, then one row per sample: more samples only add rows."""
        source = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, block))
        normals = np.random.Generator(np.random.Philox(source)).standard_normal((1 + self._width, BLOCK))
        return self._law((self._shared * normals[0] + self._own * normals[1:]).T)


def read_lengths(path: Path) -> list[float]:
    """Recorded lengths: a text file with one number per line, a JSON list, or the journal of a run."""
    if path.is_dir():
        path = path / "run.db"
    try:
        values = _from_journal(path) if path.suffix == ".db" else _from_text(path)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"Cannot read lengths from {path} ({problem}): write the path of a list of numbers or of a run."
        ) from problem
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"{path} is not a list of lengths ({problem}): write one number per line or a JSON list."
        ) from problem
    if not values:
        raise ConfigError(
            f"{path} has no lengths: name a file with at least one number, or a run that finished trajectories."
        )
    worst = next((value for value in values if not 0 <= value < math.inf), None)
    if worst is not None:
        raise ConfigError(
            f"{path} has a length of {worst:g}: write only finite numbers of tokens that are not negative."
        )
    return values


def _law_of(workload: Workload, base: Path) -> laws.Law:
    lengths, cap = workload.lengths, workload.max_completion_tokens
    if lengths.law == "empirical":
        if not lengths.file:
            raise ConfigError(
                'lengths.law = "empirical" needs samples: write the path of a list or of a run in lengths.file.'
            )
        return laws.empirical(read_lengths(base / lengths.file))
    if lengths.file:
        raise ConfigError(
            f'lengths.file is not used by the {lengths.law} law: write lengths.law = "empirical", or leave it out.'
        )
    return {"fixed": laws.fixed, "lognormal": laws.lognormal, "mixture": laws.mixture}[lengths.law](lengths, cap)


def _from_text(path: Path) -> list[float]:
    text = path.read_text(encoding="utf-8")
    numbers = json.loads(text) if text.lstrip().startswith("[") else text.split()
    return [float(number) for number in numbers]


def _from_journal(path: Path) -> list[float]:
    # Read-only, so that no empty database is created for a mistyped path, and no side files for a finished run.
    quiet = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro{quiet}", uri=True)) as journal:
        rows = journal.execute("SELECT json_extract(event, '$.meta.tokens') FROM journal WHERE kind = 'Finished'")
        return [float(tokens) for (tokens,) in rows if tokens is not None]


def _keep(cache: dict, key: int, value):
    """Cache a block and evict the oldest one: groups are asked for in nearly rising order."""
    if len(cache) >= BLOCKS_KEPT:
        del cache[next(iter(cache))]
    cache[key] = value
    return value
