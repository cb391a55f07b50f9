"""Paged decode attention (flash-decoding, split-KV): one new token per row over its keys and values in the KV pool.

Called by the native engine in every layer of a decode step. A program takes all query heads of one KV head (GQA), so
that every key and value is read once. A row is divided among at most `splits` programs; rows that are short enough for
one are written directly, so that the combining kernel only reads long rows.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 32  # tokens per step of a program, for heads of 256 bytes
WARPS = 4
STAGES = 5  # loads of the block table take half of them: two tiles are in flight, in 37 KB of shared memory
SHARE = 64  # fewer tokens than this are not worth a second program and the combining kernel
LONGEST_SHARE = 1024  # a program that reads more than this alone would outlast the rest of the batch
PROGRAMS = 4  # per multiprocessor, to keep its memory pipe full


def splits_for(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Splits for a batch whose longest row has at most `longest` tokens: enough to fill the multiprocessors, and to
    balance one long row with the others; a power of two."""
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
    """Attention output of the newest token of every row, [rows, heads, head size].

    `q` [rows, heads, head size]; KV pools [blocks, kv heads, block tokens, head size]; `table` [rows, max blocks] is
    the block table; `lengths` counts a row's tokens, the newest included; 0 marks an idle row, whose output is zero.
    `window`: sliding window in tokens. `softcap`: logit soft-capping, softcap * tanh(score / softcap).
    """
    rows, heads, size = q.shape
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == q.stride(2) == table.stride(1) == 1
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    partials = torch.empty((rows, heads, splits, size) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((rows, heads, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    width, group = triton.next_power_of_2(size), heads // kv_heads
    tile = max(TILE * 256 // max(width * q.element_size(), 256), 16)
    _attend[(kv_heads, rows, splits)](
        q, keys, values, table, lengths, out, partials, log_sums, scale, splits,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        heads, group, max(16, triton.next_power_of_2(group)), size, width, block_tokens, tile, SHARE,
        window or 0, softcap or 0.0, "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _combine[(heads, rows)](
            partials, log_sums, lengths, out, splits,
            heads, size, width, triton.next_power_of_2(splits), tile, SHARE, window or 0, num_warps=2,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q, keys, values, table, lengths, out, partials, log_sums, scale, splits,
    q_row_stride, q_head_stride, block_stride, head_stride, token_stride, table_stride,
    heads: tl.constexpr, group: tl.constexpr, group_width: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    block_tokens: tl.constexpr, tile: tl.constexpr, least_share: tl.constexpr,
    window: tl.constexpr, softcap: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = splits - 1 - tl.program_id(2)  # only long rows have the last splits: those start first
    length = tl.load(lengths + row)
    first, share = _split_range(length, splits, tile, least_share, window)
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    if split > 0 and begin >= end:
        return

    member = tl.arange(0, group_width)
    dim = tl.arange(0, width)
    head = kv_head * group + member
    valid = (member < group)[:, None] & (dim < size)[None, :]
    query = tl.load(q + row * q_row_stride + head[:, None] * q_head_stride + dim[None, :], mask=valid, other=0.0)

    blocks = table + row * table_stride
    base = kv_head * head_stride + dim[None, :]
    running_max = tl.full([group_width], -1e30, tl.float32)  # finite: a difference of two infinities is NaN
    denominators = tl.zeros([group_width, tile], tl.float32)  # reduced after the loop: that costs barriers across warps
    acc = tl.zeros([group_width, width], tl.float32)
    for start in tl.range(begin, end, tile):
        at = start + tl.arange(0, tile)
        visible = at < end
        loaded = visible[:, None]
        if width != size:
            loaded = loaded & (dim < size)[None, :]
        block = tl.load(blocks + at // block_tokens, mask=visible, other=0).to(tl.int64)
        cell = (block * block_stride + (at % block_tokens) * token_stride)[:, None] + base
        key = tl.load(keys + cell, mask=loaded, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
        score = tl.where(visible[None, :], score * 1.4426950408889634, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        value = tl.load(values + cell, mask=loaded, other=0.0)
        denominators = denominators * rescale[:, None] + weight
        acc = tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision=precision)
        running_max = new_max

    denominator = tl.sum(denominators, 1)
    output = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    index = row * heads + head
    if length - first <= share:
        tl.store(out + index[:, None] * size + dim[None, :], output.to(out.dtype.element_ty), mask=valid)
    else:
        partial = index * splits + split
        tl.store(partials + partial[:, None] * size + dim[None, :], output, mask=valid)
        tl.store(log_sums + partial, running_max + tl.log2(denominator), mask=member < group)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partials, log_sums, lengths, out, splits,
    heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, splits_width: tl.constexpr,
    tile: tl.constexpr, least_share: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first, share = _split_range(length, splits, tile, least_share, window)
    if length - first <= share:
        return
    index = row * heads + tl.program_id(0)
    split = tl.arange(0, splits_width)
    dim = tl.arange(0, width)
    used = split * share < length - first
    log_sum = tl.load(log_sums + index * splits + split, mask=used, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    valid = used[:, None] & (dim < size)[None, :]
    partial = tl.load(partials + (index * splits + split)[:, None] * size + dim[None, :], mask=valid, other=0.0)
    output = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + index * size + dim, output.to(out.dtype.element_ty), mask=dim < size)


@triton.jit
def _split_range(length, splits, tile: tl.constexpr, least_share: tl.constexpr, window: tl.constexpr):
    """The first visible token, and how many tokens one split takes."""
    first = length * 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = tl.maximum(tl.cdiv(length - first, splits), least_share)
    return first, tl.cdiv(share, tile) * tile
