"""The sizing of a plan as text and as an object: how to run it, a rank's memory, and what a weight publish moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tailrace.config.fields import leaf
from tailrace.config.render import literal
from tailrace.obs.tables import render_table
from tailrace.planner.launch_command import LaunchCommand
from tailrace.planner.placement import NodeGroup, Placement
from tailrace.planner.sizing import Sizing, TrainerSize
from tailrace.sim.publishing import PublishPlan, Traffic
from tailrace.wording import counted

MEMORY_COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "moments",
    "frozen": "frozen\npolicies",
    "snapshot": "publish\nsnapshot",
    "gathered": "gathered\nlayers",
    "activations": "activations",
    "logits": "logits",
}


def render_sizing(sizing: Sizing | None, command: LaunchCommand) -> Iterator[str]:
    """Paragraphs."""
    yield from _run(sizing, command)
    if sizing:
        if sizing.trainer:
            yield _memory(sizing.trainer)
        yield _publish(sizing.publish)


def sizing_json(sizing: Sizing | None, command: LaunchCommand) -> dict[str, Any]:
    """Plain values for programs."""
    launch = msgspec.to_builtins(command)
    if sizing is None:
        return {"launch": launch, "placement": None, "trainer": None, "publish": None}
    trainer = msgspec.to_builtins(sizing.trainer)
    if sizing.trainer:
        trainer["memory"]["total"] = sizing.trainer.memory.total
    groups = [group._asdict() for group in sizing.placement.groups]
    placement = msgspec.to_builtins(sizing.placement) | {"groups": groups}
    return {
        "launch": launch,
        "placement": placement,
        "trainer": trainer,
        "publish": msgspec.to_builtins(sizing.publish),
    }


# ----------------------------------------------------------------------------------------------------------------- run


def _run(sizing: Sizing | None, command: LaunchCommand) -> Iterator[str]:
    notes = "\n".join(f"- {note}" for note in command.notes)
    if not command.commands:
        yield f"It cannot be run as it is:\n{notes}"
        return
    where = f", {_where(sizing.placement)}" if sizing else ""
    yield f"Run it{where}. Settings to write too:" if command.settings else f"Run it{where}:"
    if command.settings:
        yield settings_toml(command.settings)
    yield "\n".join(command.commands)
    if notes:
        yield notes


def settings_toml(settings: Mapping[str, Any]) -> str:
    tables: dict[str, list[str]] = {}
    for key, value in settings.items():
        tables.setdefault(key.rpartition(".")[0], []).append(f"{leaf(key)} = {literal(value)}")
    return "\n\n".join("\n".join((f"[{section}]", *lines)) for section, lines in tables.items())


def _where(placement: Placement) -> str:
    shared = " on shared cards" if placement.shared else ""
    if placement.nodes == 1:
        return f"on one box with {_group(placement.groups[0], placement.ways)}{shared}"
    parts = [f"{_hosts(group.nodes)} with {_group(group, placement.ways)}" for group in placement.groups]
    return f"on {'; '.join(parts)}{shared}"


def _hosts(nodes: int) -> str:
    return f"{counted(nodes, 'host')}{' each' if nodes > 1 else ''}"


def _group(group: NodeGroup, ways: int) -> str:
    replicas = counted(group.replicas, "replica") + (f" of {ways} GPUs" if ways > 1 else "")
    parts = [counted(group.ranks, "trainer rank")] if group.ranks else []
    return " and ".join([*parts, *([replicas] if group.replicas else [])])


# -------------------------------------------------------------------------------------------------------------- tables


def _memory(size: TrainerSize) -> str:
    cells = [_gb(getattr(size.memory, name)) for name in MEMORY_COLUMNS]
    table = render_table(
        [*MEMORY_COLUMNS.values(), "total", "of"], [[*cells, _gb(size.memory.total), _gb(size.room)]], left=0
    )
    recomputed = ", activations recomputed" if size.recompute else ""
    return (
        f"Memory of a trainer rank, GB ({_sharding(size)}, packs of up to {size.tokens_per_batch:,} tokens"
        f"{recomputed}):\n{table}{_exchange(size)}"
    )


def _sharding(size: TrainerSize) -> str:
    if size.ranks == 1:
        return "one rank"
    over = f"the {size.ranks_per_host} ranks of a host" if size.sharding == "hybrid" else f"{size.ranks} ranks"
    return f"FSDP2 over {over}"


def _exchange(size: TrainerSize) -> str:
    if size.ranks == 1:
        return ""
    hidden = "which hides it" if size.exchange_s <= size.arithmetic_s else "so the exchange sets the pace"
    passes = "1 pass" if size.passes == 1 else f"{size.passes:,} passes"
    return (
        f"\nA pass exchanges weights and gradients for {_seconds(size.exchange_s)} and computes for "
        f"{_seconds(size.arithmetic_s)}, {hidden}; {passes} a mini-batch."
    )


def _publish(plan: PublishPlan) -> str:
    table = render_table(("", "received", "sent"), [(name, *_cells(each)) for name, each in _places(plan) if each])
    return (
        f"Weight publish, {_gb(plan.version_bytes)} GB, predicted (GB a version):\n{table}\n"
        f"The trainer stalls for {_seconds(plan.stall_s)}; the master relay has the version after "
        f"{_seconds(plan.master_s)}{_everywhere(plan)}. A host needs {_gb(plan.host_memory)} GB of memory for versions."
    )


def _everywhere(plan: PublishPlan) -> str:
    return f", all {plan.relays:,} relays after {_seconds(plan.everywhere_s)}" if plan.relays > 1 else ""


def _places(plan: PublishPlan) -> Iterator[tuple[str, Traffic | None]]:
    yield "trainer rank", plan.rank
    yield "master relay", plan.master
    yield "relay of another host with ranks", plan.relay_with_ranks
    yield "relay of a host without ranks", plan.relay_without_ranks


def _cells(traffic: Traffic) -> tuple[str, str]:
    return _gb(traffic.received), _gb(traffic.sent)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size else "-"


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.1f} ms" if value < 0.1 else f"{value:,.2f} s" if value < 10 else f"{value:,.0f} s"
