"""What a run came to: a table, `summary.json` and `summary.png`, all folded from its `run.db`.

`summarise(folder)` needs nothing but the file, so the summary of a resumed run covers all of it, and can be made again
at any time. What it says of held-out rows is what the run noted about itself in `meta`: `accuracy_before`,
`reward_before`, and the same with `_after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from tailrace.config.tree import Config
from tailrace.obs.account import Staleness, StepRecord, staleness
from tailrace.obs.activity import Span
from tailrace.obs.ending import Ending, ending_of
from tailrace.obs.live import LiveRun
from tailrace.store.folder import PRIVATE
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.types import RIGHT_ABOVE, ReplicaId

JSON, PICTURE = "summary.json", "summary.png"
UNMEASURED = "- before, - after"


class HeldOut(msgspec.Struct, frozen=True):
    """A figure of the held-out rows; None where it was not measured."""

    before: float | None
    after: float | None


class LedgerCounts(msgspec.Struct, frozen=True):
    """Groups: `started` is the sum of all others."""

    started: int
    trained: int
    dropped_stale: int
    filtered: int
    failed: int
    in_flight: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`, field by field. Shares lie between 0 and 1, times are seconds."""

    ended: Ending
    accuracy: HeldOut  # share of rewards above `RIGHT_ABOVE`
    mean_reward: HeldOut
    wall_s: float  # in which the run was running
    steps: int
    trained_groups: int
    trained_samples: int
    trained_tokens: int  # prompts included
    tokens_per_s: float  # trained, from the first sample to the last trained step
    staleness: Staleness
    repacks: int
    moved: int
    publish_stall_s: float  # mean per publication
    trainer_idle: float
    rollout_idle: float
    rollout_scoring: float  # of that: nothing to generate, and samples with a judge
    failed_samples: int  # whose last attempt failed
    failed_attempts: int
    ledger: LedgerCounts


class History(NamedTuple):
    """What the picture is drawn from."""

    name: str
    schedule: str
    seconds: float
    began: float
    steps: list[StepRecord]
    max_staleness: int
    trainer: list[Span]
    replicas: dict[ReplicaId, list[Span]]


class Report(NamedTuple):
    summary: Summary
    history: History


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
    name = config.run.name or journal.path.parent.name
    return Report(_summary(live, ended, accuracy, reward), _history(live, config, name))


def write_summary(run: Path, stream: TextIO | None = None) -> Summary:
    """Write `summary.json` and `summary.png` into the run's directory, and the table to `stream`."""
    report = summarise(run)
    folder = run if run.is_dir() else run.parent
    text = msgspec.json.format(msgspec.json.encode(report.summary), indent=1)
    (folder / JSON).touch(PRIVATE)
    (folder / JSON).write_bytes(text + b"\n")
    if stream is not None:
        print_summary(report.summary, report.history.name, stream)
    note = draw(report, folder / PICTURE)
    if note and stream is not None:
        print(note, file=stream)
    return report.summary


def draw(report: Report, path: Path) -> str:
    """The picture; without matplotlib a sentence that says so, because a run is not worth less for it."""
    try:
        from tailrace.obs.plots_run import save
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return f"{path.name} is not drawn, because matplotlib is not installed; install tailrace[plot]"
    path.touch(PRIVATE)
    save(report.history, report.summary, path)
    return ""


def held_out(meta: Mapping[str, Any], name: str) -> HeldOut:
    """What the run noted about itself; whoever edits the file may write what is no number."""
    return HeldOut(_number(meta.get(f"{name}_before")), _number(meta.get(f"{name}_after")))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _summary(live: LiveRun, ended: Ending, accuracy: HeldOut, reward: HeldOut) -> Summary:
    account = live.account
    tally = account.tally
    counts = (tally.started, tally.trained, tally.dropped_stale, tally.filtered, tally.failed, tally.in_flight)
    return Summary(
        ended=ended,
        accuracy=accuracy,
        mean_reward=reward,
        wall_s=live.seconds,
        steps=len(account.steps),
        trained_groups=tally.trained,
        trained_samples=account.total.samples,
        trained_tokens=account.total.tokens,
        tokens_per_s=live.tokens_per_s,
        staleness=staleness(account.total.ages),
        repacks=account.repacks,
        moved=account.moved,
        publish_stall_s=live.publish_stall_s,
        trainer_idle=live.trainer_idle,
        rollout_idle=live.rollout_idle,
        rollout_scoring=live.rollout_scoring,
        failed_samples=account.failed_samples,
        failed_attempts=account.failures,
        ledger=LedgerCounts(*counts),
    )


def _history(live: LiveRun, config: Config, name: str) -> History:
    lanes = {id: lane.timeline(live.seconds) for id, lane in sorted(live.activity.replicas.items())}
    return History(
        name=name,
        schedule=config.schedule.kind,
        seconds=live.seconds,
        began=live.began,
        steps=live.account.steps,
        max_staleness=config.schedule.max_staleness,
        trainer=live.activity.trainer.timeline(live.seconds),
        replicas=lanes,
    )


# --------------------------------------------------------------------------------------------------------- the table


def print_summary(summary: Summary, name: str, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(name, "bold"), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for title, value in summary_rows(summary):
        table.add_row(title, value)
    console = Console(file=stream, highlight=False)
    console.width = Console(width=500).measure(table).maximum  # numbers are never cut; a narrow terminal wraps
    console.print(table)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    ages, ledger, accuracy = summary.staleness, summary.ledger, summary.accuracy
    ends = f"{ledger.trained:,} trained + {ledger.dropped_stale:,} stale + {ledger.filtered:,} filtered"
    rows = [
        ("ended", str(summary.ended)),
        ("held-out accuracy", f"{_before_and_after(accuracy)} (share of rewards above {RIGHT_ABOVE:g})"),
        ("held-out reward", f"{_before_and_after(summary.mean_reward)} (mean)"),
        ("steps", f"{summary.steps:,} in {summary.wall_s:,.1f} s"),
        ("trained", f"{summary.trained_samples:,} samples, {summary.trained_tokens:,} tokens (prompts included)"),
        ("trained tokens/s", f"{summary.tokens_per_s:,.0f}"),
        ("staleness", f"{ages.mean:.2f} mean, {ages.p95:.0f} p95, {ages.max} max"),
        ("repacks", f"{summary.repacks:,}, {summary.moved:,} samples moved"),
        ("stall per publication", f"{summary.publish_stall_s:.3f} s"),
        ("idle", _idle(summary)),
        ("failed samples", f"{summary.failed_samples:,}; {summary.failed_attempts:,} attempts failed in all"),
        ("groups", f"{ledger.started:,} started = {ends} + {ledger.failed:,} failed + {ledger.in_flight:,} in flight"),
    ]
    return [row for row in rows if UNMEASURED not in row[1]]


def _before_and_after(figure: HeldOut) -> str:
    return f"{_figure(figure.before)} before, {_figure(figure.after)} after"


def _idle(summary: Summary) -> str:
    scoring = f" (scoring {100 * summary.rollout_scoring:.0f} %)" if summary.rollout_scoring >= 0.005 else ""
    return f"trainer {100 * summary.trainer_idle:.0f} %, replicas {100 * summary.rollout_idle:.0f} %{scoring}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
