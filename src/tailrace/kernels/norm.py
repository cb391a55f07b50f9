"""RMSNorm. Called by the native engine twice per layer; rounds where transformers' module does.

Where a product was left in parts (split-K, `skinny.product_parts`), their sum, the residual addition and the norm are
one kernel.
"""

# Triton hides launch options from type checkers.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [rows, hidden] normalised in float32, rounded to its type, times `weight`."""
    rows, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows:
        width = triton.next_power_of_2(hidden)
        warps = min(max(width // 512, 1), 16)
        _norm_row[(rows,)](x, weight, out, x.stride(0), eps, hidden, width, num_warps=warps)
    return out


def add_rms_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add the sum of `parts` [parts, rows, hidden] (float32) to `residual` [rows, hidden] in place, rounded once, and
    return the RMSNorm of the result."""
    rows, hidden = residual.shape
    assert parts.is_contiguous()
    out = torch.empty(rows, hidden, dtype=residual.dtype, device=residual.device)
    if rows:
        width = triton.next_power_of_2(hidden)
        _add_and_norm_row[(rows,)](
            parts, residual, weight, out, residual.stride(0), eps, rows, len(parts),
            triton.next_power_of_2(len(parts)), hidden, width, num_warps=min(max(width // 128, 1), 16),
        )  # fmt: skip
    return out


@triton.jit
def _norm_row(x, weight, out, x_stride, eps, hidden: tl.constexpr, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < hidden
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    _store_normed(value, weight, out + row * hidden, at, inside, eps, hidden)


@triton.jit(do_not_specialize=["rows", "count"])
def _add_and_norm_row(
    parts, residual, weight, out, stride, eps, rows, count,
    parts_width: tl.constexpr, hidden: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < hidden
    target = residual + row * stride + at
    value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    part = tl.arange(0, parts_width)[:, None]  # loaded all at once, or each load would wait for the one before
    source = parts + (part * rows + row) * hidden + at[None, :]
    summed = tl.sum(tl.load(source, mask=(part < count) & inside[None, :], other=0.0), 0)
    value = (value + summed).to(out.dtype.element_ty)
    tl.store(target, value, mask=inside)
    _store_normed(value.to(tl.float32), weight, out + row * hidden, at, inside, eps, hidden)


@triton.jit
def _store_normed(value, weight, out, at, inside, eps, hidden: tl.constexpr):
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    rounded = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (rounded * scale).to(out.dtype.element_ty), mask=inside)
