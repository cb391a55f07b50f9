"""Rotary position embedding (RoPE) of queries and keys, fused with storing new keys and values in the KV pool.

Called by the native engine after the fused QKV product, in prefill and in decode. The rotation is done in float32 and
rounded once.
"""

# Triton hides launch options and loops from type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 4  # per program: one warp, 16 bytes per thread and half a head, at a head size of 128
WARPS = 1


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Returns the rotated queries [tokens, heads, head size]; stores rotated keys, and values, in `slots` of the pools.

    `qkv` [tokens, (heads + 2 * kv heads) * head size], or its split-K parts: [parts, tokens, ...] in float32; `cos` and
    `sin` [positions, head size] with two equal halves, of which the first is read; slot = block * block tokens +
    offset, -1 for a token that is not stored; `q_norm` and `k_norm` are the weights of a per-head RMSNorm (QK norm),
    both or none.
    """
    assert (q_norm is None) == (k_norm is None)
    assert keys.stride() == values.stride()
    _, kv_heads, block_tokens, size = keys.shape
    parts, part_stride = (len(qkv), qkv.stride(0)) if qkv.dim() == 3 else (1, 0)
    tokens, heads = qkv.shape[-2], qkv.shape[-1] // size - 2 * kv_heads
    q = torch.empty(tokens, heads, size, dtype=keys.dtype, device=qkv.device)
    if tokens:
        grid = (tokens, triton.cdiv(heads + 2 * kv_heads, HEADS))
        _rotate_and_store[grid](
            qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, q, eps,
            part_stride, qkv.stride(-2), cos.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
            heads, kv_heads, block_tokens, size // 2, triton.next_power_of_2(size // 2), HEADS, q_norm is not None,
            parts, num_warps=WARPS,
        )  # fmt: skip
    return q


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, q, eps,
    part_stride, qkv_stride, table_stride, block_stride, head_stride, token_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, block_tokens: tl.constexpr,
    half_dim: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, with_norm: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * tile + tl.arange(0, tile))[:, None]
    dim = tl.arange(0, width)[None, :]
    inside = (head < heads + 2 * kv_heads) & (dim < half_dim)
    is_query = head < heads
    is_value = head >= heads + kv_heads

    source = qkv + token * qkv_stride + head * (2 * half_dim) + dim
    low = _summed(source, inside, part_stride, parts).to(q.dtype.element_ty).to(tl.float32)
    high = _summed(source + half_dim, inside, part_stride, parts).to(q.dtype.element_ty).to(tl.float32)
    new_low, new_high = low, high
    if with_norm:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half_dim) + eps)[:, None]
        dtype = q.dtype.element_ty
        new_low = _weighted((low * scale).to(dtype), q_norm, k_norm, dim, is_query, half_dim).to(dtype).to(tl.float32)
        new_high = _weighted((high * scale).to(dtype), q_norm + half_dim, k_norm + half_dim, dim, is_query, half_dim)
        new_high = new_high.to(dtype).to(tl.float32)

    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cos + position * table_stride + dim, mask=dim < half_dim, other=0.0).to(tl.float32)
    sine = tl.load(sin + position * table_stride + dim, mask=dim < half_dim, other=0.0).to(tl.float32)
    rotated_low = (new_low * cosine - new_high * sine).to(q.dtype.element_ty)
    rotated_high = (new_high * cosine + new_low * sine).to(q.dtype.element_ty)

    target = q + (token * heads + head) * (2 * half_dim) + dim
    tl.store(target, rotated_low, mask=inside & is_query)
    tl.store(target + half_dim, rotated_high, mask=inside & is_query)

    slot = tl.load(slots + token).to(tl.int64)
    stored = inside & (slot >= 0)
    cell = (slot // block_tokens) * block_stride + (slot % block_tokens) * token_stride + dim
    target = keys + cell + (head - heads) * head_stride
    tl.store(target, rotated_low, mask=stored & ~is_query & ~is_value)
    tl.store(target + half_dim, rotated_high, mask=stored & ~is_query & ~is_value)
    target = values + cell + (head - heads - kv_heads) * head_stride
    tl.store(target, low.to(q.dtype.element_ty), mask=stored & is_value)
    tl.store(target + half_dim, high.to(q.dtype.element_ty), mask=stored & is_value)


@triton.jit
def _summed(source, inside, part_stride, parts: tl.constexpr):
    total = tl.load(source, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(source + part * part_stride, mask=inside, other=0.0)
    return total


@triton.jit
def _weighted(value, q_norm, k_norm, dim, is_query, half_dim: tl.constexpr):
    """Half a head times the norm weights of queries or keys."""
    for_query = tl.load(q_norm + dim, mask=dim < half_dim, other=0.0).to(tl.float32)
    for_key = tl.load(k_norm + dim, mask=dim < half_dim, other=0.0).to(tl.float32)
    return value.to(tl.float32) * tl.where(is_query, for_query, for_key)
