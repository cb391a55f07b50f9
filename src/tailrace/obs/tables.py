"""Tables as text, all with one look: the first column left, numbers right, two spaces between columns.

`render_table` gives plain text, `print_table` writes the same with bold headings where the stream is a terminal.
Numbers are never cut; a narrow terminal wraps the line. `print_results` compares simulated schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

GAP = "  "
Cells = Sequence[str]


def render_table(columns: Cells, rows: Sequence[Cells], left: int = 1) -> str:
    """Headings may have several lines, and be left out; the first `left` columns are aligned left."""
    return "\n".join(_lines(columns, rows, left))


def print_table(
    stream: TextIO, columns: Cells, rows: Sequence[Cells], title: str = "", best: int | None = None, left: int = 1
) -> None:
    """`best` is the row that stands out."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    lines = _lines(columns, rows, left)
    first = len(lines) - len(rows)
    styles = ["bold"] * first + ["bold green" if row == best else "" for row in range(len(rows))]
    if title:
        console.print(Text(title, "bold"))
    for line, style in zip(lines, styles, strict=True):
        console.print(Text(line, style))


def _lines(columns: Cells, rows: Sequence[Cells], left: int) -> list[str]:
    tall = max((title.count("\n") + 1 for title in columns), default=0)
    titles = [["", *title.split("\n")] if title.count("\n") + 1 < tall else title.split("\n") for title in columns]
    lines = [*zip(*titles, strict=True), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [_aligned(line, widths, left) for line in lines]


def _aligned(line: Cells, widths: Sequence[int], left: int) -> str:
    fits = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return GAP.join([fit(cell, width) for fit, cell, width in zip(fits, line, widths, strict=True)]).rstrip()


# -------------------------------------------------------------------------------------------------------------- cells


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else "-"


def seconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def decimals(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"


# ------------------------------------------------------------------------------------------------- simulated schedules

Row = Mapping[str, Any]  # a result as `--json` has it, so that anything read from a file can be shown as well


class ResultColumn(NamedTuple):
    title: str
    cell: Callable[[Row, float], str]  # of a row, and sync's tokens/s at the same number of GPUs (0: not simulated)


COLUMNS = (
    ResultColumn("schedule", lambda row, _: _name(row)),
    ResultColumn("tokens/s", lambda row, _: f"{row['tokens_per_s']:,.0f}"),
    ResultColumn("against\nsync", lambda row, sync: ratio(row["tokens_per_s"], sync)),
    ResultColumn("step\ns", lambda row, _: seconds(row["step_s"])),
    ResultColumn("trainer\nidle", lambda row, _: percent(row["trainer_idle"])),
    ResultColumn("rollout\nidle", lambda row, _: percent(row["rollout_idle"])),
    ResultColumn("KV\nuse", lambda row, _: percent(row["kv_usage"])),
    ResultColumn("staleness\nmean/p95/max", lambda row, _: _staleness(row["staleness"])),
    ResultColumn("groups\ntrained", lambda row, _: f"{row['trained']:,}"),
    ResultColumn("groups\ndropped", lambda row, _: f"{row['dropped']:,}"),
    ResultColumn("samples\nmoved", lambda row, _: f"{row['moved']:,}"),
    ResultColumn("of the\nbound", lambda row, _: percent(row["tokens_per_s"] / row["bound_tokens_per_s"])),
    ResultColumn("bound\nset by", lambda row, _: row["limit"]),
)
MORE_COLUMNS = (
    ResultColumn("GPUs", lambda row, _: f"{row['gpus']:,}"),
    ResultColumn("repacks", lambda row, _: f"{row['repacks']:,}"),
    ResultColumn("wait per pull, s", lambda row, _: decimals(row["pull_wait_s"])),
    ResultColumn("stall per publish, s", lambda row, _: decimals(row["publish_stall_s"])),
    ResultColumn("decoded tokens/s", lambda row, _: decimals(row["decoded_tokens_per_s"])),
    ResultColumn("$ per M tokens", lambda row, _: decimals(row["dollars_per_million_tokens"])),
    ResultColumn("bound, tokens/s", lambda row, _: f"{row['bound_tokens_per_s']:,.0f}"),
    ResultColumn("steps measured", lambda row, _: f"{row['steps']:,} after {row['warm_up']:,}"),
    ResultColumn("useful groups/s", lambda row, _: decimals(row["useful_groups_per_s"])),
    ResultColumn("prompts skipped", lambda row, _: f"{row['skipped']:,}"),
    ResultColumn("groups filtered", lambda row, _: f"{row['filtered']:,}"),
    ResultColumn("virtual time, s", lambda row, _: decimals(row["virtual_s"])),
)


def print_results(rows: Sequence[Row], title: str, stream: TextIO, size: str = "") -> None:
    """One table per number of GPUs. `size`: how large the fleet is, where it does not consist of GPUs."""
    for number, gpus in enumerate(dict.fromkeys(row["gpus"] for row in rows)):
        same = [row for row in rows if row["gpus"] == gpus]
        rates = [row["tokens_per_s"] for row in same]
        best = rates.index(max(rates)) if len(same) > 1 else None
        if number:
            print(file=stream)
        titles, cells = [column.title for column in COLUMNS], _cells(same, COLUMNS)
        print_table(stream, titles, cells, f"{title}{size or f'{gpus:,} GPUs'}", best)


def result_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of everything that is known of these results; what a row lacks is left blank."""
    columns = [COLUMNS[0], MORE_COLUMNS[0], *COLUMNS[1:], *MORE_COLUMNS[1:]]
    return [column.title.replace("\n", " ") for column in columns], _cells(rows, columns)


def _cells(rows: Sequence[Row], columns: Sequence[ResultColumn]) -> list[list[str]]:
    sync = {row["gpus"]: row["tokens_per_s"] for row in reversed(rows) if row["schedule"] == "sync"}
    return [[_cell(column, row, sync.get(row["gpus"], 0.0)) for column in columns] for row in rows]


def _cell(column: ResultColumn, row: Row, sync: float) -> str:
    try:
        return column.cell(row, sync)
    except KeyError:
        return ""


def _name(row: Row) -> str:
    return "no repack" if row["schedule"] == "trajectory" and not row["repack"] else str(row["schedule"])


def _staleness(ages: Mapping[str, float]) -> str:
    return f"{ages['mean']:.1f}/{ages['p95']:.0f}/{ages['max']}"
