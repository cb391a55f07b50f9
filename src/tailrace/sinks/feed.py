"""From `run.db` to rows for trackers: one per trained step, and one per evaluated version.

`Feed.poll` reads what is new, as the page does: the file is opened read-only and closed again, so the run never waits.
A step's row comes once the step has ended, when everything that its mini-batches measured is in the file. Figures have
the names that people know from other frameworks (docs/logging.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from tailrace.config.tree import Config
from tailrace.obs.live import LiveRun
from tailrace.obs.trained_steps import StepRecord
from tailrace.protocol import Command, Evaluate, RecordEvaluation, Train
from tailrace.sinks.base import Logged, SampleText
from tailrace.sinks.sample_text import SampleTexts
from tailrace.store.journal import Entry, Journal
from tailrace.store.metrics import Measurement, measurements
from tailrace.types import TrajectoryId, Version

TRAINER = "trainer"
NAMES = {"lr": "train/learning_rate"}  # of the trainer's figures; the others are "train/" and their own name
SUMMED = ("trainer/seconds", "trainer/cpu_s", "trainer/tokens")  # over the mini-batches of a step; others are averaged
LARGEST = ("ratio_max",)
LEFT_OUT = ("seconds", "reward", "reward_std")  # are said otherwise


class Feed:
    """`done`: rows that were read before, and are passed over. `samples`: of every row that comes with some."""

    def __init__(self, run: Path, done: int = 0, samples: int = 0) -> None:
        self._run = run
        self._done = done
        self._most = samples
        self.journal = Journal(run)
        self.live = LiveRun(self.journal.config)
        self._read = self._measured = 0
        self._figures: dict[int, dict[str, list[float]]] = {}  # of the trainer, by step and name
        self._other: dict[int, dict[str, float]] = {}  # of the controller, by step
        self._trained: dict[int, list[TrajectoryId]] = {}  # some of those that each step was trained on
        self._evaluated: dict[Version, list[TrajectoryId]] = {}  # and each version was evaluated by
        self._texts: SampleTexts | None = None

    @property
    def config(self) -> Config:
        return self.live.config

    def poll(self) -> Iterator[Logged]:
        """What is new. The figures of a step are in the file with the event that ends it, or before."""
        self.journal = Journal(self._run)
        self.live.config = self.journal.config
        for entry in self.journal.entries(self._read):
            self._read = entry.seq
            for row, ids in self._rows(entry):
                if self._done > 0:
                    self._done -= 1
                else:
                    yield row._replace(samples=self._read_samples(row.step, ids))

    def close(self) -> None:
        if self._texts is not None:
            self._texts.close()

    def _read_samples(self, step: int, ids: list[TrajectoryId]) -> list[SampleText]:
        if not ids:
            return []
        self._texts = self._texts or SampleTexts(self._run, self.config)
        return list(self._texts.read(step, ids))

    def _rows(self, entry: Entry) -> Iterator[tuple[Logged, list[TrajectoryId]]]:
        before = len(self.live.fold.steps)
        self.live.see(entry.now, entry.event, entry.commands)
        for step in self.live.fold.steps[before:]:
            self._measure()
            yield Logged(step.step + 1, step.ended, self._of_step(step)), self._trained.pop(step.step, [])
        for command in entry.commands:
            self._note(command)
            if isinstance(command, RecordEvaluation):
                values = {name: value for one in command.results for name, value in one.metrics.items()}
                row = Logged(command.version, self.live.seconds, values)
                yield row, self._evaluated.pop(command.version, [])

    def _note(self, command: Command) -> None:
        """Which samples to show: the first ones, of different groups."""
        if isinstance(command, Train):
            chosen = self._trained.setdefault(command.step, [])
            firsts = [group.trajectories[0] for group in command.groups if group.trajectories]
        elif isinstance(command, Evaluate):
            chosen = self._evaluated.setdefault(command.version, [])
            firsts = [one.trajectory for one in command.requests if one.trajectory == one.group]
        else:
            return
        chosen += [id for id in firsts if id not in chosen][: max(0, self._most - len(chosen))]

    def _measure(self) -> None:
        for one in measurements(self._run, self._measured):
            self._measured += 1
            if one.value is None:
                continue
            self.live.measure(one.now, one.step, one.source, {one.name: one.value})
            self._keep(one, one.value)

    def _keep(self, one: Measurement, value: float) -> None:
        if one.source == TRAINER and one.name not in LEFT_OUT:
            self._figures.setdefault(one.step, {}).setdefault(one.name, []).append(value)
        elif one.source == "controller" and one.step >= 0:
            self._other.setdefault(one.step, {})[one.name] = value

    def _of_step(self, step: StepRecord) -> dict[str, float]:
        view, lengths = self.live.view(), step.lengths
        values = {
            "completions/mean_length": lengths.mean,
            "completions/min_length": float(lengths.shortest),
            "completions/max_length": float(lengths.longest),
            "completions/truncated_share": lengths.truncated_share,
            "reward/zero_variance_share": 1.0 - step.useful / max(1, step.groups),
            "staleness/mean": step.staleness.mean,
            "staleness/max": float(step.staleness.max),
            "throughput/trained_tokens_per_s": view.tokens_per_s,
            "throughput/trained_tokens": float(view.trained_tokens),
            "trainer/idle_ratio": view.trainer_idle,
            "rollout/idle_ratio": view.rollout_idle,
            "kv_usage": fmean([one.kv for one in view.replicas]) if view.replicas else 0.0,
            "samples/failed": float(view.failed_samples),
            "samples/moved": float(view.moved),
            "time/seconds": step.ended,
        }
        if step.reward is not None:
            values |= {"reward/mean": step.reward, "reward/std": step.reward_std}
        return values | self._measured_of(step.step)

    def _measured_of(self, step: int) -> dict[str, float]:
        found = {_named(name): _joined(name, each) for name, each in self._figures.pop(step, {}).items()}
        return found | self._other.pop(step, {})


def _named(name: str) -> str:
    return NAMES.get(name) or (name if "/" in name else f"train/{name}")


def _joined(name: str, values: list[float]) -> float:
    if name in SUMMED:
        return sum(values)
    return max(values) if name in LARGEST else fmean(values)
