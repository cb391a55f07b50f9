"""The task beside this file, from Python: rows in memory, a reward with a closure, what came of it as rows.

    make setup && .venv/bin/python examples/own_task/train.py

`run.toml` has the settings; what is given here wins. No main guard is needed: the run has processes of its own.
"""

import json
from pathlib import Path

import tailrace

HERE = Path(__file__).parent
rows = [json.loads(line) for line in (HERE / "words.jsonl").read_text().splitlines()]


def about(share: float):
    """A reward of which this share is for the word that was asked for, the rest for being short."""

    def reward(completion: str, answer: str, most: int) -> float:
        words = [word.strip(".,;:!?\"'").lower() for word in completion.split()]
        return share * (answer in words) + (1 - share) * (0 < len(words) <= most)

    return reward


run = tailrace.train(HERE / "run.toml", data=rows, reward=about(0.7), name="own task in Python", steps=2)

for row in run.metrics:
    print(f"step {row['step']}: reward {row['reward']:.2f}, {row['completion_tokens']:.0f} tokens")
best = max(run.samples(state="trained"), key=lambda sample: sample["reward"])
print(f"the best answer, {best['reward']:.2f}: {best['completion']!r}")
