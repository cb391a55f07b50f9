"""The forward pass of a Llama-like decoder, written out: what the native engine runs wherever the model allows it.

A transformers module spends most of a small decode step between its matrix products: a dozen small operations for every
norm and rotation, a call for every submodule. Here a layer is four products and a handful of operations, into buffers
that exist once. It reads the module's own parameters where they lie, so weights that are replaced in place are new here
too. `llama_decoder` says None for a model that it does not know down to the last operation; that one runs as a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.engines.attention import LayerShape
from tailrace.engines.layout import joined_product

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # others change with the length of the sequence


class Heads(NamedTuple):
    """What attention needs to know of a layer beside its projections."""

    layer: int
    queries: int
    keys: int
    dim: int
    scale: float
    window: int | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float


class Attention(Protocol):
    """Of one step: rotates queries and keys, stores keys and values, and looks at what every token may see."""

    def attend(self, heads: Heads, qkv: Tensor) -> Tensor:
        """[tokens, (queries + 2 * keys) * dim], as `Operations.project` gave it -> [tokens, queries * dim]"""
        ...


class Norm(NamedTuple):
    weight: Tensor
    eps: float


class Product(NamedTuple):
    weight: Tensor  # [in, out]
    bias: Tensor | None

    def of(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)

    def onto(self, out: Tensor, x: Tensor) -> None:
        out.addmm_(x, self.weight)
        if self.bias is not None:
            out.add_(self.bias)


class Operations(Protocol):
    """What a layer consists of, by device. What one gives may be overwritten when the same one is called again."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def product(self, x: Tensor, product: Product) -> Tensor: ...

    def project(self, x: Tensor, product: Product) -> Tensor:
        """Queries, keys and values, in the form that this device's attention likes best."""
        ...

    def gated(self, x: Tensor, product: Product) -> Tensor:
        """SiLU of the product's first half, times its second half."""
        ...

    def add(self, hidden: Tensor, x: Tensor, product: Product, norm: Norm) -> Tensor:
        """Adds the product to `hidden`, in place; the norm of what that has become."""
        ...


class Layer(NamedTuple):
    heads: Heads
    norm: Norm
    qkv: Product
    output: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product


class LlamaDecoder:
    def __init__(self, model: PreTrainedModel, layers: list[Layer], operations: Operations) -> None:
        decoder: Any = model.get_decoder()
        head: Any = model.get_output_embeddings()
        self._layers = layers
        self._operations = operations
        self._rotary = decoder.rotary_emb
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norms = [layer.norm for layer in layers] + [_norm(decoder.norm)]
        self._head = _product(head)

    def hidden(self, tokens: Tensor, attention: Attention) -> Tensor:
        """After the last layer and its norm."""
        hidden = self._embedding.index_select(0, tokens)
        normed = self._operations.norm(hidden, self._norms[0])
        for layer, following in zip(self._layers, self._norms[1:], strict=True):
            normed = self._pass(layer, attention, hidden, normed, following)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self._operations.product(hidden, self._head)

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all positions below `length`: [length, dim], float32."""
        device = self._embedding.device
        positions = torch.arange(length, device=device)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
        return cos[0].contiguous(), sin[0].contiguous()

    def _pass(self, layer: Layer, attention: Attention, hidden: Tensor, normed: Tensor, following: Norm) -> Tensor:
        """`hidden` moves on in place; the norm of it that the next layer starts from."""
        operations = self._operations
        found = attention.attend(layer.heads, operations.project(normed, layer.qkv))
        normed = operations.add(hidden, found, layer.output, layer.mlp_norm)
        return operations.add(hidden, operations.gated(normed, layer.gate_up), layer.down, following)


# -------------------------------------------------------------------------------------------------- which models


def llama_decoder(
    model: PreTrainedModel, shapes: Mapping[int, LayerShape], operations: Operations
) -> LlamaDecoder | None:
    """None unless everything in it is as expected. Its projections must have been joined (`layout.py`)."""
    decoder: Any = model.get_decoder()
    if not is_known(model):
        return None
    layers = [_layer(shapes[index], index, layer) for index, layer in enumerate(decoder.layers)]
    found = [layer for layer in layers if layer is not None]
    return LlamaDecoder(model, found, operations) if len(found) == len(layers) else None


def is_known(model: PreTrainedModel) -> bool:
    """Whether it has a form here, as far as its settings tell."""
    config, decoder = cast(Any, model.config), cast(Any, model.get_decoder())
    head = model.get_output_embeddings()
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and decoder.rotary_emb.rope_type in FIXED_ROTATIONS
        and type(head) is torch.nn.Linear
        and head.bias is None
    )


def _layer(shape: LayerShape, index: int, layer: Any) -> Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = joined_product(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = joined_product(mlp.gate_proj, mlp.up_proj)
    plain = all(type(each) is torch.nn.Linear for each in (attention.o_proj, mlp.down_proj))
    if qkv is None or gate_up is None or not plain or shape.softcap is not None or shape.key_dim != shape.value_dim:
        return None
    return Layer(
        heads=_heads(shape, index, attention, layer.input_layernorm.variance_epsilon),
        norm=_norm(layer.input_layernorm),
        qkv=Product(*qkv),
        output=_product(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=Product(*gate_up),
        down=_product(mlp.down_proj),
    )


def _heads(shape: LayerShape, index: int, attention: Any, eps: float) -> Heads:
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Heads(
        layer=index,
        queries=shape.query_heads,
        keys=shape.kv_heads,
        dim=shape.key_dim,
        scale=shape.scale,
        window=shape.window,
        query_norm=getattr(query_norm, "weight", None),
        key_norm=getattr(key_norm, "weight", None),
        eps=eps,
    )


def _norm(part: Any) -> Norm:
    return Norm(part.weight, part.variance_epsilon)


def _product(part: Any) -> Product:
    return Product(part.weight.t(), part.bias)
