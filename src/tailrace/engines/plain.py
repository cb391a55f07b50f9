"""What a Llama decoder's layers consist of, with torch alone: on a CPU, and wherever the fused kernels cannot run.

Every call costs microseconds on a CPU whatever it does, so there are few of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import Attention, Heads, Norm, Product
from tailrace.engines.paged_attention import PagedBatch
from tailrace.engines.scheduler import Chunk


class PlainOperations:
    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], Tensor] = {}  # fresh memory costs a page fault every few kilobytes

    def attention(
        self, cache: KVCache, chunks: Sequence[Chunk], rotations: tuple[Tensor, Tensor], positions: Tensor
    ) -> Attention:
        """Of one step's tokens, which lie at `positions` of their sequences."""
        return Rotated(PagedBatch(cache, chunks, positions.device), rotations, positions)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().div_(x.shape[-1]).add_(norm.eps).rsqrt_()
        return torch.mul(x, scale.to(x.dtype)).mul_(norm.weight)

    def product(self, x: Tensor, product: Product) -> Tensor:
        return product.of(x, out=self._room("product", len(x), product.weight.shape[1], x))

    project = product

    def gated(self, x: Tensor, product: Product) -> Tensor:
        gate, up = self.project(x, product).chunk(2, dim=-1)
        return torch.mul(silu(gate, inplace=True), up, out=self._room("gated", len(gate), gate.shape[1], gate))

    def add(self, hidden: Tensor, x: Tensor, product: Product, norm: Norm) -> Tensor:
        product.onto(hidden, x)
        return self.norm(hidden, norm)

    def _room(self, use: str, rows: int, width: int, like: Tensor) -> Tensor:
        """Space for what is read before the next one of its use and width is computed."""
        room = self._rooms.get((use, width))
        if room is None or len(room) < rows:
            room = self._rooms[use, width] = torch.empty(rows, width, dtype=like.dtype, device=like.device)
        return room[:rows]


class Rotated:
    """The attention of one step's tokens, which lie at `positions`."""

    def __init__(self, batch: PagedBatch, rotations: tuple[Tensor, Tensor], positions: Tensor) -> None:
        self._batch = batch
        self._operations = PlainOperations()
        cos, sin = (each.index_select(0, positions).unsqueeze(1) for each in rotations)
        self._cos, self._sines = cos, sin.chunk(2, dim=-1)

    def attend(self, heads: Heads, qkv: Tensor) -> Tensor:
        mixed = qkv.unflatten(1, (-1, heads.dim))
        query, key, value = mixed.split((heads.queries, heads.keys, heads.keys), dim=1)
        if heads.query_norm is not None and heads.key_norm is not None:
            norms = ((query, Norm(heads.query_norm, heads.eps)), (key, Norm(heads.key_norm, heads.eps)))
            rotary = torch.cat([self._operations.norm(x, norm) for x, norm in norms], dim=1)
        else:
            rotary = mixed[:, : heads.queries + heads.keys]
        query, key = self._rotated(rotary).split((heads.queries, heads.keys), dim=1)
        found = self._batch.attend(heads.layer, query, key, value, heads.scale, heads.window, None)
        return found.flatten(1)

    def _rotated(self, x: Tensor) -> Tensor:
        """Both halves of every head as the coordinates of points, rotated by the angles of their position."""
        half_dim = x.shape[-1] // 2
        rotated = (x * self._cos).to(x.dtype)
        rotated[..., :half_dim].addcmul_(x[..., half_dim:], self._sines[0].to(x.dtype), value=-1)
        rotated[..., half_dim:].addcmul_(x[..., :half_dim], self._sines[1].to(x.dtype))
        return rotated
