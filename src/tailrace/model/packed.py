"""Sequence packing: causal attention over many sequences in one row, none of which attends to another.

The trainer calls `install` once on a loaded model, then `hidden_states` for every pack. Everything but attention works
on the flat row, without padding, and with prefixes that sequences share computed once (`paths`). For attention,
sequences of similar length are gathered into batches and padded on the right, which causal attention never sees; half
precision on CUDA uses the row itself (`varlen.py`), where `reads_rows` says so and the layout was made with `room`. No
mask of the whole pack is ever built: sliding windows and soft-capped scores are computed in blocks.

`install` compares a pack with the model's own attention before anything is trained, and refuses a model that differs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from tailrace.model.longrope import FAR, rotate_by_sequence, switch_of
from tailrace.model.support import check_call, check_layers, refuse, trunk_of, trying
from tailrace.model.varlen import attend_row

log = logging.getLogger(__name__)

NAME = "tailrace_packed"
SLACK = 8  # tokens by which sequences of a batch may differ, or a quarter of the longest if that is more
QUERY_BLOCK = 256  # queries whose soft-capped scores exist at once
HALF = (torch.float16, torch.bfloat16)
ROW_ERROR = 0.05  # allowed difference of the two attention paths in half precision, relative to the hidden states


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the sequences of a pack are in its row, and in the padded batches of neighbours of similar length.

    torch.compile recompiles when a plain number in here changes, so a row for `varlen.py` has tensors only.
    """

    positions: Tensor  # of each token in its own sequence
    reach: Tensor  # length of each token's sequence
    batches: tuple[tuple[int, int], ...] = ()  # sequences of each, and the length they are padded to
    spread: Tensor | None = None  # token of each slot of the padded batches; None: nothing is padded or shared
    gather: Tensor | None = None  # slot of each token in the padded batches
    bounds: Tensor | None = None  # cumulative sequence lengths (cu_seqlens)
    sizes: Tensor | None = None  # on the host: longest sequence, tokens


def layout(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    room: int | None = None,
    paths: NDArray[np.int64] | None = None,
) -> Layout:
    """With `room` attention uses the row itself, padded to so many tokens.

    `paths`: the index in the row of every token of every sequence, where sequences share prefixes; a shared token is in
    the row once, with the first sequence that has it. Without, the sequences are concatenated.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    bounds = pad(sizes.cumsum(0), (1, 0))
    positions = torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(sizes)
    reach = sizes.repeat_interleave(sizes)
    if room is not None:
        assert paths is None
        return _row(lengths, positions, reach, bounds, room, device)
    batches = tuple(_similar(lengths))
    if paths is None and len(set(lengths)) == 1:
        return Layout(positions.to(device), reach.to(device), batches)
    path = torch.arange(len(positions)) if paths is None else torch.from_numpy(paths)
    widths = torch.tensor([longest for sequences, longest in batches for _ in range(sequences)])
    starts = pad(widths.cumsum(0), (1, 0))
    slot = starts[:-1].repeat_interleave(sizes) + positions
    spread = path.new_zeros(int(starts[-1])).index_copy_(0, slot, path)
    new = path > pad(path.cummax(0).values[:-1], (1, 0), value=-1)
    kept = positions[new].to(device), reach[new].to(device)
    return Layout(*kept, batches, spread.to(device), slot[new].to(device))


def _similar(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Batches of neighbours no longer than the first and not much shorter: how many, and the first's length."""
    longest = sequences = 0
    for length in lengths:
        if sequences and not longest - max(SLACK, longest // 4) <= length <= longest:
            yield sequences, longest
            sequences = 0
        longest = longest if sequences else length
        sequences += 1
    yield sequences, longest


def _row(
    lengths: Sequence[int], positions: Tensor, reach: Tensor, bounds: Tensor, room: int, device: torch.device | str
) -> Layout:
    tokens = len(positions)
    assert tokens <= room, f"{tokens} tokens in a row of {room}"
    sizes = torch.tensor([max(lengths), tokens])
    positions, reach = (pad(each, (0, room - tokens)).to(device) for each in (positions, reach))
    return Layout(positions, reach, bounds=bounds.to(device, torch.int32), sizes=sizes)


def install(model: PreTrainedModel, try_out: bool = True) -> PreTrainedModel:
    """Give the model this attention, or refuse it with the reason."""
    check_layers(model)
    rotate_by_sequence(model)
    AttentionInterface.register(NAME, attention)
    if not try_out:
        model.set_attn_implementation(NAME)
        return model
    with trying(model):
        before = _try_out(model, "eager", packed=False)
        if not torch.allclose(before, _try_out(model, NAME, packed=True), atol=1e-3, rtol=1e-2):
            refuse(model.config.model_type, "a pack gives other hidden states than its sequences one by one")
    return model


def reads_rows(model: PreTrainedModel) -> bool:
    """Whether the varlen kernel supports this model's attention, and agrees with the padded batches.

    Call it in the precision of the forward passes, autocast included.
    """
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    special = [getattr(config, name, None) for name in ("attn_logit_softcapping", "v_head_dim", "qk_rope_head_dim")]
    half_precision = model.dtype in HALF or torch.is_autocast_enabled(model.device.type)
    if model.device.type != "cuda" or not half_precision or width % 8 or width > 256 or any(special):
        return False
    spread = _try_out(model, NAME, packed=True)
    try:
        error = (_try_out(model, NAME, packed=True, room=16) - spread).norm() / spread.norm()
    except RuntimeError as trouble:
        return _say_without_rows((str(trouble).splitlines() or [""])[0][:200])
    return bool(error < ROW_ERROR) or _say_without_rows(f"its result is off by {float(error):.1%}")


def _say_without_rows(why: str) -> bool:
    log.warning("torch's variable-length attention does not work here (%s): sequences are padded, which is slower", why)
    return False


def hidden_states(model: PreTrainedModel, tokens: Tensor, where: Layout) -> Tensor:
    """The last hidden state of every token of the row: (tokens, width)."""
    switch, positions = switch_of(model), where.positions
    if switch is not None:
        positions = positions + FAR * (where.reach > switch)
    return trunk_of(model)(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed=where
    ).last_hidden_state.squeeze(0)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: Layout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: (1, heads, tokens, width) in, (1, tokens, heads, width) out."""
    check_call(module, packed is not None, attention_mask, rest)
    assert packed is not None
    query, key, value = _in_arithmetic_precision(query, key, value)
    if packed.sizes is not None:
        assert softcap is None
        return _in_a_row(query, key, value, packed, scaling, sliding_window)[None], None
    queries, keys, values = (_spread(x.squeeze(0).transpose(0, 1), packed) for x in (query, key, value))
    batches = zip(queries, keys, values, strict=True)
    attended = [_attend(q, k, v, scaling, sliding_window, softcap) for q, k, v in batches]
    return _flatten(attended, packed)[None], None


def _try_out(model: PreTrainedModel, implementation: str, *, packed: bool, room: int | None = None) -> Tensor:
    """Hidden states of two short sequences, in one pack or one after the other."""
    model.set_attn_implementation(implementation)
    lengths, device = (7, 3), model.device
    tokens = torch.arange(sum(lengths), device=device) % model.config.get_text_config().vocab_size
    with torch.no_grad():
        if packed:
            row = pad(tokens, (0, (room or len(tokens)) - len(tokens)))
            return hidden_states(model, row, layout(lengths, device, room))[: len(tokens)].float()
        rows = [trunk_of(model)(input_ids=piece[None], use_cache=False) for piece in tokens.split(lengths)]
    return torch.cat([row.last_hidden_state[0] for row in rows]).float()


def _in_arithmetic_precision(*tensors: Tensor) -> list[Tensor]:
    """Under autocast RoPE leaves queries and keys in float32, unlike values."""
    kind = tensors[0].device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return [x.to(wanted) for x in tensors]


def _in_a_row(
    query: Tensor, key: Tensor, value: Tensor, packed: Layout, scaling: float | None, window: int | None
) -> Tensor:
    assert packed.bounds is not None
    assert packed.sizes is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_row(q, k, v, packed.bounds, packed.sizes, scale, window or 0)[0]


def _spread(row: Tensor, packed: Layout) -> Iterator[Tensor]:
    """(tokens, heads, width) -> (sequences, heads, longest, width) for each batch."""
    padded = row if packed.spread is None else row.index_select(0, packed.spread)
    parts = padded.split([sequences * longest for sequences, longest in packed.batches])
    return (piece.unflatten(0, shape).transpose(1, 2) for piece, shape in zip(parts, packed.batches, strict=True))


def _flatten(batches: list[Tensor], packed: Layout) -> Tensor:
    """The inverse."""
    padded = torch.cat([batch.transpose(1, 2).flatten(0, 1) for batch in batches])
    return padded if packed.gather is None else padded.index_select(0, packed.gather)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    if window is not None and window >= q.shape[2]:
        window = None
    if softcap is not None:
        return _softcapped(q, k, v, scaling or q.shape[-1] ** -0.5, window, softcap)
    if window is not None:
        return _windowed(q, k, v, scaling, window)
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int) -> Tensor:
    """Sliding window, in blocks of its length: each attends to itself and to the block before it."""
    sequences, _, length, _ = q.shape
    q, k, v = (pad(x, (0, 0, 0, -length % window)) for x in (q, k, v))
    first = _attend(q[:, :, :window], k[:, :, :window], v[:, :, :window], scaling, None, None)
    queries, keys, values = _blocks(q[:, :, window:], window, window), *(_blocks(x, 2 * window, window) for x in (k, v))
    query, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    mask = (key > query) & (key <= query + window)  # the window ends at the token itself
    later = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    later = later.unflatten(0, (sequences, -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, later], dim=2)[:, :, :length]


def _blocks(x: Tensor, size: int, step: int) -> Tensor:
    """(sequences, heads, length, width) -> (sequences * blocks, heads, size, width)."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float) -> Tensor:
    """Logit soft-capping. No kernel has it, so scores are computed for a block of queries at a time, and recomputed in
    the backward pass."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    starts = range(0, q.shape[2], QUERY_BLOCK)
    pieces = [
        checkpoint(_capped_block, piece, k, v, start, scaling, window, softcap, use_reentrant=False)
        for start, piece in zip(starts, q.split(QUERY_BLOCK, dim=2), strict=True)
    ]
    return torch.cat(pieces, dim=2)  # type: ignore[arg-type]


def _capped_block(
    q: Tensor, k: Tensor, v: Tensor, start: int, scaling: float, window: int | None, softcap: float
) -> Tensor:
    end = start + q.shape[2]
    begin = max(0, start - window + 1) if window else 0
    scores = softcap * torch.tanh(q @ k[:, :, begin:end].transpose(2, 3) * (scaling / softcap))
    age = torch.arange(start, end, device=q.device)[:, None] - torch.arange(begin, end, device=q.device)
    hidden = (age < 0) | (age >= (window or end))
    return scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(v.dtype) @ v[:, :, begin:end]
