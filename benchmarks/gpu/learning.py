"""Does a real model learn sooner without the barrier? SmolLM2-135M-Instruct on one-digit sums.

    python benchmarks/gpu/learning.py [--seeds 2] [--steps 100] [--goal 0.8] [--kinds adaptive trajectory sync]

All kinds start from the same weights, draw the same prompts with the same seeds and train the same number of samples.
Accuracy is the share of right answers among the last 1,024 that were given, at the moment when they were given; time is
counted from the first sample. A short run before all others, not counted, fills torch's and Triton's caches. After each
run the held-out questions are put to the last weights (unless --no-eval). Runs alternate, so that whatever else the
machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
from processes import ROOT, tailrace, tails, trained_mini_batches  # noqa: E402

RECIPE = ROOT / "examples" / "gpu" / "smollm2_sums.toml"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_learning.json"
COLOURS = {"adaptive": "#0072b2", "trajectory": "#00866a", "sync": "#d55e00"}
KINDS = tuple(COLOURS)
WINDOW = 1024  # answers over which accuracy is a mean
POINTS = 200  # of a curve
WARM_UP = 3  # steps
FOREVER = 1_000_000  # steps
LISTS = ("curve", "steps")
Row = dict[str, Any]


def train(kind: str, seed: int, steps: int, folder: Path, options: argparse.Namespace) -> Path:
    """The folder of a run of so many steps. Unless somebody wants its last weights it goes on until it is stopped: that
    is quicker than to end with a checkpoint."""
    run, log = folder / f"{kind}-{seed}-{steps}", folder / f"{kind}-{seed}-{steps}.log"
    words = ["--schedule.kind", kind, "--run.seed", str(seed), "--run.folder", str(folder), "--run.name", run.name]
    words += ["--trainer.mini_batches", "1", "--run.steps", str(steps if options.eval else FOREVER)]
    words += ["--run.evaluate", "false", *options.set]
    code = tailrace(
        ["train", str(options.recipe), *words],
        log,
        options.deadline,
        enough=lambda: not options.eval and trained_mini_batches(run) >= steps,
    )
    if code != 0 and trained_mini_batches(run) < steps:
        raise RuntimeError(f"tailrace train ended with {code} before it was done\n{tails(run, log)}")
    return run


def read(run: Path, steps: int, goal: float) -> Row:
    from tailrace.obs.summary import summarise

    report = summarise(run)
    summary, live = report.summary, report.live
    done, start = live.fold.steps[:steps], live.first_sample_at
    curve = [(now - start, mean) for now, mean in answered(run) if now <= done[-1].ended]
    return {
        "seconds_to_goal": next((second for second, mean in curve if mean >= goal), None),
        "seconds": done[-1].ended - start,
        "last": curve[-1][1],
        "samples": sum(step.samples for step in done),
        "staleness": summary.staleness.mean,
        "trainer_idle": summary.trainer_idle,
        "rollout_idle": summary.rollout_idle,
        "restarts": restarts(run),
        "curve": [[round(second, 3), round(mean, 4)] for second, mean in thinned(curve)],
        "steps": [(round(step.ended - start, 2), round(step.reward or 0.0, 4), step.tokens) for step in done],
    }


def answered(run: Path) -> list[tuple[float, float]]:
    """When an answer was given, and the share of right ones among it and those before it."""
    from tailrace.protocol import Finished
    from tailrace.store.journal import Journal

    given = [(entry.now, entry.event.meta) for entry in Journal(run).entries() if type(entry.event) is Finished]
    sums = [0.0, *accumulate(meta.reward or 0.0 for _, meta in given)]
    return [(given[at - 1][0], (sums[at] - sums[at - WINDOW]) / WINDOW) for at in range(WINDOW, len(sums))]


def restarts(run: Path) -> int:
    """Of components; a run in which there were any is not one to compare with."""
    from tailrace.protocol import RunStarted, Start
    from tailrace.store.journal import Journal

    later = [entry for entry in Journal(run).entries() if not isinstance(entry.event, RunStarted)]
    return sum(isinstance(command, Start) for entry in later for command in entry.commands)


def thinned(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = max(1, len(curve) // POINTS)
    return [*curve[:-1:every], *curve[-1:]]


def held_out(run: Path, deadline: float) -> float:
    """Accuracy of the last weights, as `tailrace eval` prints it."""
    log = run.with_suffix(".eval.log")
    tailrace(["eval", str(run)], log, deadline)
    found = re.search(r"accuracy ([0-9.]+)", log.read_text())
    if found is None:
        raise RuntimeError(f"tailrace eval came to no figure\n{tails(run, log)}")
    return float(found.group(1))


# ------------------------------------------------------------------------------------------------------ the comparison


def compare(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        train(options.kinds[0], 0, WARM_UP, Path(folder), argparse.Namespace(**vars(options) | {"eval": False}))
        for seed in range(options.seeds):
            for kind in options.kinds:
                try:
                    rows.append(measure(kind, seed, Path(folder), options))
                except RuntimeError as error:  # the others are still worth having
                    print(f"{kind}, seed {seed}: {error}", flush=True)
                    continue
                print(json.dumps({n: value for n, value in rows[-1].items() if n not in LISTS}), flush=True)
                write(rows, options)
    return rows


def measure(kind: str, seed: int, folder: Path, options: argparse.Namespace) -> Row:
    run = train(kind, seed, options.steps, folder, options)
    after = held_out(run, options.deadline) if options.eval else None
    return {"kind": kind, "seed": seed, "held_out": after, **read(run, options.steps, options.goal)}


def mean_of(rows: list[Row], kind: str, name: str) -> float | None:
    """Over the seeds; None where one of them never got there."""
    found = [row[name] for row in rows if row["kind"] == kind]
    return fmean(found) if found and None not in found else None


def write(rows: list[Row], options: argparse.Namespace) -> None:
    times = {kind: mean_of(rows, kind, "seconds_to_goal") for kind in KINDS}
    sooner = {kind: times["sync"] / other for kind, other in times.items() if times["sync"] and other}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"goal": options.goal, "sooner": sooner, "runs": rows}) + "\n")


def table(rows: list[Row], goal: float) -> None:
    print(f"\n{'':11} {f's to {goal:.0%}':>10} {'s in all':>9} {'last':>6} {'held out':>9} {'staleness':>10}")
    for kind in KINDS:
        figures = [
            mean_of(rows, kind, name) for name in ("seconds_to_goal", "seconds", "last", "held_out", "staleness")
        ]
        shown = ["-" if figure is None else f"{figure:.3g}" for figure in figures]
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
        ylabel=f"right among the last {WINDOW:,} answers",
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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
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
