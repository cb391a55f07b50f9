"""The simulator predicts this machine: costs fitted from one real run foretell the throughput of another schedule.

python benchmarks/prediction.py     # prints the table, writes benchmarks/results/prediction.json

The default recipe with one replica. Costs come from the journal and the metrics of a run under one schedule; the
simulator, which runs the same control plane in virtual time, is then asked for the other one. Nothing of the second
run is used but its throughput, against which the prediction is held. Throughput is taken over the same window on both
sides: after the first third of the steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.config import with_values
from tailrace.obs.summary import summarise
from tailrace.sim.fit import fitted
from tailrace.sim.simulation import Simulation
from tailrace.store.journal import Journal

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
STEPS = 24
SETTINGS = ["--run.steps", str(STEPS), "--local.replicas", "1", "--run.evaluate", "false"]
PAIRS = (("trajectory", "sync"), ("trajectory", "one_step"), ("sync", "trajectory"))


def run(kind: str, folder: Path) -> Path:
    words = ["--schedule.kind", kind, "--run.folder", str(folder), "--run.name", kind, *SETTINGS]
    subprocess.run([sys.executable, "-m", "tailrace", "train", str(RECIPE), *words], check=True, capture_output=True)
    return folder / kind


def throughput(run: Path) -> float:
    """Trained tokens per second after the first third of the steps, as the simulator counts them."""
    steps = summarise(run).live.fold.steps
    first = STEPS // 3
    return sum(step.tokens for step in steps[first:]) / (steps[-1].ended - steps[first - 1].ended)


def predict(known: Path, kind: str) -> float:
    config = with_values(Journal(known).config, fitted(known) | {"schedule.kind": kind})
    return Simulation(config).run().tokens_per_s


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: run(kind, Path(folder)) for kind in ("trajectory", "sync", "one_step")}
        real = {kind: throughput(each) for kind, each in runs.items()}
        rows: list[dict[str, Any]] = [
            {"fitted": known, "predicted": kind, "tokens_per_s": predict(runs[known], kind), "real": real[kind]}
            for known, kind in PAIRS
        ]
    table = Table("costs from", "schedule", "predicted tokens/s", "real tokens/s", "error")
    for row in rows:
        row["error"] = row["tokens_per_s"] / row["real"] - 1
        figures = f"{row['tokens_per_s']:,.0f}", f"{row['real']:,.0f}", f"{row['error']:+.0%}"
        table.add_row(row["fitted"], row["predicted"], *figures)
    Console(width=100).print(table)
    (ROOT / "benchmarks" / "results" / "prediction.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
