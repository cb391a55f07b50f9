"""Results as a table for people: the schedules side by side, for each number of GPUs.

Rows are results as `--json` has them, so that anything read from a file can be shown as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


class Column(NamedTuple):
    title: str
    cell: Callable[[Row, float], str]  # of a row, and sync's tokens/s at the same number of GPUs (0: not simulated)


COLUMNS = (
    Column("tokens/s", lambda row, _: f"{row['tokens_per_s']:,.0f}"),
    Column("against\nsync", lambda row, sync: f"{row['tokens_per_s'] / sync:.2f}x" if sync else "-"),
    Column("step\ns", lambda row, _: _seconds(row["step_s"])),
    Column("trainer\nidle", lambda row, _: _percent(row["trainer_idle"])),
    Column("rollout\nidle", lambda row, _: _percent(row["rollout_idle"])),
    Column("KV\nuse", lambda row, _: _percent(row["kv_usage"])),
    Column("staleness\nmean/p95/max", lambda row, _: _staleness(row["staleness"])),
    Column("groups\ntrained", lambda row, _: f"{row['trained']:,}"),
    Column("\ndropped", lambda row, _: f"{row['dropped']:,}"),
    Column("samples\nmoved", lambda row, _: f"{row['moved']:,}"),
)


def print_results(rows: Sequence[Row], title: str, stream: TextIO, size: str = "") -> None:
    """`size`: how large the fleet is, where it does not consist of GPUs."""
    console = Console(file=stream, highlight=False)
    counts = list(dict.fromkeys(row["gpus"] for row in rows))
    for gpus in counts:
        table = _table([row for row in rows if row["gpus"] == gpus], f"{title}{size or f'{gpus:,} GPUs'}")
        console.width = _width(table)  # numbers are never cut; a narrow terminal wraps the line
        console.print(table)
        if gpus != counts[-1]:
            console.print()


def _width(table: Table) -> int:
    return Console(width=500).measure(table).maximum


def _table(rows: Sequence[Row], title: str) -> Table:
    sync = next((row["tokens_per_s"] for row in rows if row["schedule"] == "sync"), 0.0)
    best = max(row["tokens_per_s"] for row in rows)
    table = Table(title=Text(title, "bold"), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nschedule", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in rows:
        style = "bold green" if row["tokens_per_s"] == best and len(rows) > 1 else ""
        table.add_row(_name(row), *[column.cell(row, sync) for column in COLUMNS], style=style)
    return table


def _name(row: Row) -> str:
    return "no repack" if row["schedule"] == "trajectory" and not row["repack"] else row["schedule"]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _staleness(ages: Mapping[str, float]) -> str:
    return f"{ages['mean']:.1f}/{ages['p95']:.0f}/{ages['max']}"
