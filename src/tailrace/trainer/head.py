"""The model's head on a GPU: logits of a chunk, their loss and their gradient in one go, so that nothing is made twice.

`logprobs.py` calls `fused_loss` for training and `scored` for policies that stand still. The loss is a sum over tokens,
so that of a chunk is computed as soon as its logits exist; their gradient then goes into the hidden states and the
head's weights at once, and the logits are forgotten. Products take half precision in and give float32 out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailrace.trainer.losses import LossOutput

TokenLoss = Callable[[slice, Tensor, Tensor], LossOutput]  # of some tokens, from their log-probs and entropies
ELEMENTS = 2**30  # of a chunk's logits, at most


class Head(NamedTuple):
    """A matrix without bias. Logits are multiplied by `factor`."""

    weight: Tensor
    factor: float
    chunk: int  # tokens whose logits exist at once


class FusedLoss(NamedTuple):
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    stats: dict[str, Tensor]


def chunk_that_fits(vocabulary: int) -> int:
    """The largest power of two of tokens whose logits are not too many."""
    return 1 << max(1, ELEMENTS // vocabulary).bit_length() - 1


def fused_loss(hidden: Tensor, targets: Tensor, head: Head, token_loss: TokenLoss) -> FusedLoss:
    """The loss, with a gradient for the hidden states and the head's weights."""
    stats: dict[str, Tensor] = {}
    loss, logprobs, entropy = _FusedLoss.apply(hidden, head.weight, targets, head, token_loss, stats)  # type: ignore[misc]
    return FusedLoss(loss, logprobs, entropy, stats)


@torch.no_grad()
def scored(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies alone."""
    pieces = [
        score(product(hidden[chunk_rows].to(head.weight.dtype), head.weight), targets[chunk_rows], head.factor)
        for chunk_rows in _chunks(len(targets), head.chunk)
    ]
    logprobs, entropy, _ = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
        token_loss: TokenLoss,
        stats: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = _Work(hidden, weight, targets, head.factor, token_loss, stats)
        losses, *scores = zip(*(work.on(chunk_rows) for chunk_rows in _chunks(len(targets), head.chunk)), strict=True)
        assert work.by_weight is not None
        ctx.save_for_backward(work.by_hidden.to(hidden.dtype), work.by_weight.to(weight.dtype))
        logprobs, entropy = (torch.cat(each) for each in scores)
        ctx.mark_non_differentiable(logprobs, entropy)
        return torch.stack(losses).sum(), logprobs, entropy

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * by_loss, by_weight * by_loss, None, None, None, None


class _Work:
    """What adds up over the chunks. Nothing as large as the logits outlives its chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        factor: float,
        token_loss: TokenLoss,
        stats: dict[str, Tensor],
    ):
        self.hidden, self.weight, self.targets = hidden, weight, targets
        self.factor, self.token_loss, self.stats = factor, token_loss, stats
        self.by_hidden = torch.empty_like(hidden, dtype=weight.dtype)
        self.by_weight: Tensor | None = None

    def on(self, chunk_rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, log-probs and entropies of a chunk; its gradients are added."""
        h, targets = self.hidden[chunk_rows].to(self.weight.dtype), self.targets[chunk_rows]
        logits = product(h, self.weight)
        logprobs, entropy, total = score(logits, targets, self.factor)
        outcome, by_logprob, by_entropy = _chunk_loss(self.token_loss, chunk_rows, logprobs, entropy)
        gradient = slope(logits, targets, total, entropy, by_logprob, by_entropy, self.factor, h.dtype)
        self.by_hidden[chunk_rows] = gradient @ self.weight
        more = product(gradient.t(), h.t())
        self.by_weight = more if self.by_weight is None else self.by_weight.add_(more)
        for name, value in outcome.stats.items():
            self.stats[name] = self.stats[name] + value if name in self.stats else value
        return outcome.loss.detach(), logprobs, entropy


def _chunk_loss(
    token_loss: TokenLoss, chunk_rows: slice, logprobs: Tensor, entropy: Tensor
) -> tuple[LossOutput, Tensor, Tensor]:
    """The outcome, and what it gains by each log-prob and each entropy."""
    with torch.enable_grad():
        leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        outcome = token_loss(chunk_rows, *leaves)
        pulls = torch.autograd.grad(outcome.loss, leaves, allow_unused=True)
    by_logprob, by_entropy = (torch.zeros_like(logprobs) if pull is None else pull.contiguous() for pull in pulls)
    return outcome, by_logprob, by_entropy


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    """At least one, if need be of nothing."""
    for start in range(0, max(1, count), chunk):
        yield slice(start, min(start + chunk, count))


# ------------------------------------------------------------------------------------------------------- on each device


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ columns.T in float32."""
    if rows.dtype == torch.float32 or not rows.is_cuda:
        return rows.float() @ columns.float().t()
    if _widens(rows.device, rows.dtype):
        return torch.mm(rows, columns.t(), out_dtype=torch.float32)
    return (rows @ columns.t()).float()


@lru_cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of half precision come out in float32 here; otherwise they are rounded on the way."""
    try:
        ones = torch.ones(16, 16, device=device, dtype=dtype)
        return bool((torch.mm(ones, ones, out_dtype=torch.float32) == 16).all())
    except RuntimeError:
        return False


def score(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and totals (log-sum-exp)."""
    if logits.is_cuda:
        from tailrace.kernels import score as kernel

        return kernel.score(logits, targets, factor)
    x = logits * factor
    total = x.logsumexp(-1)
    chosen = x.gather(-1, targets[:, None])[:, 0]
    return chosen - total, total - ((x - total[:, None]).exp() * x).sum(-1), total


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
    """The gradient by the logits."""
    if logits.is_cuda:
        from tailrace.kernels import score as kernel

        return kernel.slope(logits, targets, total, entropy, by_logprob, by_entropy, factor, dtype)
    x, mean = logits * factor, total - entropy
    gradient = -(x - total[:, None]).exp() * (by_logprob[:, None] + by_entropy[:, None] * (x - mean[:, None]))
    gradient.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    return (gradient * factor).to(dtype)
