"""A predicted weight publish beside what is published and measured, and what it says of 32B and 405B.

    python benchmarks/publish_prediction.py     # prints the tables, writes benchmarks/results/publish_prediction.json

Predictions are those of `sim/publishing.py` with the link rates of `examples/clusters/` and the constants of the cost
model; no row has a constant of its own. Laminar's trainer stalls while it pushes its weights to the master relay. Ours
stalls for a copy within the card, so its push is compared: the time until the master relay has the version.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.config import load
from tailrace.config.tree import Config
from tailrace.sim.publishing import PublishPlan, publish_of

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"


class Row(NamedTuple):
    source: str
    figure: str
    known: float
    ours: float


def plan_of(config: Config) -> PublishPlan:
    """Ranks fill hosts; every host has a relay."""
    per_host = config.cluster.gpus_per_host
    return publish_of(config, config.trainer_gpus, per_host, -(-config.cluster.gpus // per_host))


def laminar(preset: str) -> Config:
    return load([CLUSTERS / f"{preset}.toml"])


def rows() -> list[Row]:
    config = laminar("laminar_math_72b")
    plan = publish_of(config, config.trainer_gpus, 8, 128)
    push = {size: plan_of(laminar(f"laminar_math_{size}")).master_s for size in ("32b", "72b")}
    return [
        Row("Laminar", "32B on the master relay, s", 0.64, push["32b"]),
        Row("Laminar", "72B on the master relay, s", 1.40, push["72b"]),
        Row("Laminar", "72B broadcast to 127 relays, s (below)", 1.6, plan.everywhere_s - plan.master_s),
        *measured_rows(),
    ]


def measured_rows() -> list[Row]:
    """One rank of 1.5B on an H200, by `benchmarks/gpu/weights.py`."""
    words = "--model.preset qwen2.5-1.5b --cluster.gpu H200 --cluster.gpus 2 --split.trainer_gpus 1"
    warm = json.loads((ROOT / "benchmarks" / "results" / "gpu_weights.json").read_text())["warm"]
    plan = publish_of(load([], words.split()), 1, 1, 1)
    return [
        Row("H200", "1.5B, one rank: trainer stall, ms", median(row["stall_ms"] for row in warm), 1e3 * plan.stall_s),
        Row("H200", "1.5B, in the relay's memory, ms", median(row["copied_ms"] for row in warm), 1e3 * plan.master_s),
    ]


def predictions() -> dict[str, PublishPlan]:
    return {name: plan_of(load([CLUSTERS / f"{name}.toml"])) for name in ("four_hosts_32b", "hosts_64_405b")}


def main() -> None:
    console, table = Console(), rows()
    grid = Table("source", "figure", "published or measured", "predicted", "error")
    for row in table:
        grid.add_row(row.source, row.figure, f"{row.known:.3g}", f"{row.ours:.3g}", f"{row.ours / row.known - 1:+.0%}")
    console.print(grid)
    plans = predictions()
    console.print(predicted_table(plans))
    data: dict[str, Any] = {
        "rows": [row._asdict() for row in table],
        "predicted": {name: msgspec.to_builtins(plan) for name, plan in plans.items()},
    }
    (ROOT / "benchmarks" / "results" / "publish_prediction.json").write_text(json.dumps(data, indent=1) + "\n")


def predicted_table(plans: dict[str, PublishPlan]) -> Table:
    grid = Table("GB a version, seconds", *plans)
    lines = {
        "version": lambda plan: plan.version_bytes / 1e9,
        "ranks": lambda plan: plan.ranks,
        "relays": lambda plan: plan.relays,
        "sent by a rank": lambda plan: plan.rank.sent / 1e9,
        "master relay: received": lambda plan: plan.master.received / 1e9,
        "another relay: received": lambda plan: (plan.relay_with_ranks or plan.master).received / 1e9,
        "memory of a host": lambda plan: plan.host_memory / 1e9,
        "trainer stall, s": lambda plan: plan.stall_s,
        "on the master, s": lambda plan: plan.master_s,
        "on every relay, s": lambda plan: plan.everywhere_s,
    }
    for name, figure in lines.items():
        grid.add_row(name, *[f"{figure(plan):,.4g}" for plan in plans.values()])
    return grid


if __name__ == "__main__":
    main()
