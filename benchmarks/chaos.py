"""What failures cost, on real runs of this machine that are broken on purpose.

    python benchmarks/chaos.py soak        # 30 minutes of random faults against native runs, and undisturbed ones
    python benchmarks/chaos.py isolation   # a fleet of 4 emulated replicas: who feels the loss of whom
    python benchmarks/chaos.py recovery    # the same fleet: seconds until a loss is known, made good, and shows
    python benchmarks/chaos.py all [--short]

Adds to benchmarks/results/chaos.json. The faults and the proof are those of tests/chaos. Full and slow disks need root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

import fleet  # noqa: E402
from faults import KINDS, REWARD, Fault, Struck, can_mount, plan, small_disk  # noqa: E402
from proof import Proof, prove  # noqa: E402
from torment import by_kind, torment  # noqa: E402
from victim import HangError, Victim, victim  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
RECIPE = (ROOT / "examples" / "running_total" / "running_total.toml").read_text()
TASK = ROOT / "tests" / "chaos" / REWARD
MOST_CHANGE = 0.10
console = Console()


# ---------------------------------------------------------------------------------------------------------------- soak


class Outcome(NamedTuple):
    """One run of the recipe: what was done to it, what the proof counted, and how well it learned."""

    seed: int
    struck: list[Struck]
    proof: Proof
    reward: float  # mean of the last steps
    seconds: float
    resumed: int


def soak(minutes: float, faults: int, steps: int, pause_s: float, seed: int) -> dict[str, Any]:
    """Runs of the recipe under faults until the time is over and there were enough; then the same ones undisturbed."""
    kinds = [kind for kind in KINDS if can_mount() or not kind.startswith("disk")]
    disturbed: list[Outcome] = []
    began = time.monotonic()
    while time.monotonic() - began < minutes * 60 or sum(len(one.struck) for one in disturbed) < faults:
        number = seed + len(disturbed)
        disturbed.append(one_run(number, steps, plan(number, pause_s, kinds)))
        console.print(
            f"run {number}: {len(disturbed[-1].struck)} faults in {disturbed[-1].seconds:.0f} s, "
            f"reward {disturbed[-1].reward:.3f}, proved"
        )
    calm = [one_run(one.seed, steps, None) for one in disturbed]
    return show_soak(disturbed, calm, time.monotonic() - began)


def one_run(seed: int, steps: int, faults: Iterator[Fault] | None) -> Outcome:
    began = time.monotonic()
    options = [
        "--run.seed",
        str(seed),
        "--run.steps",
        str(steps),
        "--run.evaluate",
        "false",
        "--local.relays",
        "2",
        "--local.listen",
        "127.0.0.1",  # for liars with a key
        "--model.path",
        str(ROOT / "examples" / "running_total" / "start"),
        "--task.reward_timeout_s",
        "3",
        "--health.backoff_s",
        "0.5",
        "--health.backoff_max_s",
        "4",
        "--health.max_restarts",
        "20",
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        small_disk(Path(folder) / "disk", 512) as disk,
        victim(disk / "run", RECIPE, *options, *own_task(Path(folder)), trouble=Path(folder) / "trouble") as run,
        kept_if_broken(run, seed),
    ):
        struck = torment(run, faults) if faults is not None else undisturbed(run)
        return Outcome(seed, struck, prove(run.folder), final_reward(run), time.monotonic() - began, run.resumed)


def own_task(folder: Path) -> tuple[str, str]:
    """Its rewards are in a file of the run's own, which can be replaced."""
    (folder / "trouble").mkdir()
    return "--task.name", f"{shutil.copy(TASK, folder / 'trouble')}:Troubled"


@contextmanager
def kept_if_broken(run: Victim, seed: int) -> Iterator[None]:
    """What a post-mortem needs: the folder of a run that hangs or of which something cannot be proved."""
    try:
        yield
    except AssertionError:
        kept = ROOT / "runs" / f"broken-{seed}"
        shutil.copytree(run.folder, kept, dirs_exist_ok=True)
        console.print(f"{run.folder} is kept as {kept}")
        raise


def undisturbed(run: Victim) -> list[Struck]:
    run.start()
    run.wait_until(run.ended, "its end", 1800)
    assert run.child is not None
    assert run.child.returncode == 0, run.said()
    return []


def final_reward(run: Victim, share: float = 0.2) -> float:
    """Mean reward of what the last steps were trained on; extreme ones say nothing about the policy."""
    [(last,)] = run.query("SELECT max(step) FROM trajectories")
    query = "SELECT avg(reward) FROM trajectories WHERE step > ? AND reward BETWEEN 0 AND 1"
    [(mean,)] = run.query(query, last * (1 - share))
    return mean


def show_soak(disturbed: list[Outcome], calm: list[Outcome], seconds: float) -> dict[str, Any]:
    struck = Counter[str]()
    for one in disturbed:
        struck += by_kind(one.struck)
    table = Table(
        "fault", "times", title=f"{struck.total()} faults in {sum(o.seconds for o in disturbed) / 60:.1f} min"
    )
    for kind, count in struck.most_common():
        table.add_row(kind, str(count))
    console.print(table)
    rewards, undisturbed_ = [one.reward for one in disturbed], [one.reward for one in calm]
    spread = max(statistics.stdev(undisturbed_) if len(calm) > 1 else 0.02, 0.005)
    apart = statistics.mean(rewards) - statistics.mean(undisturbed_)
    noise = 2 * spread * (2 / len(calm)) ** 0.5
    console.print(f"{len(disturbed)} runs, each proved: nothing lost, doubled, broken or hanging would have passed")
    console.print(
        f"reward at the end {statistics.mean(rewards):.3f}, undisturbed {statistics.mean(undisturbed_):.3f}: "
        f"{apart:+.3f}, seed noise {noise:.3f}"
    )
    return {
        "faults": dict(struck),
        "total": struck.total(),
        "minutes": sum(o.seconds for o in disturbed) / 60,
        "runs": len(disturbed),
        "steps": sum(o.proof.steps for o in disturbed),
        "trained_groups": sum(o.proof.trained for o in disturbed),
        "stale": sum(o.proof.dropped for o in disturbed),
        "failed_groups": sum(o.proof.failed for o in disturbed),
        "repeated_parts": sum(o.proof.repeated for o in disturbed),
        "resumed": sum(o.resumed for o in disturbed),
        "events": sum(o.proof.events for o in disturbed),
        "proved": len(disturbed),
        "reward": rewards,
        "reward_undisturbed": undisturbed_,
        "apart": apart,
        "seed_noise": noise,
        "within_noise": abs(apart) <= noise,
        "wall_s": seconds,
    }


# ----------------------------------------------------------------------------------------------------------- isolation


def isolation(window_s: float) -> dict[str, Any]:
    away = ("--health.backoff_s", str(window_s))  # whoever is lost stays away for the whole window
    with broken_fleet(*away) as (run, tape):
        rows = fleet.step_intervals(run, tape, window_s, list(fleet.BROKEN))
    with broken_fleet(*away, *fleet.ROOM) as (run, tape):
        generation = fleet.generation_without_trainer(run, tape, min(window_s, 15.0))
    table = Table("fault", "before", "after", "change", title="who feels it")
    for row in rows:
        table.add_row(row.fault, f"{row.before:.3f} s a step", f"{row.after:.3f} s a step", f"{row.share:+.1%}")
    table.add_row(
        generation.fault,
        f"{generation.before:,.0f} tokens/s",
        f"{generation.after:,.0f} tokens/s",
        f"{generation.share:+.1%}",
    )
    console.print(table)
    kept = all(row.share <= MOST_CHANGE for row in rows) and generation.share >= -MOST_CHANGE
    return {
        "window_s": window_s,
        "rows": [row._asdict() | {"change": row.share} for row in (*rows, generation)],
        "kept": kept,
    }


@contextmanager
def broken_fleet(*options: str) -> Iterator[tuple[Victim, fleet.Tape]]:
    """A fleet in full swing; in the end it is stopped, and what must hold is proved."""
    with tempfile.TemporaryDirectory() as folder, victim(Path(folder), fleet.FLEET, *options) as run:
        run.start()
        fleet.in_full_swing(run)
        with fleet.taped(run) as tape:
            yield run, tape
        stop(run)
        prove(run.folder)


def stop(run: Victim) -> None:
    assert run.interrupt()[0] == 130, run.said()
    run.wait_until_gone()


# ------------------------------------------------------------------------------------------------------------ recovery


def recovery(times: int) -> dict[str, Any]:
    """With the default heartbeats. The worst of several times."""
    found: dict[str, list[fleet.Recovery]] = {}
    with tempfile.TemporaryDirectory() as folder, victim(Path(folder), fleet.FLEET) as run:
        run.start()
        for turn in range(times):
            for row in one_of_each(run, turn):
                found.setdefault(row.fault, []).append(row)
        stop(run)
        prove(run.folder)
    table = Table(
        "fault", "known", "with somebody again", "shows", title=f"seconds after the fault, the worst of {times}"
    )
    worst = {kind: [max(each) for each in zip(*(row[1:] for row in rows), strict=True)] for kind, rows in found.items()}
    for kind, figures in worst.items():
        table.add_row(kind, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    kept = (
        all(worst[f"replica {how}"][1] <= 3.0 for how in ("killed", "stopped")) and worst["controller killed"][1] <= 10
    )
    return {"worst": worst, "all": {kind: [row[1:] for row in rows] for kind, rows in found.items()}, "kept": kept}


def one_of_each(run: Victim, turn: int) -> Iterator[fleet.Recovery]:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for break_ in (
            lambda tape, number=number: fleet.replica_recovery(run, tape, turn % fleet.REPLICAS, number),
            lambda tape, number=number: fleet.master_recovery(run, tape, number),
            lambda tape, number=number: fleet.trainer_recovery(run, tape, number),
            lambda tape, number=number: fleet.store_recovery(run, tape, number),
        ):
            fleet.in_full_swing(run)
            with fleet.taped(run) as tape:
                yield break_(tape)
    fleet.in_full_swing(run)
    yield fleet.controller_recovery(run)


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["soak", "isolation", "recovery", "all"])
    parser.add_argument("--short", action="store_true", help="minutes rather than an hour")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30, help="of each run of the soak")
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between two faults of the soak")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        if asked.what in ("recovery", "all"):
            results["recovery"] = recovery(1 if asked.short else 5)
        if asked.what in ("isolation", "all"):
            results["isolation"] = isolation(6.0 if asked.short else 20.0)
        if asked.what in ("soak", "all"):
            limits = (1.0, 5, 12) if asked.short else (asked.minutes, asked.faults, asked.steps)
            results["soak"] = soak(*limits, asked.pause, asked.seed)
    except HangError as hang:
        console.print(f"it hangs: {hang}", markup=False)
        return 1
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
