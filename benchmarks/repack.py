"""Repack, on and off, with the same seed: the preset laminar_math_7b, which has 64 replicas.

python benchmarks/repack.py           # prints the table, writes benchmarks/results/repack.json
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.config import load, with_values
from tailrace.sim.simulation import Simulation

ROOT = Path(__file__).parents[1]
SETTINGS = {"trainer.balance": "step", "run.steps": 15}


def measure(repack: bool) -> dict[str, Any]:
    config = load([ROOT / "examples" / "clusters" / "laminar_math_7b.toml"])
    simulation = Simulation(with_values(config, {**SETTINGS, "repack.enabled": repack}))
    row = msgspec.to_builtins(simulation.run())
    ages: Counter[int] = simulation.meter.fold.total.ages
    row["share_below_3"] = sum(n for age, n in ages.items() if age < 3) / sum(ages.values())
    return row


def main() -> None:
    on, off = measure(True), measure(False)
    grid = Table("figure", "repack on", "off", "on / off")
    for key in ("decoded_tokens_per_s", "tokens_per_s", "kv_usage", "moved", "share_below_3"):
        ratio = f"{on[key] / off[key]:.2f}" if off[key] else ""
        grid.add_row(key, f"{on[key]:,.4g}", f"{off[key]:,.4g}", ratio)
    grid.add_row(
        "staleness mean / max", *(f"{r['staleness']['mean']:.1f} / {r['staleness']['max']}" for r in (on, off)), ""
    )  # type: ignore[index]
    Console().print(grid)
    (ROOT / "benchmarks" / "results" / "repack.json").write_text(json.dumps({"on": on, "off": off}, indent=1) + "\n")


if __name__ == "__main__":
    main()
