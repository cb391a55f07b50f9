"""Which models can be computed with here, and the one sentence for those that cannot.

Trainer and engine run the module that transformers made of a model, with an attention function of their own. That is
exact only if the module hands everything that matters to that function, and if attention is all that its tokens know of
each other. Both look before they start: what they cannot compute exactly is refused with the family and the reason.
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

LAYERS = {"full_attention", "sliding_attention"}  # the kinds that can be computed with
OWN_PARTS = {  # what a layer may bring along, and why that is too much
    "position_bias": "adds a bias for positions to its scores",
    "s_aux": "has attention sinks",
    "block_indices": "chooses the tokens that it looks at",
}


class UnsupportedModelError(TailraceError):
    """A model that cannot be computed with here, exactly."""


def refuse(family: str, why: str) -> NoReturn:
    raise UnsupportedModelError(f"model.path: models of the family {family} cannot be used: {why}; use another model")


def trunk_of(model: PreTrainedModel) -> Any:
    """The model without its head."""
    return model.base_model if model.base_model is not model else model.get_decoder()


def check_layers(model: PreTrainedModel) -> None:
    """As far as its settings tell."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if kinds:
        refuse(config.model_type, f"it has layers of the kind {', '.join(sorted(kinds))}")
    if getattr(config, "attention_chunk_size", None):
        refuse(config.model_type, "it attends in chunks")
    if getattr(config, "attn_temperature_tuning", None):
        refuse(config.model_type, "it scales scores by the place of a token in its row, not in its sequence")


def check_call(module: torch.nn.Module, reached: bool, mask: Tensor | None, rest: Mapping[str, Any]) -> None:
    """What a layer asks of attention, beside the usual. `reached`: what the caller gave the model has come along."""
    family, name = _family(module), type(module).__name__
    if not reached:
        refuse(family, f"{name} does not hand its arguments through to attention")
    if mask is not None:
        refuse(family, f"{name} makes a mask of its own")
    for part, why in OWN_PARTS.items():
        if rest.get(part) is not None:
            refuse(family, f"{name} {why}")
    if not (rest.get("is_causal", True) and getattr(module, "is_causal", True)):
        refuse(family, f"{name} is not causal")


def _family(module: torch.nn.Module) -> str:
    return getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__


@contextmanager
def trying(model: PreTrainedModel) -> Iterator[None]:
    """Around the first passes: this is the border to modules of whatever origin, which may raise anything."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if ran_out(error):
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
        refuse(model.config.model_type, f"trying it out failed ({type(error).__name__}: {reason})")
