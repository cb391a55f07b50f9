"""Where the constants of `[efficiency]` come from: fitted to half of the published sources, never to the others.

    python benchmarks/published_fit.py        # prints the fit, writes benchmarks/results/published_fit.json

Fitted are the floor of a layer in decoding, the trainer's share of peak in matrix products and how often activations go
through memory beside them, what sharing its cards costs a trainer, the floor of a mixture's layer in training, and what
calling other hosts costs an engine; to the seconds of steps and of training that verl and NeMo RL v0.4 and v0.5 publish
(AReaL's hours are left out: its lengths are not published, and those assumed for it were inferred from its throughput).
Once all together, and once the last two with the others as they are shipped: those are what is shipped. A step in
rounds has a closed form: up to its
longest sample and training, one after the other or side by side; a continuous one takes as long as training, or as
generating with full batches. So no simulation is needed. Both parts are linear in the terms that the constants stand
in, so a few evaluations of a row give all others. The best of a grid is taken, by the mean absolute logarithm of
predicted over published, and among equals by its square.
"""

from __future__ import annotations

import json
from itertools import product
from math import exp
from typing import Any, NamedTuple

import numpy as np
from published_rows import ROOT, Row, rows

from tailrace.config.tree import Config, Efficiency
from tailrace.planner.balance import round_seconds, stream_seconds
from tailrace.sim.cost_model import LAYER_S, CostModel
from tailrace.sim.sizes import sizes_of

GRID: dict[str, tuple[float, ...]] = {
    "layer_us": (70, 100, 140, 170, 200, 240, 280, 340, 400),
    "training": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8),
    "activation_passes": (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0),
    "colocated": (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0),
    "expert_pass_us": (0, 1000, 2000, 3000, 4000, 5000, 6000, 8000),
    "host_call_us": (0, 4000, 8000, 12000, 16000, 20000),
}
START = {
    "layer_us": 200.0, "training": 0.5, "activation_passes": 4.0, "colocated": 0.8,
    "expert_pass_us": 2000.0, "host_call_us": 8000.0,
}  # fmt: skip
OF_DENSE_MODELS = ("layer_us", "training", "activation_passes", "colocated")
LOWEST = {name: values[0] for name, values in GRID.items()}  # with others: terms are products of constants
FORWARD_OVER_TRAINING = 0.73  # verl's split of a step: an extra forward pass costs 0.4 to 0.5 of an update
ROUNDS = ("sync", "one_step")
SQUARED = 0.1  # weight of squared errors: all between two versions that disagree is equally near; then the middle
Points = dict[str, np.ndarray]  # the values of each constant, one after the other


class Parts(NamedTuple):
    """Seconds of one step; of all points at once."""

    round_s: Any
    train_s: Any
    fixed_s: float  # colocated: the change of roles; else: samples that are handed to the trainer
    colocated: bool

    @property
    def step_s(self) -> Any:
        if self.colocated:
            return self.round_s + self.train_s + self.fixed_s
        return np.maximum(self.round_s, self.train_s + self.fixed_s)

    @property
    def trainer_idle(self) -> Any:
        return 1.0 - self.train_s / self.step_s


def closed_rows() -> list[Row]:
    """Seconds, or hours, of steps that have a closed form."""
    seconds = [row for row in rows() if row.kind == "absolute" and len(row.cases) == 1]
    return [row for row in seconds if row.cases[0].schedule in (*ROUNDS, "partial")]


def parts(config: Config) -> Parts:
    costs, sizes = CostModel(config), sizes_of(config.workload, config.run.seed)
    per_batch = len(sizes.sequences) // config.trainer.mini_batches
    batches = [sizes.sequences[at : at + per_batch] for at in range(0, len(sizes.sequences), per_batch)]
    trained = sum([costs.train(batch) for batch in batches]) + costs.push()
    fixed = costs.switch_s if config.colocated else costs.fetch(len(sizes.sequences))
    generated = round_seconds(config) if config.schedule.kind in ROUNDS else stream_seconds(config)
    return Parts(generated + costs.pull(remote=False), trained, fixed, config.colocated)


def unevenness(config: Config) -> float:
    """Seconds of training over what they would be if no rank waited for another."""
    costs, sizes = CostModel(config), sizes_of(config.workload, config.run.seed)
    at_best = costs.train_at_best(sizes.sequences, 1.0, config.trainer.mini_batches)
    return parts(config).train_s / (at_best + costs.push())


def tied(constants: dict[str, float]) -> dict[str, float]:
    return {**constants, "forward": constants["training"] * FORWARD_OVER_TRAINING}


def round_terms(at: Points) -> np.ndarray:
    floor = at["layer_us"]
    return np.stack([np.ones_like(floor), floor, at["host_call_us"]], axis=1)


def train_terms(at: Points, colocated: bool) -> np.ndarray:
    products = 1 / at["training"]
    slower = 1 / at["colocated"] if colocated else np.ones_like(products)
    same = [np.ones_like(products), at["expert_pass_us"]]
    return np.stack([*same, slower, slower * products, slower * at["activation_passes"]], axis=1)


class LinearRow:
    """A row whose parts follow from the terms."""

    def __init__(self, row: Row) -> None:
        points = [START, *[START | {name: value} for name, values in GRID.items() for value in (values[0], values[-1])]]
        points += [START | {name: value, "colocated": 1.0} for name, value in LOWEST.items()]
        known = [parts(row.cases[0].config(tied(point))) for point in points]
        at = {name: np.array([point[name] for point in points]) for name in GRID}
        self.row, self.known = row, known[0]
        self.round = solve(round_terms(at), [each.round_s for each in known])
        self.train = solve(train_terms(at, self.known.colocated), [each.train_s for each in known])

    def predicted(self, at: Points) -> np.ndarray:
        times = round_terms(at) @ self.round, train_terms(at, self.known.colocated) @ self.train
        return np.asarray(self.row.predict(Parts(*times, self.known.fixed_s, self.known.colocated)))


def solve(terms: np.ndarray, values: list[float]) -> np.ndarray:
    return np.linalg.lstsq(terms, np.array(values), rcond=None)[0]


def fit(table: list[LinearRow], grid: dict[str, tuple[float, ...]]) -> tuple[dict[str, float], float]:
    """The constants with the least mean absolute logarithm of predicted over published, and that mean as a share."""
    values = np.array(list(product(*grid.values()))).T
    points = dict(zip(grid, values, strict=True))
    errors = [np.abs(np.log(each.predicted(points) / each.row.published)) for each in table]
    means = np.mean(errors, axis=0)
    best = int(np.argmin(means + SQUARED * np.mean(np.square(errors), axis=0)))
    return {name: float(each[best]) for name, each in points.items()}, exp(means[best]) - 1


def at_point(constants: dict[str, float]) -> Points:
    return {name: np.array([value]) for name, value in constants.items()}


def main() -> None:
    table = [LinearRow(row) for row in closed_rows()]
    known = [each for each in table if not each.row.held_out and each.row.source != "AReaL"]
    shipped = Efficiency()
    defaults = {name: getattr(shipped, name) for name in GRID} | {"layer_us": 1e6 * LAYER_S["typical"]}
    fitted, error = fit(known, GRID)
    rest, rest_error = fit(known, GRID | {name: (defaults[name],) for name in OF_DENSE_MODELS})
    lines = [
        {
            "source": each.row.source,
            "figure": each.row.figure,
            "held_out": each.row.held_out,
            "published": each.row.published,
            "unevenness": unevenness(each.row.cases[0].config()),
            "fitted": float(each.predicted(at_point(fitted))[0]),
            "shipped": float(each.predicted(at_point(defaults))[0]),
        }
        for each in table
    ]
    for line in lines:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()})
    print(f"fitted: {fitted}, mean error {error:.1%}; with those of dense models as shipped: {rest}, {rest_error:.1%}")
    print(f"shipped: {defaults}")
    out = ROOT / "benchmarks" / "results" / "published_fit.json"
    data = {"fitted": fitted, "mean_error": error, "shipped": defaults, "rows": lines}
    data |= {"fitted_beside_dense": rest, "mean_error_beside_dense": rest_error}
    out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
