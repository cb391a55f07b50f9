"""A plan as text to read and paste, and as an object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tailrace.config import Config
from tailrace.config.defaults import FLEET, following_fleet
from tailrace.config.fields import UNSET, fields, read
from tailrace.obs.tables import percent, render_table, seconds
from tailrace.planner.launch_command import launch_command
from tailrace.planner.search import Candidate, Plan
from tailrace.planner.search_space import CONTINUOUS
from tailrace.planner.sizing_report import render_sizing, settings_toml, sizing_json
from tailrace.sim.provisioning import advice_on, provision_of
from tailrace.sim.result import Result

COLUMNS = ("", "tokens/s", "step\ns", "trainer\nidle", "rollout\nidle", "staleness\nmean/max", "$ per M\ntokens")


def render_plan(plan: Plan, files: Sequence[str] = ()) -> str:
    """Verdict, fragment, table, how to run it, reasons and alternatives, as plain text."""
    command = launch_command(plan.best, plan.sizing, files)
    parts = [_verdict(plan), _recommendation(plan), render_table(COLUMNS, list(_rows(plan)))]
    parts += [*render_sizing(plan.sizing, command), _why(plan)]
    if plan.alternatives:
        rows = [_row(describe(each.config), each.result) for each in plan.alternatives]
        parts.append(f"Next best:\n{render_table(COLUMNS, rows)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def fragment(asked: Config, best: Config) -> str:
    """The settings of `best` that differ from `asked`, as TOML: to be loaded after the user's file."""
    return settings_toml(differences(asked, best) | _fleet_to_say(asked, best))


def _fleet_to_say(asked: Config, best: Config) -> dict[str, Any]:
    """The fleet, where it may have followed from settings that the plan changes."""
    before, after = following_fleet(asked), following_fleet(best)
    same = [key for key in FLEET if read(asked, key) == read(best, key) == before[key] != after[key]]
    return {key: read(best, key) for key in same}


def differences(asked: Config, best: Config) -> dict[str, Any]:
    changed = [key for key in fields() if read(asked, key) != read(best, key)]
    return {key: UNSET if (value := read(best, key)) is None else value for key in changed}


def plan_json(plan: Plan, files: Sequence[str] = ()) -> dict[str, Any]:
    """The plan for programs: plain values only."""
    return {
        "best": _entry(plan, Candidate(plan.best, plan.result)),
        "baseline": _entry(plan, plan.baseline),
        "own": _entry(plan, plan.own) if plan.own else None,
        "alternatives": [_entry(plan, each) for each in plan.alternatives],
        "gain": plan.gain,
        "async_helps": plan.async_helps,
        "theta_star": plan.theta_star,
        "theory": msgspec.to_builtins(plan.theory),
        "fragment": fragment(plan.asked, plan.best),
        "reasons": list(plan.reasons),
        "simulations": plan.simulations,
        **sizing_json(plan.sizing, launch_command(plan.best, plan.sizing, files)),
    }


def _entry(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    return {
        "changes": differences(plan.asked, candidate.config),
        "result": msgspec.to_builtins(candidate.result),
        "trainer_gpus": candidate.config.trainer_gpus,
        "rollout_gpus": candidate.config.rollout_gpus,
    }


def describe(config: Config) -> str:
    """A config in a few words: "trajectory, 24 + 40 GPUs, TP 1, staleness 2"."""
    words = [config.schedule.kind, _hardware(config)]
    if config.schedule.kind not in ("sync", "one_step"):
        words.append(f"staleness {config.schedule.max_staleness}")
    if config.schedule.max_inflight:
        words.append(f"{config.schedule.max_inflight} in flight")
    return ", ".join(words)


def _hardware(config: Config) -> str:
    if config.costs.measured:
        return config.size
    split = f"{config.size} shared" if config.colocated else f"{config.trainer_gpus} + {config.rollout_gpus} GPUs"
    return f"{split}, TP {config.split.tensor_parallel}"


def _verdict(plan: Plan) -> str:
    if plan.async_helps:
        return f"{_capital(describe(plan.best))}: {plan.gain:.2f} times the throughput of synchronous training."
    margin = f"the best of it gives {plan.gain:.2f} times synchronous training" if plan.alternatives else "none can run"
    return f"Asynchrony will not help here: {margin}. Train synchronously ({describe(plan.best)})."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _recommendation(plan: Plan) -> str:
    text = fragment(plan.asked, plan.best)
    return f"Paste into your config:\n\n{text}" if text else "Your config has the best settings already."


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield _row("plan", plan.result)
    if plan.async_helps:
        yield _row("sync", plan.baseline.result)
    if plan.own:
        yield _row("yours", plan.own.result)


def _row(name: str, result: Result) -> tuple[str, ...]:
    return (
        name,
        f"{result.tokens_per_s:,.0f}",
        seconds(result.step_s),
        percent(result.trainer_idle),
        percent(result.rollout_idle),
        f"{result.staleness.mean:.1f}/{result.staleness.max}",
        f"{result.dollars_per_million_tokens:.3f}" if result.dollars_per_million_tokens else "-",
    )


def _why(plan: Plan) -> str:
    notes = [*plan.reasons, *_theory_note(plan), *_provisioning_note(plan)]
    if plan.own is None:
        notes.append("Your config as it is does not fit its GPUs, so there is no row for it.")
    return "Why:\n" + "\n".join(f"- {note}" for note in notes)


def _provisioning_note(plan: Plan) -> Iterator[str]:
    """Whether the trainer of an asynchronous plan has to wait for data that is fresh enough."""
    if plan.async_helps and not plan.best.costs.measured and plan.best.schedule.kind in CONTINUOUS:
        yield from (f"By the provisioning rule {text}." for text in advice_on(provision_of(plan.best)))


def _theory_note(plan: Plan) -> Iterator[str]:
    if plan.theory and plan.async_helps:
        chosen = plan.best.trainer_gpus / plan.best.cluster.gpus
        yield (
            f"Theory balances at {plan.theta_star:.0%} of the GPUs for the trainer (theta*); the simulated best has "
            f"{chosen:.0%}."
        )
