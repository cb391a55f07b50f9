"""`tailrace bench schedules`: all schedules for real, one after the other, on the same settings and seed."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec

from tailrace.config import load, with_values
from tailrace.config.errors import ConfigError
from tailrace.config.tree import SCHEDULES, Config
from tailrace.launch.folder import run_folder
from tailrace.logs import output
from tailrace.obs.progress import Progress
from tailrace.obs.summary import JSON, Summary
from tailrace.obs.tables import percent, print_table, ratio

log = logging.getLogger(__name__)

WITHOUT_REPACK = "trajectory without repack"
COLUMNS = (
    "schedule",
    "tokens/s",
    "against\nsync",
    "trainer\nidle",
    "rollout\nidle",
    "staleness\nmean/max",
    "groups\ndropped",
    "samples\nmoved",
)


class BenchRow(NamedTuple):
    name: str
    summary: Summary


def bench_schedules(files: list[str], settings: list[str], rounds: int, as_json: bool) -> int:
    """Run them and print how they compare. Several rounds alternate, so that a busy moment does not hit one alone."""
    config = load(files, settings)
    folder = run_folder(config, files).with_name(config.run.name or f"bench-{Path(files[-1]).stem}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name another with --run.name NAME")
    measured: dict[str, list[Summary]] = {}
    plans = list(_plans(config)) * rounds
    with Progress("schedules") as progress:
        for number, (name, options) in enumerate(plans):
            progress(number, len(plans), "runs")
            run_name = f"{name.replace(' ', '_')}-{number // (len(plans) // rounds)}"
            words = ["--run.folder", str(folder), "--run.name", run_name, "--run.evaluate", "false", *options]
            _run(name, files, settings + words)
            summary = msgspec.json.decode((folder / run_name / JSON).read_bytes(), type=Summary)
            measured.setdefault(name, []).append(summary)
    rows = [BenchRow(name, _median(summaries)) for name, summaries in measured.items()]
    if as_json:
        output(msgspec.json.encode({row.name: row.summary for row in rows}).decode())
    else:
        print_rows(rows, sys.stdout)
    return 0


def _plans(config: Config) -> Iterator[tuple[str, list[str]]]:
    for kind in SCHEDULES:
        try:
            with_values(config, {"schedule.kind": kind})
        except ConfigError as error:
            log.info("note: %s is left out: %s", kind, error)
            continue
        yield kind, ["--schedule.kind", kind]
    yield WITHOUT_REPACK, ["--schedule.kind", "trajectory", "--repack.enabled", "false"]


def _run(name: str, files: list[str], words: list[str]) -> None:
    command = [sys.executable, "-m", "tailrace", "train", *files, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{name} did not get through: {done.stderr.strip()[-1000:].removeprefix('tailrace: ')}")
    time.sleep(0.5)  # for the last processes of this run to be gone before the next one is timed


def _median(summaries: list[Summary]) -> Summary:
    return sorted(summaries, key=lambda each: each.tokens_per_s)[len(summaries) // 2]


def print_rows(rows: list[BenchRow], stream: TextIO) -> None:
    rates = [row.summary.tokens_per_s for row in rows]
    sync = next((row.summary.tokens_per_s for row in rows if row.name == "sync"), 0.0)
    print_table(stream, COLUMNS, [_cells(row, sync) for row in rows], best=rates.index(max(rates)))


def _cells(row: BenchRow, sync: float) -> list[str]:
    one = row.summary
    return [
        row.name,
        f"{one.tokens_per_s:,.0f}",
        ratio(one.tokens_per_s, sync),
        percent(one.trainer_idle),
        percent(one.rollout_idle),
        f"{one.staleness.mean:.1f}/{one.staleness.max}",
        f"{one.ledger.dropped_stale:,}",
        f"{one.moved:,}",
    ]
