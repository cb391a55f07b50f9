"""Which schedule is fastest where: `partial`, `trajectory` and `adaptive` over the published set-ups, in virtual time.

    python benchmarks/schedule_sweep.py [strong] [weak] [--seeds 3] [--steps 60] [--processes 2] [--only NAME]
                                        [--gpus N] [--set KEY=VALUE]  # only this size; another setting for all
    python benchmarks/schedule_sweep.py --table                  # what has been measured so far

Strong scaling: the same step on more GPUs. Weak scaling: half a prompt per GPU. A third of the steps is warm-up (60
steps: 40 are measured). Every simulation is a row of `benchmarks/results/schedule_sweep.json`, written as it ends, so
an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

RESULTS = ROOT / "benchmarks" / "results" / "schedule_sweep.json"
CLUSTERS = ROOT / "examples" / "clusters"
SCHEDULES = ("partial", "trajectory", "adaptive")
STRONG = {
    "laminar_math_7b": (64, 128, 256, 512, 1024),
    "laminar_tools_7b": (64, 256, 1024),
    "laminar_math_32b": (64, 256, 512, 1024),
    "laminar_math_72b": (128, 512, 1024),
    "dora_32b": (64, 128, 256),
    "areal_1_5b": (128, 256),
    "verl_7b_h20": (32, 128),
}
WEAK = {"laminar_math_7b": (256, 1024, 4096), "laminar_math_32b": (256, 1024, 4096)}
PROMPTS_PER_GPU = 0.5  # weak scaling
Case = tuple[str, str, str, int, int, str, int]  # see NAMES
NAMES = ("scaling", "preset", "variant", "gpus", "seed", "schedule", "steps")
Row = dict[str, Any]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Seed by seed, of each the largest first: they take longest."""
    variant, presets = " ".join(options.set), {"strong": STRONG, "weak": WEAK}
    points = [
        (gpus, scaling, name)
        for scaling in options.scaling
        for name, sizes in presets[scaling].items()
        for gpus in sizes
        if options.only in name and options.gpus in (0, gpus)
    ]
    for seed in range(options.seeds):
        for gpus, scaling, name in sorted(points, reverse=True):
            yield from ((scaling, name, variant, gpus, seed, kind, options.steps) for kind in SCHEDULES)


def simulate(case: Case) -> Row:
    from tailrace.config.load import load
    from tailrace.sim.sweep import simulate

    scaling, name, variant, gpus, seed, kind, steps = case
    settings = {"cluster.gpus": gpus, "run.seed": seed, "schedule.kind": kind, "run.steps": steps}
    if scaling == "weak":
        settings["workload.prompts_per_step"] = int(gpus * PROMPTS_PER_GPU)
    began = time.monotonic()
    words = [*[f"{key}={value}" for key, value in settings.items()], *variant.split()]
    outcome = simulate(load([CLUSTERS / f"{name}.toml"], [f"--{word}" for word in words]))
    row = dict(zip(NAMES, case, strict=True))
    result = outcome.result
    assert result is not None, outcome.lost
    return row | {
        "tokens_per_s": round(result.tokens_per_s),
        "trainer_idle": round(result.trainer_idle, 3),
        "rollout_idle": round(result.rollout_idle, 3),
        "bound": round(result.bound_tokens_per_s),
        "limit": result.limit,
        "staleness_mean": round(result.staleness.mean, 2),
        "staleness_p95": result.staleness.p95,
        "staleness_max": result.staleness.max,
        "dropped": result.dropped,
        "moved": result.moved,
        "wall_s": round(time.monotonic() - began, 1),
    }


def key(row: Row) -> tuple[Any, ...]:
    return tuple([row[name] for name in NAMES])


def sweep(options: argparse.Namespace) -> None:
    rows: list[Row] = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {key(row) for row in rows}
    todo = [one for one in cases(options) if one not in known]
    with multiprocessing.Pool(options.processes, maxtasksperchild=4) as pool:
        for number, row in enumerate(pool.imap_unordered(simulate, todo), 1):
            rows.append(row)
            options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in sorted(rows, key=key)) + "\n]\n")
            print(f"{number} of {len(todo)}: {row}", flush=True)


def table(out: Path) -> None:
    """The mean of the seeds, and `adaptive` over the better of the two others."""
    rows: list[Row] = json.loads(out.read_text())
    points = sorted({key(row)[:4] for row in rows})
    rates = "partial | trajectory | adaptive | over the better | of the bound | limit"
    print(f"| scaling | set-up | with | GPUs | {rates} | p95 staleness | dropped |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|---|--:|--:|")
    for point in points:
        at = {kind: [row for row in rows if (key(row)[:4], row["schedule"]) == (point, kind)] for kind in SCHEDULES}
        if all(at.values()):
            print(line(point, at))


def line(point: tuple[Any, ...], at: dict[str, list[Row]]) -> str:
    def mean(kind: str, name: str) -> float:
        return statistics.fmean(row[name] for row in at[kind])

    rates = {kind: mean(kind, "tokens_per_s") for kind in SCHEDULES}
    ratio = rates["adaptive"] / max(rates["partial"], rates["trajectory"])
    ages = "/".join(f"{mean(kind, 'staleness_p95'):.1f}" for kind in SCHEDULES)
    dropped = "/".join(f"{mean(kind, 'dropped'):.0f}" for kind in SCHEDULES)
    reached = [f"{rates['adaptive'] / mean('adaptive', 'bound'):.0%}", at["adaptive"][0]["limit"]]
    cells = [*point, *[f"{rate:,.0f}" for rate in rates.values()], f"{ratio:.3f}", *reached, ages, dropped]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scaling", nargs="*", default=["strong", "weak"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="presets whose name has this in it")
    parser.add_argument("--gpus", type=int, default=0, help="only clusters of this size")
    parser.add_argument("--set", action="append", default=[], help="another setting, such as schedule.mixed_share=0.2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        sweep(options)
    table(options.out)


if __name__ == "__main__":
    main()
