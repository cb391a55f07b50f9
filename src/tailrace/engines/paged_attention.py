"""Attention of one step over the paged KV pool, with torch alone: the form that runs on every device.

A step's keys and values are written into the pool first; then every token looks at all that it may see there. Chunks of
about the same length, single tokens (decoding) above all, are computed together: the blocks of their sequences are
gathered into one padded tensor, and one attention call does the rest. Long chunks are computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tailrace.engines.kv import KVCache
from tailrace.engines.scheduler import Chunk

PADDED = 2  # gather no more than so many times the tokens that are there
SHORT = 64  # chunks up to this length are padded together, longer ones are computed one by one


def in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks as a batch wants them: those that are computed together lie together."""
    return sorted(chunks, key=lambda chunk: (chunk.length, chunk.end))


class PagedBatch:
    """Where the tokens of one step lie in the pool, and what each may see: the same for every layer."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._cache = cache
        slots = np.concatenate([_slots_of(chunk, cache.block_tokens) for chunk in chunks], axis=1)
        self._blocks, self._slots = torch.from_numpy(slots).to(device)
        self._targets: dict[int, torch.Tensor] = {}
        self._parts = _parts(chunks, cache.block_tokens, device)

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
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._write(keys, key)
        self._write(values, value)
        query = query.unflatten(1, (key.shape[1], -1))  # the query heads that share a KV head lie together
        if len(self._parts) == 1:
            return self._parts[0].attend(query, keys, values, scale, window, softcap).flatten(1, 2)
        found = [part.attend(query[part.rows], keys, values, scale, window, softcap) for part in self._parts]
        return torch.cat(found).flatten(1, 2)

    def _write(self, pool: torch.Tensor, fresh: torch.Tensor) -> None:
        """Rows of the pool are what one head has of one token."""
        heads, slots, dim = pool.shape[1:]
        if heads not in self._targets:
            self._targets[heads] = (_per_head(self._blocks[:, None], heads) * slots + self._slots[:, None]).flatten()
        pool.view(-1, dim)[self._targets[heads]] = fresh.reshape(-1, dim)


def _slots_of(chunk: Chunk, block_tokens: int) -> np.ndarray:
    """Two rows: the block and the slot of every token of the chunk."""
    block, slot = np.divmod(np.arange(chunk.start, chunk.end), block_tokens)
    first = chunk.start // block_tokens
    blocks = np.array(chunk.sequence.blocks[first : block[-1] + 1], np.int64)
    return np.stack([blocks[block - first], slot])


def _per_head(blocks: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of blocks [..., 1] in a pool seen as [blocks * heads, ...], one for each head: [..., heads]."""
    return blocks * heads + torch.arange(heads, device=blocks.device)


class _Part(Protocol):
    """Some of the step's tokens, computed at once. Queries are [tokens, KV heads, groups, dim], as is the result."""

    rows: slice

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


def _parts(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> list[_Part]:
    parts: list[_Part] = []
    row = 0
    for together in _batches(chunks, block_tokens):
        kind = Span if together[0].length > SHORT else _Padded
        parts.append(kind(together, row, block_tokens, device))
        row = parts[-1].rows.stop
    return parts


def _batches(chunks: Sequence[Chunk], block_tokens: int) -> Iterator[Sequence[Chunk]]:
    """Chunks of which little is padding when they are computed together."""
    batch: list[Chunk] = []
    real = widest = 0
    for chunk in chunks:
        width = chunk.end + block_tokens
        real, widest = real + chunk.length * width, max(widest, width)
        padded = chunk.length * widest * (len(batch) + 1)  # the lengths are in order
        if batch and (chunk.length > SHORT or padded > PADDED * real):
            yield batch
            batch, real, widest = [], chunk.length * width, width
        batch.append(chunk)
    yield batch


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """All are [batch, heads, tokens, dim]; the mask holds what is added to the scores."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = _capped(torch.matmul(query * scale, key.transpose(2, 3)).float(), softcap)
    return torch.matmul((scores + mask).softmax(-1).to(value.dtype), value)


# ------------------------------------------------------------------------------------------ short chunks, padded


class _Padded:
    """Short chunks of several sequences, as one batch: [sequences, KV heads, tokens * groups, dim].

    Sequences are padded to the longest with blocks that are not seen, chunks with queries that nobody asks for.
    """

    def __init__(self, chunks: Sequence[Chunk], row: int, block_tokens: int, device: torch.device) -> None:
        self._count = len(chunks)
        self._length = max(chunk.length for chunk in chunks)
        starts, lengths = (np.array([getattr(chunk, name) for chunk in chunks]) for name in ("start", "length"))
        self.rows = slice(row, row + int(lengths.sum()))
        step = np.minimum(np.arange(self._length), lengths[:, None] - 1)  # the last token again is the padding
        first = lengths.cumsum() - lengths
        self._spread = torch.from_numpy((first[:, None] + step).flatten()).to(device)
        asked = np.arange(self._length) < lengths[:, None]
        self._asked = torch.from_numpy(np.flatnonzero(asked)).to(device)
        self._positions = torch.from_numpy(starts[:, None] + step).to(device)
        self._blocks = torch.from_numpy(block_table(chunks, block_tokens)).to(device)
        self._keys = torch.arange(self._blocks.shape[1] * block_tokens, device=device)
        self._sources: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        mask = self._mask(window, query)
        key, value = self._gathered(keys), self._gathered(values)
        if self._length == 1:
            return _masked_attention(query, key, value, mask, scale, softcap)
        shape = (self._count, self._length, *query.shape[1:])
        spread = query.index_select(0, self._spread).view(shape).transpose(1, 2).flatten(2, 3)
        found = _masked_attention(spread, key, value, mask, scale, softcap)
        found = found.unflatten(2, (self._length, -1)).transpose(1, 2).flatten(0, 1)
        return found.index_select(0, self._asked)

    def _gathered(self, pool: torch.Tensor) -> torch.Tensor:
        """[sequences, heads, tokens, dim]"""
        heads, slots, dim = pool.shape[1:]
        if heads not in self._sources:
            self._sources[heads] = _per_head(self._blocks.unsqueeze(-1), heads).transpose(1, 2).flatten()
        rows = pool.view(-1, slots * dim).index_select(0, self._sources[heads])
        return rows.view(self._count, heads, -1, dim)

    def _mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        groups = query.shape[2] if self._length > 1 else 1  # of one token they all see the same
        if (window, groups) not in self._masks:
            positions = self._positions.repeat_interleave(groups, 1)[:, None, :, None]
            seen = self._keys <= positions
            seen = seen if window is None else seen & (self._keys > positions - window)
            self._masks[window, groups] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return self._masks[window, groups]


def block_table(chunks: Sequence[Chunk], block_tokens: int) -> np.ndarray:
    """The blocks of every chunk's sequence up to its end, padded with its first."""
    counts = [-(-chunk.end // block_tokens) for chunk in chunks]
    table = np.empty((len(chunks), max(counts)), np.int64)
    for row, chunk, count in zip(table, chunks, counts, strict=True):
        row[:count] = chunk.sequence.blocks[:count]
        row[count:] = chunk.sequence.blocks[0]
    return table


# ------------------------------------------------------------------------------------------ many tokens of a sequence


class Span:
    """A long chunk of one sequence against everything before it and itself."""

    def __init__(self, chunks: Sequence[Chunk], row: int, block_tokens: int, device: torch.device) -> None:
        (chunk,) = chunks
        self.rows = slice(row, row + chunk.length)
        self._start, self._end = chunk.start, chunk.end
        blocks = chunk.sequence.blocks[: -(-chunk.end // block_tokens)]
        self._blocks = torch.tensor(blocks, device=device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        query = query.permute(1, 2, 0, 3)  # [heads, groups, tokens, dim]
        shared = (*query.shape[:2], -1, -1)
        key, value = (self._gathered(pool).unsqueeze(1).expand(shared) for pool in (keys, values))
        window = None if window is None or window >= self._end else window
        if self._start == 0 and window is None and softcap is None:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        else:
            out = _masked_attention(query, key, value, self._mask(window, query), scale, softcap)
        return out.permute(2, 0, 1, 3)

    def _gathered(self, pool: torch.Tensor) -> torch.Tensor:
        """The sequence's own keys or values, [heads, tokens, dim]."""
        return pool[self._blocks].transpose(0, 1).flatten(1, 2)[:, : self._end]

    def _mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        if window not in self._masks:
            position = torch.arange(self._start, self._end, device=query.device)[:, None]
            key = torch.arange(self._end, device=query.device)
            seen = key <= position
            seen = seen if window is None else seen & (key > position - window)
            self._masks[window] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return self._masks[window]
