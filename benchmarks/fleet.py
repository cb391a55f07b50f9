"""Mixed and far fleets: what planner and simulator give beside AReaL-Hex's and ECHO-2's published figures, and how long
a plan for 1,000 GPUs takes.

    python benchmarks/fleet.py hex      # each prints a table and writes benchmarks/results/fleet_PART.json
    python benchmarks/fleet.py echo --case "8B, lengths x 2"
    python benchmarks/fleet.py ladder   # what 60,000 tokens/s of examples/clusters/mixed_7b.toml cost with more kinds
    python benchmarks/fleet.py scale

Their exact set-ups are not known to us. What is assumed, written down before the first run; nothing is fitted:

AReaL-Hex (1.5B, 7B, 14B on mathematics; up to 1.50 times the throughput at equal budget, up to 1.46 times cheaper at
equal throughput, against fleets of one kind of card)
- Recipe: AReaL's own for mathematics, as `examples/clusters/areal_1_5b.toml` has it (16 samples a prompt, up to 27,648
  tokens, median 7,500, mean 9,500, one update behind at a time, nothing dropped), with 128 prompts a step, since the
  fleets are smaller than AReaL's.
- Cards: H800 (989 TFLOP/s, 3.35 TB/s, 80 GB) and H20 (148 TFLOP/s, 4 TB/s, 96 GB), 64 of each to choose from, in hosts
  of eight on one network.
- Prices: the catalogue's, $2.50 and $1.50 an hour, so an H20 costs 0.6 of an H800. Varied: 0.4 and 0.8 of it.
- Budget: that of 32 H800, $80 an hour.
- Ways of the trainer: 2, 4 and 8 GPUs a sequence, as for AReaL in `benchmarks/published_rows.py`.
- Lengths varied for 7B: half and twice the median with a sigma of 0.8, under the same cap. Added after the first run,
  in which trainers of whole four GPUs left little to choose at this budget: twice the budget and batch; and, since the
  KV that AReaL recomputes at every update is dear on cards with little arithmetic, samples that keep their version.

ECHO-2 (Qwen3-4B and 8B; 33 to 36 % cheaper at equal reward, staleness up to 6)
- Recipe: 256 prompts of 200 tokens x 8 samples, answers of median 1,500 (sigma 0.8), up to 8,192; one mini-batch.
- Centralised fleet: A100-80GB in hosts of eight at $2.00 an hour, as fast as $32 an hour (16 cards) make it.
- Far fleet: training on the same A100; RTX 5090 (hosts of two) at three sites of 16, at $0.80 an hour, each behind
  1 Gbit/s (0.125 GB/s) and 100 ms. A100 may generate too.
- Equal reward is taken to be equal throughput with the same bound, S = 6 in both: the cheapest fleet with the
  centralised fleet's tokens/s. Kappa (`schedule.publish_every`) is what the link needs, as the planner sets it.
- Varied: the price of a 5090 (0.4, 0.6, 1.2), the link (0.1 and 10 Gbit/s), lengths (half and twice), for 8B.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tailrace.config import Config, ConfigError, load, with_values
from tailrace.config.kinds import gpus_in
from tailrace.planner.fleet_plan import FleetPlan, plan_fleet
from tailrace.planner.fleet_program import FleetGoal
from tailrace.planner.fleet_report import describe_fleet

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIXED = ROOT / "examples" / "clusters" / "mixed_7b.toml"
AREAL = ROOT / "examples" / "clusters" / "areal_1_5b.toml"
H800, H20, BUDGET = 2.5, 1.5, 80.0
CENTRAL_BUDGET = 32.0


class Case(NamedTuple):
    name: str
    settings: dict[str, Any]  # that differ from the base


RowOfCase = Callable[[Case, int], dict[str, Any]]


def with_cards(config: Config, cards: dict[str, Any], settings: dict[str, Any]) -> Config:
    base = {"cluster.cards": cards, "cluster.gpus": gpus_in(cards), "split.trainer_gpus": 0}
    kinds = {"cluster.gpu": next(name for name in reversed(cards) if cards[name]["gpus"])}
    return with_values(config, base | kinds | settings)


def without(cards: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: table | ({"gpus": 0} if name in names else {}) for name, table in cards.items()}


def row_of(plan: FleetPlan) -> dict[str, Any]:
    result = plan.best.result
    return {
        "fleet": describe_fleet(plan.best),
        "publish_every": plan.best.config.schedule.publish_every,
        "tokens_per_s": result.tokens_per_s,
        "predicted_tokens_per_s": plan.best.choice.rate,
        "dollars_per_hour": plan.best.dollars,
        "trainer_idle": result.trainer_idle,
        "staleness_max": result.staleness.max,
        "simulations": plan.simulations,
    }


def best(config: Config, goal: FleetGoal, processes: int) -> dict[str, Any] | None:
    try:
        return row_of(plan_fleet(config, goal, processes=processes))
    except ConfigError:
        return None


# -------------------------------------------------------------------------------------------------------- AReaL-Hex


def hex_cases() -> list[Case]:
    sizes = {
        "1.5B": ("r1-distill-qwen-1.5b", 2),
        "7B": ("r1-distill-qwen-7b", 4),
        "14B": ("r1-distill-qwen-14b", 8),
    }
    cases = [
        Case(name, {"model.preset": preset, "split.trainer_parallel": ways}) for name, (preset, ways) in sizes.items()
    ]
    seven = cases[1].settings
    cases += [Case(f"7B, H20 at {share:g} of an H800", seven | {"price": share * H800}) for share in (0.4, 0.8)]
    for times in (0.5, 2.0):
        lengths = {"workload.lengths.median": 7500 * times, "workload.lengths.mean": 0, "workload.lengths.sigma": 0.8}
        cases.append(Case(f"7B, lengths x {times:g}", seven | lengths))
    cases.append(Case("7B, twice the budget", seven | {"budget": 2 * BUDGET, "workload.prompts_per_step": 256}))
    ours = {"schedule.kind": "trajectory", "schedule.max_staleness": 8, "schedule.steps_ahead": 4}
    cases.append(Case("7B, samples keep their version", seven | ours))
    return cases


def hex_row(case: Case, processes: int) -> dict[str, Any]:
    settings = dict(case.settings)
    price, dollars = settings.pop("price", H20), settings.pop("budget", BUDGET)
    cards = {"H800": {"gpus": 64, "dollars_per_hour": H800}, "H20": {"gpus": 64, "dollars_per_hour": price}}
    base, budget = load([AREAL]), FleetGoal(budget=dollars)
    settings = {"workload.prompts_per_step": 128} | settings
    alone = {
        name: best(with_cards(base, without(cards, other), settings), budget, processes)
        for name, other in (("H800", "H20"), ("H20", "H800"))
    }
    mixed = best(with_cards(base, cards, settings), budget, processes)
    winner = max((each for each in alone.values() if each), key=lambda each: each["tokens_per_s"])
    fastest, paid = winner["tokens_per_s"], winner["dollars_per_hour"]
    same = best(with_cards(base, cards, settings), FleetGoal(tokens_per_s=fastest), processes)
    assert mixed
    return {
        "case": case.name,
        "mixed": mixed,
        "alone": alone,
        "cheapest_mixed_at_that_throughput": same,
        "gain_over_best_alone": mixed["tokens_per_s"] / fastest,
        "gain_over": {name: mixed["tokens_per_s"] / each["tokens_per_s"] for name, each in alone.items() if each},
        "times_cheaper": paid / same["dollars_per_hour"] if same else None,
        "reached": same["tokens_per_s"] / fastest if same else None,
    }


# ----------------------------------------------------------------------------------------------------------- ECHO-2

ECHO = {
    "workload.prompts_per_step": 256,
    "workload.group_size": 8,
    "workload.prompt_tokens": 200,
    "workload.max_completion_tokens": 8192,
    "workload.lengths.median": 1500,
    "workload.lengths.sigma": 0.8,
    "trainer.mini_batches": 1,
    "schedule.kind": "trajectory",
    "schedule.max_staleness": 6,
}


def echo_cases() -> list[Case]:
    eight = {"model.preset": "qwen3-8b"}
    cases = [Case("4B", {"model.preset": "qwen3-4b"}), Case("8B", eight)]
    cases += [Case(f"8B, a 5090 at ${price:.2f}", eight | {"price": price}) for price in (0.4, 0.6, 1.2)]
    cases += [Case(f"8B, {gbit:g} Gbit/s a site", eight | {"link": gbit / 8}) for gbit in (0.1, 10)]
    for times in (0.5, 2.0):
        cases.append(Case(f"8B, lengths x {times:g}", eight | {"workload.lengths.median": 1500 * times}))
    return cases


def echo_row(case: Case, processes: int) -> dict[str, Any]:
    settings = dict(case.settings)
    price, link = settings.pop("price", 0.8), settings.pop("link", 0.125)
    sites = ("north", "south", "east")
    far = {"gpu": "RTX-5090", "gpus": 16, "gpus_per_host": 2, "dollars_per_hour": price}
    cards = {"A100-80GB": {"gpus": 32, "dollars_per_hour": 2.0}} | {
        f"5090-{site}": far | {"site": site} for site in sites
    }
    settings = ECHO | settings | {"cluster.sites": {site: {"gbytes_per_s": link, "latency_ms": 100} for site in sites}}
    settings |= {"cluster.trainer_gpu": "A100-80GB"}
    own = without(cards, *[name for name in cards if name.startswith("5090")])
    central = best(with_cards(Config(), own, settings), FleetGoal(budget=CENTRAL_BUDGET), processes)
    assert central
    goal = FleetGoal(tokens_per_s=central["tokens_per_s"])
    spread = best(with_cards(Config(), cards, settings), goal, processes)
    return {
        "case": case.name,
        "central": central,
        "far": spread,
        "saved": 1 - spread["dollars_per_hour"] / central["dollars_per_hour"] if spread else None,
        "reached": spread["tokens_per_s"] / central["tokens_per_s"] if spread else None,
    }


# ------------------------------------------------------------------------------------------------------------ scale


def thousand() -> Config:
    cards = {
        "H100": {"gpus": 256},
        "H20": {"gpus": 384},
        "A100-80GB": {"gpus": 232},
        "far": {"gpu": "L40S", "gpus": 128, "site": "far"},
    }
    settings = {
        "model.preset": "qwen2.5-7b",
        "cluster.sites": {"far": {"gbytes_per_s": 1.25, "latency_ms": 80}},
        "workload.prompts_per_step": 512,
        "workload.group_size": 16,
        "workload.max_completion_tokens": 8192,
        "workload.lengths.median": 1500,
        "workload.lengths.sigma": 1.0,
    }
    return with_cards(Config(), cards, settings)


def scale_row(name: str, goal: FleetGoal, processes: int) -> dict[str, Any]:
    before, began = _cpu_s(), time.perf_counter()
    plan = plan_fleet(thousand(), goal, processes=processes)
    seconds = time.perf_counter() - began
    for process in multiprocessing.active_children():
        process.join()  # its CPU time counts once it has ended
    return {"case": name, "seconds": seconds, "cpu_s": _cpu_s() - before, "processes": processes, **row_of(plan)}


def _cpu_s() -> float:
    """Of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# ----------------------------------------------------------------------------------------------------------- ladder


def ladder_rows(processes: int) -> list[dict[str, Any]]:
    """The cheapest fleet for one throughput: of one kind of card, of two, and with a site abroad."""
    config, goal = load([MIXED]), FleetGoal(tokens_per_s=60_000.0)
    cards = config.cluster.cards
    fleets = {
        "H800 at home": without(cards, "H20", "abroad"),
        "and H20 at home": without(cards, "abroad"),
        "and H20 abroad": cards,
    }
    return [
        {"case": name, **(best(with_cards(config, kinds, {}), goal, processes) or {})} for name, kinds in fleets.items()
    ]


# ----------------------------------------------------------------------------------------------------------- results


def keep(part: str, rows: list[dict[str, Any]]) -> None:
    (RESULTS / f"fleet_{part}.json").write_text(json.dumps(rows, indent=1) + "\n")


def measured(part: str, cases: list[Case], row_of_case: RowOfCase, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all cases, in their order: of those that are asked for anew, of the others as they were."""
    path = RESULTS / f"fleet_{part}.json"
    rows = {row["case"]: row for row in json.loads(path.read_text())} if options.case and path.exists() else {}
    for case in cases:
        if not options.case or case.name in options.case:
            rows[case.name] = row_of_case(case, options.processes)
            keep(part, [rows[each.name] for each in cases if each.name in rows])
    return [rows[each.name] for each in cases if each.name in rows]


def run_hex(options: argparse.Namespace) -> None:
    table = Table("AReaL-Hex", "equal budget", "published", "times cheaper", "published", "mixed fleet")
    for row in measured("hex", hex_cases(), hex_row, options):
        gain, cheaper = f"{row['gain_over_best_alone']:.2f}", f"{row['times_cheaper'] or 0:.2f}"
        table.add_row(row["case"], gain, "up to 1.50", cheaper, "up to 1.46", row["mixed"]["fleet"])
    Console(width=160).print(table)


def run_echo(options: argparse.Namespace) -> None:
    table = Table("ECHO-2", "cheaper", "published", "throughput", "far fleet")
    for row in measured("echo", echo_cases(), echo_row, options):
        saved = f"{100 * row['saved']:.0f} %" if row["far"] else "-"
        reached = f"{row['reached']:.2f}" if row["far"] else "-"
        table.add_row(row["case"], saved, "33 to 36 %", reached, row["far"]["fleet"] if row["far"] else "none")
    Console(width=160).print(table)


def run_ladder(options: argparse.Namespace) -> None:
    rows = ladder_rows(options.processes)
    keep("ladder", rows)
    table = Table("60,000 tokens/s", "$ an hour", "tokens/s", "fleet")
    for row in rows:
        table.add_row(row["case"], f"{row['dollars_per_hour']:.2f}", f"{row['tokens_per_s']:,.0f}", row["fleet"])
    Console(width=160).print(table)


def run_scale(options: argparse.Namespace) -> None:
    goals = {"have": FleetGoal(), "budget": FleetGoal(budget=800.0), "throughput": FleetGoal(tokens_per_s=300_000.0)}
    rows: list[dict[str, Any]] = []
    for name, goal in goals.items():
        rows.append(scale_row(name, goal, options.processes))
        keep("scale", rows)
    table = Table("1,000 GPUs of four kinds", "seconds", "CPU s", "fleet")
    for row in rows:
        table.add_row(row["case"], f"{row['seconds']:.1f}", f"{row['cpu_s']:.1f}", row["fleet"])
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("hex", "echo", "ladder", "scale"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", action="append", help="of hex or echo: only this one; the others stay as they are")
    options = parser.parse_args()
    parts = {"hex": run_hex, "echo": run_echo, "ladder": run_ladder, "scale": run_scale}
    parts[options.part](options)


if __name__ == "__main__":
    main()
