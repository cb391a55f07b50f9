"""Activations that are computed again in backward instead of being kept (`trainer.recompute`).

transformers can do that, but only for layers in training mode, and in training mode layers drop out. A log-prob must be
a function of the weights alone, so a layer is in training mode only as far as the code around it can see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tailrace.model.support import UnsupportedModelError

Run = Callable[..., Any]  # a layer's forward pass, with its hooks


def recompute_layers(model: PreTrainedModel) -> None:
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"trainer.recompute: models of the family {model.config.model_type} have no layers that can be computed "
            "again; write trainer.recompute = false"
        )
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(_twice, layer)


def _twice(layer: Any, run: Run, *inputs: Any) -> Any:
    """Now, and again in backward."""
    return checkpoint(partial(_without_dropout, layer, run), *inputs, use_reentrant=False, preserve_rng_state=False)


def _without_dropout(layer: Any, run: Run, *inputs: Any) -> Any:
    layer.training = False
    try:
        return run(*inputs)
    finally:
        layer.training = True
