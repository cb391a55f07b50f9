"""What an interrupt and a move cost, on a real engine: weights changed under running sequences, and sequences that
arrive from another replica.

    python benchmarks/gpu/interrupt.py [native] [vllm] [--size 1.5b] [--json FILE]
    python benchmarks/gpu/interrupt.py native --size tiny --device cpu        # the same code on a CPU
    python benchmarks/gpu/interrupt.py native vllm --vllm-python PYTHON --size 135m --device cpu --cases 4x128 16x512

For every batch size and context length: sequences of that length decode until their rate is steady; then the weights
are replaced (the same ones, so that nothing else changes) and decoding goes on until it is steady again. What was not
decoded from the call on, at the steady rate, is the cost of the interrupt in seconds: the time in which the engine does
nothing, and the recomputation of the KV (chunks of prefill beside the sequences that decode already). Beside it, how
long the call took: an engine in a process of its own decodes for a part of that. With `keep`, nothing is recomputed. A
move is one sequence of the same length submitted beside the batch: what the batch did not decode, and the time until
the newcomer's first token. Beside each: what the cost model says, tokens of KV times the prefill rate that this engine
reached when it filled its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(HERE), str(ROOT / "src")]  # `engine_vllm` is the one for a CPU

RESULTS = ROOT / "benchmarks" / "results"
CASES = [(16, 512), (16, 4096), (16, 16384), (64, 512), (64, 4096), (256, 512), (256, 2048), (256, 4096)]
TINY_CASES = [(2, 32), (4, 64)]
STEADY_TOKENS = 48  # of every sequence, over which the steady rate is measured
AFTER = 4  # times as many until it is steady again: vLLM's process has decoded some of them before the switch
LONGEST_WAIT_S = 120.0
LONGEST_IN_VLLM = 8192  # tokens of a sequence
Row = dict[str, Any]


class Clock(NamedTuple):
    """Tokens that came, by when."""

    began: float
    seconds: float
    tokens: int


class Bench:
    """An engine and the sequences that it decodes."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.number = 0
        self.length: dict[int, int] = {}  # tokens sampled, by sequence

    def submit(self, count: int, context: int, most: int) -> list[int]:
        from tailrace.engines.base import Job
        from tailrace.types import id_bytes

        drawn = random.Random(self.number)
        ids = list(range(self.number, self.number + count))
        for id in ids:
            tokens = [drawn.randrange(5, self.vocabulary) for _ in range(context)]
            self.engine.submit(Job(id, id, id_bytes(tokens), min(context, 16), most))
            self.length[id] = 0
        self.number += count
        return ids

    def until(self, ids: list[int], tokens: int) -> Clock:
        """Until each of these has got so many more."""
        goal = {id: self.length[id] + tokens for id in ids}
        began, before = time.perf_counter(), sum(self.length.values())
        while any(self.length[id] < goal[id] for id in ids):
            assert time.perf_counter() - began < LONGEST_WAIT_S, "the engine has stopped"
            for id, sampled, _, _ in self.engine.step().additions():
                self.length[id] += len(sampled) // 4
        return Clock(began, time.perf_counter() - began, sum(self.length.values()) - before)

    def clear(self) -> None:
        self.engine.withdraw(list(self.length))
        self.length.clear()
        while len(self.engine.step().ids):
            pass


def measure(bench: Bench, weights: Any, count: int, context: int) -> Row:
    engine = bench.engine
    most = 32 * STEADY_TOKENS
    began = time.perf_counter()
    ids = bench.submit(count, context, most)
    bench.until(ids, 1)
    prefill_s = (time.perf_counter() - began) / (count * context)
    steady = rate_of(bench, ids)
    row: Row = {"sequences": count, "context": context, "prefill_s_per_token": prefill_s, "tokens_per_s": steady}
    for name, keep in (("interrupt", False), ("keep", True)):
        began = time.perf_counter()
        engine.load_weights(engine.version + 1, weights, keep_kv=keep)
        switch_s = time.perf_counter() - began
        after = bench.until(ids, AFTER * STEADY_TOKENS)
        before, steady = steady, rate_of(bench, ids)
        row[f"{name}_switch_s"] = switch_s
        row[f"{name}_lost_s"] = switch_s + after.seconds - 2 * after.tokens / (before + steady)
    row["predicted_lost_s"] = prefill_s * count * (context + STEADY_TOKENS)
    return row | move(bench, ids, context, most)


def rate_of(bench: Bench, ids: list[int]) -> float:
    clock = bench.until(ids, STEADY_TOKENS)
    return clock.tokens / clock.seconds


def move(bench: Bench, ids: list[int], context: int, most: int) -> Row:
    """One more sequence joins; the tokens of the others count."""
    steady = rate_of(bench, ids)
    (newcomer,) = bench.submit(1, context, most)
    before = sum(bench.length[id] for id in ids)
    arrived = bench.until([newcomer], 1)
    lost = arrived.seconds - (sum(bench.length[id] for id in ids) - before) / steady
    return {"move_lost_s": lost, "move_first_token_s": arrived.seconds}


# ------------------------------------------------------------------------------------------------------------- engines


def native(options: argparse.Namespace) -> list[Row]:
    import torch
    from models import random_model

    from tailrace.config.tree import Config, Rollout, Workload
    from tailrace.engines.native import NativeEngine

    cases = cases_of(options)
    model = random_model(options.size, options.device, getattr(torch, dtype_of(options)), max_position_embeddings=32768)
    longest = max(context for _, context in cases) + 32 * STEADY_TOKENS
    kv_tokens = max(kv_tokens_of(cases), longest)
    rollout = Rollout(max_running=running_of(cases), kv_tokens=kv_tokens, prefill_tokens=options.prefill_tokens)
    config = Config(workload=Workload(prompt_tokens=longest, max_completion_tokens=1), rollout=rollout)
    engine = NativeEngine(model, lambda tokens: "", (), config, seed=0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.load_weights(0, weights)
    return rows(Bench(engine, 100), weights, cases, "native", options)


def vllm(options: argparse.Namespace) -> list[Row]:
    import torch
    from engine_vllm import Ours
    from models import random_model
    from workloads import settings

    cases = [case for case in cases_of(options) if case[1] <= 4096]
    dtype = dtype_of(options)
    with tempfile.TemporaryDirectory() as folder:
        shape = {**settings(options.size), "torch_dtype": dtype, "max_position_embeddings": 32768}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        arguments = {"model": folder, "dtype": dtype, "load_format": "dummy", "skip_tokenizer_init": True}
        arguments |= {"gpu_memory_utilization": 0.5, "max_model_len": LONGEST_IN_VLLM, "seed": 0}
        arguments["max_num_seqs"] = running_of(cases)
        kv_tokens = 0 if options.device == "cuda" else max(kv_tokens_of(cases), 2 * LONGEST_IN_VLLM)
        engine = Ours(options.vllm_python, arguments, kv_tokens)._engine
        model = random_model(options.size, "cpu", getattr(torch, dtype), max_position_embeddings=32768)
        weights = dict(model.state_dict())
        engine.load_weights(0, weights)
        with mapped(weights) as file:
            return rows(Bench(engine, 100), file, cases, "vllm", options)


@contextmanager
def mapped(weights: dict[str, Any]) -> Iterator[Any]:
    """As a relay hands them to a replica: in a file of shared memory, written once."""
    from tailrace.engines.vllm_engine import _write
    from tailrace.weights.region import MappedVersion
    from tailrace.weights.shared_memory import default_base

    with tempfile.NamedTemporaryFile(dir=default_base(), prefix="tailrace-weights-") as file:
        _write(file, weights)
        yield MappedVersion(0, "", memoryview(b""), Path(file.name))


def cases_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    if options.cases:
        return [(int(count), int(context)) for count, context in [case.split("x") for case in options.cases]]
    return CASES if options.device == "cuda" else TINY_CASES


def dtype_of(options: argparse.Namespace) -> str:
    return "bfloat16" if options.device == "cuda" else "float32"


def running_of(cases: list[tuple[int, int]]) -> int:
    return max(count for count, _ in cases) + 1


def kv_tokens_of(cases: list[tuple[int, int]]) -> int:
    return max((count + 1) * (context + 20 * STEADY_TOKENS) for count, context in cases)


def rows(bench: Bench, weights: Any, cases: list[tuple[int, int]], name: str, options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    measure(bench, weights, *cases[0])  # kernels are compiled and captured
    bench.clear()
    for count, context in cases:
        row = {"engine": name, "model": options.size, **measure(bench, weights, count, context)}
        bench.clear()
        print(json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}), flush=True)
        found.append(row)
        write(found, name, options)
    return found


def write(found: list[Row], name: str, options: argparse.Namespace) -> None:
    file = options.json or RESULTS / ("gpu_interrupt.json" if options.device == "cuda" else "cpu_interrupt.json")
    known = json.loads(file.read_text()) if file.is_file() else {}
    known[f"{name} {options.size}"] = found
    file.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", default=["native"], help="native, vllm")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", default=[], help="sequences and their context, such as 64x512")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--prefill-tokens", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the rows go; benchmarks/results, if not given")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    for name in options.engines:
        {"native": native, "vllm": vllm}[name](options)
    sys.stdout.flush()
    os._exit(0)  # vLLM's processes end with this one


if __name__ == "__main__":
    main()
