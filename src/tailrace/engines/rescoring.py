"""Scores what another engine has generated: one forward pass over the whole sequence, then every token is held against
the distribution that it should have been drawn from, and against the number that it should have been drawn with.

A token has a stretch of [0, 1), as long as its probability; the drawn number (`sampling.uniform`) must lie in it. Two
machines do not round alike, so log-probs may differ by `tolerance` nats, and the ends of the stretch by as much in
log-odds: if every logit is off by at most half of it, neither is off by more. Where arithmetic is coarse, differences
have a long tail (bfloat16 on a GPU: 0.04 nats in the median, 0.3 of one token in a thousand, 0.6 of one in ten
thousand), so there a small share of a sample's tokens may be further off.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.config.tree import Config
from tailrace.engines import attention, scheduler
from tailrace.engines.base import Job
from tailrace.engines.eager import EagerExecutor
from tailrace.engines.kv import KVCache
from tailrace.engines.llama_decoder import llama_decoder
from tailrace.engines.plain import PlainOperations
from tailrace.engines.sampling import allowed_scores, uniform

CHUNK = 256  # tokens of one forward pass
SCORES = 1 << 22  # that exist at once, in double precision, several times over


class Rounding(NamedTuple):
    """What machines of one precision may differ by."""

    tolerance: float  # nats
    share: float = 0.0  # of a sample's tokens that may differ by more

    @property
    def most(self) -> float:
        """Nats that no token may differ by."""
        return 8 * self.tolerance if self.share else self.tolerance

    def allowance(self, tokens: int) -> int:
        return ceil(self.share * tokens)


COARSE = Rounding(0.25, share=0.02)
ROUNDING = {
    "float32": Rounding(0.01),
    "float16": Rounding(0.1, share=0.02),
    "bfloat16": COARSE,
}  # others: each machine as it likes


class Rescoring:
    """With the model of an engine, whose layers page their attention; it has a KV cache of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: dict[int, attention.LayerShape],
        operations: PlainOperations,
        config: Config,
        seed: int,
        switch: int,
    ) -> None:
        self._model, self._shapes, self._operations = model, shapes, operations
        self._seed, self._switch = seed, switch
        self._sampling, self._draws = config.sampling, config.strangers.draws
        self._block_tokens = config.rollout.block_tokens
        usual = ROUNDING.get(config.rollout.precision, COARSE)
        self._rounding = usual._replace(tolerance=config.strangers.tolerance or usual.tolerance)
        self._executor: EagerExecutor | None = None
        self._room = 0  # tokens that its cache holds
        self.worst = 0.0  # difference of log-probs that was ever found, in nats

    @torch.inference_mode()
    def complaint_about(self, job: Job, logprobs: NDArray[np.float32]) -> str:
        sequence, left = scheduler.Sequence(job, job.length), self._rounding.allowance(len(logprobs))
        for first, logits in self._logits(sequence):
            tokens = torch.tensor(sequence.tokens[first : first + len(logits)], device=logits.device)
            at = first - job.prompt_tokens
            claimed = torch.from_numpy(logprobs[at : at + len(logits)].astype(np.float64)).to(logits.device)
            for doubt in self._doubts(job, first, logits, tokens, claimed):
                left -= doubt.tokens
                if left < 0 or doubt.certain:
                    return doubt.sentence
        return ""

    # ------------------------------------------------------------------------------------------------ distributions

    def _logits(self, sequence: scheduler.Sequence) -> Iterator[tuple[int, Tensor]]:
        """The position of the first token that each of them is for, and a row for each from there on. A sequence that
        has grown beyond the switch was computed anew from there on."""
        length, prompt = len(sequence.tokens), sequence.prompt
        near = min(length, self._switch + 1)
        if prompt < near:
            yield from self._pass(sequence, prompt, near, far=prompt > self._switch)
        if near < length:
            yield from self._pass(sequence, max(prompt, near), length, far=True)

    def _pass(self, sequence: scheduler.Sequence, first: int, end: int, far: bool) -> Iterator[tuple[int, Tensor]]:
        """Logits for the tokens from `first` to `end`."""
        executor = self._with_room(end)
        sequence.blocks, sequence.far = list(range(-(-end // self._block_tokens))), far
        rows = max(1, min(CHUNK, SCORES // self._model.config.get_text_config().vocab_size))
        for start in range(0, end - 1, rows):
            length = min(rows, end - 1 - start)
            skipped = max(0, first - 1 - start)
            kept = torch.arange(min(skipped, length), length, device=self._model.device)
            logits = executor.logits([scheduler.Chunk(sequence, start, length)], kept)
            if len(kept):
                yield start + skipped + 1, logits.float()

    def _with_room(self, tokens: int) -> EagerExecutor:
        """Made anew only where a longer sequence comes than any before."""
        if self._executor is not None and tokens <= self._room:
            return self._executor
        model, operations = self._model, self._operations
        self._room = 1 << (tokens - 1).bit_length()
        blocks = -(-self._room // self._block_tokens)
        cache = KVCache(self._shapes, blocks, self._block_tokens, model.dtype, model.device)
        decoder = llama_decoder(model, self._shapes, operations)
        self._executor = EagerExecutor(model, decoder, operations, cache, self._room, self._seed, self._sampling)
        return self._executor

    # ------------------------------------------------------------------------------------------------------- verdicts

    def _doubts(self, job: Job, first: int, logits: Tensor, tokens: Tensor, claimed: Tensor) -> Iterator[Doubt]:
        """About these tokens, the first of which is at `first`."""
        scores = (logits / self._sampling.temperature if self._sampling.temperature else logits).double()
        kept = self._kept(logits, scores)
        off = _difference(scores, kept, tokens, claimed)
        self.worst = max(self.worst, float(off.max()))
        misdrawn = self._misdrawn(job, first, scores, kept, tokens) if self._draws else torch.zeros_like(off)
        excluded = kept.lowest - _at(scores, tokens)
        for by, what in (
            (excluded, "is one that top-k or top-p excludes"),
            (off, f"has another log-prob, by up to {float(off.max()):.3g} nats,"),
            (misdrawn, "is not the one that the seed draws"),
        ):
            wrong = by > self._rounding.tolerance
            if count := int(wrong.sum()):
                sentence = _sentence(job, first + int(wrong.nonzero()[0]), count, what)
                yield Doubt(count, bool((by > self._rounding.most).any()), sentence)

    def _kept(self, logits: Tensor, scores: Tensor) -> AllowedTokens:
        allowed = ~torch.isinf(allowed_scores(logits, self._sampling))
        lowest, slack = scores.masked_fill(~allowed, torch.inf).amin(-1), self._rounding.tolerance
        if bool(allowed.all()):
            return AllowedTokens(allowed, allowed, lowest)
        return AllowedTokens(scores >= lowest[:, None] + slack, scores >= lowest[:, None] - slack, lowest)

    def _misdrawn(self, job: Job, first: int, scores: Tensor, kept: AllowedTokens, tokens: Tensor) -> Tensor:
        """By how many nats each token is not the one that is drawn; below 0: it is."""
        if self._sampling.temperature == 0:
            return scores.amax(-1) - _at(scores, tokens)
        positions = np.arange(first, first + len(tokens))
        drawn = torch.from_numpy(uniform(self._seed, [job.stream] * len(tokens), positions)).to(scores.device)
        low, high = _stretch(scores, kept, tokens)
        return torch.maximum(_odds(low) - _odds(drawn), _odds(drawn) - _odds(high))


class Doubt(NamedTuple):
    tokens: int  # that are further off than the tolerance
    certain: bool  # no rounding explains it
    sentence: str


class AllowedTokens(NamedTuple):
    """What top-k and top-p keep: tokens that are kept for certain, and those that are if rounding is generous."""

    narrow: Tensor
    wide: Tensor
    lowest: Tensor  # score that is kept


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """Of each row, that of its token."""
    return values.gather(-1, tokens[:, None])[:, 0]


def _difference(scores: Tensor, kept: AllowedTokens, tokens: Tensor, claimed: Tensor) -> Tensor:
    """Nats by which log-probs are outside of what they can be: the more is kept, the less likely is each."""
    own = torch.zeros_like(kept.narrow).scatter_(-1, tokens[:, None], True)
    most = _at(scores, tokens) - scores.masked_fill(~(kept.narrow | own), -torch.inf).logsumexp(-1)
    least = _at(scores, tokens) - scores.masked_fill(~(kept.wide | own), -torch.inf).logsumexp(-1)
    return torch.maximum(claimed - most, least - claimed).clamp(min=0.0)


def _stretch(scores: Tensor, kept: AllowedTokens, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Where in [0, 1) that of each token begins, and ends, at the earliest and at the latest."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    own = _at(weights, tokens)
    (few, after_few), (many, after_many) = (_around(weights * mask, tokens) for mask in kept[:2])
    return few / (few + own + after_many), (many + own) / (many + own + after_few)


def _around(weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The sums before and after each token."""
    sums = weights.cumsum(-1)
    until = _at(sums, tokens)
    return until - _at(weights, tokens), sums[:, -1] - until


def _odds(share: Tensor) -> Tensor:
    """Logarithm of the odds; what is within rounding of 0 or 1 is so here."""
    tiny = 1e-9
    return torch.logit(share.clamp(tiny, 1.0 - tiny))


def _sentence(job: Job, position: int, count: int, what: str) -> str:
    more = f", and {count - 1} more of those near it" if count > 1 else ""
    return f"token {position - job.prompt_tokens} {what} under these weights{more}"
