"""What the GPU benchmarks generate: model shapes, cases of rollout, prompts and lengths.

No torch here, so that the process of any engine can read it. Everything follows from the case's name: the native
engine, vLLM and the floor get the same prompts and lengths.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

ROW = "ROW "  # begins a line of JSON on a child's standard output; everything else there is chatter
Work = list[tuple[list[int], int]]  # a prompt and how many tokens are wanted

# Qwen2.5's published shapes, a small one, and one that a CPU runs in a second.
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "135m": {  # SmolLM2's numbers
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
    },
}


class Case(NamedTuple):
    """One table row: so many requests to one model."""

    name: str
    model: str
    requests: int
    prompt: int
    new: int  # tokens per request; 0: the long tail

    def lengths(self) -> list[int]:
        if self.new:
            return [self.new] * self.requests
        draw = random.Random(1)
        return [min(8192, max(16, round(draw.lognormvariate(5.5, 1.0)))) for _ in range(self.requests)]

    def work(self, number: int = 0) -> Work:
        """Other prompts for every round, so that no cache has seen them."""
        draw = random.Random(f"{self.name} {number}")
        vocabulary = SHAPES[self.model]["vocab_size"]
        return [([draw.randrange(vocabulary) for _ in range(self.prompt)], length) for length in self.lengths()]

    def warm_up(self) -> Work:
        """As many requests, of a few tokens each and of falling lengths: every size of batch is seen once."""
        work = self.work(-1)
        return [(prompt, min(length, 4 + 64 * at // len(work))) for at, (prompt, length) in enumerate(work)]

    @property
    def longest(self) -> int:
        return self.prompt + max(self.lengths())


CASES = {
    case.name: case
    for case in (
        Case("1.5b-64", "1.5b", 64, 128, 256),
        Case("1.5b-256", "1.5b", 256, 128, 256),
        Case("1.5b-512", "1.5b", 512, 128, 256),
        Case("1.5b-1024", "1.5b", 1024, 128, 256),
        Case("1.5b-tail", "1.5b", 1024, 128, 0),
        Case("1.5b-4096", "1.5b", 128, 4096, 256),
        Case("7b-256", "7b", 256, 128, 256),
        Case("tiny-8", "tiny", 8, 16, 24),
        Case("tiny-4", "tiny", 4, 100, 8),
    )
}


def chosen(names: list[str]) -> list[Case]:
    """Cases by name, or all of a model by the model's name."""
    found = [case for name in names for case in CASES.values() if name in (case.name, case.model)]
    unknown = [name for name in names if not any(name in (case.name, case.model) for case in CASES.values())]
    if unknown:
        raise SystemExit(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    return list(dict.fromkeys(found))


def settings(model: str) -> dict[str, Any]:
    """The fields of the model's config.json."""
    fixed = {"max_position_embeddings": 32768, "rope_theta": 1e6, "use_sliding_window": False, "rms_norm_eps": 1e-6}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **SHAPES[model], **fixed, **ends}
