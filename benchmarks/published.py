"""Our predictions beside published figures, those of sources that no constant was fitted to apart.

    python benchmarks/published.py            # prints the table, writes benchmarks/results/published.json
    python benchmarks/published.py verl DORA  # simulates only these sources; the other rows stay as they were written

`published_rows.py` has the rows, where they come from and what is assumed; `published_fit.py` the fit of the constants
to half of the sources. What is quoted is always the simulation.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from statistics import mean, median
from typing import Any

from published_rows import ASSUMED, DIFFERENCES, MISSING, ROOT, SOURCES, Case, Row, laminar, rows, speed_up
from rich.console import Console
from rich.table import Table

from tailrace.sim.result import Result
from tailrace.sim.sweep import sweep

ALL = ("sync", "one_step", "stream", "partial", "trajectory")
Line = tuple[Row, float]
LARGE_ERROR = 0.35  # above it, what the model lacks has to be named
OUT = ROOT / "benchmarks" / "results" / "published.json"
ORDER = "Laminar, mean: "


def mean_gain(results: dict[Case, Result], kind: str) -> float:
    pairs = zip(laminar(kind), laminar("sync"), strict=True)
    return mean(speed_up(results[one], results[base]) for one, base in pairs)


def wrong_order(results: dict[Case, Result]) -> list[str]:
    """Where the published order of the schedules does not come out; within 2 % is no contradiction."""
    wrong: list[str] = []
    for slower, faster in pairwise(ALL):
        if mean_gain(results, faster) < 0.98 * mean_gain(results, slower):
            wrong.append(f"{ORDER}{faster} should be ahead of {slower}")
    return wrong


def contradicted(lines: list[Line]) -> list[str]:
    """Where a source reports a gain and we do not."""
    gains = [(row, ours) for row, ours in lines if row.kind == "speed-up" and row.published > 1.02]
    return [f"{row.source}, {row.figure}" for row, ours in gains if ours < 0.98]


def simulated(table: list[Row]) -> dict[Case, Result]:
    cases = list(dict.fromkeys(one for row in table for one in row.cases))
    with Console().status("simulating") as status:
        configs = [one.config() for one in cases]
        outcomes = sweep(configs, [False] * len(cases), lambda n, of, what: status.update(f"{n}/{of} steps: {what}"))
    return {one: outcome.result for one, outcome in zip(cases, outcomes, strict=True) if outcome.result}


def main(sources: list[str]) -> None:
    before = json.loads(OUT.read_text()) if sources else {"rows": [], "summary": {"wrong_order": []}}
    ours = {(row["source"], row["figure"]): row["ours"] for row in before["rows"]}
    new = [row for row in rows() if not sources or row.source in sources]
    results = simulated(new)
    ours |= {row.key: row.predict(*[results[one] for one in row.cases]) for row in new}
    lines = [(row, ours[row.key]) for row in rows()]
    order = [text for text in before["summary"]["wrong_order"] if text.startswith(ORDER)]
    if not sources or "Laminar" in sources:
        order = wrong_order(results)
    report(Console(), lines, [*order, *contradicted(lines)])


def report(console: Console, lines: list[Line], unlike: list[str]) -> None:
    grid = Table("source", "figure", "kind", "published", "ours", "error", "held out")
    for row, ours in lines:
        shown = (f"{row.published:,.4g}", f"{ours:,.4g}", f"{error(row, ours):+.0%}", "yes" * row.held_out)
        grid.add_row(row.source, row.figure, row.kind, *shown)
    console.print(grid)
    summary = {
        "all": summary_of(lines),
        "held_out": summary_of([line for line in lines if line[0].held_out]),
        "fitted": summary_of([line for line in lines if not line[0].held_out]),
        "wrong_order": unlike,
    }
    for name in ("held_out", "fitted", "all"):
        console.print(f"speed-ups, {name}: {sentence(summary[name])}")
    console.print("order of the schedules: " + ("; ".join(unlike) or "right in every row"))
    console.print(
        f"\nFrom:\n{SOURCES}\nAssumed where they are silent, alike for all schedules of a workload:\n{ASSUMED}"
    )
    for row, ours in lines:
        if row.kind == "speed-up" and abs(error(row, ours)) > LARGE_ERROR:
            named = MISSING.get(row.key, "not known")
            console.print(f"{row.source}, {row.figure}, {error(row, ours):+.0%}. Missing: {named}")
    console.print(f"Other differences:\n{DIFFERENCES}")
    data = {"summary": summary, "rows": [line_of(row, ours) for row, ours in lines]}
    OUT.write_text(json.dumps(data, indent=1) + "\n")


def line_of(row: Row, ours: float) -> dict[str, Any]:
    named = {"source": row.source, "figure": row.figure, "kind": row.kind, "held_out": row.held_out}
    return named | {"published": row.published, "ours": ours}


def summary_of(lines: list[Line]) -> dict[str, float]:
    errors = [abs(error(row, ours)) for row, ours in lines if row.kind == "speed-up"]
    if not errors:
        return {"speed_ups": 0}
    return {
        "speed_ups": len(errors),
        "median_error": median(errors),
        "within_15_percent": sum(e <= 0.15 for e in errors),
        "above_35_percent": sum(e > LARGE_ERROR for e in errors),
    }


def sentence(summary: dict[str, float]) -> str:
    if not summary["speed_ups"]:
        return "none"
    return (
        f"median error {summary['median_error']:.0%}; {summary['within_15_percent']} of {summary['speed_ups']} within "
        f"15 %, {summary['above_35_percent']} above 35 %"
    )


def error(row: Row, ours: float) -> float:
    return ours / row.published - 1.0


if __name__ == "__main__":
    main(sys.argv[1:])
