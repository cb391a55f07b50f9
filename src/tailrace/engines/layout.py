"""How a model's weights lie in memory while the native engine runs it on a CPU. Called once, when the engine is built.

Products of a few dozen rows are much faster with column-major weights, and faster still when projections of the same
input are one product. Both are layouts only: every parameter keeps its name, shape and ties, and is written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def use_fast_layout(model: PreTrainedModel) -> None:
    """Looking up tokens in an embedding that shares its weights gets slower, but by far less than is gained."""
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
    for module in list(model.modules()):
        for names in SAME_INPUT:
            parts = [getattr(module, name, None) for name in names]
            if can_join(parts):
                Joined([part for part in parts if isinstance(part, torch.nn.Linear)])


def can_join(parts: Sequence[torch.nn.Module | None]) -> bool:
    """Plain linear layers of one kind; anything that a model or an adapter has changed is left alone."""
    kinds = {(part.in_features, part.bias is None) for part in parts if type(part) is torch.nn.Linear}
    return len(kinds) == 1 and all(type(part) is torch.nn.Linear for part in parts)


class Joined:
    """Linear layers whose parameters are slices of one matrix. The first that sees an input computes all of them; the
    others take their share of that, and the last of them lets it go."""

    def __init__(self, parts: Sequence[torch.nn.Linear]) -> None:
        self._weight = torch.cat([part.weight.data.t() for part in parts], dim=1)
        self._bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()
        self._sizes = [part.out_features for part in parts]
        self._adopt(parts)

    def _adopt(self, parts: Sequence[torch.nn.Linear]) -> None:
        for place, (part, weight) in enumerate(zip(parts, self._weight.split(self._sizes, dim=1), strict=True)):
            part.weight.data = weight.t()
            if self._bias is not None:
                part.bias.data = self._bias.split(self._sizes)[place]
            part.forward = partial(self._share, place)  # pyright: ignore[reportAttributeAccessIssue]

    def _share(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            self._input = x
            self._outputs = linear(x, self._weight.t(), self._bias).split(self._sizes, dim=-1)
        share = self._outputs[place]
        if place == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return share
