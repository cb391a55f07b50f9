"""The summary of a run: a table, `summary.json` and `summary.png`, all folded from its `run.db`.

`summarise(folder)` needs nothing but the file, so the summary of a resumed run covers all of it, and can be made again
at any time. What it says of held-out rows is what the run noted about itself in `meta`: `accuracy_before`,
`reward_before`, and the same with `_after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from tailrace.logs import output
from tailrace.obs.charts import MEAN_OF, Curve, RunCharts, run_charts
from tailrace.obs.ending import RunEnding, ending_of
from tailrace.obs.fold import GroupCounts
from tailrace.obs.live import LiveRun
from tailrace.obs.records import StrangerRecord
from tailrace.obs.savings import Savings
from tailrace.obs.spending import Spent
from tailrace.obs.tables import percent, print_table
from tailrace.obs.trained_steps import Staleness, staleness
from tailrace.protocol import RecordEvaluation
from tailrace.store.folder import PRIVATE
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.types import RIGHT_ABOVE, Version
from tailrace.wording import counted

JSON, PICTURE = "summary.json", "summary.png"
BEFORE, AFTER = "before", "after"  # training
SHOWN = 8  # evaluated versions in a line
UNMEASURED = "- before, - after"


class HeldOut(msgspec.Struct, frozen=True):
    """A figure of the held-out rows; None where it was not measured."""

    before: float | None
    after: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`, field by field. Shares lie between 0 and 1, times are seconds."""

    ended: RunEnding
    accuracy: HeldOut  # share of rewards above `RIGHT_ABOVE`
    mean_reward: HeldOut
    wall_s: float  # running time: pauses do not count
    steps: int
    trained_groups: int
    trained_samples: int
    trained_tokens: int  # prompts included
    tokens_per_s: float  # trained, from the first sample to the last trained step
    staleness: Staleness
    repacks: int
    moved: int
    publish_stall_s: float  # mean per weight publish
    trainer_idle: float
    rollout_idle: float
    rollout_scoring: float  # of that: nothing to generate, and samples with a judge
    failed_samples: int  # whose last attempt failed
    failed_attempts: int
    ledger: GroupCounts
    savings: Savings
    strangers: dict[str, StrangerRecord]
    evaluations: tuple[RecordEvaluation, ...] = ()  # while training, in their order
    best: tuple[Version, ...] = ()  # evaluated versions, best first: one, or as many as `eval.keep_best`
    spent: Spent = Spent()


class Report(NamedTuple):
    summary: Summary
    live: LiveRun
    name: str

    @property
    def charts(self) -> RunCharts:
        curve = Curve()
        for step in self.live.fold.steps:
            curve.add(step, self.live.first_sample_at)
        return run_charts(self.live, curve)


def summarise(run: Path) -> Report:
    """Read a run, finished or not, from its first event."""
    journal = Journal(run)
    config = journal.config
    live = LiveRun(config, timeline=True)
    for entry in journal.entries():
        live.see(entry.now, entry.event, entry.commands)
    for one in measurements(run):
        if one.value is not None:
            live.measure(one.now, one.step, one.source, {one.name: one.value})
    accuracy, reward = (held_out(journal.meta, name) for name in ("accuracy", "reward"))
    ended = ending_of(journal.meta, journal.path.parent, live.stop)
    return Report(_summary(live, ended, accuracy, reward), live, config.run.name or journal.path.parent.name)


def write_summary(run: Path, stream: TextIO | None = None) -> Summary:
    """Write `summary.json` and `summary.png` into the run's directory, and the table to `stream`."""
    report = summarise(run)
    folder = run if run.is_dir() else run.parent
    text = msgspec.json.format(msgspec.json.encode(report.summary), indent=1)
    (folder / JSON).touch(PRIVATE)
    (folder / JSON).write_bytes(text + b"\n")
    if stream is not None:
        print_table(stream, (), summary_rows(report.summary), report.name, left=2)
    note = draw(report, folder / PICTURE)
    if note and stream is not None:
        output(note, stream)
    return report.summary


def draw(report: Report, path: Path) -> str:
    """The picture; without matplotlib a sentence that says so, because a run is not worth less for it."""
    try:
        from tailrace.obs.png import RunPicture, save_run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return f"{path.name} is not drawn, because matplotlib is not installed; install tailrace[plot]"
    path.touch(PRIVATE)
    charts = report.charts
    save_run(RunPicture(charts, report.name, _subtitle(report), _notes(report, charts)), path)
    return ""


def _subtitle(report: Report) -> str:
    summary, accuracy = report.summary, report.summary.accuracy
    words = [
        f"schedule {report.live.config.schedule.kind}",
        f"{counted(summary.steps, 'step')} in {summary.wall_s:,.0f} s",
    ]
    if accuracy.before is not None and accuracy.after is not None:
        change = f"{accuracy.before:.2f} → {accuracy.after:.2f}"
        words.append(f"held-out accuracy (rewards above {RIGHT_ABOVE:g}) {change}")
    words.append(f"{counted(summary.trained_samples, 'sample')} trained")
    words.append(f"{summary.moved:,} moved in {counted(summary.repacks, 'repack')}")
    return "   ·   ".join(words)


def _notes(report: Report, charts: RunCharts) -> dict[str, list[str]]:
    """What is said beside each chart."""
    summary, ages = report.summary, report.summary.staleness
    rewards = [point[charts.columns.index("mean_reward")] for point in charts.points]
    last = rewards[-1] if rewards else None
    allowed = f"bound: {report.live.config.schedule.max_staleness}"
    shown = [f"{len(charts.lanes) - 1} of {charts.replicas:,} shown"] if charts.replicas >= len(charts.lanes) else []
    idle = [f"trainer {percent(summary.trainer_idle)} idle", f"replicas {percent(summary.rollout_idle)} idle"]
    notes = {
        "reward": [] if last is None else [f"{last:.2f}", f"{min(MEAN_OF // 2 + 1, len(rewards))}-step mean"],
        "rate": [f"{summary.tokens_per_s:,.0f}", "mean of the run"],
        "staleness": [f"{ages.mean:.2f}", f"mean; p95 {ages.p95:.0f}, max {ages.max}", allowed],
    }
    return notes | {"timeline": idle + shown} if summary.steps else {"timeline": idle + shown}


def held_out(meta: Mapping[str, Any], name: str) -> HeldOut:
    """What the run noted about itself; a value that is no number counts as not measured."""
    return HeldOut(_number(meta.get(f"{name}_before")), _number(meta.get(f"{name}_after")))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _summary(live: LiveRun, ended: RunEnding, accuracy: HeldOut, reward: HeldOut) -> Summary:
    fold, groups = live.fold, live.fold.groups
    return Summary(
        ended=ended,
        accuracy=accuracy,
        mean_reward=reward,
        wall_s=live.seconds,
        steps=len(fold.steps),
        trained_groups=groups.trained,
        trained_samples=fold.total.samples,
        trained_tokens=fold.total.tokens,
        tokens_per_s=live.tokens_per_s,
        staleness=staleness(fold.total.ages),
        repacks=fold.repacks,
        moved=fold.moved,
        publish_stall_s=live.publish_stall_s,
        trainer_idle=live.trainer_idle,
        rollout_idle=live.rollout_idle,
        rollout_scoring=live.rollout_scoring,
        failed_samples=fold.failed_samples,
        failed_attempts=fold.failures,
        ledger=groups,
        savings=fold.savings,
        strangers=fold.strangers,
        evaluations=tuple(fold.evaluations),
        best=fold.evaluations[-1].best if fold.evaluations else (),
        spent=live.spending.total(live.seconds),
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    ages, ledger, accuracy = summary.staleness, summary.ledger, summary.accuracy
    ends = f"{ledger.trained:,} trained + {ledger.dropped_stale:,} stale + {ledger.filtered:,} filtered"
    ends += f" + {ledger.stopped:,} stopped early" if ledger.stopped else ""
    ends += f" + {ledger.failed:,} failed" + (f" + {ledger.lost:,} lost" if ledger.lost else "")
    rows = [
        ("ended", str(summary.ended)),
        ("held-out accuracy", f"{_before_and_after(accuracy)} (share of rewards above {RIGHT_ABOVE:g})"),
        ("held-out reward", f"{_before_and_after(summary.mean_reward)} (mean)"),
        ("steps", f"{summary.steps:,} in {summary.wall_s:,.1f} s"),
        ("trained", f"{summary.trained_samples:,} samples, {summary.trained_tokens:,} tokens (prompts included)"),
        ("trained tokens/s", f"{summary.tokens_per_s:,.0f}"),
        ("staleness", f"{ages.mean:.2f} mean, {ages.p95:.0f} p95, {ages.max} max"),
        ("repacks", f"{summary.repacks:,}, {counted(summary.moved, 'sample')} moved"),
        ("stall per weight publish", f"{summary.publish_stall_s:.3f} s"),
        ("idle", _idle(summary)),
        ("failed samples", f"{summary.failed_samples:,}; {counted(summary.failed_attempts, 'attempt')} failed in all"),
        ("groups", f"{ledger.started:,} started = {ends} + {ledger.in_flight:,} in flight"),
    ]
    rows += _curves(summary)
    rows += [("saved", str(summary.savings))] if summary.savings else []
    rows += [(f"stranger {name}", str(one)) for name, one in summary.strangers.items()]
    rows += [("spent", str(summary.spent))] if summary.spent else []
    return [row for row in rows if UNMEASURED not in row[1]]


def _curves(summary: Summary) -> list[tuple[str, str]]:
    """Of every set, the accuracy of each evaluated version; of many versions the first and the last ones."""
    found: dict[str, list[str]] = {}
    for one in summary.evaluations:
        for result in one.results:
            k, passed = result.samples, f" ({result.passed[result.samples]:.3f})" if result.samples > 1 else ""
            name = f"{result.name} avg@{k}" + (f" (pass@{k})" if k > 1 else "")
            found.setdefault(name, []).append(f"v{one.version} {result.accuracy:.3f}{passed}")
    rows = [
        (name, ", ".join(each if len(each) <= SHOWN else [each[0], "...", *each[2 - SHOWN :]]))
        for name, each in found.items()
    ]
    return rows + ([("best", ", ".join([f"v{version}" for version in summary.best]))] if rows else [])


def _before_and_after(figure: HeldOut) -> str:
    return f"{_figure(figure.before)} before, {_figure(figure.after)} after"


def _idle(summary: Summary) -> str:
    scoring = f" (judging {percent(summary.rollout_scoring)})" if summary.rollout_scoring >= 0.005 else ""
    return f"trainer {percent(summary.trainer_idle)}, replicas {percent(summary.rollout_idle)}{scoring}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
