"""Skinny GEMM: a few rows times a large matrix, bound by the time to read the matrix.

Called by the native engine for batches of at most `MOST_ROWS` rows. Every program streams its own tile of the matrix
through a pipeline and keeps all rows, so that each weight is read once. A matrix with too few columns to occupy the GPU
is also divided along its depth (split-K): the parts stay in float32, and the next kernel adds them up in a fixed order
(`norm.add_rms_norm`, `rope.rope_store`).

Measured on an H200 in bfloat16, decode steps without attention and sampling at 1, 8, 16 and 32 rows: a 1.5B model takes
1.45, 1.39, 1.43 and 1.47 ms with cuBLAS, 1.31, 1.28, 1.28 and 1.32 ms with these, where each of them is
divided in the best of many ways; a 7B model takes 4.05, 4.13, 4.15 and 4.25 ms, and 3.94, 3.85, 3.86 and 3.89 ms.
`tiling_for` is one simple rule drawn from those ways; `benchmarks/gpu/skinny.py` times it. At 64 rows the best ways
gain only 6 % at 1.5B and 2 % at 7B, at 128 rows nothing: those are left to cuBLAS.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

MOST_ROWS = 32
TILE = 64  # columns of a program; of gate and up projection each, where there is a gate
STEP = 128  # weights of a column that are read at once; half as many of gate and up each
WARPS = 4
SHARED_BYTES = 72 * 1024  # of a program's pipeline, so that three fit on a multiprocessor
PROGRAMS = 2  # per multiprocessor, with split-K
PROCESSORS = 132  # assumed where there is no GPU


class Tiling(NamedTuple):
    """How a product is divided among programs."""

    tile: int
    step: int
    splits: int
    warps: int
    stages: int


def suits(x: torch.Tensor) -> bool:
    """Whether these kernels are faster than cuBLAS for these rows. In float32 there are no tensor cores to use."""
    return len(x) <= MOST_ROWS and (x.element_size() == 2 or not x.is_cuda)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling | None = None
) -> torch.Tensor:
    """`x` [rows, depth] times `weight` [columns, depth] plus `bias`: [rows, columns]."""
    tiling = (tiling or tiling_for(x, len(weight)))._replace(splits=1)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return _launch(x, weight, bias, out, tiling, gated=False)


def product_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling | None = None
) -> torch.Tensor:
    """Split-K: [parts, rows, columns] in float32, which add up to the product. The bias is in the first part."""
    tiling = _without_empty_splits(tiling or tiling_for(x, len(weight)), x.shape[1])
    out = torch.empty(tiling.splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    return _launch(x, weight, bias, out, tiling, gated=False)


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling | None = None
) -> torch.Tensor:
    """SwiGLU: silu(gate) * up [rows, width]; the first `width` rows of `weight` are the gate projection, the
    others the up projection. Rounded where two kernels, the product and `gate.silu_mul`, would round."""
    width = len(weight) // 2
    tiling = (tiling or tiling_for(x, width, gated=True))._replace(splits=1)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    return _launch(x, weight, bias, out, tiling, gated=True)


def tiling_for(x: torch.Tensor, columns: int, gated: bool = False) -> Tiling:
    """As many splits as occupy the GPU, none shorter than its pipeline."""
    step = STEP // (1 + gated)
    stages = SHARED_BYTES // ((TILE * (1 + gated) + _rows_width(len(x))) * step * x.element_size())
    occupying = PROGRAMS * _processors(x.device) // -(-columns // TILE)
    splits = max(min(occupying, x.shape[1] // (step * stages)), 1)
    return Tiling(TILE, step, splits, WARPS, stages)


def _without_empty_splits(tiling: Tiling, depth: int) -> Tiling:
    """Without splits that would be empty."""
    steps = -(-depth // tiling.step)
    return tiling._replace(splits=-(-steps // -(-steps // tiling.splits)))


def _rows_width(rows: int) -> int:
    return 16 if rows <= 16 else MOST_ROWS


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiling: Tiling, gated: bool
) -> torch.Tensor:
    (rows, depth), columns = x.shape, out.shape[-1]
    assert rows <= MOST_ROWS
    assert x.stride(1) == 1
    if rows:
        share = -(-depth // (tiling.step * tiling.splits)) * tiling.step
        _multiply[(triton.cdiv(columns, tiling.tile), tiling.splits)](
            x, weight, bias, out, rows, columns, depth, share, x.stride(0), weight.stride(0), weight.stride(1),
            _rows_width(rows), tiling.tile, tiling.step, depth % tiling.step == 0, bias is not None, gated,
            "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, bias, out, rows, columns, depth, share, x_stride, column_stride, depth_stride,
    rows_width: tl.constexpr, tile: tl.constexpr, step: tl.constexpr, even: tl.constexpr, biased: tl.constexpr,
    gated: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    split = tl.program_id(1)
    row = tl.arange(0, rows_width)
    # out-of-range rows and columns read the last one again, without a mask; they are not stored
    rows_at = x + (tl.minimum(row, rows - 1) * x_stride)[:, None]
    columns_at = weight + (tl.minimum(column, columns - 1).to(tl.int64) * column_stride)[:, None]
    up_at = columns_at + columns.to(tl.int64) * column_stride
    begin = split * share
    acc = tl.zeros([tile, rows_width], tl.float32)
    up = tl.zeros([tile, rows_width], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + share, depth), step):
        at = (start + tl.arange(0, step))[None, :]
        in_range = at < depth
        weights = _load_tile(columns_at, at * depth_stride, in_range, even)
        values = tl.trans(_load_tile(rows_at, at, in_range, even))
        acc = tl.dot(weights, values, acc, input_precision=precision)
        if gated:
            weights = _load_tile(up_at, at * depth_stride, in_range, even)
            up = tl.dot(weights, values, up, input_precision=precision)

    inside = column < columns
    if biased:
        first = (split == 0) & inside
        acc += tl.load(bias + column, mask=first, other=0.0).to(tl.float32)[:, None]
        if gated:
            up += tl.load(bias + columns + column, mask=first, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    if gated:
        gate = acc.to(dtype).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    target = out + ((split * rows + row).to(tl.int64) * columns)[None, :] + column[:, None]
    tl.store(target, acc.to(dtype), mask=inside[:, None] & (row < rows)[None, :])


@triton.jit
def _load_tile(base, at, in_range, even: tl.constexpr):
    return tl.load(base + at) if even else tl.load(base + at, mask=in_range, other=0.0)
