"""A few tokens through the paged model before anything is generated: they must come out as without paging.

The native engine calls `try_out` for models that run as the module that transformers made of them. Two sequences go
through in chunks and token by token, side by side; their logits must be those of the module's own attention over each
sequence alone. What is not right is refused, with the family, instead of being sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.config.tree import Sampling
from tailrace.engines.attention import NAME, LayerShape
from tailrace.engines.base import Job
from tailrace.engines.eager import EagerExecutor
from tailrace.engines.kv import KVCache
from tailrace.engines.paged_attention import in_order
from tailrace.engines.plain import PlainOperations
from tailrace.engines.scheduler import Chunk, Sequence
from tailrace.model.support import refuse, trying
from tailrace.types import id_bytes

LENGTHS = (9, 4)
STEPS = ((5, 3), (8, 4), (9, 4))  # how far each sequence is after each step
BLOCK = 4
ERROR = {torch.float32: 1e-3}  # relative to the logits
ROUNDED = 0.3  # in half precision, where a mixture may choose another expert


@torch.inference_mode()
def try_out(model: PreTrainedModel, shapes: Mapping[int, LayerShape]) -> None:
    with trying(model):
        model.set_attn_implementation("eager")
        alone = [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in _sequences(model)]
        model.set_attn_implementation(NAME)
        error = _error(model, dict(shapes), alone)
    if not error < ERROR.get(model.dtype, ROUNDED):
        refuse(model.config.model_type, f"with paged attention its logits are off by {error:.0%}")


def _sequences(model: PreTrainedModel) -> list[Tensor]:
    tokens = torch.arange(sum(LENGTHS), device=model.device) % model.config.get_text_config().vocab_size
    return list(tokens.split(LENGTHS))


def _error(model: PreTrainedModel, shapes: dict[int, LayerShape], alone: list[Tensor]) -> float:
    """Of the token that is off most, relative to the logits of all. The steps are those of an engine."""
    sequences = [_placed(number, tokens.tolist()) for number, tokens in enumerate(_sequences(model))]
    cache = KVCache(shapes, sum(len(s.blocks) for s in sequences), BLOCK, model.dtype, model.device)
    executor = EagerExecutor(model, None, PlainOperations(), cache, 0, 0, Sampling())
    off, size = [], torch.cat(alone).float().norm(dim=-1).mean()
    for ends in STEPS:
        moving = [(s, end) for s, end in zip(sequences, ends, strict=True) if end > s.cached]
        chunks = in_order([Chunk(s, s.cached, end - s.cached) for s, end in moving])
        last = torch.from_numpy(np.cumsum([chunk.length for chunk in chunks]) - 1).to(model.device)
        right = torch.stack([alone[chunk.sequence.id][chunk.end - 1] for chunk in chunks])
        off.append((executor.logits(chunks, last) - right).float().norm(dim=-1).max() / size)
        for sequence, end in moving:
            sequence.cached = end
    return float(torch.stack(off).max())


def _placed(number: int, tokens: list[int]) -> Sequence:
    """With blocks of its own, none of which follow each other."""
    sequence = Sequence(Job(number, number, id_bytes(tokens), len(tokens), 0), len(tokens))
    count = -(-max(LENGTHS) // BLOCK)
    sequence.blocks = list(range(number * count, (number + 1) * count))[::-1]
    return sequence
