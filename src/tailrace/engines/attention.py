"""Paged attention as one of transformers' attention functions: how a model's module reaches the KV pool.

The native engine runs a module on one packed row of tokens and passes a `PagedBatch` through its keyword arguments;
every attention layer then comes here. No mask is built outside: transformers skips masks for an attention function that
has no mask function beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from tailrace.model.support import check_call, refuse, trying

NAME = "tailrace_paged"


class LayerShape(NamedTuple):
    """What a layer asks of attention, always the same."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


class Attends(Protocol):
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Tensors are [tokens, heads, dim], as is the result."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: Attends | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    check_call(module, paged is not None, attention_mask, kwargs)
    assert paged is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return paged.attend(layer, query, key, value, scale, sliding_window, softcap)[None], None


def use_paged_attention(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Switch the model over and find out, with one token, what each layer puts into the cache."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    probe = _Probe(model.config.model_type)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode(), trying(model):
        model(input_ids=token, position_ids=token, use_cache=False, paged=probe)
    return probe.shapes


class _Probe:
    """Sees shapes, computes nothing."""

    def __init__(self, family: str) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._family = family

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        if layer in self.shapes:
            refuse(self._family, f"its layer {layer} attends more than once")
        shape = query.shape[1], key.shape[1], key.shape[2], value.shape[2]
        self.shapes[layer] = LayerShape(*shape, *how)
        return query.new_zeros(*query.shape[:2], value.shape[2])
