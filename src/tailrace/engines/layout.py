"""How a model's weights lie in memory while the native engine runs it. Called once, when the engine is built.

Projections of the same input are one matrix, hence one product. Where torch multiplies on a CPU, weights are
column-major besides: its products of a few dozen rows are much faster so. Both are layouts only: every parameter keeps
its name, shape and ties, and is written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

OWNER = "tailrace_joined"  # the attribute of a joined layer that says with which others
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def use_fast_layout(model: PreTrainedModel, column_major: bool) -> None:
    """Looking up tokens in a column-major embedding that shares its weights is slower, by far less than is gained."""
    arrange = _column_major if column_major else torch.Tensor.contiguous
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = arrange(module.weight.data)
    for module in list(model.modules()):
        for names in SAME_INPUT:
            parts = [getattr(module, name, None) for name in names]
            if can_join(parts):
                Joined([part for part in parts if isinstance(part, torch.nn.Linear)], arrange)


def _column_major(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


def joined_product(*parts: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The one matrix, as [in, out], and bias of these layers; None if they were not joined."""
    owners = {getattr(part, OWNER, None) for part in parts}
    owner = owners.pop() if len(owners) == 1 else None
    return None if owner is None else (owner.weight.t(), owner.bias)


def can_join(parts: Sequence[torch.nn.Module | None]) -> bool:
    """Plain linear layers of one kind; anything that a model or an adapter has changed is left alone."""
    kinds = {(part.in_features, part.bias is None) for part in parts if type(part) is torch.nn.Linear}
    return len(kinds) == 1 and all(type(part) is torch.nn.Linear for part in parts)


class Joined:
    """Linear layers whose parameters are slices of one matrix. The first that sees an input computes all of them; the
    others take their share of that, and the last of them lets it go."""

    def __init__(self, parts: Sequence[torch.nn.Linear], arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.weight = arrange(torch.cat([part.weight.data for part in parts]))
        self.bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()
        self._sizes = [part.out_features for part in parts]
        self._adopt(parts)

    def _adopt(self, parts: Sequence[torch.nn.Linear]) -> None:
        for index, (part, weight) in enumerate(zip(parts, self.weight.split(self._sizes), strict=True)):
            part.weight.data = weight
            if self.bias is not None:
                part.bias.data = self.bias.split(self._sizes)[index]
            part.forward = partial(self._share, index)  # pyright: ignore[reportAttributeAccessIssue]
            setattr(part, OWNER, self)

    def _share(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            self._input = x
            self._outputs = linear(x, self.weight, self.bias).split(self._sizes, dim=-1)
        share = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return share
