"""Attention of one new token per row over its keys and values in the paged pool (split-KV, flash-decoding).

Called by the lean decoder in every layer of a decode step. A program takes all query heads of one KV head, so that
every key and value is read once; a row is shared among at most `splits` programs, and rows that are short enough for
one are written directly, so that the joining kernel touches long rows only.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 32  # tokens per step of a program, for heads of 256 bytes
WARPS = 4
STAGES = 5  # the block table's numbers take half of them: two tiles are under way, and 37 KB are used
SHARE = 64  # fewer tokens than this are not worth a second program and the joining
LONGEST_SHARE = 1024  # a program that reads more than this alone would outlast the rest of the batch
PROGRAMS = 4  # per multiprocessor, to keep its memory pipe full


def splits_for(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """How many splits suit a batch whose longest row may reach `longest` tokens: enough to fill the processors, and to
    keep one long row from outlasting the others; a power of two."""
    fill = PROGRAMS * processors // max(rows * kv_heads, 1)
    level = -(-longest // LONGEST_SHARE)
    most = -(-longest // SHARE)
    return 1 << (max(min(max(fill, level), most), 1) - 1).bit_length()


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int,
) -> torch.Tensor:
    """What the newest token of every row attends to, [rows, heads, head size].

    `q` [rows, heads, head size]; pools [blocks, kv heads, block tokens, head size]; `table` [rows, most blocks] says
    which blocks hold a row's tokens; `lengths` counts them, the newest included; 0 marks an idle row, which gets
    zeros. `window`: only so many last tokens are seen. `softcap`: scores are bent to stay within it.
    """
    rows, heads, size = q.shape
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == q.stride(2) == table.stride(1) == 1
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    parts = torch.empty((rows, heads, splits, size) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    peaks = torch.empty((rows, heads, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    width, group = triton.next_power_of_2(size), heads // kv_heads
    tile = max(TILE * 256 // max(width * q.element_size(), 256), 16)
    _attend[(kv_heads, rows, splits)](
        q, keys, values, table, lengths, out, parts, peaks, scale, splits,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        heads, group, max(16, triton.next_power_of_2(group)), size, width, block_tokens, tile, SHARE,
        window or 0, softcap or 0.0, "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _join[(heads, rows)](
            parts, peaks, lengths, out, splits,
            heads, size, width, triton.next_power_of_2(splits), tile, SHARE, window or 0, num_warps=2,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q, keys, values, table, lengths, out, parts, peaks, scale, splits,
    q_row_stride, q_head_stride, block_stride, head_stride, token_stride, table_stride,
    heads: tl.constexpr, group: tl.constexpr, group_width: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    block_tokens: tl.constexpr, tile: tl.constexpr, least: tl.constexpr,
    window: tl.constexpr, softcap: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = splits - 1 - tl.program_id(2)  # the last splits belong to the longest rows: those start first
    length = tl.load(lengths + row)
    first, share = _share(length, splits, tile, least, window)
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    if split > 0 and begin >= end:
        return

    member = tl.arange(0, group_width)
    dim = tl.arange(0, width)
    head = kv_head * group + member
    held = (member < group)[:, None] & (dim < size)[None, :]
    query = tl.load(q + row * q_row_stride + head[:, None] * q_head_stride + dim[None, :], mask=held, other=0.0)

    blocks = table + row * table_stride
    base = kv_head * head_stride + dim[None, :]
    peak = tl.full([group_width], -1e30, tl.float32)  # finite, so that no difference of peaks is undefined
    totals = tl.zeros([group_width, tile], tl.float32)  # summed up after the loop: across warps, a sum costs barriers
    summed = tl.zeros([group_width, width], tl.float32)
    for start in tl.range(begin, end, tile):
        at = start + tl.arange(0, tile)
        seen = at < end
        there = seen[:, None]
        if width != size:
            there = there & (dim < size)[None, :]
        block = tl.load(blocks + at // block_tokens, mask=seen, other=0).to(tl.int64)
        cell = (block * block_stride + (at % block_tokens) * token_stride)[:, None] + base
        key = tl.load(keys + cell, mask=there, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
        score = tl.where(seen[None, :], score * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        value = tl.load(values + cell, mask=there, other=0.0)
        totals = totals * fade[:, None] + weight
        summed = tl.dot(weight.to(value.dtype), value, summed * fade[:, None], input_precision=precision)
        peak = higher

    total = tl.sum(totals, 1)
    mean = summed / tl.where(total > 0, total, 1.0)[:, None]
    place = row * heads + head
    if length - first <= share:
        tl.store(out + place[:, None] * size + dim[None, :], mean.to(out.dtype.element_ty), mask=held)
    else:
        part = place * splits + split
        tl.store(parts + part[:, None] * size + dim[None, :], mean, mask=held)
        tl.store(peaks + part, peak + tl.log2(total), mask=member < group)


@triton.jit(do_not_specialize=["splits"])
def _join(
    parts, peaks, lengths, out, splits,
    heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, splits_width: tl.constexpr,
    tile: tl.constexpr, least: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first, share = _share(length, splits, tile, least, window)
    if length - first <= share:
        return
    place = row * heads + tl.program_id(0)
    split = tl.arange(0, splits_width)
    dim = tl.arange(0, width)
    used = split * share < length - first
    peak = tl.load(peaks + place * splits + split, mask=used, other=float("-inf"))
    weight = tl.exp2(peak - tl.max(peak, 0))
    held = used[:, None] & (dim < size)[None, :]
    part = tl.load(parts + (place * splits + split)[:, None] * size + dim[None, :], mask=held, other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * size + dim, mean.to(out.dtype.element_ty), mask=dim < size)


@triton.jit
def _share(length, splits, tile: tl.constexpr, least: tl.constexpr, window: tl.constexpr):
    """Where the tokens that are seen begin, and how many of them one split takes."""
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = tl.maximum(tl.cdiv(length - first, splits), least)
    return first, tl.cdiv(share, tile) * tile
