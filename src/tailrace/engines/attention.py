"""Attention over a paged KV cache, as one of transformers' attention functions.

The native engine runs a model on one packed row of tokens and passes a `PagedBatch` through its keyword arguments;
every attention layer then comes here, writes its keys and values into the pool and reads what its tokens may see. No
mask is built outside: transformers skips masks for an attention function that has no mask function beside it.

Short chunks, single tokens (decoding) above all, are computed together: the blocks of all their sequences are gathered
into one padded tensor, and one attention call does the rest. Where that would copy far more than there is, because one
sequence is much longer than the others or because many share a long prompt, single tokens read the pool where it lies.
Each block is then one batch element of a matrix product and the small queries are brought to the blocks, not the large
blocks to the queries; partial results of one sequence's blocks are added up. A shared block is read once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tailrace.engines.scheduler import Chunk

NAME = "tailrace_paged"
HIDDEN = -1e30  # added to scores that must not be seen; finite, so that a block without any is still a number
FEW = 32  # blocks that are always gathered: fewer calls are worth more than fewer bytes
PADDED = 2  # gather no more than so many times the blocks that are there
SHORT = 64  # chunks up to this length are padded together, longer ones are computed one by one
SPARSE = 2  # gather the blocks when the region that holds them is more than so many times larger


class LayerShape(NamedTuple):
    kv_heads: int
    key_dim: int
    value_dim: int


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
    assert paged is not None, "a model with paged attention is only run by the native engine"
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks, which paged attention does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return paged.attend(layer, query, key, value, scale, sliding_window, softcap)[None], None


def use_paged_attention(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Switch the model over and find out, with one token, what each layer puts into the cache."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, paged=probe)
    return probe.shapes


class _Probe:
    """Sees shapes, computes nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:2], value.shape[2])


class KVCache:
    """The pool's tensors, two per layer, keys and values: [blocks, heads, slots, dim]."""

    def __init__(
        self, shapes: dict[int, LayerShape], blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_tokens = block_tokens
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for layer, (heads, key_dim, value_dim) in shapes.items():
            self.keys[layer] = _zeros((blocks, heads, block_tokens, key_dim), dtype, device)
            self.values[layer] = _zeros((blocks, heads, block_tokens, value_dim), dtype, device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks. All sources are read before any target is written."""
        if copies:
            sources, targets = torch.tensor(copies).T
            for tensor in chain(self.keys.values(), self.values.values()):
                tensor[targets.to(tensor.device)] = tensor[sources.to(tensor.device)]


def bytes_per_token(shapes: dict[int, LayerShape], dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in shapes.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU from calloc, so that a large pool takes memory only as far as it gets used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class PagedBatch:
    """Where the tokens of one step lie in the pool, and what each may see: the same for every layer."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._cache = cache
        places = np.concatenate([_places(chunk, cache.block_tokens) for chunk in chunks], axis=1)
        self._blocks, self._slots = torch.from_numpy(places).to(device)
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
        pool.view(-1, dim).index_copy_(0, self._targets[heads], fresh.reshape(-1, dim))


def _places(chunk: Chunk, block_tokens: int) -> np.ndarray:
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
        if together[0].length > SHORT:
            part: _Part = _Span(together[0], row, block_tokens, device)
        elif together[0].length > 1 or _worth_gathering(together, block_tokens):
            part = _Padded(together, row, block_tokens, device)
        else:
            part = _Singles(together, row, block_tokens, device)
        parts.append(part)
        row = part.rows.stop
    return parts


def _batches(chunks: Sequence[Chunk], block_tokens: int) -> Iterator[Sequence[Chunk]]:
    """All single tokens, then short chunks of about the same size together, then each long chunk by itself."""
    single = sum(chunk.length == 1 for chunk in chunks)
    if single:
        yield chunks[:single]
    batch: list[Chunk] = []
    for chunk in chunks[single:]:
        if batch and not _alike([*batch, chunk], block_tokens):
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _alike(chunks: Sequence[Chunk], block_tokens: int) -> bool:
    """Whether little of what is computed for them together is padding."""
    lengths, ends = [chunk.length for chunk in chunks], [chunk.end + block_tokens for chunk in chunks]
    padded = max(lengths) * max(ends) * len(chunks)
    return max(lengths) <= SHORT and padded <= PADDED * sum(map(mul, lengths, ends))


def _worth_gathering(chunks: Sequence[Chunk], block_tokens: int) -> bool:
    tables = [chunk.sequence.blocks[: -(-chunk.end // block_tokens)] for chunk in chunks]
    padded = len(tables) * max(map(len, tables))
    return padded <= FEW or padded <= PADDED * len(set(chain.from_iterable(tables)))


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
        self._places = torch.from_numpy(starts[:, None] + step).to(device)
        self._blocks = torch.from_numpy(_block_table(chunks, block_tokens)).to(device)
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
            places = self._places.repeat_interleave(groups, 1)[:, None, :, None]
            seen = self._keys <= places
            seen = seen if window is None else seen & (self._keys > places - window)
            self._masks[window, groups] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return self._masks[window, groups]


def _block_table(chunks: Sequence[Chunk], block_tokens: int) -> np.ndarray:
    """The blocks of every chunk's sequence up to its end, padded with its first."""
    counts = [-(-chunk.end // block_tokens) for chunk in chunks]
    table = np.empty((len(chunks), max(counts)), np.int64)
    for row, chunk, count in zip(table, chunks, counts, strict=True):
        row[:count] = chunk.sequence.blocks[:count]
        row[count:] = chunk.sequence.blocks[0]
    return table


# ------------------------------------------------------------------------------------------ one token per sequence


class _Singles:
    """One token of each of many sequences against all blocks of that sequence, which are read where they lie."""

    def __init__(self, chunks: Sequence[Chunk], row: int, block_tokens: int, device: torch.device) -> None:
        self.rows = slice(row, row + len(chunks))
        ends = np.array([chunk.end for chunk in chunks])
        counts = -(-ends // block_tokens)
        tables = (chunk.sequence.blocks[:count] for chunk, count in zip(chunks, counts.tolist(), strict=True))
        blocks = np.fromiter(chain.from_iterable(tables), np.int64, int(counts.sum()))
        sequence = np.repeat(np.arange(len(chunks)), counts)
        index = np.arange(len(blocks)) - np.repeat(counts.cumsum() - counts, counts)
        visible = ends[sequence] - index * block_tokens
        sole = np.bincount(blocks)[blocks] == 1
        rows = np.empty_like(blocks)
        self._passes: list[_Pass] = []
        for chosen, place in ((sole, _place_sole), (~sole, _place_shared)):
            if chosen.any():
                before = sum(done.rows for done in self._passes)
                where, local, size, lanes = place(blocks[chosen])
                rows[chosen] = before + local
                seen = visible[chosen]
                self._passes.append(_Pass(where, local, size, lanes, sequence[chosen], seen, block_tokens, device))
        table = np.repeat(rows[index == 0][:, None], counts.max(), axis=1)
        table[sequence, index] = rows
        self._table = torch.from_numpy(table).to(device)  # the rows of every sequence, padded with its first

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        query = query * scale
        scores = [each.scores(query, keys, window, softcap) for each in self._passes]
        highest = [each.by_row(score.amax(-1)) for each, score in zip(self._passes, scores, strict=True)]
        peak = torch.cat(highest)[self._table].amax(1)
        total = torch.zeros_like(peak)
        out = query.new_zeros(*query.shape[:3], values.shape[-1])
        for each, score in zip(self._passes, scores, strict=True):
            each.add(score, peak, values, total, out)
        return out.div_(total.unsqueeze(-1))


def _place_sole(blocks: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray, int, int]:
    """Blocks with one reader: the whole low region of the pool as it lies, unless it is mostly holes."""
    region = int(blocks.max()) + 1
    if region <= SPARSE * len(blocks):
        return slice(0, region), blocks, region, 1
    return blocks, np.arange(len(blocks)), len(blocks), 1


def _place_shared(blocks: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray, int, int]:
    """Blocks with several readers, gathered, with as many lanes as the most read of them has readers."""
    which, inverse, readers = np.unique(blocks, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    lane = np.empty_like(inverse)
    lane[order] = np.arange(len(blocks)) - np.repeat(readers.cumsum() - readers, readers)
    lanes = int(readers.max())
    return which, inverse * lanes + lane, len(which), lanes


class _Pass:
    """Some blocks and, for each, `lanes` places for readers. A row is one such place; one without a reader is computed
    too, but hidden, and adds nothing to sequence 0.

    Shapes: b blocks, h KV heads, l lanes, g query heads of a KV head, s slots.
    """

    def __init__(
        self,
        where: slice | np.ndarray,
        rows: np.ndarray,
        size: int,
        lanes: int,
        readers: np.ndarray,
        visible: np.ndarray,
        block_tokens: int,
        device: torch.device,
    ) -> None:
        self.rows = size * lanes
        self._size, self._lanes, self._slots = size, lanes, block_tokens
        self._where = where if isinstance(where, slice) else torch.from_numpy(where).to(device)
        self._readers = _spread(rows, readers, self.rows).to(device)
        self._visible = _spread(rows, visible, self.rows).to(device)
        self._hidden: dict[int | None, torch.Tensor] = {}

    def scores(
        self, query: torch.Tensor, keys: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """[b, h, l, g, s] from queries [sequences, h, g, dim]."""
        groups = query.shape[2]
        brought = self._by_block(query[self._readers]).flatten(2, 3)
        found = torch.matmul(brought, self._blocks_of(keys).transpose(2, 3)).float().unflatten(2, (self._lanes, groups))
        return _capped(found, softcap).add_(self._mask(window))

    def add(
        self, scores: torch.Tensor, peak: torch.Tensor, values: torch.Tensor, total: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add this pass's share to every reader's sum of weights and weighted sum of values."""
        weights = scores.sub_(self._by_block(peak[self._readers]).unsqueeze(-1)).exp_()
        total.index_add_(0, self._readers, self.by_row(weights.sum(-1)))
        found = torch.matmul(weights.flatten(2, 3).to(values.dtype), self._blocks_of(values))
        out.index_add_(0, self._readers, self.by_row(found.unflatten(2, weights.shape[2:4])))

    def by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """[b, h, l, ...] -> [b * l, h, ...]"""
        return tensor.transpose(1, 2).flatten(0, 1)

    def _by_block(self, tensor: torch.Tensor) -> torch.Tensor:
        """[b * l, h, ...] -> [b, h, l, ...]"""
        return tensor.unflatten(0, (self._size, self._lanes)).transpose(1, 2)

    def _blocks_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self._where]

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._hidden:
            slots = torch.arange(self._slots, device=self._visible.device)
            ends = self._visible.unsqueeze(-1)
            seen = slots < ends if window is None else (slots < ends) & (slots >= ends - window)
            hidden = torch.where(seen, 0.0, HIDDEN).view(self._size, 1, self._lanes, 1, self._slots)
            self._hidden[window] = hidden
        return self._hidden[window]


def _spread(rows: np.ndarray, numbers: np.ndarray, size: int) -> torch.Tensor:
    spread = np.zeros(size, np.int64)
    spread[rows] = numbers
    return torch.from_numpy(spread)


# ------------------------------------------------------------------------------------------ many tokens of a sequence


class _Span:
    """A long chunk of one sequence against everything before it and itself."""

    def __init__(self, chunk: Chunk, row: int, block_tokens: int, device: torch.device) -> None:
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
            place = torch.arange(self._start, self._end, device=query.device)[:, None]
            key = torch.arange(self._end, device=query.device)
            seen = key <= place
            seen = seen if window is None else seen & (key > place - window)
            self._masks[window] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return self._masks[window]
