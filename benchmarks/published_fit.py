"""Where the constants of `[efficiency]` come from: fitted to half of the published sources, never to the others.

    python benchmarks/published_fit.py        # prints the fit, writes benchmarks/results/published_fit.json

Fitted are the floor of a layer in decoding, the trainer's share of peak, and how much slower a mixture's layers and
products are; to the seconds of synchronous steps that verl and NeMo RL v0.4 publish (AReaL's hours are left out: its
lengths are not published, and those assumed for it were inferred from its throughput). A synchronous step has a closed
form (a round up to its longest sample, then training), so no simulation is needed; it is linear in the terms that the
constants stand in, so a few evaluations of a row give all others. The best of a grid is taken, by the mean absolute
logarithm of predicted over published.
"""

from __future__ import annotations

import json
from itertools import product
from math import exp

import numpy as np
from published_rows import ROOT, Row, rows

from tailrace.config.tree import Config, Efficiency
from tailrace.planner import theory
from tailrace.sim.cost_model import LAYER_S, CostModel

GRID: dict[str, tuple[float, ...]] = {
    "layer_us": (70, 100, 140, 170, 200, 240, 280, 340, 400),
    "training": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
    "expert_layer": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
    "experts": (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
}
START = {"layer_us": 200.0, "training": 0.4, "expert_layer": 1.0, "experts": 0.3}
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
    return row.predict(_Step(step_s(one.config(tied(constants)))))


def tied(constants: dict[str, float]) -> dict[str, float]:
    return {**constants, "forward": constants["training"] * FORWARD_OVER_TRAINING}


def terms(constants: dict[str, float]) -> list[float]:
    floor, training = constants["layer_us"], constants["training"]
    expert_floor = constants["expert_layer"] * floor
    return [1.0, floor, constants["expert_layer"], expert_floor, 1 / training, 1 / (training * constants["experts"])]


def linear(row: Row) -> np.ndarray:
    """What each term is worth in this row."""
    points = [START | {name: value} for name, values in GRID.items() for value in (values[0], values[-1])]
    known = [(terms(point), predicted(row, point)) for point in [START, *points]]
    return np.linalg.lstsq(np.array([term for term, _ in known]), np.array([value for _, value in known]), rcond=None)[
        0
    ]


def fit(table: list[Row]) -> tuple[dict[str, float], float]:
    """The constants with the least mean absolute logarithm of predicted over published, and that mean as a share."""
    worth = np.array([linear(row) / row.published for row in table])
    points = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    losses = [float(np.abs(np.log(worth @ np.array(terms(point)))).mean()) for point in points]
    best = int(np.argmin(losses))
    return points[best], exp(losses[best]) - 1


def main() -> None:
    table = sync_rows()
    known = [row for row in table if not row.held_out and row.source != "AReaL"]
    fitted, error = fit(known)
    shipped = Efficiency()
    defaults = {name: getattr(shipped, name) or 1e6 * LAYER_S["typical"] for name in GRID}
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
    for line in lines:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()})
    print(f"fitted: {fitted}, mean error {error:.0%}; shipped: {defaults}")
    out = ROOT / "benchmarks" / "results" / "published_fit.json"
    data = {"fitted": fitted, "mean_error": error, "shipped": defaults, "rows": lines}
    out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
