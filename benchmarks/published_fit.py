"""Where the constants of `[efficiency]` come from: fitted to half of the published sources, never to the others.

    python benchmarks/published_fit.py        # prints the fit, writes benchmarks/results/published_fit.json

Fitted are the floor of a layer in decoding, the trainer's share of peak, and how much slower a mixture's layers and
products are; to the seconds of synchronous steps that verl and NeMo RL v0.4 publish (AReaL's hours are left out: its
lengths are not published, and those assumed for it were inferred from its throughput). A synchronous step has a closed
form (a round up to its longest sample, then training), so no simulation is needed. One constant after the other is
moved over a grid until none improves the mean absolute logarithm of predicted over published.
"""

from __future__ import annotations

import json
from math import exp, log
from statistics import mean

from published_rows import ROOT, Case, Row, rows

from tailrace.config.tree import Config, Efficiency
from tailrace.planner import theory
from tailrace.sim.cost_model import CostModel

GRID: dict[str, tuple[float, ...]] = {
    "layer_us": (70, 100, 140, 200, 240, 280, 340, 400),
    "training": (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
    "expert_layer": (0.0, 0.4, 0.85, 1.3, 1.7),
    "experts": (0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
}
FORWARD_OVER_TRAINING = 0.73  # verl's split of a step: an extra forward pass costs 0.4 to 0.5 of an update


def sync_rows() -> list[Row]:
    """Seconds, or hours, of synchronous steps."""
    return [row for row in rows() if row.kind == "absolute" and [one.schedule for one in row.cases] == ["sync"]]


def step_s(config: Config) -> float:
    found = theory(config)
    return found.tail_speed_up * found.async_step_s + CostModel(config).switch_s


class _Step:
    """What a row's `predict` looks at."""

    def __init__(self, seconds: float) -> None:
        self.step_s = seconds


def predicted(row: Row, constants: dict[str, float]) -> float:
    (one,) = row.cases
    return row.predict(_Step(step_s(Case.config(one, tied(constants)))))


def tied(constants: dict[str, float]) -> dict[str, float]:
    return {**constants, "forward": constants["training"] * FORWARD_OVER_TRAINING}


def loss(table: list[Row], constants: dict[str, float]) -> float:
    return mean(abs(log(predicted(row, constants) / row.published)) for row in table)


def fit(table: list[Row]) -> dict[str, float]:
    constants = {"layer_us": 200.0, "training": 0.45, "expert_layer": 0.85, "experts": 0.5}
    best, before = loss(table, constants), 0.0
    while best != before:
        before = best
        for name, values in GRID.items():
            tried = {value: loss(table, constants | {name: value}) for value in values}
            value = min(tried, key=lambda value: tried[value])
            if tried[value] < best:
                best, constants = tried[value], constants | {name: value}
    return constants


def main() -> None:
    table = sync_rows()
    known = [row for row in table if not row.held_out and row.source != "AReaL"]
    fitted = fit(known)
    shipped = Efficiency()
    defaults = {name: getattr(shipped, name) or 200.0 for name in GRID}
    lines = [
        {
            "source": row.source,
            "figure": row.figure,
            "held_out": row.held_out,
            "published": row.published,
            "fitted": predicted(row, fitted),
            "shipped": predicted(row, defaults),
        }
        for row in table
    ]
    errors = {name: exp(loss(known, each)) - 1 for name, each in (("fitted", fitted), ("shipped", defaults))}
    for line in lines:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()})
    print("fitted:", fitted, "shipped:", defaults, "mean errors:", errors)
    out = ROOT / "benchmarks" / "results" / "published_fit.json"
    out.write_text(
        json.dumps({"fitted": fitted, "shipped": defaults, "errors": errors, "rows": lines}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
