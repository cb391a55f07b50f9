"""Variable-length flash attention over a packed row, by torch's own kernel.

`packed.py` calls `attend_row` on CUDA in half precision. It is a custom operator, opaque to torch.compile: the longest
sequence and the number of tokens are passed in a host tensor, so that one compiled block serves every pack. Rows may
end in padding that belongs to no sequence; its output and its gradients are zeros. Grouped-query attention (GQA) uses
the kernel's own support where that is right.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CLOSE = 0.02  # relative error allowed in half precision
Kernel = tuple[Tensor, Tensor]  # output and log-sum-exp


@torch.library.custom_op("tailrace::attend_row", mutates_args=(), device_types="cuda")
def attend_row(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sizes: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(tokens, heads, width) each. `sizes`, on the host: longest sequence, tokens. `window` 0: no limit."""
    longest, tokens = sizes.tolist()
    keys, values = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    out, total = _forward(q.contiguous(), keys, values, bounds, longest, scale, window)
    out[tokens:] = 0
    return out, total


@torch.library.custom_op("tailrace::attend_row_backward", mutates_args=(), device_types="cuda")
def attend_row_backward(
    by_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    bounds: Tensor,
    sizes: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    longest, tokens = sizes.tolist()
    keys, values = (_repeat_kv(x, q.shape[1]) for x in (k, v))
    result = (out, total)
    by_q, by_k, by_v = _backward(
        by_out.contiguous(), q.contiguous(), keys, values, result, bounds, longest, scale, window
    )
    for each in (by_q, by_k, by_v):
        each[tokens:] = 0
    return by_q, _sum_groups(by_k, k.shape[1]), _sum_groups(by_v, v.shape[1])


@attend_row.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sizes: Tensor, scale: float, window: int) -> Kernel:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@attend_row_backward.register_fake
def _(by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Kernel) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, by_out: Tensor, by_total: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, sizes, out, total = ctx.saved_tensors
    found = attend_row_backward(by_out, q, k, v, out, total, bounds, sizes, ctx.scale, ctx.window)
    return (*found, None, None, None, None)


attend_row.register_autograd(_gradients, setup_context=_save)


# ----------------------------------------------------------------------------------------------------------- the kernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    causal, sides = _window(window, longest)
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, causal, False, scale=scale, **sides
    )
    return found[0], found[1]


def _backward(
    by_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Kernel,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    causal, sides = _window(window, longest)
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # for dropout
    return torch.ops.aten._flash_attention_backward(
        by_out, q, k, v, *result, bounds, bounds, longest, longest, 0.0, causal, state, unused, scale=scale, **sides
    )


def _window(window: int, longest: int) -> tuple[bool, dict[str, int]]:
    """The kernel's window does not include the token itself."""
    causal = not 0 < window < longest
    return causal, {"window_size_left": -1 if causal else window - 1, "window_size_right": 0}


# ---------------------------------------------------------------------------------------------------------------- heads


def _repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for every query head if the kernel has no GQA."""
    if x.shape[1] == heads or _supports_gqa(x.device, x.dtype):
        return x.contiguous()
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `_repeat_kv`: summed over the query heads of a group."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


@lru_cache
def _supports_gqa(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel of this torch computes GQA correctly, forward and backward."""
    q = torch.randn(40, 4, 64, device=device, dtype=dtype)
    k, v = (torch.randn(40, 2, 64, device=device, dtype=dtype) for _ in range(2))
    bounds = torch.tensor([0, 24, 40], device=device, dtype=torch.int32)
    try:
        shared = _forward_and_backward(q, k, v, bounds)
    except RuntimeError:
        return False
    plain = _forward_and_backward(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), bounds)
    return all(
        _error(mine, _sum_groups(theirs, mine.shape[1])) < CLOSE for mine, theirs in zip(shared, plain, strict=True)
    )


def _forward_and_backward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    result = _forward(q, k, v, bounds, 24, 0.125, 0)
    return result[0], *_backward(torch.ones_like(q), q, k, v, result, bounds, 24, 0.125, 0)


def _error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())
