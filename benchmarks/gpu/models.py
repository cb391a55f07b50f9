"""Random models of a given shape, made where they are used: nothing is downloaded and nothing is saved.

`rollout.py` calls this in the process that holds the card. Weights are drawn on the device: seconds for a 7B model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from workloads import SHAPES, settings


def config_of(size: str, **changed: Any) -> Qwen2Config:
    given = {name: value for name, value in settings(size).items() if name not in ("model_type", "architectures")}
    return Qwen2Config(**{**given, **changed})


def random_model(size: str, device: str, dtype: torch.dtype, seed: int = 0, **changed: Any) -> PreTrainedModel:
    """Weights of the usual spread, drawn from the seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config_of(size, **changed), dtype=dtype)
    return model.eval()


def products(size: str) -> tuple[list[tuple[int, int]], int]:
    """The matrices of one layer as (out, in), and how many layers there are; the last product gives the logits."""
    shape = SHAPES[size]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    joined = (shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * head
    return [(joined, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)], shape["num_hidden_layers"]
