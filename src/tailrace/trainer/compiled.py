"""Decoder blocks compiled by torch, all of them as one, for packs of any size.

`step.py` makes one for a model whose packs are read as rows (`model/varlen.py`), and has a pack go through it at the
start, so that nothing is compiled in the middle of a run. Where torch cannot compile the blocks, or fails to later,
`give_up` goes back to the plain ones and says so, once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ONES = 64  # compiled versions of a block that may exist: of kinds of layers, few tokens or many, with gradients or not
GRAIN = 64  # rows are padded to a multiple of this, the height of a tile of products


class Blocks:
    """The compiled blocks of a model, from now on until they are given up."""

    def __init__(self, model: PreTrainedModel, backend: str = "inductor"):
        from torch._dynamo import config
        from torch._dynamo.exc import TorchDynamoException

        config.recompile_limit = max(ONES, config.recompile_limit)
        self.failures: tuple[type[Exception], ...] = (TorchDynamoException,)
        self.on = True
        self._blocks = _decoder_blocks(model)
        for block in self._blocks:  # `forward` alone: what is hooked to the block (shards, recomputation) stays outside
            block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True, backend=backend)

    def give_up(self, why: Exception) -> None:
        if not self.on:
            raise why
        self.on = False
        for block in self._blocks:
            del block.forward
        reason = (str(why).strip().splitlines() or [""])[0]
        log.warning(
            f"torch could not compile the model's blocks ({type(why).__name__}: {reason[:200]}): they run uncompiled, "
            "slower; trainer.compile = false leaves out the attempt"
        )


def padded(tokens: int) -> int:
    """The size of row that so many tokens are padded to."""
    return -(-tokens // GRAIN) * GRAIN


def _decoder_blocks(model: PreTrainedModel) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
