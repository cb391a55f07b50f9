"""What a version costs on its way from a trainer's GPU to a replica's, beside what both of them compute.

    python benchmarks/gpu/weights.py             # the shape of a 1.5B model, bfloat16; writes results/gpu_weights.json
    python benchmarks/gpu/weights.py --rehearse  # a small one on the CPU, to see that the script works; writes nothing

Trainer (this process, float32 weights), relay and replica are processes, as in a run. Each version: the trainer takes
a snapshot (`stall`), orders it sent and goes on with a step that changes the weights; it is `copied` when the last byte
is in the relay's shared memory, and `sealed` when its checksum is there too and replicas may open it (both counted from
the order). Then the replica, which replays a CUDA graph over all its weights, pulls: `pull` is from the order until it
generates with the new weights, checksum verified once more; `pause` is how long it stood still for that. `step_before`
and `step_during` are medians of its steps, `gap` the longest time between two steps in the meantime. Every version is
compared byte for byte in shared memory and in the replica's parameters, and the graph's output with that of the same
operations run anew. The first versions are `cold`: their memory is new, and has to be claimed and registered. In
`beside` replica and trainer compute while a version is published.
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu
from transformers import Qwen2Config, Qwen2ForCausalLM

from tailrace.weights.channel import Address
from tailrace.weights.layout import WeightLayout
from tailrace.weights.publisher import Publisher
from tailrace.weights.pull import Puller
from tailrace.weights.relay_node import RelayNode
from tailrace.weights.shard import ShardLayout
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader, shared_memory_path
from tailrace.weights.staging import Staging, replace_weights

ROOT = Path(__file__).parents[2]
TOKEN = os.urandom(32)
DEADLINE_S = 120.0
COLD, WARM, KEEP = 3, 6, 2
ROWS = 256  # of the replica's batch
STALL_MS, COPY_RATIO, PAUSE_MS = 10.0, 1.5, 20.0  # what is aimed at
Numbers = dict[str, Any]


def shape(small: bool) -> Qwen2Config:
    sizes = (64, 160, 2, 4, 500) if small else (1536, 8960, 28, 12, 151936)
    hidden, inner, layers, heads, words = sizes
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=words,
        tie_word_embeddings=True,
    )


def model_of(small: bool, device: torch.device | str) -> Qwen2ForCausalLM:
    torch.set_default_dtype(precision(small))
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(shape(small))
    finally:
        torch.set_default_dtype(torch.float32)


def precision(small: bool) -> torch.dtype:
    """Not every CPU multiplies in bfloat16."""
    return torch.float32 if small else torch.bfloat16


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.to(expected.device).view(torch.uint8), expected.detach().view(torch.uint8))


# ------------------------------------------------------------------------------------------------------- children


class Child:
    """A process that obeys lines of JSON and answers in lines of JSON."""

    def __init__(self, *words: str) -> None:
        self.name = words[0]
        everything = [sys.executable, __file__, *words]
        self.process = subprocess.Popen(everything, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[Any] = queue.Queue()
        Thread(target=self._listen, daemon=True).start()

    def tell(self, what: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        try:
            found = self._answers.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise TimeoutError(f"no answer from the {self.name} for {DEADLINE_S:.0f} s") from None
        if found is None:
            raise RuntimeError(f"the {self.name} has ended")
        return found

    def end(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def relay(token: str) -> None:
    memory = SharedMemory(shared_memory_path(f"bench-{os.getpid()}", "h0"))
    node = RelayNode(0, memory, bytes.fromhex(token), on_stored=lambda version: say({"stored": version}))
    say([*node.address, str(memory.path)])
    try:
        for line in sys.stdin:
            node.drop(json.loads(line)["drop"])
    finally:
        node.close()
        memory.remove()


def replica(small: str, device: str) -> None:
    generator = Generator(model_of(small == "small", device))
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "pull" in order:
            say(generator.pull(order["pull"], SharedMemoryReader(Path(order["memory"]), parallel=True)))
        else:
            say(generator.generate(order["seconds"]))


class Generator:
    """Steps that read all weights once, replayed as a graph where there is a GPU."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model, self.device = model, model.device
        self.puller = Puller(Staging(model))
        self.input = torch.randn(ROWS, model.config.hidden_size, dtype=model.dtype, device=self.device)
        self.layers = [dict(layer.named_parameters()) for layer in model.model.layers]
        self.output = self._forward()
        self._replay: Callable[[], None] = self._again
        if self.device.type == "cuda":
            self._replay = self._captured()

    def pull(self, version: int, reader: SharedMemoryReader) -> Numbers:
        before = self._steps(0.2)
        began = time.perf_counter()
        self.puller.begin(version, reader)
        during = [began]
        while (ready := self.puller.poll()) is None:
            self._step()
            during.append(time.perf_counter())
            if during[-1] - began > DEADLINE_S:
                raise TimeoutError(f"version {version} was not pulled")
        stopped = time.perf_counter()
        replace_weights(self.model, ready.weights)
        switched = time.perf_counter()
        self._step()
        gaps = [1e3 * (b - a) for a, b in pairwise(during)]
        return {
            "pull_ms": 1e3 * (switched - began),
            "pause_ms": 1e3 * (switched - stopped),
            "staged": type(ready.weights).__name__ == "StagedWeights",
            "step_before_ms": median(before),
            "step_during_ms": median(gaps or [0.0]),
            "gap_ms": max(gaps or [0.0]),
            "same_bytes": self._has(reader.open(version).tensors()),
            "graph_sees_them": self._is_close(self._forward()),
        }

    def generate(self, seconds: float) -> Numbers:
        steps = self._steps(seconds)
        return {"step_ms": median(steps), "longest_step_ms": max(steps)}

    def _steps(self, seconds: float) -> list[float]:
        times = [time.perf_counter()]
        while times[-1] - times[0] < seconds:
            self._step()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(times)]

    def _step(self) -> None:
        self._replay()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # as an engine that reads its tokens; not the streams of a pull

    def _has(self, tensors: dict[str, torch.Tensor]) -> bool:
        parameters = dict(self.model.named_parameters())
        return parameters.keys() == tensors.keys() and all(same(tensors[name], p) for name, p in parameters.items())

    def _is_close(self, expected: torch.Tensor) -> bool:
        """Other weights would give something else altogether."""
        return bool((self.output - expected).abs().max() <= 0.05 * expected.abs().max())

    def _again(self) -> None:
        self.output = self._forward()

    def _captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.output = self._forward()
        return graph.replay

    @torch.no_grad()
    def _forward(self) -> torch.Tensor:
        """Every matrix once, in a chain like that of the model; what attention would do is left out."""
        x = self.input
        for layer in self.layers:
            query, _, _ = (linear(x, layer[f"self_attn.{name}_proj.weight"]) for name in "qkv")
            x = x + linear(query, layer["self_attn.o_proj.weight"])
            inner = silu(linear(x, layer["mlp.gate_proj.weight"])) * linear(x, layer["mlp.up_proj.weight"])
            x = rms_norm(x + linear(inner, layer["mlp.down_proj.weight"]), x.shape[-1:])
        return linear(x, self.model.get_parameter("model.embed_tokens.weight"))


# -------------------------------------------------------------------------------------------------------- trainer


class Trainer:
    """Float32 weights on the device, a publisher, and a step of matrix products that takes a fifth of a second."""

    def __init__(self, small: bool, device: torch.device) -> None:
        self.device = device
        names = dict(model_of(small, "meta").named_parameters())
        self.weights = {name: 0.02 * torch.randn(p.shape, device=device) for name, p in names.items()}
        self.precision = precision(small)
        self.layout = WeightLayout.of_tensors(self.weights, dtype=self.precision)
        self.publisher = Publisher(ShardLayout.whole(self.layout), TOKEN, device=device)
        side = 8192 if device.type == "cuda" else 64
        self._matrix = torch.randn(side, side, device=device, dtype=self.precision)

    def publish(self, version: int, master: tuple[Child, Address, str], steps: int = 1) -> Numbers:
        """A version, and the step or steps after it, which are under way while it travels."""
        child, address, memory = master
        expected = {name: p.to(self.precision, copy=True) for name, p in self.weights.items()}
        sealed: queue.Queue[Any] = queue.Queue()
        settle(self.device)
        began = time.perf_counter()
        stall = self.publisher.snapshot(version, self.weights)
        self.publisher.send(address, lambda _, seconds: sealed.put(seconds), lambda _, reason: sealed.put(reason))
        stood = time.perf_counter() - began
        trained = [self.train() for _ in range(steps)]
        seconds = sealed.get(timeout=DEADLINE_S)
        if isinstance(seconds, str):
            raise RuntimeError(f"version {version} could not be published: {seconds}")
        assert child.answer() == {"stored": version}
        found = SharedMemoryReader(Path(memory)).open(version).tensors()
        return {
            "version": version,
            "stall_ms": 1e3 * stall,
            "stall_with_order_ms": 1e3 * stood,
            "copied_ms": 1e3 * self.publisher.copied_s,
            "sealed_ms": 1e3 * seconds,
            "step_ms": trained[0],
            "same_bytes": all(same(found[name], tensor) for name, tensor in expected.items()),
        }

    def train(self) -> float:
        """Milliseconds. Changes every weight, as the next step does."""
        began = time.perf_counter()
        for parameter in self.weights.values():
            parameter.neg_().add_(0.01)
        for _ in range(140 if self.device.type == "cuda" else 10):
            torch.mm(self._matrix, self._matrix)
        settle(self.device)
        return 1e3 * (time.perf_counter() - began)

    def pinned_share(self) -> float:
        """How much of the relay's memory the GPU writes to directly."""
        regions = self.publisher._in_place._regions.values() if self.publisher._in_place else ()
        return min((region._registered / self.layout.size for region in regions), default=0.0)


def link_speed(device: torch.device, size: int = 1 << 30) -> Numbers:
    """GB/s between the device and pinned memory, the best of five."""
    if device.type == "cpu":
        return {"out_gb_s": 1.0, "in_gb_s": 1.0}
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return {"out_gb_s": _best(host, there, device), "in_gb_s": _best(there, host, device)}


def _best(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    times = []
    for _ in range(5):
        settle(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        settle(device)
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times) / 1e9


# --------------------------------------------------------------------------------------------------------- report


def measure(small: bool, device: torch.device) -> Numbers:
    children = [Child("replica", "small" if small else "large", str(device)), Child("relay", TOKEN.hex())]
    try:
        host, port, memory = children[1].answer()
        trainer = Trainer(small, device)
        assert children[0].answer() == "ready"
        figures = _rows(trainer, children[0], (children[1], Address(host, port), memory))
        trainer.publisher.close()
        return figures
    finally:
        for child in children:
            child.end()


def _rows(trainer: Trainer, replica: Child, master: tuple[Child, Address, str]) -> Numbers:
    child, _, memory = master
    trainer.train()
    alone = median(trainer.train() for _ in range(3))
    rows: list[Numbers] = []
    for version in range(COLD + WARM):
        row = trainer.publish(version, master)
        if version >= KEEP:
            child.tell({"drop": version - KEEP})  # as control does when a version is there
        replica.tell({"pull": version, "memory": memory})
        rows.append(row | {f"replica_{name}": value for name, value in replica.answer().items()})
    replica.tell({"seconds": 1.5})
    beside = trainer.publish(COLD + WARM, master, steps=2)
    beside |= {f"replica_{name}": value for name, value in replica.answer().items()}
    return {
        "bytes": trainer.layout.size,
        "cores": os.cpu_count(),
        "link": link_speed(trainer.device),
        "pinned_share": trainer.pinned_share(),
        "step_alone_ms": alone,
        "cold": rows[:COLD],
        "warm": rows[COLD:],
        "beside": beside,
    }


def summary(figures: Numbers) -> Numbers:
    warm, size = figures["warm"], figures["bytes"]
    middle = {name: median(row[name] for row in warm) for name in warm[0] if name.endswith("_ms")}
    link_ms = 1e3 * size / (figures["link"]["out_gb_s"] * 1e9)
    everything = [*figures["cold"], *warm]
    return middle | {
        "link_ms": link_ms,
        "copied_over_link": middle["copied_ms"] / link_ms,
        "sealed_over_link": middle["sealed_ms"] / link_ms,
        "same_bytes": all(row["same_bytes"] and row["replica_same_bytes"] for row in everything)
        and figures["beside"]["same_bytes"],
        "graph_sees_them": all(row["replica_graph_sees_them"] for row in everything),
        "stall_reached": max(row["stall_ms"] for row in warm) <= STALL_MS,
        "copied_reached": middle["copied_ms"] <= COPY_RATIO * link_ms,
        "pause_reached": max(row["replica_pause_ms"] for row in warm) <= PAUSE_MS,
    }


def main(rehearse: bool, out: Path) -> None:
    if not rehearse and not torch.cuda.is_available():
        sys.exit("no GPU here: --rehearse tries the script on the CPU")
    began = time.perf_counter()
    figures = measure(rehearse, torch.device("cpu" if rehearse else "cuda:0"))
    figures["summary"] = summary(figures)
    figures["device"] = "cpu" if rehearse else torch.cuda.get_device_name()
    figures["seconds"] = time.perf_counter() - began
    for name in ("bytes", "link", "pinned_share", "seconds", "beside", "summary"):
        print(name, json.dumps(figures[name], indent=1))
    print("cold", json.dumps([{k: round(v, 1) for k, v in row.items()} for row in figures["cold"]]))
    if not rehearse:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    if not (figures["summary"]["same_bytes"] and figures["summary"]["graph_sees_them"]):
        sys.exit("weights arrived damaged")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("relay", "replica"):
        {"relay": relay, "replica": replica}[sys.argv[1]](*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rehearse", action="store_true")
        parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_weights.json")
        chosen = parser.parse_args()
        main(chosen.rehearse, chosen.out)
