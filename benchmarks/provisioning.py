"""The provisioning rule against the simulator: with which S, kappa and workers does the trainer never wait?

    python benchmarks/provisioning.py            # prints a table, writes benchmarks/results/provisioning.json

A trainer of two H100 and far workers (one H20 each, at a site behind one link), over staleness bounds, publish
intervals, numbers of workers and two links. Each point is simulated; the trainer waits if it is idle for more than
`WAITS` of the measured time. Beside that stand two forms of the rule (`tailrace/control/provisioning.py`): ours, with
the time of generation in the window and a term for the first step that depends on a version, and ECHO-2's, without
that term, in which generation only has to fit. A first version of ours had no such term: its misses in this sweep
showed the need of it, and the term was derived then; no constant was fitted. The points are chosen around the rate
at which the fleet keeps up (`WORKERS`), so that both sides of the rule are met; nothing is fitted to the outcome.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.config import Config, with_values
from tailrace.control.provisioning import Provisioning
from tailrace.sim.provisioning import provision_of
from tailrace.sim.simulation import FleetLostError, Simulation, StandstillError

RESULTS = Path(__file__).parent / "results" / "provisioning.json"
STALENESS = (1, 2, 3, 4, 6, 8)
PUBLISH_EVERY = (1, 2, 4)
WORKERS = (0.6, 0.9, 1.2, 1.6, 2.4)  # times what keeps up with the trainer
LINKS = (1.0, 0.1)  # gigabytes per second
WAITS = 0.05  # share of the time; a trainer also stalls for its pushes, which do not count as waiting
STEPS = 12


def config_of(workers: int, link: float, staleness: int, publish_every: int) -> Config:
    cards = {"H100": {"gpus": 2}, "H20": {"gpus": workers, "site": "far"}}
    return with_values(
        Config(),
        {
            "model.preset": "qwen2.5-1.5b",
            "cluster.cards": cards,
            "cluster.gpus": 2 + workers,
            "cluster.sites": {"far": {"gbytes_per_s": link, "latency_ms": 100}},
            "split.trainer_gpus": 2,
            "workload.prompts_per_step": 128,
            "workload.group_size": 8,
            "workload.prompt_tokens": 200,
            "workload.max_completion_tokens": 8192,
            "workload.lengths.median": 1500,
            "workload.lengths.sigma": 0.7,
            "trainer.mini_batches": 1,
            "schedule.kind": "trajectory",
            "schedule.max_staleness": staleness,
            "schedule.steps_ahead": staleness,
            "schedule.max_inflight": 128 * 8,  # a step's worth at a time: more would only take longer
            "schedule.publish_every": publish_every,
            "run.steps": STEPS,
        },
    )


def points() -> list[Config]:
    """Every combination that can run at all: below kappa - 1 there is nothing fresh enough."""
    base = provision_of(config_of(8, LINKS[0], STALENESS[-1], 1))
    enough = 8 * base.work / base.step_s / base.rate
    return [
        config_of(max(1, round(share * enough)), link, staleness, every)
        for link, staleness, every, share in product(LINKS, STALENESS, PUBLISH_EVERY, WORKERS)
        if staleness >= every
    ]


def echo_holds(rule: Provisioning) -> bool:
    """ECHO-2's form: generation has to fit, but takes nothing from the window."""
    window = rule.staleness * rule.step_s - rule.broadcast_s
    fits = window > rule.generate_s
    return fits and rule.rate >= rule.work * max(1 / rule.step_s, rule.publish_every / window)


def measure(config: Config) -> dict[str, Any]:
    rule = provision_of(config)
    try:
        result = Simulation(config, until_steady=True).run()
    except (FleetLostError, StandstillError):
        result = None
    idle = result.trainer_idle if result else 1.0
    return {
        "staleness": config.schedule.max_staleness,
        "publish_every": config.schedule.publish_every,
        "workers": config.replicas,
        "link_gbytes_per_s": config.cluster.sites["far"]["gbytes_per_s"],
        "rate_over_needed": rule.rate / rule.needed,
        "rate_over_trainer": rule.rate * rule.step_s / rule.work,
        "step_s": rule.step_s,
        "broadcast_s": rule.broadcast_s,
        "generate_s": rule.generate_s,
        "trainer_idle": idle,
        "dropped": result.dropped / max(1, result.dropped + result.trained) if result else 1.0,
        "waits": idle > WAITS,
        "rule_holds": rule.holds,
        "echo_holds": echo_holds(rule),
    }


def agreement(rows: list[dict[str, Any]], form: str) -> dict[str, int]:
    """Of points: the rule says yes and the trainer never waits, and so on."""
    counts = {"yes, never waits": 0, "yes, but waits": 0, "no, and waits": 0, "no, but never waits": 0}
    for row in rows:
        said, waits = row[form], row["waits"]
        counts[
            ("yes, " if said else "no, ") + ("but " if said == waits else "and " if waits else "")
            + ("waits" if waits else "never waits")
        ] += 1  # fmt: skip
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = list(pool.map(measure, points()))
    forms = {form: agreement(rows, form) for form in ("rule_holds", "echo_holds")}
    table = Table("form of the rule", *forms["rule_holds"])
    for form, counts in forms.items():
        table.add_row(form, *map(str, counts.values()))
    Console().print(table)
    arguments.out.write_text(json.dumps({"waits_above": WAITS, "agreement": forms, "points": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
