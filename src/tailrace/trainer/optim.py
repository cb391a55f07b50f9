"""AdamW with warm-up, decay and clipping, and its moments as named tensors.

One `Optimiser` for the policy and one for the critic. A gradient that is not finite changes nothing but the count. One
that is zero everywhere still lets the moments fade and the weights follow them, as in any loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tailrace.config.tree import Trainer

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Update(NamedTuple):
    """What one update did."""

    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool


def rate_factor(settings: Trainer, update: int, total: int) -> float:
    """What the learning rate is multiplied by at the update after `update` others, of `total`."""
    if update < settings.warmup_steps:
        return (update + 1) / settings.warmup_steps
    progress = min(1.0, (update - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    if settings.decay == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress)) if settings.decay == "cosine" else 1.0


class Optimiser:
    """Owns the moments of the named parameters and the number of updates so far."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], rate: float, settings: Trainer, total: int):
        self.updates = 0
        self._rate, self._settings, self._total = rate, settings, total
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        vectors = [p for p in self._parameters.values() if p.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,  # the unfused one makes several copies of every parameter on its way
        )

    def update(self) -> Update:
        """Use the gradients and drop them."""
        norm = self.clip()
        return self.finish(norm, math.isfinite(norm))

    def clip(self) -> float:
        """Clip the gradients; returns their norm before that."""
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm)
        whole = getattr(norm, "full_tensor", None)  # of sharded gradients
        return float(whole() if whole is not None else norm)

    def finish(self, norm: float, sound: bool) -> Update:
        """Use the clipped gradients, whose norm was this, if they are sound; drop them in any case."""
        rate = self._rate * rate_factor(self._settings, self.updates, self._total)
        if sound:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.updates += 1
        return Update(norm, rate, not sound)

    def set_zero_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """`MOMENT/NAME` and the tensor (a shard of it, where parameters are sharded)."""
        for name, parameter in self._parameters.items():
            state = self._adam.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in state:
                    yield f"{moment}/{name}", state[moment]

    def load(self, updates: int, moments: Mapping[str, Tensor]) -> None:
        """The inverse, with tensors laid out like the parameters."""
        self.updates = updates
        for name, parameter in self._parameters.items():
            if f"step/{name}" in moments:
                state = {moment: moments[f"{moment}/{name}"] for moment in MOMENTS}
                state["step"] = state["step"].to(parameter.device)  # the fused kernel counts where it works
                self._adam.state[parameter] = state
