"""What a Llama decoder's layers consist of on a GPU: the kernels of `tailrace.kernels`, a launch each.

Products of many rows are the library's. For few rows the time goes into reading the weights, and kernels of our own do
that faster; what follows a product is then part of it, or of the kernel that adds up its parts.
Nothing here reads anything back from the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import Heads, Norm, Product
from tailrace.kernels import skinny
from tailrace.kernels.decode import paged_decode
from tailrace.kernels.gate import silu_mul
from tailrace.kernels.norm import add_rms_norm, rms_norm
from tailrace.kernels.prefill import paged_prefill
from tailrace.kernels.rope import rope_store


class FusedOperations:
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def product(self, x: Tensor, product: Product) -> Tensor:
        return skinny.product(x, product.weight.t(), product.bias) if skinny.suits(x) else product.of(x)

    def project(self, x: Tensor, product: Product) -> Tensor:
        return skinny.product_parts(x, product.weight.t(), product.bias) if skinny.suits(x) else product.of(x)

    def gated(self, x: Tensor, product: Product) -> Tensor:
        if skinny.suits(x):
            return skinny.gated_product(x, product.weight.t(), product.bias)
        return silu_mul(product.of(x))

    def add(self, hidden: Tensor, x: Tensor, product: Product, norm: Norm) -> Tensor:
        if skinny.suits(x):
            parts = skinny.product_parts(x, product.weight.t(), product.bias)
            return add_rms_norm(parts, hidden, norm.weight, norm.eps)
        product.onto(hidden, x)
        return rms_norm(hidden, norm.weight, norm.eps)


class Stored(NamedTuple):
    """Where a step's tokens are: their positions in their sequences, their slots in the pool, their sequences'
    blocks."""

    cache: KVCache
    rotations: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor  # -1: this token is not stored
    table: Tensor

    def store(self, heads: Heads, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rotated queries, and the pool's keys and values with the new ones in them."""
        keys, values = self.cache.keys[heads.layer], self.cache.values[heads.layer]
        norms = heads.query_norm, heads.key_norm, heads.eps
        return rope_store(qkv, *self.rotations, self.positions, self.slots, keys, values, *norms), keys, values


class DecodeAttention(NamedTuple):
    """One token for every row."""

    stored: Stored
    lengths: Tensor  # 0: an idle row
    splits: int

    def attend(self, heads: Heads, qkv: Tensor) -> Tensor:
        query, keys, values = self.stored.store(heads, qkv)
        how = heads.scale, heads.window, None, self.splits
        return paged_decode(query, keys, values, self.stored.table, self.lengths, *how).flatten(1)


class PrefillAttention(NamedTuple):
    """Chunks of several sequences, one after the other."""

    stored: Stored
    starts: Tensor
    lengths: Tensor  # of what is in the pool, these chunks included
    bounds: Tensor  # the first row of every chunk, and the end
    longest: int

    def attend(self, heads: Heads, qkv: Tensor) -> Tensor:
        query, keys, values = self.stored.store(heads, qkv)
        where = self.stored.table, self.starts, self.lengths, self.bounds, self.longest
        return paged_prefill(query, keys, values, *where, heads.scale, heads.window, None).flatten(1)
