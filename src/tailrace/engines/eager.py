"""Computes a scheduler's plan step by step: one packed row of tokens through the model, one draw for all that sample.

The form that runs on every device and for every model. Where the model has one, a Llama decoder computes
(`llama_decoder.py`), otherwise the transformers module itself does, through `attention.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tailrace.config.tree import Sampling
from tailrace.engines import scheduler
from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import LlamaDecoder
from tailrace.engines.paged_attention import PagedBatch, in_order
from tailrace.engines.plain import PlainOperations
from tailrace.engines.sampling import sample
from tailrace.model.longrope import FAR


class Drawn(NamedTuple):
    """What a plan sampled: the tokens of all sequences in one array, and their log-probs."""

    sequences: list[scheduler.Sequence]
    counts: list[int]  # tokens of each
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


NOTHING_DRAWN = Drawn([], [], np.zeros(0, np.int32), np.zeros(0, np.float32))


class EagerExecutor:
    steps = 1  # that a plan may take at once

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: LlamaDecoder | None,
        operations: PlainOperations,
        cache: KVCache,
        longest: int,
        seed: int,
        sampling: Sampling,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._operations = operations
        self._rotations = None if decoder is None else decoder.rotations(longest)
        self._cache = cache
        self._seed = seed
        self._sampling = sampling

    @torch.inference_mode()
    def run(self, plan: scheduler.BatchPlan) -> Drawn:
        chunks = in_order(plan.chunks)
        ready = [chunk.sequence for chunk in chunks if chunk.samples]
        last = np.cumsum([chunk.length for chunk in chunks]) - 1
        kept = torch.from_numpy(last[[chunk.samples for chunk in chunks]]).to(self._model.device)
        logits = self.logits(chunks, kept)
        if not ready:
            return NOTHING_DRAWN
        return Drawn(ready, [1] * len(ready), *self._sample(logits, ready))

    def _sample(
        self, logits: torch.Tensor, sequences: list[scheduler.Sequence]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Those of one temperature together."""
        tokens, logprobs = np.empty(len(sequences), np.int32), np.empty(len(sequences), np.float32)
        for temperature, rows in by_temperature(sequences).items():
            some = [sequences[row] for row in rows]
            places = ([s.stream for s in some], [len(s.tokens) for s in some])
            chosen = logits if len(rows) == len(sequences) else logits[rows]
            drawn = sample(chosen, self._seed, *places, sampling_at(self._sampling, temperature))
            tokens[rows], logprobs[rows] = drawn
        return tokens, logprobs

    def logits(self, chunks: list[scheduler.Chunk], kept: torch.Tensor) -> torch.Tensor:
        """Of some of the chunks' tokens, those at the indices `kept` of the row that they make."""
        device = self._model.device
        tokens = torch.from_numpy(planned_tokens(chunks)).to(device)
        positions = torch.from_numpy(np.concatenate([_positions(chunk) for chunk in chunks])).to(device)
        if self._decoder is not None and self._rotations is not None:
            attention = self._operations.attention(self._cache, chunks, self._rotations, positions)
            hidden = self._decoder.hidden(tokens, attention)
            return self._decoder.logits(hidden.index_select(0, kept))
        batch = PagedBatch(self._cache, chunks, device)
        found = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept, paged=batch
        )
        return found.logits[0]


def by_temperature(sequences: Iterable[scheduler.Sequence]) -> dict[float | None, list[int]]:
    """The places of those that are drawn alike. All are, but beside an evaluation with a temperature of its own."""
    rows: dict[float | None, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows.setdefault(sequence.temperature, []).append(row)
    return rows


def sampling_at(sampling: Sampling, temperature: float | None) -> Sampling:
    return sampling if temperature is None else msgspec.structs.replace(sampling, temperature=temperature)


def planned_tokens(chunks: Iterable[scheduler.Chunk]) -> NDArray[np.int64]:
    """The tokens of the chunks, end to end."""
    tokens = array("i")
    for sequence, start, length in chunks:
        tokens += sequence.tokens[start : start + length]
    return np.array(tokens, np.int64)


def _positions(chunk: scheduler.Chunk) -> np.ndarray:
    """Of the chunk's tokens in their sequence, as the model wants to have them (`model/longrope.py`)."""
    return np.arange(chunk.start, chunk.end) + (FAR if chunk.sequence.far else 0)
