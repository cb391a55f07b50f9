"""What the control plane and its virtual-time driver cost at scale.

    python benchmarks/scale.py            # 1,024 GPUs with five schedules; then 1,000 to 25,000 replicas (200,000 GPUs)

Writes benchmarks/results/scale.json. Each measurement runs in a process of its own, so that peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.config import load, with_values
from tailrace.config.tree import SCHEDULES
from tailrace.sim.simulation import Simulation

ROOT = Path(__file__).parents[1]
REPLICAS = (1000, 2500, 5000, 10000, 25000)


def measure(preset: str, settings: Mapping[str, object]) -> dict[str, float]:
    """Simulate in this process; seconds of CPU, events handled by the control plane, and peak memory."""
    config = with_values(load([ROOT / "examples" / "clusters" / preset]), settings)
    simulation = Simulation(config)
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulation.run()
    spent = time.process_time() - cpu
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": spent,
        "events": simulation.handled,
        "us_per_event": spent / simulation.handled * 1e6,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "tokens_per_s": result.tokens_per_s,
        "trained_groups": result.trained,
    }


def apart(preset: str, settings: Mapping[str, object]) -> dict[str, float]:
    words = [sys.executable, __file__, "--measure", preset, json.dumps(dict(settings))]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def curve(console: Console) -> list[dict[str, float]]:
    """The same work per replica on ever more replicas."""
    rows: list[dict[str, float]] = []
    for replicas in REPLICAS:
        settings = {"cluster.gpus": replicas * 8, "workload.prompts_per_step": replicas}
        rows.append({"replicas": replicas, **apart("fleet_200k.toml", settings)})
        console.print(
            f"{replicas:>6,} replicas: {rows[-1]['us_per_event']:.1f} us an event, {rows[-1]['wall_s']:.0f} s"
        )
    return rows


def five_schedules() -> dict[str, float]:
    """The command that users run, from outside: all five schedules on 1,024 GPUs, ten steps."""
    words = [sys.executable, "-m", "tailrace", "simulate", str(ROOT / "examples/clusters/laminar_math_72b.toml")]
    words += ["--gpus", "1024", "--run.steps", "10", "--json"]
    start = time.perf_counter()
    rows = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["results"]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    return {"wall_s": time.perf_counter() - start}


def main() -> None:
    console = Console()
    small = five_schedules()
    console.print(f"1,024 GPUs, 8,192 trajectories a step, 10 steps, five schedules: {small['wall_s']:.1f} s")
    rows = curve(console)
    large = rows[-1]
    grid = Table("replicas", "GPUs", "events", "us per event", "wall s", "peak GB")
    for row in rows:
        counts = [f"{number:,.0f}" for number in (row["replicas"], row["replicas"] * 8, row["events"])]
        grid.add_row(*counts, f"{row['us_per_event']:.1f}", f"{row['wall_s']:.0f}", f"{row['peak_gb']:.2f}")
    console.print(grid)
    console.print(f"cost per event, 25,000 over 1,000 replicas: {large['us_per_event'] / rows[0]['us_per_event']:.2f}x")
    out = {"five_schedules_1024_gpus": small, "curve": rows}
    (ROOT / "benchmarks" / "results" / "scale.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        main()
