"""A plan for several kinds of card as text to read and paste, and as an object for programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tailrace.obs.tables import percent, render_table
from tailrace.planner.fleet_plan import FleetCandidate, FleetPlan, HostGroup, within
from tailrace.planner.launch_command import trainer_notes, trainer_settings
from tailrace.planner.sizing_report import settings_toml
from tailrace.sim.provisioning import advice_on, provision_of
from tailrace.wording import counted

COLUMNS = ("", "tokens/s", "trainer\nidle", "rollout\nidle", "staleness\nmean/max", "$ an\nhour", "$ per M\ntokens")


def render_fleet_plan(plan: FleetPlan, files: Sequence[str] = ()) -> str:
    rows = [_row("plan", plan.best), *[_row(describe_fleet(each), each) for each in plan.others]]
    parts = [
        _verdict(plan),
        f"Paste into your config:\n\n{settings_toml(fleet_settings(plan.best))}",
        render_table(COLUMNS, rows),
        f"Where it runs:\n{render_table(('', 'hosts', 'ranks', 'replicas', 'GPUs of one'), list(_hosts(plan)))}",
        f"Settings to write too:\n\n{settings_toml(settings)}" if (settings := launch_settings(plan)) else "",
        "\n".join(commands(plan, files)),
        "\n".join(f"- {note}" for note in notes(plan)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def fleet_plan_json(plan: FleetPlan, files: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values for programs."""
    goal = {key: value for key, value in plan.goal._asdict().items() if 0 < value < float("inf")}
    return {
        "goal": goal,
        "reached": plan.reached,
        "best": _entry(plan.best),
        "others": [_entry(each) for each in plan.others],
        "hosts": [{**group.kind._asdict(), **group._asdict(), "kind": group.kind.name} for group in plan.hosts],
        "launch_settings": launch_settings(plan),
        "commands": list(commands(plan, files)),
        "notes": list(notes(plan)),
        "provisioning": _provisioning(plan),
        "simulations": plan.simulations,
    }


def _entry(each: FleetCandidate) -> dict[str, Any]:
    return {
        "settings": fleet_settings(each),
        "predicted_tokens_per_s": each.choice.rate,
        "dollars_per_hour": each.dollars,
        "result": msgspec.to_builtins(each.result),
    }


def _provisioning(plan: FleetPlan) -> dict[str, Any]:
    rule = provision_of(plan.best.config)
    figures = rule._asdict() | {"needed": rule.needed, "holds": rule.holds, "least_staleness": rule.least_staleness}
    return {key: value if value != float("inf") else None for key, value in figures.items()}


def fleet_settings(each: FleetCandidate) -> dict[str, Any]:
    """By dotted key: how many cards of each kind, the shape of their replicas, and who trains."""
    config = each.config
    settings: dict[str, Any] = {"cluster.trainer_gpu": config.cluster.trainer_gpu}
    generating = {host.kind.name for host in config.fleet_hosts if host.replicas}
    for name, table in config.cluster.cards.items():
        if "gpus" in table:
            settings[f"cluster.cards.{name}.gpus"] = table["gpus"]
        if name in generating:
            settings[f"cluster.cards.{name}.tensor_parallel"] = table["tensor_parallel"]
    return settings | {
        "split.trainer_gpus": config.trainer_gpus,
        "schedule.publish_every": config.schedule.publish_every,
    }


def describe_fleet(each: FleetCandidate) -> str:
    """In a few words: "24 H800 train, 32 H20 generate"."""
    config = each.config
    replicas: dict[str, int] = {}
    for host in config.fleet_hosts:
        replicas[host.kind.name] = replicas.get(host.kind.name, 0) + host.replicas * host.kind.ways
    generating = " + ".join(f"{gpus} {name}" for name, gpus in replicas.items() if gpus)
    return f"{config.trainer_gpus} {config.cluster.trainer_gpu} train, {generating} generate"


def _verdict(plan: FleetPlan) -> str:
    best = plan.best
    text = (
        f"{describe_fleet(best)}: {best.result.tokens_per_s:,.0f} tokens/s for ${best.dollars:,.2f} an hour, "
        f"{within(plan.goal)}."
    )
    if plan.reached:
        return text
    return f"{text} That is less than was asked for: the cards could do it, but the schedule keeps them waiting."


def _row(name: str, each: FleetCandidate) -> tuple[str, ...]:
    result = each.result
    return (
        name,
        f"{result.tokens_per_s:,.0f}",
        percent(result.trainer_idle),
        percent(result.rollout_idle),
        f"{result.staleness.mean:.1f}/{result.staleness.max}",
        f"{each.dollars:,.2f}",
        f"{each.dollars / 3.6e-3 / result.tokens_per_s:.3f}",
    )


def _hosts(plan: FleetPlan) -> Iterator[tuple[str, ...]]:
    for group in plan.hosts:
        at = f" at {group.kind.site}" if group.kind.site else ""
        ways = str(group.kind.ways) if group.replicas else "-"
        yield f"{group.kind.name}{at}", str(group.nodes), str(group.ranks or "-"), str(group.replicas or "-"), ways


def launch_settings(plan: FleetPlan) -> dict[str, Any]:
    """By dotted key: what else a run on these cards needs."""
    settings = dict(trainer_settings(plan.best.config, plan.trainer)) if plan.trainer else {}
    settings |= {"rollout.engine": "vllm"} if _has_large_replicas(plan) else {}
    return settings


def _has_large_replicas(plan: FleetPlan) -> bool:
    return any(group.kind.ways > 1 for group in plan.hosts if group.replicas)


def commands(plan: FleetPlan, files: Sequence[str]) -> Iterator[str]:
    """The first host of the trainer starts the run, all others join it."""
    first, *others = sorted(plan.hosts, key=lambda group: -group.ranks)
    ranks = plan.best.config.trainer_gpus
    network = " --trainer.interface NETWORK" if ranks > first.ranks else ""
    yield (
        f"tailrace train {shlex.join(files) or 'FILE'} --trainer.ranks {ranks} --local.ranks {first.ranks} "
        f"--local.replicas {first.replicas} --local.listen ADDRESS{network}{_shape(plan, first)}"
    )
    for group in (first._replace(nodes=first.nodes - 1), *others):
        if group.nodes:
            yield _join(plan, group, first.kind.site)


def _join(plan: FleetPlan, group: HostGroup, home: str) -> str:
    ranks = f" --ranks {group.ranks}" if group.ranks else ""
    far = f" --site {shlex.quote(group.kind.site or 'main')} --stay --wait 3600" if group.kind.site != home else ""
    many = "one more host" if group.nodes == 1 else f"each of {counted(group.nodes, 'host')}"
    return (
        f"tailrace worker --join HOST:PORT --key join.key --replicas {group.replicas}{ranks}{far}{_shape(plan, group)}"
        f"    # on {many} of {group.kind.name}"
    )


def _shape(plan: FleetPlan, group: HostGroup) -> str:
    """A host whose replicas have one GPU says so too where others have several."""
    said = group.replicas and _has_large_replicas(plan)
    return f" --rollout.vllm.tensor_parallel_size {group.kind.ways}" if said else ""


def notes(plan: FleetPlan) -> Iterator[str]:
    rule = provision_of(plan.best.config)
    if rule.holds:
        every = counted(rule.publish_every, "step")
        yield (
            f"The trainer need not wait: with staleness {rule.staleness} and a publish every {every}, "
            f"{rule.needed:,.0f} tokens/s are needed, and replicas make up to {rule.rate:,.0f}."
        )
    yield from (f"{text[:1].upper()}{text[1:]}." for text in advice_on(rule))
    used = {*plan.too_small, *[each.name for each in plan.best.config.kinds]}
    unused = [kind.name for kind in plan.asked.kinds if kind.name not in used]
    if unused:
        yield f"Not needed: {', '.join(unused)}."
    if plan.too_small:
        yield f"Too little memory for this model and its longest sequences: {', '.join(plan.too_small)}."
    if _has_large_replicas(plan):
        yield "Replicas of several GPUs are vLLM's, which needs a Python of its own: write it as rollout.python."
    if plan.best.config.trainer_gpus > max(group.ranks for group in plan.hosts):
        yield "NETWORK is the one between the trainer's hosts that you trust (NCCL does not encrypt)."
    yield from trainer_notes(plan.best.config, plan.trainer)
