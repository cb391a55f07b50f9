"""Does a real model learn sooner without the barrier? SmolLM2-135M-Instruct on one-digit sums, `trajectory` and `sync`.

    python benchmarks/gpu/learning.py [--seeds 2] [--steps 60] [--goal 0.8]

Both kinds start from the same weights, draw the same prompts with the same seeds and train the same number of samples.
Accuracy is the share of right answers among the samples that a step trained on, each drawn by a current policy, as a
mean over a few steps; time is counted from the first sample, so start-up is left out. After each run the held-out
questions are put to the last weights. Runs alternate, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "src"))

RECIPE = ROOT / "examples" / "gpu" / "smollm2_sums.toml"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_learning.json"
KINDS = ("trajectory", "sync")
COLOURS = {"trajectory": "#00866a", "sync": "#d55e00"}
WINDOW = 5  # steps over which accuracy is a mean
Row = dict[str, Any]


def train(kind: str, seed: int, folder: Path, options: argparse.Namespace) -> Row:
    name = f"{kind}-{seed}"
    words = ["--schedule.kind", kind, "--run.seed", str(seed), "--run.folder", str(folder), "--run.name", name]
    words += ["--run.steps", str(options.steps), "--run.evaluate", "false", *options.set]
    began = time.monotonic()
    tailrace("train", str(options.recipe), *words, deadline=options.deadline)
    took = time.monotonic() - began
    return {"kind": kind, "seed": seed, **read(folder / name, options.goal), "process_s": round(took, 1)}


def tailrace(*words: str, deadline: float) -> str:
    """What the command printed. It must succeed."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "tailrace", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=deadline, check=False)
    if done.returncode:
        raise RuntimeError(f"tailrace {words[0]} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def read(run: Path, goal: float) -> Row:
    from tailrace.obs.summary import summarise

    report = summarise(run)
    steps, start = report.history.steps, report.history.began
    seconds = [step.ended - start for step in steps]
    rewards = [step.reward or 0.0 for step in steps]
    means = [fmean(rewards[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(rewards))]
    full = [at for at, mean in enumerate(means) if at >= WINDOW - 1 and mean >= goal]
    return {
        "seconds_to_goal": seconds[full[0]] if full else None,
        "samples_to_goal": sum(step.samples for step in steps[: full[0] + 1]) if full else None,
        "seconds": seconds[-1],
        "last_accuracy": means[-1],
        "samples": report.summary.trained_samples,
        "tokens_per_s": report.summary.tokens_per_s,
        "staleness": report.summary.staleness.mean,
        "trainer_idle": report.summary.trainer_idle,
        "rollout_idle": report.summary.rollout_idle,
        "curve": [[round(second, 3), round(mean, 4)] for second, mean in zip(seconds, means, strict=True)],
    }


def held_out(run: Path, deadline: float) -> float | None:
    """Accuracy of the last weights, as `tailrace eval` prints it."""
    found = re.search(r"accuracy ([0-9.]+)", tailrace("eval", str(run), deadline=deadline))
    return float(found.group(1)) if found else None


# ------------------------------------------------------------------------------------------------------ the comparison


def compare(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for seed in range(options.seeds):
            for kind in KINDS:
                try:
                    row = train(kind, seed, Path(folder), options)
                    row["held_out"] = (
                        held_out(Path(folder) / f"{kind}-{seed}", options.deadline) if options.eval else None
                    )
                except Exception as error:  # the others are still worth having
                    print(f"{kind}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                    print(logs(Path(folder) / f"{kind}-{seed}"), flush=True)
                    continue
                rows.append(row)
                print(json.dumps({name: value for name, value in row.items() if name != "curve"}), flush=True)
                write(rows, options)
    return rows


def logs(run: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(run.glob("logs/*.log")))


def mean_of(rows: list[Row], kind: str, name: str) -> float | None:
    """Over the seeds; None where one of them never got there."""
    found = [row[name] for row in rows if row["kind"] == kind]
    return fmean(found) if found and None not in found else None


def write(rows: list[Row], options: argparse.Namespace) -> None:
    times = {kind: mean_of(rows, kind, "seconds_to_goal") for kind in KINDS}
    sooner = times["sync"] / times["trajectory"] if times["sync"] and times["trajectory"] else None
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"goal": options.goal, "sooner": sooner, "runs": rows}, indent=1) + "\n")


def table(rows: list[Row], goal: float) -> None:
    print(f"\n{'':11} {f's to {goal:.0%}':>10} {'s in all':>9} {'last':>6} {'held out':>9} {'staleness':>10}")
    for kind in KINDS:
        figures = [mean_of(rows, kind, name) for name in ("seconds_to_goal", "seconds", "last_accuracy", "held_out")]
        shown = ["-" if figure is None else f"{figure:.3g}" for figure in (*figures, mean_of(rows, kind, "staleness"))]
        print(f"{kind:11} {shown[0]:>10} {shown[1]:>9} {shown[2]:>6} {shown[3]:>9} {shown[4]:>10}")


def draw(rows: list[Row], goal: float, path: Path) -> None:
    """Accuracy over the seconds since the first sample; one line per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        seconds, accuracy = zip(*row["curve"], strict=True)
        label = row["kind"] if row["seed"] == 0 else None
        axes.plot(seconds, accuracy, color=COLOURS[row["kind"]], linewidth=1.6, alpha=0.9, label=label)
    axes.axhline(goal, color="#6b6b6b", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(
        xlabel="seconds since the first sample",
        ylabel=f"accuracy (mean of {WINDOW} steps)",
        ylim=(0, 1),
        xlim=(0, None),
    )
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(str(path), dpi=180, facecolor="white", format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--goal", type=float, default=0.8)
    parser.add_argument("--no-eval", dest="eval", action="store_false", help="leave out the held-out questions")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=None, help="PNG of the curves; unset: beside --out")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of the runs, last")
    options = parser.parse_args()
    rows = compare(options)
    if not rows:
        raise SystemExit("no run came to an end")
    table(rows, options.goal)
    draw(rows, options.goal, options.picture or options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
