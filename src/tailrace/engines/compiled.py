"""What a Llama decoder's layers consist of, on a CPU with a C compiler: products of few rows at the speed of memory.

Many rows, as in the prefill of long prompts, are what general matrix libraries are made for: those stay with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import Attention, Heads, Norm, Product
from tailrace.engines.paged_attention import SHORT, Span, block_table
from tailrace.engines.plain import PlainOperations
from tailrace.engines.scheduler import Chunk
from tailrace.kernels.cpu import LayerOfHeads

MOST_ROWS = 48  # beyond these torch's products are faster


class CompiledOperations(PlainOperations):
    def __init__(self, kernels: ctypes.CDLL) -> None:
        super().__init__()
        self._kernels = kernels

    def attention(
        self, cache: KVCache, chunks: Sequence[Chunk], rotations: tuple[Tensor, Tensor], positions: Tensor
    ) -> Attention:
        return _Attention(self._kernels, cache, chunks, rotations, positions)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        rows, width = x.shape
        y = self._room("norm", rows, width, x)
        self._kernels.norm(x.data_ptr(), norm.weight.data_ptr(), y.data_ptr(), rows, width, norm.eps)
        return y

    def product(self, x: Tensor, product: Product) -> Tensor:
        if len(x) > MOST_ROWS:
            return super().product(x, product)
        y = self._room("product", len(x), product.weight.shape[1], x)
        self._multiply(x, product, y, add=False)
        return y

    project = product

    def gated(self, x: Tensor, product: Product) -> Tensor:
        both = self.product(x, product)
        rows, width = len(both), both.shape[1] // 2
        y = self._room("gated", rows, width, both)
        self._kernels.gate(both.data_ptr(), y.data_ptr(), rows, width)
        return y

    def add(self, hidden: Tensor, x: Tensor, product: Product, norm: Norm) -> Tensor:
        if len(x) > MOST_ROWS:
            product.onto(hidden, x)
        else:
            self._multiply(x, product, hidden, add=True)
        return self.norm(hidden, norm)

    def _multiply(self, x: Tensor, product: Product, y: Tensor, add: bool) -> None:
        weight, bias = product.weight.data_ptr(), None if product.bias is None else product.bias.data_ptr()
        self._kernels.product(x.data_ptr(), weight, bias, y.data_ptr(), len(x), *product.weight.shape, add)


class _Attention:
    """Of one step. Short chunks, single tokens above all, are looked at token by token where their keys lie; long ones
    are gathered and computed with torch, one by one."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        cache: KVCache,
        chunks: Sequence[Chunk],
        rotations: tuple[Tensor, Tensor],
        positions: Tensor,
    ) -> None:
        self._kernels = kernels
        self._cache = cache
        self._rotations = rotations
        self._positions = positions
        self._tables = np.repeat(block_table(chunks, cache.block_tokens), [chunk.length for chunk in chunks], axis=0)
        self._seen = sum(chunk.length for chunk in chunks if chunk.length <= SHORT)
        self._spans = _spans(chunks, self._seen, cache.block_tokens)
        self._out = torch.empty(0)

    def attend(self, heads: Heads, qkv: Tensor) -> Tensor:
        if self._out.numel() == 0:
            self._out = qkv.new_empty(len(qkv), heads.queries * heads.dim)
        layer, (cosines, sines) = self._layer(heads), self._rotations
        self._kernels.attend(
            ctypes.byref(layer),
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            self._positions.data_ptr(),
            self._tables.ctypes.data,
            self._tables.shape[1],
            len(qkv),
            self._seen,
            self._out.data_ptr(),
        )
        for span in self._spans:
            self._out[span.rows] = self._span(span, heads, qkv[span.rows])
        return self._out

    def _layer(self, heads: Heads) -> LayerOfHeads:
        keys, values = self._cache.keys[heads.layer], self._cache.values[heads.layer]
        norms = [None if norm is None else norm.data_ptr() for norm in (heads.query_norm, heads.key_norm)]
        shape = (heads.queries, heads.keys, heads.dim, self._cache.block_tokens, heads.window or 0)
        return LayerOfHeads(*shape, heads.scale, heads.eps, *norms, keys.data_ptr(), values.data_ptr())

    def _span(self, span: Span, heads: Heads, qkv: Tensor) -> Tensor:
        query = qkv[:, : heads.queries * heads.dim].unflatten(1, (heads.keys, -1, heads.dim))
        keys, values = self._cache.keys[heads.layer], self._cache.values[heads.layer]
        return span.attend(query, keys, values, heads.scale, heads.window, None).flatten(1)


def _spans(chunks: Sequence[Chunk], row: int, block_tokens: int) -> list[Span]:
    """Those of the long chunks, which come last and start at `row`."""
    spans: list[Span] = []
    for chunk in chunks:
        if chunk.length > SHORT:
            spans.append(Span([chunk], row, block_tokens, torch.device("cpu")))
            row = spans[-1].rows.stop
    return spans
