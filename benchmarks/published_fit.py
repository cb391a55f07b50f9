"""Where the constants of `[efficiency]` come from: fitted to half of the published sources, never to the others.

    python benchmarks/published_fit.py        # prints the fit, writes benchmarks/results/published_fit.json

Fitted are the floor of a layer in decoding, the trainer's share of peak, and how much slower a mixture's layers and
products are; to the seconds of synchronous and one-step-ahead steps that verl and NeMo RL v0.4 publish (AReaL's hours
are left out: its lengths are not published, and those assumed for it were inferred from its throughput). Such a step
has a closed form, a round up to its longest sample and training, one after the other or side by side, so no simulation
is needed. Both are linear in the terms that the constants stand in, so a few evaluations of a row give all others. The
best of a grid is taken, by the mean absolute logarithm of predicted over published.
"""

from __future__ import annotations

import json
from itertools import product
from math import exp
from typing import NamedTuple

import numpy as np
from published_rows import ROOT, Row, rows

from tailrace.config.tree import Config, Efficiency
from tailrace.planner.balance import round_seconds
from tailrace.sim.cost_model import LAYER_S, CostModel
from tailrace.sim.sizes import sizes_of

GRID: dict[str, tuple[float, ...]] = {
    "layer_us": (70, 100, 140, 170, 200, 240, 280, 340, 400),
    "training": (0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
    "expert_layer": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
    "experts": (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
}
START = {"layer_us": 200.0, "training": 0.4, "expert_layer": 1.0, "experts": 0.3}
FORWARD_OVER_TRAINING = 0.73  # verl's split of a step: an extra forward pass costs 0.4 to 0.5 of an update


CLOSED = ("sync", "one_step")


class Parts(NamedTuple):
    """Seconds of one step."""

    round_s: float
    train_s: float
    fixed_s: float  # colocated: the change of roles
    colocated: bool

    @property
    def step_s(self) -> float:
        return self.round_s + self.train_s + self.fixed_s if self.colocated else max(self.round_s, self.train_s)


def closed_rows() -> list[Row]:
    """Seconds, or hours, of steps that have a closed form."""
    return [row for row in rows() if row.kind == "absolute" and len(row.cases) == 1 and row.cases[0].schedule in CLOSED]


def parts(config: Config) -> Parts:
    costs, sizes = CostModel(config), sizes_of(config.workload, config.run.seed)
    times = config.workload.trajectories_per_step / len(sizes.sequences)
    trained = costs.train_at_best(sizes.sequences, times, config.trainer.mini_batches) + costs.push()
    fixed = costs.switch_s if config.colocated else 0.0
    return Parts(round_seconds(config) + costs.pull(remote=False), trained, fixed, config.colocated)


def tied(constants: dict[str, float]) -> dict[str, float]:
    return {**constants, "forward": constants["training"] * FORWARD_OVER_TRAINING}


def round_terms(constants: dict[str, float]) -> list[float]:
    floor, experts = constants["layer_us"], constants["expert_layer"]
    return [1.0, floor, experts, experts * floor]


def train_terms(constants: dict[str, float]) -> list[float]:
    return [1.0, 1 / constants["training"], 1 / (constants["training"] * constants["experts"])]


class LinearRow:
    """A row whose parts follow from the terms."""

    def __init__(self, row: Row) -> None:
        points = [START, *[START | {name: value} for name, values in GRID.items() for value in (values[0], values[-1])]]
        known = [parts(row.cases[0].config(tied(point))) for point in points]
        self.row, self.known = row, known[0]
        self.round = solve([round_terms(point) for point in points], [each.round_s for each in known])
        self.train = solve([train_terms(point) for point in points], [each.train_s for each in known])

    def predicted(self, constants: dict[str, float]) -> float:
        times = float(self.round @ round_terms(constants)), float(self.train @ train_terms(constants))
        return self.row.predict(Parts(*times, self.known.fixed_s, self.known.colocated))


def solve(points: list[list[float]], values: list[float]) -> np.ndarray:
    return np.linalg.lstsq(np.array(points), np.array(values), rcond=None)[0]


def fit(table: list[LinearRow]) -> tuple[dict[str, float], float]:
    """The constants with the least mean absolute logarithm of predicted over published, and that mean as a share."""
    points = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    losses = [loss(table, point) for point in points]
    best = int(np.argmin(losses))
    return points[best], exp(losses[best]) - 1


def loss(table: list[LinearRow], constants: dict[str, float]) -> float:
    return float(np.mean([abs(np.log(each.predicted(constants) / each.row.published)) for each in table]))


def main() -> None:
    table = [LinearRow(row) for row in closed_rows()]
    known = [each for each in table if not each.row.held_out and each.row.source != "AReaL"]
    fitted, error = fit(known)
    shipped = Efficiency()
    defaults = {name: getattr(shipped, name) or 1e6 * LAYER_S["typical"] for name in GRID}
    lines = [
        {
            "source": each.row.source,
            "figure": each.row.figure,
            "held_out": each.row.held_out,
            "published": each.row.published,
            "fitted": each.predicted(fitted),
            "shipped": each.predicted(defaults),
        }
        for each in table
    ]
    for line in lines:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()})
    print(f"fitted: {fitted}, mean error {error:.0%}; shipped: {defaults}")
    out = ROOT / "benchmarks" / "results" / "published_fit.json"
    data = {"fitted": fitted, "mean_error": error, "shipped": defaults, "rows": lines}
    out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
