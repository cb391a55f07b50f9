"""Plain synchronous GRPO in one file: generate a batch, score it, train on it, repeat.

    python examples/sync_reference.py --steps 30 --seed 0

No part of Tailrace's runtime is used, neither control plane nor engine, relay or trainer: only the task, the order of
its prompts and the random number of each token. So this is what a run of Tailrace is compared with. At staleness 0
both build the same batches (`--dump`), and both reach the same accuracy after the same number of trained samples.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tailrace.engines.sampling import uniform
from tailrace.envs.base import Row, Turn
from tailrace.envs.prompts import order
from tailrace.envs.running_total import RunningTotal
from tailrace.types import id_bytes

START = Path(__file__).parent / "running_total" / "start"
EVALUATION = 1 << 40  # trajectory ids from here on belong to the evaluation
TOGETHER = 64  # sequences in one batch of generation, or in one forward and backward pass


@dataclass
class Sample:
    trajectory: int
    row: Row
    tokens: list[int] = field(default_factory=list)  # of the completion
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def sequence(self) -> list[int]:
        return [*self.row.ids.tolist(), *self.tokens]


# ---------------------------------------------------------------------------------------------------------- prompts


def row_at(place: int, task: RunningTotal, tokenizer: Any, seed: int) -> Row:
    """Place in the endless sequence of prompts: every epoch has all rows, in an order of its own."""
    epoch, position = divmod(place, len(task))
    return to_row(place, task.row(order(seed, epoch, len(task))[position]), tokenizer)


def to_row(place: int, columns: dict[str, Any], tokenizer: Any) -> Row:
    return Row(place, id_bytes(tokenizer(columns["prompt"])["input_ids"]), columns["prompt"], columns)


# ------------------------------------------------------------------------------------------------------- generation


@torch.no_grad()
def generate(model: Any, samples: list[Sample], seed: int, max_tokens: int) -> None:
    """Fill in tokens and log-probs. Which samples share a batch matters to speed only."""
    samples = sorted(samples, key=lambda sample: sample.row.length)
    for start in range(0, len(samples), TOGETHER):
        generate_batch(model, samples[start : start + TOGETHER], seed, max_tokens)


def generate_batch(model: Any, running: list[Sample], seed: int, max_tokens: int) -> None:
    """Prompts are padded on the left; sequences that end leave the batch."""
    end, width = model.config.eos_token_id, max(sample.row.length for sample in running)
    pads = torch.tensor([width - sample.row.length for sample in running])
    inputs = torch.tensor([[end] * (width - sample.row.length) + sample.row.ids.tolist() for sample in running])
    cache = DynamicCache(config=model.config)
    for length in range(width, width + max_tokens):
        places = torch.arange(length) - pads[:, None]
        now = places[:, -inputs.shape[1] :].clamp(min=0)
        mask = (places >= 0).long()
        logits = model(inputs, attention_mask=mask, position_ids=now, past_key_values=cache, logits_to_keep=1).logits
        inputs = draw(logits[:, -1], running, seed)
        unfinished = (inputs[:, 0] != end).nonzero()[:, 0]
        if not len(unfinished):
            return
        if len(unfinished) < len(running):
            running = [running[place] for place in unfinished.tolist()]
            inputs, pads = inputs[unfinished], pads[unfinished]
            cache.batch_select_indices(unfinished)


def draw(logits: torch.Tensor, running: list[Sample], seed: int) -> torch.Tensor:
    """A token for each: the one on which its random number falls when probabilities are laid end to end."""
    logprobs = logits.double().log_softmax(-1)
    places = [len(sample.sequence) for sample in running]
    numbers = torch.from_numpy(uniform(seed, [sample.trajectory for sample in running], places))
    ends = logprobs.exp().cumsum(-1)
    tokens = torch.searchsorted(ends, numbers[:, None] * ends[:, -1:], right=True)
    for sample, token, logprob in zip(running, tokens[:, 0].tolist(), logprobs.gather(-1, tokens), strict=True):
        sample.tokens.append(token)
        sample.logprobs.append(float(logprob))
    return tokens


def score(samples: list[Sample], task: RunningTotal, tokenizer: Any) -> None:
    for sample in samples:
        text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
        sample.reward = task.respond(sample.row, (Turn("policy", text),)).reward


# --------------------------------------------------------------------------------------------------------- training


def set_advantages(group: list[Sample]) -> None:
    """How much better than the rest of its group, in standard deviations (those of a sample: n - 1)."""
    rewards = [sample.reward for sample in group]
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    for sample in group:
        sample.advantage = (sample.reward - fmean(rewards)) / (spread + 1e-6)


def train_step(model: Any, optimizer: Any, groups: list[list[Sample]], options: argparse.Namespace) -> None:
    """As many optimiser steps as there are mini-batches, all clipped around the weights that generated."""
    for group in groups:
        set_advantages(group)
    size = -(-len(groups) // options.mini_batches)
    for start in range(0, len(groups), size):
        train_batch(model, optimizer, [sample for group in groups[start : start + size] for sample in group], options)


def train_batch(model: Any, optimizer: Any, samples: list[Sample], options: argparse.Namespace) -> None:
    """One optimiser step on the mean over tokens; gradients add up over passes of similar length."""
    samples = sorted(samples, key=lambda sample: len(sample.sequence))
    tokens = sum(len(sample.tokens) for sample in samples)
    for start in range(0, len(samples), TOGETHER):
        (token_losses(model, samples[start : start + TOGETHER], options.clip).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def token_losses(model: Any, samples: list[Sample], clip: float) -> torch.Tensor:
    """PPO's clipped loss of every sampled token."""
    width = max(len(sample.sequence) for sample in samples)
    padded = torch.tensor([sample.sequence + [0] * (width - len(sample.sequence)) for sample in samples])
    everything = model(padded).logits[:, :-1].log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
    spans = [slice(sample.row.length - 1, len(sample.sequence) - 1) for sample in samples]
    new = torch.cat([line[span] for line, span in zip(everything, spans, strict=True)])
    old = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    advantages = torch.tensor([sample.advantage for sample in samples for _ in sample.tokens])
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


# ------------------------------------------------------------------------------------------------------ the program


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    task = RunningTotal({}, options.seed)
    report(options, evaluate(model, task, tokenizer, options))
    batches = []
    for step in range(options.steps):
        began = time.monotonic()
        groups = make_groups(step, task, tokenizer, options)
        samples = [sample for group in groups for sample in group]
        generate(model, samples, options.seed, options.max_tokens)
        score(samples, task, tokenizer)
        generated = time.monotonic()
        train_step(model, optimizer, groups, options)
        times = {"generate_s": generated - began, "train_s": time.monotonic() - generated}
        report(options, {"step": step + 1, "reward": fmean(sample.reward for sample in samples), **times})
        batches.append([(sample.row.id, sample.trajectory, sample.tokens, sample.reward) for sample in samples])
    report(options, evaluate(model, task, tokenizer, options))
    if options.dump:
        options.dump.write_text(json.dumps(batches))


def make_groups(step: int, task: RunningTotal, tokenizer: Any, options: argparse.Namespace) -> list[list[Sample]]:
    """Trajectories are numbered through from the first group of the first step on."""
    first, size = step * options.prompts_per_step, options.group_size
    rows = [row_at(first + number, task, tokenizer, options.seed) for number in range(options.prompts_per_step)]
    return [[Sample(row.id * size + number, row) for number in range(size)] for row in rows]


def evaluate(model: Any, task: RunningTotal, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """One sample at temperature 1 for each held-out row: accuracy, and how long the answers are."""
    held_out = task.held_out()[: options.eval_rows]
    if not held_out:
        return {}
    rows = [to_row(-1 - number, columns, tokenizer) for number, columns in enumerate(held_out)]
    samples = [Sample(EVALUATION + number, row) for number, row in enumerate(rows)]
    generate(model, samples, options.seed, options.max_tokens)
    score(samples, task, tokenizer)
    lengths = [len(sample.tokens) for sample in samples]
    accuracy = fmean(sample.reward for sample in samples)
    return {"accuracy": accuracy, "median_tokens": median(lengths), "p99_tokens": quantiles(lengths, n=100)[98]}


def report(options: argparse.Namespace, figures: dict[str, float]) -> None:
    if not figures:
        return
    plain = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
    print(json.dumps(figures) if options.json else plain, flush=True)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain synchronous GRPO on the running-total task.")
    parser.add_argument("--model", type=Path, default=START, help="a Hugging Face model directory")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=4, help="optimiser steps per step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--eval-rows", type=int, default=512, help="held-out rows; 0: no evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--dump", type=Path, help="write the batches: per step (place, trajectory, tokens, reward)")
    return parser.parse_args(words)


if __name__ == "__main__":
    run(parse())
