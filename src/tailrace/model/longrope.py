"""LongRoPE for packed rows: rotary frequencies that depend on the length of each sequence.

A LongRoPE model has two sets of frequencies: short ones up to its original context, long ones for sequences beyond it.
transformers chooses by the largest position in a row and rotates the whole row so, which is right for one sequence
only. Here the choice is per sequence: positions of a sequence beyond the limit have `FAR` added to them by whoever
builds the row, and `rotate_by_sequence` makes the model understand that. Rows without such positions are rotated as
transformers would.

When a sequence crosses the limit while it is generated, all its keys are rotated again (as in transformers' Phi-3): the
log-prob of a token depends on the length of its sequence when it was sampled, and on nothing later. The trainer does
the same: it computes the prefix of such a sequence twice, once with the short frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.model.support import refuse

FAR = 1 << 40  # above all real positions
SWITCH = "tailrace_switch"  # attribute of a model: its limit


def rotate_by_sequence(model: PreTrainedModel) -> None:
    """Make the model accept positions with `FAR` added. Call it before the first forward pass."""
    if hasattr(model, SWITCH):
        return
    rotations = list(_switching(model))
    limits = {limit for module in rotations for limit in _limits(module)}
    if len(limits) > 1:
        refuse(model.config.model_type, "its layers change their rotary frequencies at different lengths")
    setattr(model, SWITCH, limits.pop() if limits else None)
    for module in rotations:
        module.forward = _BySequence(module, switch_of(model) or 0)


def switch_of(model: PreTrainedModel) -> int | None:
    """Sequences of more tokens than this use the long frequencies; None: the model has one set."""
    return getattr(model, SWITCH, None)


def _switching(model: PreTrainedModel) -> Iterator[Any]:
    return (module for module in model.modules() if "longrope" in _by_layer(getattr(module, "rope_type", None)))


def _limits(rotary: Any) -> Iterator[int]:
    parameters = rotary.config.rope_parameters
    for table in [parameters] if "rope_type" in parameters else parameters.values():
        if table["rope_type"] == "longrope":
            yield table["original_max_position_embeddings"]


def _by_layer(kind: Any) -> list[Any]:
    return list(kind.values()) if isinstance(kind, dict) else [kind]


class _BySequence:
    """Replaces `forward` of a rotary embedding."""

    def __init__(self, rotary: nn.Module, limit: int) -> None:
        self._original = rotary.forward
        self._limit = limit

    def __call__(self, x: Tensor, position_ids: Tensor, **more: Any) -> tuple[Tensor, ...]:
        far = position_ids >= FAR
        short = self._original(x, position_ids.masked_fill(far, 0), **more)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self._limit)  # selects the long frequencies
        positions = torch.cat([torch.where(far, position_ids - FAR, 0), beyond], dim=-1)
        long = [table[..., :-1, :] for table in self._original(x, positions, **more)]
        return tuple([torch.where(far[..., None], b, a) for a, b in zip(short, long, strict=True)])
