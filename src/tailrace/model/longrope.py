"""Rotary frequencies that depend on the length of the sequence (Long RoPE), in rows that hold many sequences.

Such a model has two sets of frequencies: a short one up to its original context, a long one for sequences that have
grown beyond it. transformers looks at the longest position in a row and rotates the whole row accordingly, which is
right for one sequence only. Here every sequence of a row says for itself how long it is: positions of one that is past
the limit are given with `FAR` added to them. Whoever builds a row does that; `rotate_by_sequence` makes the model
understand it. Rows without such positions are rotated as transformers would.

When a sequence crosses the limit while it is generated, all its keys have to be rotated anew (transformers' Phi-3 does
that too): the log-prob of a token depends on how long its sequence was when it was drawn, and on nothing that came
later. The trainer follows: it looks at the beginning of such a sequence twice, once as it was before it crossed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.model.support import refuse

FAR = 1 << 40  # above all positions
SWITCH = "tailrace_switch"  # the attribute of a model that has the limit


def rotate_by_sequence(model: PreTrainedModel) -> None:
    """From now on positions may be far. To be called once, before the first pass."""
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
    """Sequences of more tokens than this are far; None: the model has one set of frequencies."""
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
    """In place of a rotary embedding's `forward`."""

    def __init__(self, rotary: nn.Module, limit: int) -> None:
        self._plain = rotary.forward
        self._limit = limit

    def __call__(self, x: Tensor, position_ids: Tensor, **more: Any) -> tuple[Tensor, ...]:
        far = position_ids >= FAR
        near = self._plain(x, position_ids.masked_fill(far, 0), **more)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self._limit)  # makes any row a far one
        places = torch.cat([torch.where(far, position_ids - FAR, 0), beyond], dim=-1)
        distant = [part[..., :-1, :] for part in self._plain(x, places, **more)]
        return tuple([torch.where(far[..., None], b, a) for a, b in zip(near, distant, strict=True)])
