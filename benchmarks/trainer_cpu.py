"""The trainer's CPU seconds for a step of the default recipe, by itself or side by side with another source tree.

    python benchmarks/trainer_cpu.py [--against OTHER/src] [--rounds 7] [--threads 1]

A step has 32 prompts with 8 samples each in 4 mini-batches, about 11,000 tokens. Prompts are as long as the recipe's
and heavy-tailed; most samples are as long as a careful chain of thought, the rest are guesses; tokens are random, so
samples of a group have their prompt in common and nothing else. Every tree trains in a process of its own, which takes
one step per round, turn and turn about: whatever else the machine does hits both alike. Seconds are of the processor,
not of the clock; figures are medians over the rounds. The losses of both are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trainer_cpu.json"
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
PROMPTS, SAMPLES, PARTS = 32, 8, 4
CAREFUL = 0.8  # of the samples
WARM = 2  # steps before anything is timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", default="", help="another source tree, such as that of an older commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    figures = compare(options)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    trees = {"this": ROOT / "src"} | ({"other": Path(options.against).resolve()} if options.against else {})
    trainers = {name: Trainer(tree, options.threads) for name, tree in trees.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    try:
        for step in range(WARM + options.rounds):
            for name in [*trainers][:: 1 if step % 2 else -1]:
                found[name].append(trainers[name].step(step))
    finally:
        for trainer in trainers.values():
            trainer.close()
    return summary({name: each[WARM:] for name, each in found.items()}, options.threads)


def summary(found: dict[str, list[dict[str, float]]], threads: int) -> dict[str, Any]:
    seconds = {name: statistics.median(one["cpu_s"] for one in each) for name, each in found.items()}
    rates = {name: statistics.median(one["tokens"] / one["cpu_s"] for one in each) for name, each in found.items()}
    figures: dict[str, Any] = {
        "threads": threads,
        "rounds": len(found["this"]),
        "tokens": round(statistics.mean(one["tokens"] for one in found["this"])),
        "cpu_s": {name: round(each, 3) for name, each in seconds.items()},
        "tokens_per_cpu_s": {name: round(each) for name, each in rates.items()},
    }
    if "other" in found:
        pairs = list(zip(found["this"], found["other"], strict=True))
        figures["ratio"] = round(statistics.median(other["cpu_s"] / this["cpu_s"] for this, other in pairs), 2)
        figures["largest_difference_of_losses"] = max(abs(this["loss"] - other["loss"]) for this, other in pairs)
    return figures


class Trainer:
    """This same file in a process of its own, which trains a step for every line it is sent."""

    def __init__(self, tree: Path, threads: int) -> None:
        pipe = subprocess.PIPE
        settings = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=settings)

    def step(self, number: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def serve() -> None:
    import torch

    from tailrace.trainer.reader import in_memory

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer = learner()
    for line in sys.stdin:
        parts = groups(int(line))
        began = time.process_time()
        losses = [
            trainer.train_mini_batch(int(line), part, *in_memory(some))["loss"] for part, some in enumerate(parts)
        ]
        cpu_s = time.process_time() - began
        print(json.dumps({"cpu_s": cpu_s, "tokens": tokens(parts), "loss": sum(losses)}), flush=True)


def learner() -> Any:
    from tailrace.config.load import load
    from tailrace.trainer.step import Learner

    return Learner(load([RECIPE]))


def groups(seed: int) -> list[list[list[Any]]]:
    """The groups of every mini-batch of a step."""
    rng = np.random.default_rng(seed)
    every = [group(rng, number) for number in range(PROMPTS)]
    return [every[start::PARTS] for start in range(PARTS)]


def group(rng: np.random.Generator, number: int) -> list[Any]:
    from tailrace.types import Segment, Trajectory

    items = int(np.clip(4 * rng.lognormal(0.0, 1.15), 1, 96))
    prompt = Segment.of(None, some_tokens(rng, 2 * items + 3))

    def sample(i: int) -> Trajectory:
        length = 3 * items + 4 if rng.random() < CAREFUL else int(rng.integers(2, 6))
        answer = Segment.of(0, some_tokens(rng, length), (-4.0,) * length)
        return Trajectory(number * SAMPLES + i, number, number, (prompt, answer), "stop", float(i % 2))

    return [sample(i) for i in range(SAMPLES)]


def some_tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(2, 143, count).tolist())


def tokens(parts: list[list[list[Any]]]) -> int:
    return sum(len(segment) for part in parts for some in part for one in some for segment in one.segments)


if __name__ == "__main__":
    main()
