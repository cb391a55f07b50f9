"""Causal attention over a pack: many sequences laid end to end in one row, none of which sees another.

The trainer calls `install` once on a loaded model, then `hidden_states` for every pack. Everything but attention works
on the flat row, so padding costs nothing there; nor do beginnings that sequences have in common, which the row has
once (`paths`). For attention sequences of similar length are spread over a batch and padded on the right, which no
earlier token can see; half precision on CUDA reads the row as it is (`varlen.py`), where `reads_rows` says so and the
layout was made with `room`. No mask of the whole pack is ever made: a sliding window is cut into blocks, a soft cap is
worked off in blocks of queries.

What cannot be right is refused: `install` compares a pack with the model's own attention before anything is trained.
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
SLACK = 8  # tokens by which sequences that are padded together may differ, or a quarter of the longest
QUERY_BLOCK = 256  # queries whose soft-capped scores exist at once
HALF = (torch.float16, torch.bfloat16)
ROW_ERROR = 0.05  # how far apart two ways to attend may be in half precision, relative to the hidden states


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the sequences of a pack lie in its row, and where each token goes when they are spread over batches: of
    sequences that follow each other and are of similar length.

    Compiled blocks are made anew when a plain number in here changes; so a row that is read as it is has tensors only.
    """

    positions: Tensor  # of each token in its own sequence
    reach: Tensor  # how long the sequence of each token is
    batches: tuple[tuple[int, int], ...] = ()  # sequences of each, and the longest, to which they are padded
    spread: Tensor | None = None  # token for each place of the padded batches; None: nothing is padded or shared
    gather: Tensor | None = None  # place in the padded batches of each token
    bounds: Tensor | None = None  # of a row: the first token of each sequence, and the end
    sizes: Tensor | None = None  # of a row, on the host: longest, tokens


def layout(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    room: int | None = None,
    paths: NDArray[np.int64] | None = None,
) -> Layout:
    """With `room` the row is read as it is, and has so many tokens: what follows the sequences is padding.

    `paths` has the place in the row of every token of every sequence, where sequences share tokens: the first that has
    a token brings it into the row. Without, the row has the sequences end to end.
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
    place = starts[:-1].repeat_interleave(sizes) + positions
    spread = path.new_zeros(int(starts[-1])).index_copy_(0, place, path)
    new = path > pad(path.cummax(0).values[:-1], (1, 0), value=-1)
    kept = positions[new].to(device), reach[new].to(device)
    return Layout(*kept, batches, spread.to(device), place[new].to(device))


def _similar(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours that are no longer than the first of them and not much shorter: how many, and the first's length."""
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


def install(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model this attention, or say why it cannot have it."""
    check_layers(model)
    rotate_by_sequence(model)
    AttentionInterface.register(NAME, attention)
    with trying(model):
        before = _try_out(model, "eager", packed=False)
        if not torch.allclose(before, _try_out(model, NAME, packed=True), atol=1e-3, rtol=1e-2):
            refuse(model.config.model_type, "a pack gives other hidden states than its sequences one by one")
    return model


def reads_rows(model: PreTrainedModel) -> bool:
    """Whether the kernel for variable lengths does this model's attention, and gives what the other way gives.

    To be asked in the precision of the passes, autocast included.
    """
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    special = [getattr(config, name, None) for name in ("attn_logit_softcapping", "v_head_dim", "qk_rope_head_dim")]
    half = model.dtype in HALF or torch.is_autocast_enabled(model.device.type)
    if model.device.type != "cuda" or not half or width % 8 or width > 256 or any(special):
        return False
    spread = _try_out(model, NAME, packed=True)
    try:
        error = (_try_out(model, NAME, packed=True, room=16) - spread).norm() / spread.norm()
    except RuntimeError as trouble:
        return _say_without_rows((str(trouble).splitlines() or [""])[0][:200])
    return bool(error < ROW_ERROR) or _say_without_rows(f"its result is off by {float(error):.1%}")


def _say_without_rows(why: str) -> bool:
    log.warning(
        "torch's attention for sequences of various lengths does not work here (%s): they are padded, which is slower",
        why,
    )
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
        rows = [trunk_of(model)(input_ids=part[None], use_cache=False) for part in tokens.split(lengths)]
    return torch.cat([row.last_hidden_state[0] for row in rows]).float()


def _in_arithmetic_precision(*tensors: Tensor) -> list[Tensor]:
    """Rotary embeddings leave queries and keys in float32 under autocast, which values then are not."""
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
    return (part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, packed.batches, strict=True))


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
    """Blocks as long as the window: each looks at itself and at the block before it, and at nothing else."""
    sequences, _, length, _ = q.shape
    q, k, v = (pad(x, (0, 0, 0, -length % window)) for x in (q, k, v))
    first = _attend(q[:, :, :window], k[:, :, :window], v[:, :, :window], scaling, None, None)
    queries, keys, values = _blocks(q[:, :, window:], window, window), *(_blocks(x, 2 * window, window) for x in (k, v))
    place, seen = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    mask = (seen > place) & (seen <= place + window)  # the window ends at the token itself
    later = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    later = later.unflatten(0, (sequences, -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, later], dim=2)[:, :, :length]


def _blocks(x: Tensor, size: int, step: int) -> Tensor:
    """(sequences, heads, length, width) -> (sequences * blocks, heads, size, width)."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float) -> Tensor:
    """No kernel caps its scores, so they are made here, for a block of queries at a time, and again in backward."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    starts = range(0, q.shape[2], QUERY_BLOCK)
    pieces = [
        checkpoint(_capped_block, part, k, v, start, scaling, window, softcap, use_reentrant=False)
        for start, part in zip(starts, q.split(QUERY_BLOCK, dim=2), strict=True)
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
