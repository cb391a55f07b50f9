"""What do the filters of prompts that teach nothing save? On a mixture of too easy, useful and too hard prompts.

    python benchmarks/filters.py [--seed-list 0 1 2] [--goals 0.8 0.85]     # the default recipe's mixture, two cores
    python benchmarks/filters.py --gpu                                      # SmolLM2-135M on one GPU

Three arms from the same weights, over the same prompts: no filter, dynamic sampling alone (DAPO: groups without
advantage are left out once they are complete), and all filters with their default settings. A step of the first has
several times as many groups as one of the others, so that about as many have an advantage: `useful_groups` says how
many there were for each step, in the mean. All arms train for the same number of steps.

Held-out accuracy is on useful questions that no run has trained on. On the CPU every checkpoint is evaluated after the
run. On a GPU, where a checkpoint would stop the trainer for several steps, the replica evaluates beside its work
(`eval.every`), which is part of the run's seconds. A goal is reached where the line between two evaluations crosses it.
Generated tokens are those of all finished samples of training, without prompts. Seconds are counted from the first
sample. Results are written after every run. With --runs FOLDER runs are kept there, and those that are there already
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "gpu"), str(HERE.parent / "src")]
from processes import ROOT, tailrace, tails  # noqa: E402

ARMS = {"none": "none", "dynamic sampling": "zero_advantage", "all filters": "all"}
PER_STEP = {False: 72, True: 96}  # groups of a step without filters; with them as the recipe says
RECIPES = {False: "running_total/mixed.toml", True: "gpu/mixed_sums.toml"}
RESULTS = {False: "filters.json", True: "gpu_filters.json"}
DIFFICULTIES = ("easy", "useful", "hard")  # of a row, by its number modulo 3
Row = dict[str, Any]


class Progress:
    """What a journal says of a run: tokens, versions, groups with an advantage, and visits by difficulty."""

    def __init__(self, run: Path, group_size: int) -> None:
        self.run, self.group_size = run, group_size
        self.rows: dict[int, int] = {}  # of a prompt
        self.prompts: dict[int, int] = {}  # of a group
        self.tokens = 0
        self.evaluated = 0  # tokens of evaluations while training: part of the run's seconds
        self.visits: dict[int, Counter[int]] = {}  # prompts generated, by row, for each difficulty
        self.spent = Counter[int]()  # tokens, for each difficulty
        self.rewards: dict[int, set[float | None]] = {}  # of a group
        self.solved: set[int] = set()  # rows that were answered right
        self.versions: dict[int, tuple[float, int]] = {}  # when each was made, and tokens until then
        self.accuracy: dict[int, float] = {}  # held-out, of versions that were evaluated while training
        self.first: float | None = None

    def read(self) -> Progress:
        from tailrace.store.journal import Journal

        for entry in Journal(self.run).entries():
            self.see(entry)
        return self

    def see(self, entry: Any) -> None:
        from tailrace.protocol import Finished, Generate, PromptsAdded, RecordEvaluation, Trained
        from tailrace.types import EVALUATION

        if isinstance(entry.event, PromptsAdded):
            self.rows |= {prompt.id: prompt.row for prompt in entry.event.prompts}
        elif isinstance(entry.event, Finished) and entry.event.meta.id >= EVALUATION:
            self.evaluated += entry.event.meta.tokens
        elif isinstance(entry.event, Finished):
            self._answered(entry.event.meta)
        elif isinstance(entry.event, Trained):
            self.versions[entry.event.step + 1] = entry.now, self.tokens
        for command in entry.commands:
            if isinstance(command, Generate):
                self.first = entry.now if self.first is None else self.first
                self._given(command)
            elif isinstance(command, RecordEvaluation):
                self.accuracy[command.version] = command.results[0].accuracy

    def _given(self, command: Any) -> None:
        for request in command.requests:
            if request.group not in self.prompts:
                self.prompts[request.group] = request.prompt
                row = self.rows[request.prompt]
                self.visits.setdefault(row % 3, Counter())[row] += 1

    def _answered(self, meta: Any) -> None:
        group = meta.id // self.group_size
        self.tokens += meta.tokens
        row = self.rows[self.prompts[group]]
        self.spent[row % 3] += meta.tokens
        self.solved |= {row} if meta.reward else set()
        self.rewards.setdefault(group, set()).add(meta.reward)

    @property
    def useful_groups(self) -> float:
        """For each step, of all that were generated."""
        return sum(len(rewards) > 1 for rewards in self.rewards.values()) / max(1, len(self.versions))


def train(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> Progress:
    """A run of as many steps as there is time for."""
    from tailrace.errors import TailraceError

    run, log = folder / f"{ARMS[arm]}-{seed}", folder / f"{ARMS[arm]}-{seed}.log"
    words = ["--groups.filter", ARMS[arm], "--run.seed", str(seed), "--run.folder", str(folder), "--run.name", run.name]
    words += ["--run.steps", str(options.steps), "--run.evaluate", "false"]
    words += ["--workload.prompts_per_step", str(PER_STEP[options.gpu])] if arm == "none" else []
    evaluating = ["eval.every"] if options.gpu else ["trainer.checkpoint_every", "trainer.archive_every"]
    words += [word for name in evaluating for word in (f"--{name}", str(options.every))]
    if not (run / "summary.json").exists():
        tailrace(["train", str(options.recipe), *words, *options.set], log, options.deadline)
    progress = Progress(run, options.group_size)
    with suppress(TailraceError):  # no journal
        progress.read()
    if not progress.versions:
        raise RuntimeError(f"tailrace train ended before a step was done\n{tails(run, log)}")
    return progress


def evaluated(progress: Progress) -> list[tuple[int, float]]:
    """Versions and their held-out accuracy: those that were evaluated while training, or the start and every
    checkpoint."""
    from tailrace.trainer.manifest import found_in, step_of

    if progress.accuracy:
        return sorted(progress.accuracy.items())
    run = progress.run
    kept = run / "held_out.json"
    if not kept.exists():
        versions = [0, *sorted(step_of(path) for path in found_in(run / "checkpoints"))]
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose memory, of the GPU too, is free afterwards
            found = pool.map(accuracy, [run] * len(versions), versions)
            kept.write_text(json.dumps(dict(zip(versions, found, strict=True))))
    return [(int(version), right) for version, right in json.loads(kept.read_text()).items()]


def accuracy(run: Path, version: int) -> float:
    """One after the other in one process: that is set up once."""
    from msgspec.structs import replace

    from tailrace.launch.models import weights_of
    from tailrace.rollout.evaluate import evaluate
    from tailrace.store.journal import Journal

    journal = Journal(run)
    config, weights = journal.config, weights_of(journal, version)
    model = config.model if weights is None else replace(config.model, path=str(weights))
    *_, last = evaluate(replace(config, model=model))
    return last.results[0].accuracy


def measured(arm: str, seed: int, progress: Progress, options: argparse.Namespace) -> Row:
    from tailrace.obs.summary import summarise

    summary = summarise(progress.run).summary
    start = progress.first or 0.0
    at = {0: (start, 0)} | progress.versions
    curve = [(at[v][0] - start, at[v][1], right) for v, right in evaluated(progress) if v in at]
    return {
        "arm": arm,
        "seed": seed,
        "seconds_to": {goal: crossing([(x, y) for x, _, y in curve], goal) for goal in options.goals},
        "tokens_to": {goal: crossing([(x, y) for _, x, y in curve], goal) for goal in options.goals},
        "steps": len(progress.versions),
        "last": curve[-1][2],
        "curve": curve,
        "tokens": {name: progress.spent[kind] for kind, name in enumerate(DIFFICULTIES)},
        "evaluation_tokens": progress.evaluated,
        "useful_groups": progress.useful_groups,
        "staleness": vars_of(summary.staleness),
        "visits": {name: visits_of(progress, kind) for kind, name in enumerate(DIFFICULTIES)},
        "ledger": vars_of(summary.ledger),
        "savings": vars_of(summary.savings),
        "trainer_idle": summary.trainer_idle,
        "rollout_idle": summary.rollout_idle,
    }


def visits_of(progress: Progress, kind: int) -> Row:
    """Of the rows of one difficulty that ever came up: visits in all, the fewest that a row got, and the rows that were
    never answered right. Useful ones of those would be starved, if there are more of them than without filters."""
    shown = {row for row in progress.rows.values() if row % 3 == kind}
    visits = progress.visits.get(kind, Counter())
    fewest = min((visits[row] for row in shown), default=0)
    return {"rows": len(shown), "visits": visits.total(), "fewest": fewest, "unsolved": len(shown - progress.solved)}


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
    if options.runs:
        options.runs.mkdir(parents=True, exist_ok=True)
    for seed in options.seed_list:
        kept = nullcontext(options.runs) if options.runs else TemporaryDirectory(ignore_cleanup_errors=True)
        with kept as folder:
            for row in of_seed(seed, Path(folder), options):
                rows.append(row)
                print(json.dumps({name: value for name, value in row.items() if name != "curve"}), flush=True)
        write(rows, options)
    return rows


def of_seed(seed: int, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Its arms are trained one after the other, so that their seconds can be compared; then all are evaluated."""
    done = [progress for arm in options.arms if (progress := trained(arm, seed, folder, options))]
    with ThreadPoolExecutor(options.evaluations) as pool:
        list(pool.map(evaluated, [progress for _, progress in done]))
    for arm, progress in done:
        yield measured(arm, seed, progress, options)


def trained(arm: str, seed: int, folder: Path, options: argparse.Namespace) -> tuple[str, Progress] | None:
    try:
        return arm, train(arm, seed, folder, options)
    except RuntimeError as error:  # the others are still worth having
        print(f"{arm}, seed {seed}: {error}", flush=True)
        return None


def ratios(rows: list[Row], goals: list[float]) -> Row:
    """Of the other arms over all filters; of means over the seeds, None where one never got there."""

    def over(arm: str, name: str, goal: float) -> float | None:
        base, ours = mean_of(rows, arm, name, goal), mean_of(rows, "all filters", name, goal)
        return base / ours if base and ours else None

    others = [arm for arm in ARMS if arm != "all filters"]
    names = ("tokens_to", "seconds_to")
    return {f"{name} {goal}, {arm}": over(arm, name, goal) for goal in goals for arm in others for name in names}


def mean_of(rows: list[Row], arm: str, name: str, goal: float) -> float | None:
    found = [row[name][goal] for row in rows if row["arm"] == arm]
    return fmean(found) if found and None not in found else None


def write(rows: list[Row], options: argparse.Namespace) -> None:
    content = {
        "recipe": options.recipe.name,
        "condition": options.condition,
        "over all filters": ratios(rows, options.goals),
    }
    options.out.write_text(json.dumps(content | {"runs": rows}, indent=1) + "\n")


def table(rows: list[Row], goals: list[float]) -> None:
    print(
        f"{'arm':17} {'tokens to goals':>24} {'s to goals':>16} {'last':>6}  visits of easy, useful, hard (never right)"
    )
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if mine:
            tokens, seconds = (figures(rows, arm, name, goals) for name in ("tokens_to", "seconds_to"))
            last = fmean(row["last"] for row in mine)
            print(f"{arm:17} {tokens:>24} {seconds:>16} {last:6.3f}  {', '.join(visits_text(mine))}")
    for name, value in ratios(rows, goals).items():
        print(f"{name} over all filters: {'-' if value is None else f'{value:.2f}'}")


def figures(rows: list[Row], arm: str, name: str, goals: list[float]) -> str:
    means = [mean_of(rows, arm, name, goal) for goal in goals]
    return " ".join("-" if mean is None else f"{mean:,.0f}" for mean in means)


def visits_text(rows: list[Row]) -> list[str]:
    found = [[row["visits"][name] for row in rows] for name in DIFFICULTIES]
    return [f"{fmean(one['visits'] for one in some):,.0f} ({max(one['unsolved'] for one in some)})" for some in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="SmolLM2-135M on one GPU instead of the default recipe")
    parser.add_argument("--seed-list", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--goals", nargs="+", type=float, help="held-out accuracy; 0.8 and 0.85, on a GPU 0.8 and 0.9")
    parser.add_argument("--steps", type=int, default=None, help="30, on a GPU 60")
    parser.add_argument("--every", type=int, default=None, help="steps between two evaluations; 2, on a GPU 8")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--recipe", type=Path, default=None)
    parser.add_argument("--deadline", type=float, default=None, help="seconds for one run; 600, on a GPU 100")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--runs", type=Path, default=None, help="folder in which runs are kept; unset: they are not")
    parser.add_argument("--evaluations", type=int, default=1, help="runs that are evaluated at a time")
    parser.add_argument("--condition", default="", help="of the machine, in words, for the file of results")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of the runs, last")
    options = parser.parse_args()
    options.recipe = options.recipe or ROOT / "examples" / RECIPES[options.gpu]
    options.out = options.out or ROOT / "benchmarks" / "results" / RESULTS[options.gpu]
    options.steps = options.steps or (60 if options.gpu else 30)
    options.goals = options.goals or [0.8, 0.9 if options.gpu else 0.85]
    options.every = options.every or (8 if options.gpu else 2)
    options.deadline = options.deadline or (100.0 if options.gpu else 600.0)
    rows = compare(options)
    if not rows:
        raise SystemExit("no run came to an end")
    table(rows, options.goals)


if __name__ == "__main__":
    main()
