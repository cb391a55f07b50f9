"""Short answers on one GPU: tokens/s and time in the engine by how many decode steps one round trip has.

    python benchmarks/gpu/round_trips.py [--size 1.5b] [--requests 4096] [--running 128] [--mean 24]
    python benchmarks/gpu/round_trips.py --size tiny --device cpu --requests 64 --running 8     # the same code on a CPU

Requests wait for one of `--running` places, with answers of exponential lengths; as many arrive as leave. The native
engine chooses by what it sees (`engines/round_trips.py`); beside it fixed numbers of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

RESULTS = ROOT / "benchmarks" / "results" / "gpu_round_trips.json"
PROMPT = 40
IN_FLIGHT = 2  # times as many as run


def started(options: argparse.Namespace) -> Any:
    import torch
    from models import random_model

    from tailrace.config.tree import Config, Rollout, Workload
    from tailrace.engines.native import NativeEngine

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = random_model(options.size, options.device, dtype)
    rollout = Rollout(max_running=options.running, kv_tokens=(PROMPT + 32 * options.mean) * (options.running + 1))
    limits = Workload(prompt_tokens=PROMPT, max_completion_tokens=16 * options.mean)
    engine = NativeEngine(model, lambda tokens: "", (), Config(workload=limits, rollout=rollout), seed=0)
    engine.load_weights(0, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    return engine


def measure(engine: Any, options: argparse.Namespace, seed: int) -> dict[str, float]:
    from tailrace.engines.base import Job
    from tailrace.types import id_bytes

    draw = random.Random(seed)
    lengths = [min(16 * options.mean, 1 + int(draw.expovariate(1 / options.mean))) for _ in range(options.requests)]
    waiting = list(enumerate(lengths, seed * options.requests))
    since: dict[int, float] = {}
    times: list[float] = []
    began = time.perf_counter()
    while waiting or since:
        while waiting and len(since) < IN_FLIGHT * options.running:
            id, length = waiting.pop()
            prompt = id_bytes([draw.randrange(5, 100) for _ in range(PROMPT)])
            since[id] = time.perf_counter()
            engine.submit(Job(id, id, prompt, PROMPT, length))
        for id, _, _, finish in engine.step().additions():
            if finish:
                times.append(time.perf_counter() - since.pop(id))
                engine.forget([id])
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "requests_per_s": len(lengths) / seconds,
        "in_engine_s": fmean(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--mean", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8, 16, 32], help="beside the engine's own choice")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    engine, rows = started(options), []
    own = engine._round_trips
    measure(engine, options, 0)  # kernels are compiled and captured
    for seed, steps in enumerate([0, *options.steps], 1):
        engine._round_trips = SimpleNamespace(steps=steps, note=lambda tokens, ended: None) if steps else own
        row = {"steps": steps or "as the engine decides", **measure(engine, options, seed)}
        rows.append({"model": options.size, "mean_tokens": options.mean, "running": options.running, **row})
        print(json.dumps(rows[-1]), flush=True)
    known = json.loads(options.json.read_text()) if options.json.is_file() else {}
    known[f"{options.size} {options.mean} {options.running}"] = rows
    options.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
