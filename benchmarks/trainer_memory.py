"""The trainer's peak memory: what it follows (the token budget) and what it does not (longest sequence, batch).

python benchmarks/trainer_memory.py   # prints the table, writes benchmarks/results/trainer_memory.json

Every case is a process of its own that trains one mini-batch of a small Llama with a vocabulary of 16,384 and reports
how far its resident memory rose above that of the weights and moments (peak RSS). Tensors are mapped one by one, so
that freed ones do not count. Lengths are log-normal with one sequence of the full length.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600
VOCABULARY = 16384
BASE = {"longest": 512, "batch": 4096, "budget": 1024, "chunk": 256, "recompute": False}
SWEEPS = {
    "longest sequence": [{"longest": longest} for longest in (128, 512, 1024)],
    "tokens in the batch": [{"batch": batch} for batch in (2048, 4096, 8192)],
    "token budget": [{"budget": budget} for budget in (1024, 2048, 4096)],
    "logits at once": [{"chunk": chunk, "budget": 4096} for chunk in (256, 1024, 4096)],
    "recomputed activations": [{"recompute": again, "budget": 4096} for again in (False, True)],
}


def main() -> None:
    grid, results = Table("sweep", "case", "above weights and moments, MB", "seconds"), []
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder))
        for sweep, changes in SWEEPS.items():
            for change in changes:
                row = {"sweep": sweep, **BASE, **change, **_in_a_process(folder, BASE | change)}
                results.append(row)
                grid.add_row(sweep, str(change), f"{row['rise_mb']:,.0f}", f"{row['seconds']:.1f}")
    Console().print(grid)
    (ROOT / "benchmarks" / "results" / "trainer_memory.json").write_text(json.dumps(results, indent=1) + "\n")


def _make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _in_a_process(folder: str, case: dict[str, int | bool]) -> dict[str, float]:
    command = [sys.executable, __file__, folder, json.dumps(case)]
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=mapped, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _case(folder: str, longest: int, batch: int, budget: int, chunk: int, recompute: bool) -> dict[str, float]:
    from tailrace.config.tree import Config, Model, Trainer
    from tailrace.trainer.reader import in_memory
    from tailrace.trainer.step import Learner

    settings = Trainer(
        mini_batches=1, device="cpu", tokens_per_batch=budget, logit_tokens=chunk, recompute=recompute, loss="aipo"
    )
    learner = Learner(Config(model=Model(path=folder), trainer=settings))
    learner.train_mini_batch(0, 0, *in_memory([_group([8, 8])]))  # gradients and moments exist from here on
    before = _resident_mb()
    metrics = learner.train_mini_batch(1, 0, *in_memory([_group(_lengths(longest, batch))]))
    return {"rise_mb": _peak_mb() - before, "before_mb": before, "seconds": metrics["seconds"]}


def _lengths(longest: int, batch: int) -> list[int]:
    rng, lengths = np.random.default_rng(0), [longest]
    while sum(lengths) < batch:
        lengths.append(int(np.clip(rng.lognormal(np.log(longest / 4), 0.7), 8, longest)))
    return lengths


def _group(lengths: list[int]) -> list:
    from tailrace.types import Segment, Trajectory

    rng = np.random.default_rng(1)

    def trajectory(i: int, length: int) -> Trajectory:
        tokens = tuple(rng.integers(0, VOCABULARY, length).tolist())
        sampled = Segment.of(0, tokens[1:], (-10.0,) * (length - 1))
        return Trajectory(i, 0, 0, (Segment.of(None, tokens[:1]), sampled), "stop", float(i % 2))

    return [trajectory(i, length) for i, length in enumerate(lengths)]


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(_case(sys.argv[1], **json.loads(sys.argv[2]))))
    else:
        main()
