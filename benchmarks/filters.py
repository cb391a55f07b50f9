"""What do the filters of prompts that teach nothing save? On a mixture of too easy, useful and too hard prompts.

    python benchmarks/filters.py [--seeds 3] [--goal 0.8]      # the default recipe's mixture, two cores
    python benchmarks/filters.py --gpu                         # SmolLM2-135M on one GPU

Three arms from the same weights, over the same prompts: no filter, dynamic sampling alone (DAPO: groups without
advantage are left out once they are complete), and all filters with their default settings. A step of the first has
four times as many groups as one of the others (32 and 8, on the GPU 96 and 24), of which about a quarter has an
advantage. So a step of each arm teaches about as much, and what differs is what it costs. A run ends when the useful
prompts are answered well enough, or after --steps.

Held-out accuracy is that of every checkpoint, on useful questions that no run has trained on. The goal is reached where
the line between two checkpoints crosses it. Generated tokens are those of all finished samples, without prompts.
Seconds are counted from the first sample, without evaluations. Results are written after every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "gpu"), str(HERE.parent / "src")]
from processes import ROOT, tailrace, tails  # noqa: E402

ARMS = {"none": "none", "dynamic sampling": "zero_advantage", "all filters": "all"}
PER_STEP = {False: 32, True: 96}  # groups of a step without filters; with them as the recipe says, a quarter
RECIPES = {False: "running_total/mixed.toml", True: "gpu/mixed_sums.toml"}
RESULTS = {False: "filters.json", True: "gpu_filters.json"}
DIFFICULTIES = ("easy", "useful", "hard")  # of a row, by its number modulo 3
WINDOW = 256  # answers to useful prompts over which accuracy is a mean
STARTS: dict[int, float] = {}  # held-out accuracy of the start weights, by seed
Row = dict[str, Any]


class Progress:
    """How far a run is, from its journal: answers to useful prompts, tokens, and visits by difficulty."""

    def __init__(self, run: Path, group_size: int) -> None:
        self.run, self.group_size = run, group_size
        self.seen = 0  # events
        self.rows: dict[int, int] = {}  # of a prompt
        self.prompts: dict[int, int] = {}  # of a group
        self.tokens = 0
        self.visits: dict[int, Counter[int]] = {}  # prompts generated, by row, for each difficulty
        self.right: list[float] = []  # of the first samples of useful prompts: later ones depend on these
        self.versions: dict[int, tuple[float, int]] = {}  # when each was made, and tokens until then
        self.first: float | None = None

    def read(self) -> Progress:
        """What the journal has got since the last time; nothing while there is none."""
        from tailrace.errors import TailraceError
        from tailrace.store.journal import Journal

        with suppress(TailraceError):
            for entry in Journal(self.run).entries(self.seen):
                self.see(entry)
                self.seen = entry.seq
        return self

    def see(self, entry: Any) -> None:
        from tailrace.protocol import Finished, Generate, PromptsAdded, Trained

        if isinstance(entry.event, PromptsAdded):
            self.rows |= {prompt.id: prompt.row for prompt in entry.event.prompts}
        elif isinstance(entry.event, Finished):
            self._answered(entry.event.meta)
        elif isinstance(entry.event, Trained):
            self.versions[entry.event.step + 1] = entry.now, self.tokens
        for command in entry.commands:
            if isinstance(command, Generate):
                self.first = entry.now if self.first is None else self.first
                self._given(command)

    def _given(self, command: Any) -> None:
        for request in command.requests:
            if request.group not in self.prompts:
                self.prompts[request.group] = request.prompt
                row = self.rows[request.prompt]
                self.visits.setdefault(row % 3, Counter())[row] += 1

    def _answered(self, meta: Any) -> None:
        group, member = divmod(meta.id, self.group_size)
        self.tokens += meta.tokens
        if self.rows[self.prompts[group]] % 3 == 1 and 2 * member < self.group_size:
            self.right.append(meta.reward or 0.0)

    @property
    def accuracy(self) -> float:
        return fmean(self.right[-WINDOW:]) if len(self.right) >= WINDOW else 0.0


def train(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> Progress:
    """A run that went on until its useful prompts were answered well."""
    run, log = folder / f"{ARMS[arm]}-{seed}", folder / f"{ARMS[arm]}-{seed}.log"
    words = ["--groups.filter", ARMS[arm], "--run.seed", str(seed), "--run.folder", str(folder), "--run.name", run.name]
    words += ["--run.steps", str(options.steps), "--run.evaluate", "false"]
    words += ["--workload.prompts_per_step", str(PER_STEP[options.gpu])] if arm == "none" else []
    words += ["--trainer.checkpoint_every", str(options.every), "--trainer.archive_every", str(options.every)]
    progress = Progress(run, options.group_size)
    code = tailrace(
        ["train", str(options.recipe), *words, *options.set],
        log,
        options.deadline,
        enough=lambda: progress.read().accuracy >= options.goal + options.margin,
    )
    if not progress.read().versions:
        raise RuntimeError(f"tailrace train ended with {code} before a step was done\n{tails(run, log)}")
    return progress


def evaluated(run: Path, seed: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Every checkpoint, and its held-out accuracy; the start first, which is the same for all arms."""
    from tailrace.launch.evaluation import measure
    from tailrace.launch.models import weights_of
    from tailrace.store.journal import Journal
    from tailrace.trainer.manifest import found_in, step_of

    journal = Journal(run)
    versions = [0, *sorted(step_of(path) for path in found_in(run / "checkpoints"))]

    def accuracy(version: int) -> float:
        if version == 0 and seed in STARTS:
            return STARTS[seed]
        return measure(journal.config, weights_of(journal, version), lambda done, total: None).accuracy

    with ThreadPoolExecutor(options.evaluations) as pool:  # each is a process
        found = list(zip(versions, pool.map(accuracy, versions), strict=True))
    STARTS[seed] = found[0][1]
    return found


def measured(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> Row:
    from tailrace.obs.summary import summarise

    progress = train(arm, seed, folder, options)
    summary = summarise(progress.run).summary
    start = progress.first or 0.0
    at = {0: (start, 0)} | progress.versions
    curve = [
        (at[v][0] - start, at[v][1], accuracy) for v, accuracy in evaluated(progress.run, seed, options) if v in at
    ]
    return {
        "arm": arm,
        "seed": seed,
        "seconds_to_goal": crossing([(x, y) for x, _, y in curve], options.goal),
        "tokens_to_goal": crossing([(x, y) for _, x, y in curve], options.goal),
        "steps": len(progress.versions),
        "last": curve[-1][2],
        "curve": curve,
        "visits": {name: visits_of(progress, kind) for kind, name in enumerate(DIFFICULTIES)},
        "ledger": vars_of(summary.ledger),
        "savings": vars_of(summary.savings),
        "trainer_idle": summary.trainer_idle,
        "rollout_idle": summary.rollout_idle,
    }


def visits_of(progress: Progress, kind: int) -> Row:
    """Of the rows of one difficulty that ever came up: visits in all, and the fewest that a row got."""
    shown = {row for row in progress.rows.values() if row % 3 == kind}
    visits = progress.visits.get(kind, Counter())
    return {"rows": len(shown), "visits": visits.total(), "fewest": min((visits[row] for row in shown), default=0)}


def vars_of(struct: Any) -> Row:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def crossing(points: list[tuple[float, float]], goal: float) -> float | None:
    """Where the line through these first reaches the goal."""
    for (x, y), (later, higher) in pairwise(points):
        if y < goal <= higher:
            return x + (later - x) * (goal - y) / (higher - y)
    return None


# ------------------------------------------------------------------------------------------------------ the comparison


def compare(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for arm in options.arms:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    rows.append(measured(arm, seed, Path(folder), options))
                except RuntimeError as error:  # the others are still worth having
                    print(f"{arm}, seed {seed}: {error}", flush=True)
                    continue
            print(json.dumps({name: value for name, value in rows[-1].items() if name != "curve"}), flush=True)
            write(rows, options)
    return rows


def ratios(rows: list[Row]) -> Row:
    """Means over the seeds; None where one never got there."""
    means = {(arm, name): mean_of(rows, arm, name) for arm in ARMS for name in ("tokens_to_goal", "seconds_to_goal")}

    def over(arm: str, name: str) -> float | None:
        base, ours = means[arm, name], means["all filters", name]
        return base / ours if base and ours else None

    return {f"{name} of {arm} over all filters": over(arm, name) for arm, name in means if arm != "all filters"}


def mean_of(rows: list[Row], arm: str, name: str) -> float | None:
    found = [row[name] for row in rows if row["arm"] == arm]
    return fmean(found) if found and None not in found else None


def write(rows: list[Row], options: argparse.Namespace) -> None:
    content = {"goal": options.goal, "recipe": options.recipe.name, **ratios(rows), "runs": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def table(rows: list[Row]) -> None:
    print(f"{'arm':17} {'tokens to goal':>15} {'s to goal':>10} {'last':>6}  visits (fewest) easy, useful, hard")
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        figures = [mean_of(rows, arm, name) for name in ("tokens_to_goal", "seconds_to_goal", "last")]
        shown = [
            "-" if figure is None else f"{figure:,.3g}" if figure < 1000 else f"{figure:,.0f}" for figure in figures
        ]
        visits = [
            f"{fmean(row['visits'][name]['visits'] for row in mine):,.0f} "
            f"({min(row['visits'][name]['fewest'] for row in mine)})"
            for name in DIFFICULTIES
        ]
        print(f"{arm:17} {shown[0]:>15} {shown[1]:>10} {shown[2]:>6}  {', '.join(visits)}")
    for name, value in ratios(rows).items():
        print(f"{name}: {'-' if value is None else f'{value:.2f}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="SmolLM2-135M on one GPU instead of the default recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--goal", type=float, default=0.8, help="held-out accuracy")
    parser.add_argument("--margin", type=float, default=0.03, help="a run ends this far above the goal")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=None, help="steps between two checkpoints; 5, on a GPU 10")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--recipe", type=Path, default=None)
    parser.add_argument("--deadline", type=float, default=None, help="seconds for one run; 600, on a GPU 60")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of the runs, last")
    options = parser.parse_args()
    options.recipe = options.recipe or ROOT / "examples" / RECIPES[options.gpu]
    options.out = options.out or ROOT / "benchmarks" / "results" / RESULTS[options.gpu]
    options.every = options.every or (10 if options.gpu else 5)
    options.evaluations = 4 if options.gpu else 1
    options.deadline = options.deadline or (60.0 if options.gpu else 600.0)
    rows = compare(options)
    if not rows:
        raise SystemExit("no run came to an end")
    table(rows)


if __name__ == "__main__":
    main()
