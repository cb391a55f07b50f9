"""Paged prefill attention (flash attention): many new tokens, causally, over the KV pool.

Called by the native engine in every layer of a prefill, of whole prompts or chunks, after the new keys and values are
stored. Tiles that are fully masked are not read; only tiles on the edge of the mask are masked.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

QUERIES = 128  # per program, for heads of up to 256 bytes
TILE = 64  # keys per step, likewise
WARPS = 8
STAGES = 3  # loads of the block table take half of them: one tile is in flight, in 96 KB of shared memory


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention output of the new tokens, [tokens, heads, head size].

    The queries of sequence s are rows cu[s] to cu[s+1] of `q` [tokens, heads, head size]; the first of them has
    position starts[s]; lengths[s] tokens of the sequence are in the pool, the new ones included. `longest`: a bound on
    the queries of a sequence. Rows from cu[-1] on stay undefined. The rest as in `paged_decode`.
    """
    tokens, heads, size = q.shape
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == q.stride(2) == table.stride(1) == 1
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    width = triton.next_power_of_2(size)
    larger = max(width * q.element_size() // 256, 1)
    queries, tile, warps = max(QUERIES // larger, 16), max(TILE // larger, 16), WARPS
    if longest <= queries // 2:
        queries, warps = max(queries // 2, 16), WARPS // 2
    if tokens and longest:
        _attend[(heads, table.shape[0], triton.cdiv(longest, queries))](
            q, keys, values, table, starts, lengths, cu, out, scale,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
            heads, heads // kv_heads, size, width, block_tokens, queries, tile,
            window or 0, softcap or 0.0, "ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    q, keys, values, table, starts, lengths, cu, out, scale,
    q_row_stride, q_head_stride, block_stride, head_stride, token_stride, table_stride,
    heads: tl.constexpr, group: tl.constexpr, size: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr,
    queries: tl.constexpr, tile: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    tile_index = tl.num_programs(2) - 1 - tl.program_id(2)  # the last queries attend to most keys: those start first
    first_query = tile_index * queries
    row = tl.load(cu + sequence).to(tl.int64)
    count = (tl.load(cu + sequence + 1) - row).to(tl.int32)
    if first_query >= count:
        return

    start = tl.load(starts + sequence).to(tl.int32)
    length = tl.load(lengths + sequence).to(tl.int32)
    number = first_query + tl.arange(0, queries)
    dim = tl.arange(0, width)
    valid = (number < count)[:, None] & (dim < size)[None, :]
    source = q + row * q_row_stride + number[:, None] * q_row_stride + head * q_head_stride + dim[None, :]
    query = tl.load(source, mask=valid, other=0.0)

    position = start + number
    first_position = start + first_query  # the first position of this tile
    end = tl.minimum(tl.minimum(first_position + queries, start + count), length)
    unmasked_end = tl.minimum((first_position + 1) // tile * tile, end // tile * tile)
    first = first_position * 0
    if window > 0:
        first = tl.maximum(first_position - window + 1, 0) // tile * tile
        unmasked_end = first  # all tiles are masked: windows are rare, and a third loop is not worth its registers
    blocks = table + sequence * table_stride
    base = (head // group) * head_stride + dim[None, :]
    running_max = tl.full([queries], -1e30, tl.float32)  # finite: a difference of two infinities is NaN
    denominator = tl.zeros([queries], tl.float32)
    acc = tl.zeros([queries, width], tl.float32)
    running_max, denominator, acc = _attend_keys(
        running_max, denominator, acc, query, position, keys, values, blocks, base, dim,
        first, unmasked_end, end, scale,
        block_stride, token_stride, size, width, block_tokens, tile, False, window, softcap, precision,
    )  # fmt: skip
    running_max, denominator, acc = _attend_keys(
        running_max, denominator, acc, query, position, keys, values, blocks, base, dim, unmasked_end, end, end, scale,
        block_stride, token_stride, size, width, block_tokens, tile, True, window, softcap, precision,
    )  # fmt: skip
    output = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    target = out + ((row + number) * heads + head)[:, None] * size + dim[None, :]
    tl.store(target, output.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _attend_keys(
    running_max, denominator, acc, query, position, keys, values, blocks, base, dim, first, last, end, scale,
    block_stride, token_stride, size: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr,
    tile: tl.constexpr, masked: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys from `first` to `last`, one tile at a time."""
    for begin in tl.range(first, last, tile):
        key_position = begin + tl.arange(0, tile)
        loaded = (key_position < end)[:, None]
        if width != size:
            loaded = loaded & (dim < size)[None, :]
        if masked:
            block = tl.load(blocks + key_position // block_tokens, mask=key_position < end, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + key_position // block_tokens).to(tl.int64)
        cell = (block * block_stride + (key_position % block_tokens) * token_stride)[:, None] + base
        if masked or width != size:
            key = tl.load(keys + cell, mask=loaded, other=0.0)
            value = tl.load(values + cell, mask=loaded, other=0.0)
        else:
            key = tl.load(keys + cell)
            value = tl.load(values + cell)
        score = tl.dot(query, tl.trans(key), input_precision=precision)
        if softcap > 0:
            score = softcap / scale * (2 * tl.sigmoid(2 * scale / softcap * score) - 1)
        if masked:
            visible = (key_position[None, :] <= position[:, None]) & (key_position < end)[None, :]
            if window > 0:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        factor = scale * 1.4426950408889634  # log2(e): the hardware has exp2
        new_max = tl.maximum(running_max, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        denominator = denominator * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision=precision)
        running_max = new_max
    return running_max, denominator, acc
