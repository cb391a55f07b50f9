"""Causal attention of many new tokens over the paged pool, in tiles (flash attention).

Called by the lean decoder in every layer of a prefill, whole prompts or chunks of them, after the new keys and values
have been stored. Tiles that the causal mask or the window hides are not read; only those on an edge are masked.
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
STAGES = 3  # the block table's numbers take half of them: one tile is under way, and 96 KB are used


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
    """What the new tokens attend to, [tokens, heads, head size], each to itself and all before it.

    The queries of sequence s are rows cu[s] to cu[s+1] of `q` [tokens, heads, head size]; the first of them has place
    starts[s]; lengths[s] tokens of the sequence are in the pool, the new ones included. `longest`: the most queries
    that a sequence has, or any bound. Rows from cu[-1] on stay undefined. The rest as in `paged_decode`.
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
    before = (tl.num_programs(2) - 1 - tl.program_id(2)) * queries  # the latest queries see most: those start first
    row = tl.load(cu + sequence).to(tl.int64)
    count = (tl.load(cu + sequence + 1) - row).to(tl.int32)
    if before >= count:
        return

    start = tl.load(starts + sequence).to(tl.int32)
    length = tl.load(lengths + sequence).to(tl.int32)
    number = before + tl.arange(0, queries)
    dim = tl.arange(0, width)
    held = (number < count)[:, None] & (dim < size)[None, :]
    source = q + row * q_row_stride + number[:, None] * q_row_stride + head * q_head_stride + dim[None, :]
    query = tl.load(source, mask=held, other=0.0)

    place = start + number
    nearest = start + before  # of the places in this tile
    end = tl.minimum(tl.minimum(nearest + queries, start + count), length)
    plain_end = tl.minimum((nearest + 1) // tile * tile, end // tile * tile)
    first = nearest * 0
    if window > 0:
        first = tl.maximum(nearest - window + 1, 0) // tile * tile
        plain_end = first  # masks everywhere: windows are rare, and a third loop is not worth its registers
    blocks = table + sequence * table_stride
    base = (head // group) * head_stride + dim[None, :]
    peak = tl.full([queries], -1e30, tl.float32)  # finite, so that no difference of peaks is undefined
    total = tl.zeros([queries], tl.float32)
    summed = tl.zeros([queries, width], tl.float32)
    peak, total, summed = _walk(
        peak, total, summed, query, place, keys, values, blocks, base, dim, first, plain_end, end, scale,
        block_stride, token_stride, size, width, block_tokens, tile, False, window, softcap, precision,
    )  # fmt: skip
    peak, total, summed = _walk(
        peak, total, summed, query, place, keys, values, blocks, base, dim, plain_end, end, end, scale,
        block_stride, token_stride, size, width, block_tokens, tile, True, window, softcap, precision,
    )  # fmt: skip
    mean = summed / tl.where(total > 0, total, 1.0)[:, None]
    target = out + ((row + number) * heads + head)[:, None] * size + dim[None, :]
    tl.store(target, mean.to(out.dtype.element_ty), mask=held)


@triton.jit
def _walk(
    peak, total, summed, query, place, keys, values, blocks, base, dim, first, last, end, scale,
    block_stride, token_stride, size: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr,
    tile: tl.constexpr, masked: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Take the keys from `first` to `last`, a tile at a time, into the running softmax."""
    for begin in tl.range(first, last, tile):
        at = begin + tl.arange(0, tile)
        there = (at < end)[:, None]
        if width != size:
            there = there & (dim < size)[None, :]
        if masked:
            block = tl.load(blocks + at // block_tokens, mask=at < end, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + at // block_tokens).to(tl.int64)
        cell = (block * block_stride + (at % block_tokens) * token_stride)[:, None] + base
        if masked or width != size:
            key = tl.load(keys + cell, mask=there, other=0.0)
            value = tl.load(values + cell, mask=there, other=0.0)
        else:
            key = tl.load(keys + cell)
            value = tl.load(values + cell)
        score = tl.dot(query, tl.trans(key), input_precision=precision)
        if softcap > 0:
            score = softcap / scale * (2 * tl.sigmoid(2 * scale / softcap * score) - 1)
        if masked:
            seen = (at[None, :] <= place[:, None]) & (at < end)[None, :]
            if window > 0:
                seen = seen & (at[None, :] > place[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        factor = scale * 1.4426950408889634  # exp2 is what the hardware has
        higher = tl.maximum(peak, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, 1)
        summed = tl.dot(weight.to(value.dtype), value, summed * fade[:, None], input_precision=precision)
        peak = higher
    return peak, total, summed
