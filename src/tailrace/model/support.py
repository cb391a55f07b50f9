"""Which models are supported, and the sentence for those that are not.

Trainer and engine run transformers' own module with an attention function of theirs. That is exact only if the module
passes everything that matters to that function, and if tokens interact through attention alone. Both check before they
start: a model that they cannot compute exactly is refused with its family and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.errors import TailraceError
from tailrace.model.memory import ran_out

LAYERS = {"full_attention", "sliding_attention"}  # supported types
UNSUPPORTED_ARGUMENTS = {  # of attention, and why
    "position_bias": "adds a bias for positions to its scores",
    "s_aux": "has attention sinks",
    "block_indices": "chooses the tokens that it looks at",
}


class UnsupportedModelError(TailraceError):
    """A model that cannot be computed exactly here."""


def refuse(family: str, why: str) -> NoReturn:
    raise UnsupportedModelError(f"model.path: models of the family {family} cannot be used: {why}; use another model")


def trunk_of(model: PreTrainedModel) -> Any:
    """The model without its head."""
    return model.base_model if model.base_model is not model else model.get_decoder()


def check_layers(model: PreTrainedModel) -> None:
    """By the model's config."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if kinds:
        refuse(config.model_type, f"it has layers of the kind {', '.join(sorted(kinds))}")
    if getattr(config, "attention_chunk_size", None):
        refuse(config.model_type, "it attends in chunks")
    if getattr(config, "attn_temperature_tuning", None):
        refuse(config.model_type, "it scales scores by the position of a token in its row, not in its sequence")


def check_call(module: torch.nn.Module, reached: bool, mask: Tensor | None, rest: Mapping[str, Any]) -> None:
    """By the arguments of an attention call. `reached`: the caller's own arguments were passed through the model."""
    family, name = _family(module), type(module).__name__
    if not reached:
        refuse(family, f"{name} does not pass its arguments through to attention")
    if mask is not None:
        refuse(family, f"{name} makes a mask of its own")
    for part, why in UNSUPPORTED_ARGUMENTS.items():
        if rest.get(part) is not None:
            refuse(family, f"{name} {why}")
    if not (rest.get("is_causal", True) and getattr(module, "is_causal", True)):
        refuse(family, f"{name} is not causal")


def _family(module: torch.nn.Module) -> str:
    return getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__


@contextmanager
def trying(model: PreTrainedModel) -> Iterator[None]:
    """Around the first forward passes: a foreign module may raise anything."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if ran_out(error):
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        refuse(model.config.model_type, f"trying it out failed ({type(error).__name__}: {reason})")
