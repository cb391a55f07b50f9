"""Engines for the contract suite, with a tiny Llama whose log-probs transformers computes as well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import load
from tailrace.config.tree import Config
from tailrace.model.load import end_tokens, load_tokenizer
from tailrace.types import Version

START = Path(__file__).parents[1] / "examples" / "running_total" / "start"
PROMPTS = [[40 + (7 * number + place) % 90 for place in range(9 + 5 * number)] for number in range(4)]
MAX_TOKENS = 24


def settings(*options: str, model: Path = START) -> Config:
    """Of an engine for the default recipe's model, or another one."""
    sizes = [
        "--workload.max_completion_tokens",
        "200",
        "--workload.prompt_tokens",
        "100",
        "--rollout.max_running",
        "16",
    ]
    return load([], ["--model.path", str(model), "--task.name", "running_total", *sizes, *options])


def stop_tokens() -> frozenset[int]:
    return end_tokens(str(START), load_tokenizer(str(START)))


@cache
def model_of(version: Version, folder: Path = START) -> Any:
    """Random weights of its own for every version: answers are long, and no two versions agree on a log-prob."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype="float32").eval()
    drawn = torch.Generator().manual_seed(version + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
            centre = 0.0 if parameter.dim() > 1 else 1.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=drawn))
    return model


def weights(version: Version, folder: Path = START) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model_of(version, folder).named_parameters()}


@torch.no_grad()
def truth(version: Version, tokens: Sequence[int], first: int, folder: Path = START) -> list[float]:
    """By transformers, of the tokens from the first one on."""
    logits = model_of(version, folder)(torch.tensor([list(tokens)])).logits[0, first - 1 : -1]
    chosen = torch.tensor(list(tokens[first:]))
    return logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
