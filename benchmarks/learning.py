"""Does it learn, and does asynchrony cost accuracy? The default recipe with several seeds, async and sync.

python benchmarks/learning.py [--seeds 3]     # prints the table, writes benchmarks/results/learning.json

Both kinds train the same number of samples. Seconds are counted from the first sample; start-up and the evaluations
before and after are left out. Runs alternate, so that a busy moment of the machine does not hit one kind alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.obs.summary import summarise

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
KINDS = ("adaptive", "trajectory", "sync")
WINDOW = 3  # steps over which the reward is smoothed
GOAL = 0.85


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    name = f"{kind}-{seed}"
    words = ["--schedule.kind", kind, "--run.seed", str(seed), "--run.folder", str(folder), "--run.name", name]
    subprocess.run([sys.executable, "-m", "tailrace", "train", str(RECIPE), *words], check=True, capture_output=True)
    report = summarise(folder / name)
    summary, steps = report.summary, report.live.fold.steps
    rewards = [step.reward or 0.0 for step in steps]
    smooth = [fmean(rewards[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(rewards))]
    start = report.live.first_sample_at
    reached = next((step.ended - start for step, mean in zip(steps, smooth, strict=True) if mean >= GOAL), None)
    return {
        "kind": kind,
        "seed": seed,
        "before": summary.accuracy.before,
        "after": summary.accuracy.after,
        "samples": summary.trained_samples,
        "seconds": steps[-1].ended - start,
        "seconds_to_goal": reached,
        "wall_s": summary.wall_s,
        "tokens_per_s": summary.tokens_per_s,
        "staleness": summary.staleness.mean,
        "repacks": summary.repacks,
        "publish_stall_s": summary.publish_stall_s,
        "rewards": rewards,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(kind, seed, Path(folder)) for seed in range(seeds) for kind in KINDS]
    table = Table("schedule", "seed", "before", "after", "samples", "s", f"s to reward {GOAL}", "staleness")
    for row in sorted(rows, key=lambda each: KINDS.index(each["kind"])):
        goal = "-" if row["seconds_to_goal"] is None else f"{row['seconds_to_goal']:.0f}"
        table.add_row(
            row["kind"],
            str(row["seed"]),
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['samples']:,}",
            f"{row['seconds']:.0f}",
            goal,
            f"{row['staleness']:.2f}",
        )
    Console(width=110).print(table)
    means = {kind: fmean(row["seconds"] for row in rows if row["kind"] == kind) for kind in KINDS}
    speedup = {kind: means["sync"] / seconds for kind, seconds in means.items()}
    print(", ".join(f"{kind} is {ratio:.2f} times as fast as sync" for kind, ratio in speedup.items()))
    results = ROOT / "benchmarks" / "results" / "learning.json"
    results.write_text(json.dumps({"speedup": speedup, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
