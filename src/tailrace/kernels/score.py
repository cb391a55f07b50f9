"""Log-prob and entropy from logits, and their backward pass, each in one pass over the logits.

`trainer/head.py` calls both for a chunk of tokens at a time. `_score` is an online softmax over one row: per lane it
keeps the running maximum, the sum of exponentials, and the sum of exponentials times logits. `_slope` writes the
gradient of the logits. Logits are multiplied by `factor` (1 / temperature, times a model's logit scale) when they are
read. Arithmetic is float32.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
WARPS = 8


def score(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: log-prob of its target, entropy, and log-sum-exp."""
    rows, width = logits.shape
    logprobs, entropy, log_sum_exp = torch.empty(3, rows, device=logits.device, dtype=torch.float32).unbind()
    if rows:
        _score[(rows,)](
            logits, targets, logprobs, entropy, log_sum_exp, logits.stride(0), factor, width, TILE, num_warps=WARPS
        )
    return logprobs, entropy, log_sum_exp


def slope(
    logits: Tensor,
    targets: Tensor,
    log_sum_exp: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits, given the gradients of log-probs (`by_logprob`) and entropies (`by_entropy`)."""
    rows, width = logits.shape
    out = torch.empty(rows, width, device=logits.device, dtype=dtype)
    if rows:
        _slope[(rows, triton.cdiv(width, TILE))](
            logits, targets, log_sum_exp, entropy, by_logprob, by_entropy, out,
            logits.stride(0), factor, width, TILE, num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _score(logits, targets, logprobs, entropies, log_sum_exps, stride, factor, width: tl.constexpr, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    lane = tl.arange(0, tile)
    running_max = tl.full((tile,), -1e30, tl.float32)  # finite: a difference of two infinities is NaN
    denominator = tl.zeros((tile,), tl.float32)
    moment = tl.zeros((tile,), tl.float32)
    for start_column in range(0, width, tile):
        column = start_column + lane
        x = tl.load(start + column, mask=column < width, other=-1e30).to(tl.float32) * factor
        new_max = tl.maximum(running_max, x)
        rescale = tl.exp(running_max - new_max)
        weight = tl.exp(x - new_max)
        denominator = denominator * rescale + weight
        moment = moment * rescale + weight * x
        running_max = new_max
    maximum = tl.max(running_max, 0)
    rescale = tl.exp(running_max - maximum)
    denominator_sum = tl.sum(denominator * rescale, 0)
    log_sum_exp = maximum + tl.log(denominator_sum)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * factor
    tl.store(logprobs + row, chosen - log_sum_exp)
    tl.store(entropies + row, log_sum_exp - tl.sum(moment * rescale, 0) / denominator_sum)
    tl.store(log_sum_exps + row, log_sum_exp)


@triton.jit
def _slope(
    logits, targets, log_sum_exps, entropies, by_logprob, by_entropy, out, stride, factor,
    width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * factor
    log_sum_exp = tl.load(log_sum_exps + row)
    mean_logit = log_sum_exp - tl.load(entropies + row)
    logprob_gradient = tl.load(by_logprob + row)
    entropy_gradient = tl.load(by_entropy + row)
    gradient = -tl.exp(x - log_sum_exp) * (logprob_gradient + entropy_gradient * (x - mean_logit))
    gradient += tl.where(column == tl.load(targets + row), logprob_gradient, 0.0)
    tl.store(out + row * width + column, (gradient * factor).to(out.dtype.element_ty), mask=inside)
