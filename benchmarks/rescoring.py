"""What does it cost to score a stranger's work again, how far apart do two machines round, and which lies are found?

    python benchmarks/rescoring.py [--samples 64] [--tokens 256]
    python benchmarks/rescoring.py --model DIR --generate cuda:bfloat16 --check cuda:bfloat16 --out gpu_rescoring.json
    python benchmarks/rescoring.py --model DIR --generate cuda:bfloat16 --check cpu:float32

One engine generates answers to held-out prompts in one batch; another one, as a checker has it, scores them one by one
and compares log-probs and draws, with the default tolerance of its precision unless --tolerance says another. Honest
work has to pass. Lies: one token in the middle of each sample drawn with another number, and the rest with the right
ones; all of it drawn with another seed, as the best of many is; one log-prob off by twice the tolerance. Seconds are
those of the engines alone. The results are appended to benchmarks/results/rescoring.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
START = ROOT / "examples" / "running_total" / "start"
SEED = 3


class Handed(NamedTuple):
    """A sample as a stranger hands it in."""

    job: Any
    logprobs: np.ndarray


def settings(arguments: argparse.Namespace, where: str) -> Any:
    from tailrace.config import load

    device, _, precision = where.partition(":")
    words = {
        "model.path": arguments.model,
        "task.name": "running_total",
        "rollout.device": device,
        "rollout.precision": precision or "float32",
        "rollout.max_running": arguments.samples,
        "rollout.kv_tokens": arguments.samples * (arguments.tokens + 256),
        "local.replicas": 1,
        "workload.max_completion_tokens": arguments.tokens,
        "strangers.tolerance": arguments.tolerance,
    }
    return load([], [word for name, value in words.items() for word in (f"--{name}", str(value))])


def prompts(config: Any, count: int) -> list[Any]:
    from tailrace.engines.base import Job
    from tailrace.rollout.build import held_out_rows

    _, rows = held_out_rows(config)
    most = config.workload.max_completion_tokens
    return [Job(id, id, rows[id % len(rows)].tokens, rows[id % len(rows)].length, most) for id in range(count)]


def generated(engine: Any, jobs: list[Any]) -> tuple[list[Handed], float]:
    """All of them in one batch, and the seconds that took."""
    from msgspec.structs import replace

    tokens, logprobs = {job.id: bytes(job.tokens) for job in jobs}, {job.id: b"" for job in jobs}
    for job in jobs:
        engine.submit(job)
    began = time.perf_counter()
    while engine.stats().running or engine.stats().waiting:
        for id, more, scores, _ in engine.step().additions():
            tokens[id] += more
            logprobs[id] += scores
    seconds = time.perf_counter() - began
    found = [Handed(replace(job, tokens=tokens[job.id]), np.frombuffer(logprobs[job.id], "<f4")) for job in jobs]
    return found, seconds


def redrawn(engine: Any, other: Any, handed: Handed, prompt: Any) -> Handed:
    """The same up to its middle, one token with another number, the rest with the right ones."""
    from msgspec.structs import replace

    middle = handed.job.prompt_tokens + len(handed.logprobs) // 2
    start = replace(handed.job, tokens=handed.job.tokens[: 4 * middle], max_tokens=1)
    (one,), _ = generated(other, [start])
    rest = prompt.max_tokens - (middle + 1 - prompt.prompt_tokens)
    (whole,), _ = generated(engine, [replace(one.job, max_tokens=rest)])
    logprobs = np.concatenate([handed.logprobs[: middle - prompt.prompt_tokens], one.logprobs, whole.logprobs])
    return Handed(replace(whole.job, max_tokens=prompt.max_tokens), logprobs)


def is_another(one: Handed, other: Handed) -> bool:
    return bytes(one.job.tokens) != bytes(other.job.tokens)


def found(checker: Any, work: list[Handed]) -> int:
    return sum(bool(checker.complaint_about(one.job, one.logprobs, True)) for one in work)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from tailrace.engines.native import build_engine

    config, checks = settings(arguments, arguments.generate), settings(arguments, arguments.check)
    jobs = prompts(config, arguments.samples)
    engine, other, checker = build_engine(config, SEED), build_engine(config, SEED + 1), build_engine(checks, SEED)
    generated(engine, jobs[:2])  # whatever is made on first use
    honest, generating_s = generated(engine, jobs)
    found(checker, honest[:2])
    began = time.perf_counter()
    refused = found(checker, honest)
    checking_s = time.perf_counter() - began
    worst = checker._rescoring().worst
    elsewhere, _ = generated(other, jobs)
    best = [one for one, true in zip(elsewhere, honest, strict=True) if is_another(one, true)]
    tokens = [redrawn(engine, other, one, job) for one, job in zip(honest, jobs, strict=True)]
    altered = [one for one, true in zip(tokens, honest, strict=True) if is_another(one, true)]
    tolerance = checker._rescoring()._tolerance
    raised = [Handed(one.job, one.logprobs - 2 * np.eye(len(one.logprobs))[0] * tolerance) for one in honest]
    return {
        "model": Path(arguments.model).name,
        "generate": arguments.generate,
        "check": arguments.check,
        "tolerance": tolerance,
        "samples": len(jobs),
        "tokens": int(sum(len(one.logprobs) for one in honest)),
        "honest_refused": refused,
        "worst_difference_nats": worst,
        "generating_s": round(generating_s, 3),
        "checking_s": round(checking_s, 3),
        "one_token_redrawn": [found(checker, altered), len(altered)],
        "drawn_with_another_seed": [found(checker, best), len(best)],
        "one_log_prob_raised": [found(checker, raised), len(raised)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(START))
    parser.add_argument("--generate", default="cpu:float32")
    parser.add_argument("--check", default="cpu:float32")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--out", default="rescoring.json")
    arguments = parser.parse_args()
    row = measure(arguments) | {"cores": os.cpu_count(), "when": time.strftime("%Y-%m-%d")}
    path = ROOT / "benchmarks" / "results" / arguments.out
    rows = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
