"""From a recorded real run to settings with which a simulation predicts the machine that it ran on.

Reads what the components of a run measured of themselves (the metrics of `run.db`) and what the journal has of the
work:

- replicas, with every heartbeat, sums since their start: `engine/busy_s` (seconds in steps), `engine/cpu_s` (processor
  seconds of the process), `engine/steps`, `engine/decoded` (running sequences over all decode steps),
  `engine/kv_read` (KV tokens over all decode steps), `engine/prefilled` (tokens), `engine/load_s`, `engine/loads`;
- the trainer, for every mini-batch: `trainer/seconds`, `trainer/cpu_s`, `trainer/tokens`; and its stalls,
  `publish/stall_s` and `checkpoint/stall_s`.

Costs are least squares over heartbeats and over mini-batches. Where processors did the work, they are fitted in
processor seconds: the clock of a crowded machine would count the same work twice, and `local.cores` lets the simulation
crowd it again. An emulated engine is fitted by the clock, and so are those of a machine with GPUs, however busily
their processes wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config.render import render_values
from tailrace.config.tree import Costs, Lengths
from tailrace.sim.journal_statistics import FitError, JournalStatistics, journal_statistics
from tailrace.store.database import file_of
from tailrace.store.journal import CARDS, Journal
from tailrace.store.metrics import measurements

ENGINE = ("decoded", "steps", "prefilled", "kv_read")  # what costs time in an engine, the likeliest cost first
COUNTED = ("busy_s", *ENGINE, "load_s", "loads")
FEWEST = 8  # heartbeats with work: twice as many as an engine has costs
BY_PROCESSOR = 0.1  # share of the busy time from which on processor seconds are what the work costs

Counters = dict[str, float]  # what a process reported at once, by name


def fit(run: Path) -> Costs:
    """The costs of one replica and of the trainer."""
    return _costs(run, _Measured(run), journal_statistics(run))


def fitted(run: Path) -> dict[str, Any]:
    """Everything that can be known, as settings by dotted key: `with_values(config, fitted(run))`."""
    measured, work = _Measured(run), journal_statistics(run)
    costs, lengths = _costs(run, measured, work), _lengths(run, work)
    return {
        **{f"costs.{name}": getattr(costs, name) for name in costs.__struct_fields__},
        **{f"workload.lengths.{name}": getattr(lengths, name) for name in lengths.__struct_fields__},
        "workload.prompt_tokens": round(work.prompt_tokens),
        "workload.reward_s": _round(work.reward_s),
        "rollout.roofline_batch": work.roofline,
        "local.cores": _cores() if measured.by_processor else 0,
    }


def fragment(run: Path) -> str:
    """The same as TOML, to be put after the settings of the run or of another: `tailrace simulate my.toml fit.toml`."""
    replicas = Journal(run).config.local.replicas
    note = f'# of a run with {replicas} replicas: where settings say local.replicas = "auto", write that'
    return f"{note}\n{render_values(fitted(run))}"


def _costs(run: Path, measured: _Measured, work: JournalStatistics) -> Costs:
    solved = _engine_costs(run, measured) | _trainer_costs(run, measured)
    return Costs(**{name: _round(value) for name, value in solved.items()}, kv_tokens=work.kv_tokens)


def _lengths(run: Path, work: JournalStatistics) -> Lengths:
    return Lengths(law="empirical", file=str(file_of(run).resolve()), correlation=_round(work.correlation))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------- what was measured


class _Measured:
    """The metrics of a run, sorted by who measured what."""

    def __init__(self, run: Path) -> None:
        journal = Journal(run)
        self.emulated = journal.config.rollout.engine == "emulated"
        self.has_cards = journal.meta.get(CARDS, "[]") != "[]"
        heartbeats: dict[str, dict[float, Counters]] = {}
        mini_batches: dict[tuple[int, float], Counters] = {}
        self.stalls: dict[str, list[float]] = {"publish": [], "checkpoint": []}
        for one in measurements(run):
            kind, _, name = one.name.partition("/")
            if one.value is None:
                continue
            if kind == "engine":
                heartbeats.setdefault(one.source, {}).setdefault(one.now, {})[name] = one.value
            elif kind == "trainer":
                mini_batches.setdefault((one.step, one.now), {})[name] = one.value
            elif name == "stall_s" and kind in self.stalls:
                self.stalls[kind].append(one.value)
        self.lives = [life for samples in heartbeats.values() for life in _lives(samples.values())]
        self.mini_batches = [one for one in mini_batches.values() if {"seconds", "tokens"} <= one.keys()]

    @property
    def by_processor(self) -> bool:
        """Processors did the work, rather than that they waited for whoever does it."""
        intervals = list(self.intervals())
        busy = sum(one["busy_s"] for one in intervals)
        if self.emulated or self.has_cards:
            return False
        return sum(one.get("cpu_s", 0.0) for one in intervals) > BY_PROCESSOR * busy

    def intervals(self) -> Iterator[Counters]:
        """What an engine did from one heartbeat to the next, wherever it did something."""
        for life in self.lives:
            for before, after in pairwise(life):
                if after["steps"] > before["steps"]:
                    yield {name: value - before.get(name, 0.0) for name, value in after.items()}


def _lives(samples: Iterable[Counters]) -> list[list[Counters]]:
    """The sums of one replica; they begin again at nothing when it is started again."""
    lives: list[list[Counters]] = []
    for sample in samples:
        if not all(name in sample for name in COUNTED):
            continue
        if not lives or any(value < lives[-1][-1].get(name, 0.0) for name, value in sample.items()):
            lives.append([])
        lives[-1].append(sample)
    return lives


# ---------------------------------------------------------------------------------------------------------------- costs


def _engine_costs(run: Path, measured: _Measured) -> dict[str, float]:
    intervals = list(measured.intervals())
    if len(intervals) < FEWEST:
        raise FitError(
            f"{run} has {len(intervals)} heartbeats between which an engine worked, too few to fit costs to; "
            f"name a real run that generated for {FEWEST} heartbeats or more"
        )
    if measured.by_processor:  # the process has also copied weights, which is no cost of its steps
        solved = _least_squares([_row(one, *ENGINE, "loads") for one in intervals], [one["cpu_s"] for one in intervals])
    else:
        solved = _least_squares([_row(one, *ENGINE) for one in intervals], [one["busy_s"] for one in intervals])
    if not solved[0] and not solved[1]:
        raise FitError(f"{run} shows no cost of decoding that grows with its work; name a longer run")
    loads = sum(life[-1]["loads"] for life in measured.lives)
    return {
        "decode_sequence": solved[0],
        "decode_step": solved[1],
        "prefill_token": solved[2],
        "decode_kv_token": solved[3],
        "load": sum(life[-1]["load_s"] for life in measured.lives) / loads if loads else 0.0,
    }


def _row(sample: Counters, *names: str) -> list[float]:
    return [sample[name] for name in names]


def _trainer_costs(run: Path, measured: _Measured) -> dict[str, float]:
    mini_batches, stalls = measured.mini_batches, measured.stalls
    if not mini_batches:
        raise FitError(f"{run} has trained nothing, so training has no cost yet; name a run with at least one step")
    seconds = "cpu_s" if measured.by_processor and all("cpu_s" in one for one in mini_batches) else "seconds"
    solved = _least_squares([[one["tokens"], 1.0] for one in mini_batches], [one[seconds] for one in mini_batches])
    stalled = sum(map(sum, stalls.values()))  # a simulated trainer stands still once for each version
    return {
        "train_token": solved[0],
        "train_mini_batch": solved[1],
        "publish": stalled / len(stalls["publish"]) if stalls["publish"] else 0.0,
    }


def _least_squares(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares: the cost of each kind of work.

    There are so few kinds that every choice of them can be tried: of the solutions without a negative cost the closest
    is the answer, and among equals the one with the fewest and likeliest kinds.
    """
    table, wanted = np.asarray(work, float), np.asarray(seconds, float)
    scale = np.linalg.norm(table, axis=0)
    used = [kind for kind in range(table.shape[1]) if scale[kind] > 0]
    best, closest = np.zeros(table.shape[1]), float(np.linalg.norm(wanted)) or 1.0
    for count in range(1, len(used) + 1):
        for kinds in map(list, combinations(used, count)):
            costs = np.linalg.lstsq(table[:, kinds] / scale[kinds], wanted, rcond=None)[0]
            distance = float(np.linalg.norm(table[:, kinds] / scale[kinds] @ costs - wanted))
            if costs.min() >= 0 and distance < closest * (1 - 1e-9):
                best, closest = np.zeros(table.shape[1]), distance
                best[kinds] = costs / scale[kinds]
    return best.tolist()
