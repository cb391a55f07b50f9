"""Log-prob, entropy and their gradient from logits, each in one pass over them.

`trainer/head.py` calls both for a chunk of tokens at a time. A program of `_score` goes through one row and keeps, per
lane, the running maximum, the sum of exponentials and the sum of exponentials times logits; `_slope` writes the
gradient. Logits are multiplied by `factor` (1 / temperature, a family's scale) on the way in. Arithmetic is float32.
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
    """Of each row: log-prob of its target, entropy, and the logarithm of the sum of exponentials."""
    rows, width = logits.shape
    logprobs, entropy, total = torch.empty(3, rows, device=logits.device, dtype=torch.float32).unbind()
    if rows:
        _score[(rows,)](
            logits, targets, logprobs, entropy, total, logits.stride(0), factor, width, TILE, num_warps=WARPS
        )
    return logprobs, entropy, total


def slope(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient by the logits, given those by the log-probs and the entropies."""
    rows, width = logits.shape
    out = torch.empty(rows, width, device=logits.device, dtype=dtype)
    if rows:
        _slope[(rows, triton.cdiv(width, TILE))](
            logits, targets, total, entropy, by_logprob, by_entropy, out,
            logits.stride(0), factor, width, TILE, num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _score(logits, targets, logprobs, entropies, totals, stride, factor, width: tl.constexpr, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    lane = tl.arange(0, tile)
    highest = tl.full((tile,), -1e30, tl.float32)  # finite, so that no difference of two of them is not a number
    mass = tl.zeros((tile,), tl.float32)
    moment = tl.zeros((tile,), tl.float32)
    for first in range(0, width, tile):
        place = first + lane
        x = tl.load(start + place, mask=place < width, other=-1e30).to(tl.float32) * factor
        above = tl.maximum(highest, x)
        shrink = tl.exp(highest - above)
        share = tl.exp(x - above)
        mass = mass * shrink + share
        moment = moment * shrink + share * x
        highest = above
    top = tl.max(highest, 0)
    shrink = tl.exp(highest - top)
    whole = tl.sum(mass * shrink, 0)
    total = top + tl.log(whole)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * factor
    tl.store(logprobs + row, chosen - total)
    tl.store(entropies + row, total - tl.sum(moment * shrink, 0) / whole)
    tl.store(totals + row, total)


@triton.jit
def _slope(
    logits, targets, totals, entropies, by_logprob, by_entropy, out, stride, factor,
    width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = place < width
    x = tl.load(logits + row * stride + place, mask=inside, other=0.0).to(tl.float32) * factor
    total = tl.load(totals + row)
    mean = total - tl.load(entropies + row)
    pull = tl.load(by_logprob + row)
    spread = tl.load(by_entropy + row)
    gradient = -tl.exp(x - total) * (pull + spread * (x - mean))
    gradient += tl.where(place == tl.load(targets + row), pull, 0.0)
    tl.store(out + row * width + place, (gradient * factor).to(out.dtype.element_ty), mask=inside)
