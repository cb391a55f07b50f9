"""Computes a scheduler's plan step by step: one packed row of tokens through the model, one draw for all that sample.

The form that runs on every device and for every model. A lean decoder computes if the model has one (`lean.py`),
otherwise the transformers module itself does, through `attention.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrace.config.tree import Sampling
from tailrace.engines import scheduler
from tailrace.engines.batch import PagedBatch, in_order
from tailrace.engines.kv import KVCache
from tailrace.engines.lean import LeanDecoder
from tailrace.engines.plain import PlainOperations
from tailrace.engines.sampling import sample
from tailrace.model.longrope import FAR


class Grown(NamedTuple):
    """What a plan added to one sequence."""

    sequence: scheduler.Sequence
    tokens: list[int]
    logprobs: list[float]


class EagerExecutor:
    steps = 1  # that a plan may take at once

    def __init__(
        self,
        model: PreTrainedModel,
        lean: LeanDecoder | None,
        operations: PlainOperations,
        cache: KVCache,
        longest: int,
        seed: int,
        sampling: Sampling,
    ) -> None:
        self._model = model
        self._lean = lean
        self._operations = operations
        self._rotations = None if lean is None else lean.rotations(longest)
        self._cache = cache
        self._seed = seed
        self._sampling = sampling

    @torch.inference_mode()
    def run(self, plan: scheduler.Plan) -> list[Grown]:
        chunks = in_order(plan.chunks)
        ready = [chunk.sequence for chunk in chunks if chunk.samples]
        last = np.cumsum([chunk.length for chunk in chunks]) - 1
        kept = torch.from_numpy(last[[chunk.samples for chunk in chunks]]).to(self._model.device)
        logits = self.logits(chunks, kept)
        if not ready:
            return []
        streams, places = [s.stream for s in ready], [len(s.tokens) for s in ready]
        drawn = sample(logits, self._seed, streams, places, self._sampling)
        return [Grown(s, [token], [logprob]) for s, token, logprob in zip(ready, *drawn, strict=True)]

    def logits(self, chunks: list[scheduler.Chunk], kept: torch.Tensor) -> torch.Tensor:
        """Of some of the chunks' tokens, those at the places `kept` of the row that they make."""
        device = self._model.device
        tokens = torch.tensor([token for c in chunks for token in c.sequence.tokens[c.start : c.end]], device=device)
        places = torch.from_numpy(np.concatenate([_places(chunk) for chunk in chunks])).to(device)
        if self._lean is not None and self._rotations is not None:
            attention = self._operations.attention(self._cache, chunks, self._rotations, places)
            hidden = self._lean.hidden(tokens, attention)
            return self._lean.logits(hidden.index_select(0, kept))
        batch = PagedBatch(self._cache, chunks, device)
        found = self._model(
            input_ids=tokens[None], position_ids=places[None], use_cache=False, logits_to_keep=kept, paged=batch
        )
        return found.logits[0]


def _places(chunk: scheduler.Chunk) -> np.ndarray:
    """Of the chunk's tokens in their sequence, as the model wants to have them (`model/longrope.py`)."""
    return np.arange(chunk.start, chunk.end) + (FAR if chunk.sequence.far else 0)
