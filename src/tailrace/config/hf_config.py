"""The shape of a model from its Hugging Face config.json, and the number of parameters that follows from it.

The count is exact for dense and mixture-of-experts decoders of the Llama, Qwen, Mistral, Gemma and SmolLM families
(embeddings, attention with its biases and norms, gated MLP, experts and router). Attention that keeps a compressed
cache is refused, since the size of its KV cache would come out wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from tailrace.config.errors import ConfigError
from tailrace.config.files import read_text

UNGATED_MLP = {"gpt_neox", "phi", "starcoder2", "nemotron"}
QKV_BIAS = {"qwen2", "qwen2_moe"}
QK_NORM = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text"}
FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3", "gemma3_text"}
REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED = ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
CONTEXT = "max_position_embeddings"
OPTIONAL = (
    CONTEXT,
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts_per_tok",
    *EXPERTS,
    *SHARED,
)


class Shape(NamedTuple):
    """The figures of a model that its weights, its arithmetic and its KV cache follow from."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    active_parameters: float = 0.0
    context: int = 0  # most tokens of a sequence; 0: unknown, and long
    experts: int = 0  # of a layer; 0: it is no mixture
    experts_per_token: int = 0


class Experts(NamedTuple):
    """The MLP of a layer: a dense one is one expert that is always used."""

    total: int
    used: int
    width: int
    shared_width: int = 0


def read_shape(path: str) -> Shape:
    """The shape that a config.json describes."""
    return shape_of(_decoder(Path(path)), path)


def shape_of(hf: Mapping[str, Any], path: str = "config.json") -> Shape:
    """The shape that the fields of a config.json describe; `path` is for the error."""
    _refuse_unusable(hf, path)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    kv_heads, head_dim = hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hidden // heads
    experts = _experts(hf)
    fixed = _embeddings(hf) + _attention_and_norms(hf, heads, kv_heads, head_dim)
    total = fixed + _mlp(hf, experts, experts.total)
    active = fixed + _mlp(hf, experts, experts.used) if experts.total > 1 else 0
    routed = (experts.total, experts.used) if experts.total > 1 else (0, 0)
    context = hf.get(CONTEXT) or 0
    return Shape(total, hf["num_hidden_layers"], hidden, heads, kv_heads, head_dim, active, context, *routed)


def _decoder(path: Path) -> dict[str, Any]:
    """The fields of the language model; a model with vision keeps them one level down."""
    text = read_text(path)
    try:
        table: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON (line {error.lineno}): {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, brackets in brackets
        raise ConfigError(f"{path} is not a Hugging Face config.json ({error})") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is not a Hugging Face config.json; it wants a JSON object")
    fields = cast("dict[str, Any]", table)
    inner = fields.get("text_config")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields


def _refuse_unusable(hf: Mapping[str, Any], path: str) -> None:
    if "kv_lora_rank" in hf:
        raise ConfigError(
            f"{path} describes latent attention (kv_lora_rank), which is not supported; "
            "write model.parameters, layers, hidden, heads, kv_heads and head_dim yourself instead of model.hf_config"
        )
    given = [name for name in OPTIONAL if hf.get(name)]
    wrong = [name for name in (*REQUIRED, *given) if not _is_count(hf.get(name))]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]} is {hf.get(wrong[0], 'missing')}; it wants a whole number of 1 or more")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _kind(hf: Mapping[str, Any]) -> str:
    return str(hf.get("model_type", ""))


def _embeddings(hf: Mapping[str, Any]) -> int:
    tied = hf.get("tie_word_embeddings", _kind(hf) in TIED_BY_DEFAULT)
    return (1 if tied else 2) * hf["vocab_size"] * hf["hidden_size"]


def _attention_and_norms(hf: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> int:
    hidden, kind = hf["hidden_size"], _kind(hf)
    projected = (heads + 2 * kv_heads) * head_dim
    layer = hidden * projected + heads * head_dim * hidden
    if kind in QKV_BIAS or hf.get("attention_bias"):
        layer += projected
    if hf.get("attention_bias") and kind not in QKV_BIAS:
        layer += hidden
    if kind in QK_NORM:
        layer += 2 * head_dim
    layer += (4 if kind in FOUR_NORMS else 2) * hidden
    return hf["num_hidden_layers"] * layer + hidden


def _experts(hf: Mapping[str, Any]) -> Experts:
    count = next((hf[name] for name in EXPERTS if hf.get(name)), 1)
    if count == 1:
        return Experts(1, 1, hf["intermediate_size"])
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    shared = hf.get("shared_expert_intermediate_size") or (hf.get("n_shared_experts") or 0) * width
    return Experts(count, hf.get("num_experts_per_tok") or 1, width, shared)


def _mlp(hf: Mapping[str, Any], experts: Experts, used: int) -> int:
    """All MLPs with `used` experts each, and the router that chooses among them."""
    matrices = 2 if _kind(hf) in UNGATED_MLP else 3
    dense = min(hf.get("first_k_dense_replace") or 0, hf["num_hidden_layers"])
    router = experts.total * hf["hidden_size"] if experts.total > 1 else 0
    sparse_layer = matrices * hf["hidden_size"] * (used * experts.width + experts.shared_width) + router
    dense_layer = matrices * hf["hidden_size"] * hf["intermediate_size"]
    return (hf["num_hidden_layers"] - dense) * sparse_layer + dense * dense_layer
