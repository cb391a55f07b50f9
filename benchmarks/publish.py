"""What publishing a version costs the trainer, how soon every relay holds it, and what it costs in memory.

    python benchmarks/publish.py          # 538 MB (SmolLM2-135M in float32); 1, 2, 4, 8 relays, chain and tree

Relays and replicas are processes of their own on this machine, so all of them share its cores and its memory, while on
real hosts each hop has both for itself. `snapshot_s` is the trainer's stall, `snapshot_cpu_s` what it is made of when
nobody else wants the core. `relay_cpu_s` is what one relay works for one version (receive, check, store,
send on): times the relays, over the cores, it is the least that `everywhere_s` can be here, whatever the topology.
Writes benchmarks/results/publish.json.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.weights.channel import Address
from tailrace.weights.layout import WeightLayout
from tailrace.weights.relay_node import RelayNode
from tailrace.weights.shard import ShardLayout
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader, shared_memory_path

ROOT = Path(__file__).parents[1]
COUNTS = (1, 2, 4, 8)
TOKEN = os.urandom(32)
DEADLINE_S = 120.0
WIDTH, LAYERS, HIDDEN, KV_WIDTH, WORDS = 576, 30, 1536, 192, 49152  # SmolLM2-135M


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "q": (WIDTH, WIDTH),
        "k": (KV_WIDTH, WIDTH),
        "v": (KV_WIDTH, WIDTH),
        "o": (WIDTH, WIDTH),
        "gate": (HIDDEN, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
        "norm1": (WIDTH,),
        "norm2": (WIDTH,),
    }
    layers = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {"embed": (WORDS, WIDTH), **layers, "norm": (WIDTH,)}


# ------------------------------------------------------------------------------------------------------- children


class Child:
    """A process that obeys lines of JSON and answers in lines of JSON."""

    def __init__(self, *words: str) -> None:
        everything = [sys.executable, __file__, *words]
        self.process = subprocess.Popen(everything, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[Any] = queue.Queue()
        Thread(target=self._listen, daemon=True).start()

    def tell(self, what: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return self._answers.get(timeout=DEADLINE_S)

    def end(self) -> None:
        self.process.communicate(timeout=DEADLINE_S)

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._answers.put(json.loads(line))


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def relay(id: int, run: str, token: str) -> None:
    shared = SharedMemory(shared_memory_path(run, f"h{id}"))
    node = RelayNode(id, shared, bytes.fromhex(token), on_stored=lambda _: say([time.time(), time.process_time()]))
    say([node.address, str(shared.path)])
    for line in sys.stdin:
        order = json.loads(line)
        if "drop" in order:
            node.drop(order["drop"])
            say("dropped")
        else:
            node.route(order["attempt"], {int(other): Address(*place) for other, place in order["targets"].items()})
    node.close()
    shared.remove()


def replica(folder: str, version: int) -> None:
    """Maps a version and touches every byte of it, as loading does."""
    before = memory("/proc/self/smaps_rollup", "Pss")
    mapped = SharedMemoryReader(Path(folder)).open(version)
    say("mapped")
    for _ in sys.stdin:
        say(memory("/proc/self/smaps_rollup", "Pss") - before)
    del mapped


def memory(file: str, row: str) -> int:
    """Bytes, from a table of the kernel."""
    return next(int(line.split()[1]) * 1024 for line in Path(file).open() if line.startswith(f"{row}:"))


# --------------------------------------------------------------------------------------------------- measurements


def fleet(count: int, topology: str) -> list[tuple[Child, Address, str]]:
    run = f"bench-{os.getpid()}"
    children = [Child("relay", str(id), run, TOKEN.hex()) for id in range(count)]
    rows = [(child, *_place(child.answer())) for child in children]
    for place, (child, _, _) in enumerate(rows):
        first, last = (place + 1, place + 2) if topology == "chain" else (2 * place + 1, 2 * place + 3)
        targets = {other: rows[other][1] for other in range(first, min(last, count))}
        child.tell({"attempt": 1, "targets": targets})
    return rows


def _place(answer: list[Any]) -> tuple[Address, str]:
    return Address(*answer[0]), answer[1]


def publishing(count: int, topology: str, repeats: int) -> dict[str, Any]:
    """Snapshot and broadcast, `repeats` times after one to warm up."""
    import torch

    from tailrace.weights.publisher import Publisher

    tensors = {name: torch.randn(shape) for name, shape in shapes().items()}
    publisher = Publisher(ShardLayout.whole(WeightLayout.of_tensors(tensors)), TOKEN)
    rows = fleet(count, topology)
    stalls, copying, masters, everywhere, work = [], [], [], [], []
    for version in range(repeats + 1):
        spent = time.thread_time()
        stalls.append(publisher.snapshot(version, tensors))
        copying.append(time.thread_time() - spent)
        start = time.time()
        publisher.send(rows[0][1], lambda *_: None, _give_up)
        moments, cpu = zip(*[child.answer() for child, _, _ in rows], strict=True)
        work.append(sum(cpu) / count)
        masters.append(moments[0] - start)
        everywhere.append(max(moments) - start)
        for child, _, _ in rows:
            child.tell({"drop": version})
        assert {child.answer() for child, _, _ in rows} == {"dropped"}  # a step of training would give them time too
    publisher.close()
    for child, _, _ in rows:
        child.end()
    figures = {"snapshot_s": stalls, "snapshot_cpu_s": copying, "master_s": masters, "everywhere_s": everywhere}
    medians = {name: median(row[1:]) for name, row in figures.items()}
    return {"relays": count, "topology": topology, **medians, "relay_cpu_s": (work[-1] - work[0]) / repeats}


def _give_up(version: int, reason: str) -> None:
    print(f"version {version} could not be published: {reason}", file=sys.stderr)
    os._exit(1)


def mapping(count: int) -> dict[str, Any]:
    """Memory of one version on one host, while `count` replicas have mapped it."""
    import torch

    from tailrace.weights.publisher import Publisher

    tensors = {name: torch.zeros(shape) for name, shape in shapes().items()}
    publisher = Publisher(ShardLayout.whole(WeightLayout.of_tensors(tensors)), TOKEN)
    publisher.snapshot(0, tensors)
    [(child, address, folder)] = fleet(1, "chain")
    before = memory("/proc/meminfo", "Shmem")
    publisher.send(address, lambda *_: None, _give_up)
    child.answer()
    replicas = [Child("replica", folder, "0") for _ in range(count)]
    assert [one.answer() for one in replicas] == ["mapped"] * count
    shared = memory("/proc/meminfo", "Shmem") - before
    for one in replicas:
        one.tell("measure")
    shares = [one.answer() for one in replicas]
    for one in [*replicas, child]:
        one.end()
    publisher.close()
    return {"replicas": count, "shared_mb": shared / 1e6, "replica_pss_mb": sum(shares) / count / 1e6}


# --------------------------------------------------------------------------------------------------------- report


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    grid = Table(*rows[0], title=title)
    for row in rows:
        grid.add_row(*[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()])
    console.print(grid)


def main(counts: list[int], repeats: int, out: Path) -> None:
    console = Console()
    size = WeightLayout.of(list(shapes()), ["float32"] * len(shapes()), shapes().values()).size
    console.print(f"a version of {size / 1e6:.0f} MB")
    broadcasts = [publishing(count, topology, repeats) for topology in ("chain", "tree") for count in counts]
    show(console, "publishing", broadcasts)
    maps = [mapping(count) for count in counts]
    show(console, "one host, several replicas", maps)
    figures = {"bytes": size, "cores": os.cpu_count(), "publish": broadcasts, "memory": maps}
    out.write_text(json.dumps(figures, indent=1) + "\n")


CHILDREN: dict[str, Callable[..., None]] = {
    "relay": lambda id, run, token: relay(int(id), run, token),
    "replica": lambda folder, version: replica(folder, int(version)),
}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in CHILDREN:
        CHILDREN[sys.argv[1]](*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--relays", type=int, nargs="+", default=list(COUNTS))
        parser.add_argument("--repeats", type=int, default=3)
        parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "publish.json")
        chosen = parser.parse_args()
        main(chosen.relays, chosen.repeats, chosen.out)
