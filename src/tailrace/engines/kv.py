"""The KV pool's tensors. Which block belongs to whom is the scheduler's business."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from tailrace.engines.attention import LayerShape


class KVCache:
    """Keys and values of every layer: [blocks, heads, slots, dim]. What has the same shape is one tensor, so that
    blocks of all layers are copied at once."""

    def __init__(
        self, shapes: dict[int, LayerShape], blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_tokens = block_tokens
        wanted = [(shape.kv_heads, dim) for shape in shapes.values() for dim in (shape.key_dim, shape.value_dim)]
        self._pools = {
            kind: _zeros((count, blocks, kind[0], block_tokens, kind[1]), dtype, device)
            for kind, count in Counter(wanted).items()
        }
        parts = {kind: iter(pool.unbind()) for kind, pool in self._pools.items()}
        self.keys = {layer: next(parts[shape.kv_heads, shape.key_dim]) for layer, shape in shapes.items()}
        self.values = {layer: next(parts[shape.kv_heads, shape.value_dim]) for layer, shape in shapes.items()}

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks. All sources are read before any target is written: without memory nothing has changed."""
        if not copies:
            return
        pools = list(self._pools.values())
        sources, targets = torch.tensor(copies, device=pools[0].device).T
        read = [pool.index_select(1, sources) for pool in pools]
        for pool, blocks in zip(pools, read, strict=True):
            pool.index_copy_(1, targets, blocks)


def bytes_per_token(shapes: dict[int, LayerShape], dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU from calloc, so that a large pool takes memory only as far as it gets used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
