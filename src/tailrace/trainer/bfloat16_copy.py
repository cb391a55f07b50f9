"""A copy of the model in bfloat16 that does the arithmetic, while the weights that are trained stay in float32.

`step.py` has one when `trainer.precision` says so and the weights are not sharded: the float32 model is then nothing
but the optimiser's weights, and its gradients are float32 sums of what the copy's passes gave. Casting once per update
costs less than casting in every pass (autocast). Sharded weights are cast as they are gathered (`Ranks.shard`). Either
way rotary angles stay float32 and are applied in float32, as the engine does.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.model.support import trunk_of


class Bfloat16Copy:
    """`model` is the copy. Its parameters have no gradients of their own."""

    def __init__(self, master: PreTrainedModel):
        self._masters: list[Any] = list(master.parameters())
        self._copies: list[Any] = [nn.Parameter(p.detach().bfloat16(), p.requires_grad) for p in self._masters]
        pairs = list(zip(self._masters, self._copies, strict=True))
        self.model: PreTrainedModel = copy.deepcopy(master, {id(p): narrow for p, narrow in pairs})
        for p, narrow in pairs:
            if p.requires_grad:
                narrow.register_post_accumulate_grad_hook(partial(_hand_over, p))
        self._stamp = self._now(0)

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """Be the float32 weights as they are now: after an update, a restored checkpoint, a swap with a snapshot."""
        now = self._now(updates)
        if now != self._stamp:
            torch._foreach_copy_(self._copies, self._masters)  # pyright: ignore[reportPrivateImportUsage]
            self._stamp = now

    def _now(self, updates: int) -> tuple[int, int]:
        """The optimiser's fused kernel does not count as a change to a tensor, everything else does."""
        return updates, sum(p._version for p in self._masters)


def _hand_over(master: nn.Parameter, narrow: Tensor) -> None:
    """Gradients of many passes add up in float32."""
    found, narrow.grad = narrow.grad, None
    assert found is not None
    if master.grad is None:
        master.grad = found.float()
    else:
        master.grad.add_(found)


def rotate_in_float32(model: PreTrainedModel) -> None:
    rotary = getattr(trunk_of(model), "rotary_emb", None)
    if isinstance(rotary, nn.Module):
        rotary.register_forward_pre_hook(_ask_for_float32)


def _ask_for_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of its first argument a rotary embedding takes the device and the type."""
    return (inputs[0][..., :1].float(), *inputs[1:]) if inputs else inputs
