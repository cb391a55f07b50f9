"""Four replicas, two of them four times slower: what is made of them, for real with emulated engines.

    python benchmarks/mixed_speeds.py [--schedules adaptive trajectory] [--rounds 3] [--steps 18]
    python benchmarks/mixed_speeds.py --simulate    # the same in virtual time, with another seed for every round
    python benchmarks/mixed_speeds.py --table       # what has been measured so far

Four fleets take turns: four fast replicas, four slow ones, two of each (mixed), and four equal ones with the total rate
of the mixed fleet. Generation is the limit in all of them. Two of four fast and two of four slow replicas together are
what the mixed fleet can do; its step interval is held against that of the equal fleet. Figures are of the steps after
the first third, and of each fleet the median of the rounds. Rows go to benchmarks/results/mixed_speeds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from tailrace.config.load import load  # noqa: E402
from tailrace.obs.summary import summarise  # noqa: E402
from tailrace.sim.simulation import Simulation  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mixed_speeds.json"
SETTINGS = ROOT / "examples" / "heavy_tail.toml"
FAST, SLOW = 0.5, 0.125  # of the speed of heavy_tail.toml
FLEETS = {
    "fast": [FAST],
    "mixed": [FAST, FAST, SLOW, SLOW],
    "equal": [(FAST + SLOW) / 2],
    "slow": [SLOW],
}
WORKLOAD = {"workload.prompts_per_step": 64, "costs.train_token": 3e-6, "run.evaluate": "false"}
Row = dict[str, Any]


def options_of(schedule: str, fleet: str, steps: int) -> list[str]:
    settings = WORKLOAD | {"rollout.speeds": json.dumps(FLEETS[fleet]), "schedule.kind": schedule, "run.steps": steps}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def simulate(schedule: str, fleet: str, steps: int, seed: int) -> Row:
    words = [*options_of(schedule, fleet, steps), "--run.seed", str(seed)]
    result = Simulation(load([SETTINGS], words)).run()
    return {
        "schedule": schedule,
        "fleet": fleet,
        "simulated": True,
        "seed": seed,
        "speeds": FLEETS[fleet],
        "steps": steps,
        "step_s": round(result.step_s, 3),
        "tokens_per_s": round(result.tokens_per_s),
        "trainer_idle": round(result.trainer_idle, 3),
        "dropped": result.dropped,
        "moved": result.moved,
        "staleness_mean": round(result.staleness.mean, 2),
    }


def run(schedule: str, fleet: str, steps: int, folder: Path) -> Row:
    name = f"{schedule}-{fleet}-{len(list(folder.iterdir()))}"
    words = options_of(schedule, fleet, steps)
    command = [sys.executable, "-m", "tailrace", "train", str(SETTINGS), *words, "--run.folder", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, "--run.name", name], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} did not get through: {done.stderr.strip()[-1000:]}")
    report = summarise(folder / name)
    made = report.live.fold.steps
    first = steps // 3
    seconds = made[-1].ended - made[first - 1].ended
    return {
        "schedule": schedule,
        "fleet": fleet,
        "speeds": FLEETS[fleet],
        "steps": steps,
        "step_s": round(seconds / (steps - first), 3),
        "tokens_per_s": round(sum(one.tokens for one in made[first:]) / seconds),
        "trainer_idle": round(report.summary.trainer_idle, 3),
        "dropped": report.summary.ledger.dropped_stale,
        "moved": report.summary.moved,
        "staleness_mean": round(report.summary.staleness.mean, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def measure(options: argparse.Namespace) -> None:
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for schedule, fleet in product(options.schedules, FLEETS):
                if options.simulate:
                    rows.append(simulate(schedule, fleet, options.steps, number))
                else:
                    rows.append(run(schedule, fleet, options.steps, Path(folder)))
                RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
                print(rows[-1], flush=True)


def table() -> None:
    rows: list[Row] = json.loads(RESULTS.read_text())
    print("| schedule | rounds | fast, slow, equal, mixed: tokens/s | mixed / sum | its step / equal | dropped |")
    print("|---|--:|--:|--:|--:|--:|")
    for simulated, schedule in sorted({(row.get("simulated", False), row["schedule"]) for row in rows}):
        these = [row for row in rows if (row.get("simulated", False), row["schedule"]) == (simulated, schedule)]
        of = {fleet: [row for row in these if row["fleet"] == fleet] for fleet in FLEETS}
        if all(of.values()):
            print(line(f"{schedule}, simulated" if simulated else schedule, of))


def line(schedule: str, of: dict[str, list[Row]]) -> str:
    rate = {fleet: median(row["tokens_per_s"] for row in rows) for fleet, rows in of.items()}
    step = {fleet: median(row["step_s"] for row in rows) for fleet, rows in of.items()}
    total = rate["mixed"] / (rate["fast"] / 2 + rate["slow"] / 2)
    rates = ", ".join(f"{rate[fleet]:,.0f}" for fleet in ("fast", "slow", "equal", "mixed"))
    dropped = "/".join(f"{median(row['dropped'] for row in of[fleet]):.0f}" for fleet in ("equal", "mixed"))
    cells = [schedule, len(of["mixed"]), rates, f"{total:.3f}", f"{step['mixed'] / step['equal']:.3f}", dropped]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["adaptive", "trajectory"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    table()


if __name__ == "__main__":
    main()
