"""A publication of a large model by several ranks: bytes per rank, relay and host, and seconds, against the plan.

    python benchmarks/publish_plan.py                  # 1.5B in bfloat16; 1, 2 and 4 gloo ranks, one relay

Ranks are processes that meet over gloo. Each one has the rows of every tensor that FSDP2 would give it (one buffer of
random numbers stands for all of them, so that four ranks fit on a small machine), and publishes them as the trainer
does. Nothing is trained. The relay is this process; it assembles the version in shared memory. Some tensors are
compared with what the ranks had. `seconds` is from the order to publish until the version is sealed. `plan` is
`sim/publishing.py` with the rates of the measurement itself for one rank, so its time for more ranks is a prediction;
all of them share this machine's cores. Writes benchmarks/results/publish_plan.json, row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tailrace.config.model_shapes import SHAPES
from tailrace.sim.publishing import LinkRates, publish_plan

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "publish_plan.json"
TOKEN = "t" * 32
DEADLINE_S = 300.0
PRESET, WORDS, INNER = "qwen2.5-1.5b", 151_936, 8960  # the preset has neither


def shapes() -> dict[str, tuple[int, ...]]:
    model = SHAPES[PRESET]
    width, keys = model.hidden, model.kv_heads * model.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (INNER, width),
        "mlp.up_proj.weight": (INNER, width),
        "mlp.down_proj.weight": (width, INNER),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    layers = {f"model.layers.{n}.{name}": shape for n in range(model.layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (WORDS, width), **layers, "model.norm.weight": (width,)}


# ------------------------------------------------------------------------------------------------------------ one rank


def numbers(rank: int, size: int) -> torch.Tensor:
    """What all tensors of a rank are made of."""
    generator = torch.Generator().manual_seed(rank)
    longest = max(-(-shape[0] // size) * torch.Size(shape[1:]).numel() for shape in shapes().values())
    return torch.randint(0, 255, (2 * longest,), generator=generator, dtype=torch.uint8).view(torch.bfloat16)


def be_a_rank(rank: int, size: int, meeting: str, address: str) -> dict[str, float]:
    from tailrace.config.load import load
    from tailrace.trainer.parallel import join
    from tailrace.trainer.ranks import Alone
    from tailrace.trainer.sending import ParameterSender, PublishRoute
    from tailrace.wire.messages import ComponentSpec

    torch.set_num_threads(1)
    ranks = join(rank, size, meeting, "cpu", DEADLINE_S, DEADLINE_S) if size > 1 else Alone()
    config = load([], ["--model.preset", PRESET, "--rollout.precision", "bfloat16"])
    tensors = _tensors(rank, size)
    spec = ComponentSpec("trainer", 0, 1, "", TOKEN, "", config, rank=rank)
    sender = ParameterSender(spec, tensors.items())
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of memory begins here
    sender.snapshot(0, tensors.items(), "first")  # its pages are new
    stall = sender.snapshot(1, tensors.items(), "all")
    ranks.gather_bytes(b"")  # all are there
    began = time.time()
    failed: list[str] = []
    sender.send(1, PublishRoute(0, {0: address}), lambda _, reason: failed.append(reason))
    while sender._under_way is not None:
        time.sleep(0.01)
    assert not failed, failed
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    figures = {"began": began, "stall_s": stall, "bytes": sender.publisher.snapshot_bytes, "rise": peak - before}
    sender.publisher.close()
    ranks.gather_bytes(b"")
    ranks.leave()
    return figures


def _tensors(rank: int, size: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    source = numbers(rank, size)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    made: dict[str, torch.Tensor] = {}
    for name, shape in shapes().items():
        local = _rows(source, shape, rank, size)
        if mesh is None:
            made[name] = local
            continue
        strides = (1,) if len(shape) == 1 else (shape[1], 1)
        made[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=strides)
    return made


def _rows(source: torch.Tensor, shape: tuple[int, ...], rank: int, size: int) -> torch.Tensor:
    each = -(-shape[0] // size)
    rows = max(0, min(each, shape[0] - rank * each))
    return source[: rows * torch.Size(shape[1:]).numel()].view(rows, *shape[1:])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------------- measurement


def measure(size: int) -> dict[str, Any]:
    from tailrace.weights.relay_node import RelayNode
    from tailrace.weights.shared_memory import SharedMemory, shared_memory_path

    stored, at = Event(), [0.0]

    def note(version: int) -> None:
        at[0] = time.time()
        stored.set()

    memory = SharedMemory(shared_memory_path(f"plan-{os.getpid()}-{size}", "h0"))
    node = RelayNode(0, memory, TOKEN.encode(), on_stored=note)
    spent = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--rank-of", str(size), f"file://{folder}/meeting", str(node.address)]
        ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
        try:
            found = [json.loads(each.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for each in ranks]
            assert stored.wait(DEADLINE_S)
            spent = time.process_time() - spent
            _compare(memory, size)
            shared = memory.held_bytes()
        finally:
            for each in ranks:
                each.kill()
            node.close()
            memory.remove()
    return {
        "ranks": size,
        "rank_bytes": max(each["bytes"] for each in found),
        "rank_rise_bytes": max(each["rise"] for each in found),
        "relay_bytes": shared,
        "host_bytes": shared + sum(each["bytes"] for each in found),
        "stall_s": max(each["stall_s"] for each in found),
        "seconds": at[0] - min(each["began"] for each in found),
        "relay_cpu_s": spent,
    }


def _compare(memory: Any, size: int) -> None:
    """Three tensors, of which every rank has rows."""
    tensors = memory.open(1).tensors()
    sources = [numbers(rank, size) for rank in range(size)]
    for name in ("model.embed_tokens.weight", "model.layers.13.mlp.down_proj.weight", "model.norm.weight"):
        shape = shapes()[name]
        expected = torch.cat([_rows(source, shape, rank, size) for rank, source in enumerate(sources)])
        assert torch.equal(tensors[name].view(torch.uint8), expected.view(torch.uint8)), name  # not all are numbers


def rates_of(one: dict[str, Any]) -> LinkRates:
    """What the row of one rank shows of this machine."""
    copied, sealed = 2 * one["rank_bytes"] / one["stall_s"], one["relay_bytes"] / one["seconds"]
    return LinkRates(network=1e12, host=1e12, device=copied, latency_s=0.0, relay=sealed)


def with_plan(row: dict[str, Any], links: LinkRates) -> dict[str, Any]:
    size = row["relay_bytes"]
    plan = publish_plan(size, row["ranks"], row["ranks"], 1, links, trained_bytes=size)
    seconds = plan.master_s - plan.stall_s  # measured from the order to publish, after the snapshot
    planned = {"plan_rank_bytes": int(plan.rank.sent), "plan_stall_s": plan.stall_s, "plan_seconds": seconds}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in (row | planned).items()}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    words.add_argument("--out", type=Path, default=RESULTS)
    words.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.rank_of:
        size, meeting, address, rank = options.rank_of
        print(json.dumps(be_a_rank(int(rank), int(size), meeting, address)))
        return
    rows: list[dict[str, Any]] = []
    links: LinkRates | None = None
    for size in options.ranks:
        row = measure(size)
        links = links or rates_of(row)
        rows.append(with_plan(row, links))
        options.out.write_text(json.dumps({"preset": PRESET, "precision": "bfloat16", "rows": rows}, indent=1) + "\n")
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*[f"{value:,}" for value in row.values()])
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
