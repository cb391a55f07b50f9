"""SwiGLU: silu(gate) * up. Called by the native engine between the two products of a feed-forward block."""

# Triton hides launch options from type checkers.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
WARPS = 4


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for `gate_up` [rows, 2 * width]; the gate is the first half of the columns."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, TILE))
        _gate_tile[grid](gate_up, out, gate_up.stride(0), width, TILE, num_warps=WARPS)
    return out


@triton.jit
def _gate_tile(gate_up, out, stride, width, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < width
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded as in transformers' module
    tl.store(out + row * width + at, (activated * up).to(out.dtype.element_ty), mask=inside)
