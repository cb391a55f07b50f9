"""Tiny random models and trajectories for tests of the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrace.config.tree import Config, Model, Run, Trainer, Workload
from tailrace.trainer.reader import InMemoryReader, SampleLengths
from tailrace.types import Segment, Trajectory

VOCABULARY = 48
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def long_rope(limit: int, head_dim: int = 8) -> dict[str, Any]:
    """Rotary frequencies that are others for sequences of more than so many tokens."""
    factors = {"long_factor": [5.0, 2.0, 9.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
    factors = {name: values * (head_dim // 8) for name, values in factors.items()}
    scales = {"short_mscale": 1.1, "long_mscale": 1.4}  # PhiMoE's
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": limit} | factors | scales
    return {"max_position_embeddings": 96, "original_max_position_embeddings": limit, "rope_parameters": rope}


def tiny_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Weights large enough that attention and logits are far from uniform."""
    config = AutoConfig.for_model(family, **(SHAPE | {"initializer_range": 0.3} | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config).eval()


def tiny_folder(folder: Path, family: str = "llama", **changes: Any) -> Path:
    tiny_model(family, **changes).save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    return folder / "model"


def settings(model: Path, **trainer: Any) -> Config:
    """One mini-batch a step on the CPU, with everything in `trainer` on top."""
    chosen = {"mini_batches": 1, "learning_rate": 1e-2, "device": "cpu", "logit_tokens": 7, "tokens_per_batch": 64}
    return Config(
        model=Model(path=str(model)),
        trainer=Trainer(**(chosen | trainer)),
        workload=Workload(max_completion_tokens=32),
        run=Run(steps=4),
    )


def group(seed: int, size: int = 4, longest: int = 30) -> list[Trajectory]:
    """Samples of one prompt with mixed lengths, versions and rewards; some have a tool's output in the middle."""
    rng = np.random.default_rng(seed)
    prompt = Segment.of(None, _tokens(rng, int(rng.integers(1, 6))))
    return [
        Trajectory(seed * 100 + i, seed, seed, (prompt, *_turns(rng, longest)), "stop", float(rng.random()))
        for i in range(size)
    ]


def poisoned(seed: int) -> list[Trajectory]:
    """The same with log-probs that are none in one sample, so that neither loss nor gradient is finite."""
    first, *rest = group(seed)
    segments = [s if s.version is None else Segment.of(s.version, s.ids, (math.nan,) * len(s)) for s in first.segments]
    return [Trajectory(first.id, first.group, first.prompt, tuple(segments), first.finish, first.reward), *rest]


class Watched:
    """A reader that remembers what it was asked for."""

    def __init__(self, reader: InMemoryReader) -> None:
        self.reader = reader
        self.asked: list[int] = []

    def lengths(self, ids: Sequence[int]) -> Sequence[SampleLengths]:
        return self.reader.lengths(ids)

    def read(self, ids: Sequence[int]) -> Iterable[Trajectory]:
        self.asked += ids
        return self.reader.read(ids)


def _turns(rng: np.random.Generator, longest: int) -> list[Segment]:
    first, second = _sampled(rng, 0, longest), _sampled(rng, 1, longest)
    tool = Segment.of(None, _tokens(rng, 3))
    return [[first], [first, second], [first, tool, second], [first, second, tool]][int(rng.integers(4))]


def _sampled(rng: np.random.Generator, version: int, longest: int) -> Segment:
    tokens = _tokens(rng, int(rng.integers(1, longest // 2)))
    return Segment.of(version, tokens, tuple(float(x) for x in -rng.exponential(2.0, len(tokens))))


def _tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.integers(0, VOCABULARY, count))
