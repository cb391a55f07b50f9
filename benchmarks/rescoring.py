"""What does it cost to score a stranger's work again, how far apart do two machines round, and which lies are found?

    python benchmarks/rescoring.py [--samples 64] [--tokens 256]
    python benchmarks/rescoring.py --model DIR --generate cuda:bfloat16 cuda:float16 cuda:float32 \\
        --check cuda:bfloat16 cuda:float16 cuda:float32 --out gpu_rescoring.json

One engine generates answers to held-out prompts in one batch; another one, as a checker has it, scores them one by one
and compares log-probs and draws, with the default tolerance of its precision unless --tolerance says another. Honest
work has to pass: `differences_nats` says how far log-probs are apart, `least_tolerance` with which tolerance all of it
would just pass, draws included. Lies, for the first --lies samples: one token in the middle of each drawn with another
number, and the rest with the right ones; all of it drawn with another seed, as the best of many is; one log-prob off by
twice the tolerance. Seconds are those of the engines alone. Every pair of --generate and --check is a row of
benchmarks/results/rescoring.json, written as soon as it is measured; it needs neither a network nor more than torch,
transformers, numpy and msgspec.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import product
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


class Engines(NamedTuple):
    """An honest one, one that draws with another seed, and one that checks."""

    engine: Any
    other: Any
    checker: Any


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


def apart(checker: Any, work: list[Handed]) -> tuple[np.ndarray, np.ndarray]:
    """For every token, the nats between its two log-probs, and the tolerance with which its draw just passes."""
    import torch

    from tailrace.engines import rescoring as rules
    from tailrace.engines.sampling import uniform
    from tailrace.engines.scheduler import Sequence

    rescoring, differences, slacks = checker._rescoring(), list[np.ndarray](), list[np.ndarray]()
    for one in work:
        sequence, job = Sequence(one.job, one.job.length), one.job
        with torch.inference_mode():
            for first, logits in rescoring._logits(sequence):
                scores = logits.double()
                tokens = torch.tensor(sequence.tokens[first : first + len(scores)], device=scores.device)
                at, all_kept = first - job.prompt_tokens, torch.ones_like(scores, dtype=torch.bool)
                kept = rules.AllowedTokens(all_kept, all_kept, scores.amin(-1))
                claimed = torch.from_numpy(one.logprobs[at : at + len(scores)].astype(np.float64)).to(scores.device)
                differences.append(rules._difference(scores, kept, tokens, claimed).cpu().numpy())
                drawn = uniform(rescoring._seed, [job.stream] * len(tokens), np.arange(first, first + len(tokens)))
                odds = rules._odds(torch.from_numpy(drawn).to(scores.device))
                low, high = (rules._odds(end) for end in rules._stretch(scores, kept, tokens))
                slacks.append(torch.maximum(low - odds, odds - high).clamp(min=0.0).cpu().numpy())
    return np.concatenate(differences), np.concatenate(slacks)


def lies_found(engines: Engines, honest: list[Handed], jobs: list[Any]) -> dict[str, list[int]]:
    """Of each kind how many were found, and how many there were: what comes out as the truth is none."""
    elsewhere, _ = generated(engines.other, jobs)
    best = [one for one, true in zip(elsewhere, honest, strict=True) if is_another(one, true)]
    tokens = [redrawn(engines.engine, engines.other, one, job) for one, job in zip(honest, jobs, strict=True)]
    altered = [one for one, true in zip(tokens, honest, strict=True) if is_another(one, true)]
    tolerance = engines.checker._rescoring()._rounding.most
    raised = [Handed(one.job, one.logprobs - 2 * np.eye(len(one.logprobs))[0] * tolerance) for one in honest]
    lies = {"one_token_redrawn": altered, "drawn_with_another_seed": best, "one_log_prob_raised": raised}
    return {name: [found(engines.checker, work), len(work)] for name, work in lies.items()}


def measure(arguments: argparse.Namespace, generate: str, check: str) -> dict[str, Any]:
    from tailrace.engines.native import build_engine

    config, checks = settings(arguments, generate), settings(arguments, check)
    jobs = prompts(config, arguments.samples)
    engine, checker = build_engine(config, SEED), build_engine(checks, SEED)
    engines = Engines(engine, build_engine(config, SEED + 1), checker)
    generated(engine, jobs[:2])  # whatever is made on first use
    honest, generating_s = generated(engine, jobs)
    found(checker, honest[:2])
    began = time.perf_counter()
    refused = found(checker, honest)
    checking_s = time.perf_counter() - began
    differences, slacks = apart(checker, honest)
    row = {
        "model": Path(arguments.model).name,
        "generate": generate,
        "check": check,
        "tolerance": checker._rescoring()._rounding.tolerance,
        "samples": len(jobs),
        "tokens": len(differences),
        "honest_refused": refused,
        "worst_difference_nats": float(differences.max()),
        "differences_nats": {str(share): float(np.quantile(differences, share)) for share in (0.5, 0.99, 0.999)},
        "least_tolerance": float(max(differences.max(), slacks.max())),
        "generating_s": round(generating_s, 3),
        "checking_s": round(checking_s, 3),
    }
    return row | lies_found(engines, honest[: arguments.lies], jobs[: arguments.lies])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(START))
    parser.add_argument("--generate", nargs="+", default=["cpu:float32"])
    parser.add_argument("--check", nargs="+", default=["cpu:float32"])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--lies", type=int, default=16)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--out", default="rescoring.json")
    arguments = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / arguments.out
    for generate, check in product(arguments.generate, arguments.check):
        row = measure(arguments, generate, check) | {"cores": os.cpu_count(), "when": time.strftime("%Y-%m-%d")}
        rows = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*rows, row], indent=1) + "\n")
        print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
