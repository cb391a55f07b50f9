"""A random model whose answers have heavy-tailed lengths, as an ordinary model directory with tokenizer and prompts.

    python benchmarks/gpu/tail_model.py FOLDER [--size 1.5b] [--device cuda]

Random weights say every token alike, so nothing would ever end. Here the model itself draws the length, and any
trainer and any engine can run it as it is. Tokens belong to kinds. Two coordinates of the hidden state carry the kind
of the last token past all layers (no layer writes to them), and the output looks at them: after a token of one kind
only tokens of that kind follow, or the end token, with that kind's own probability. The prompt's last token belongs to
no kind, so the first token of an answer draws the kind. A length is then a mixture of geometric laws:

    80 % of answers have a mean of 260 tokens, 20 % of 900: median 220, mean 388, p99 about 2,700, before any limit

All other weights are random and do the work of a real model. Lengths of the samples of one prompt are independent.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from models import random_model
from workloads import SHAPES

MEANS = (260.0, 900.0)  # tokens
EVERY = 5  # one token in so many is of the second kind: that is also its share of the answers
SIGNAL = 20.0  # how far the logits of the right kind stand above all others
PROMPT = 128


def special(size: str) -> tuple[int, int, int]:
    """The end token, the padding, and the token without a kind that every prompt ends with."""
    vocabulary = SHAPES[size]["vocab_size"]
    return vocabulary - 1, vocabulary - 2, vocabulary - 3


def kinds(size: str, device: str = "cpu") -> torch.Tensor:
    """The kind of every token; -1 for the special ones."""
    found = (torch.arange(SHAPES[size]["vocab_size"], device=device) % EVERY == 0).long()
    found[-3:] = -1
    return found


@torch.no_grad()
def tail_model(size: str, device: str, dtype: torch.dtype, seed: int, means: tuple[float, ...] = MEANS) -> Any:
    end, padding, _ = special(size)
    model: Any = random_model(size, device, torch.float32, seed, eos_token_id=end, pad_token_id=padding)
    reserve_coordinates(model)
    kind, words = kinds(size, device), model.get_input_embeddings().weight
    words[:, : len(means)] = torch.nn.functional.one_hot(kind.clamp(min=0), len(means)) * (kind >= 0)[:, None]
    words[end] = 0.0
    set_signal(model, kind)
    model = model.to(dtype)
    set_hazards(model, kind, end, means)
    return model


def reserve_coordinates(model: Any, count: int = len(MEANS)) -> None:
    """No layer writes to the first coordinates of the hidden state."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:count] = 0.0
        layer.mlp.down_proj.weight[:count] = 0.0


def set_signal(model: Any, kind: torch.Tensor) -> None:
    """Scale the kinds' coordinates in the last norm, by how large a hidden state is there."""
    strength = torch.stack([final_states(model, kind, each)[..., each].mean() for each in range(len(MEANS))]).mean()
    model.model.norm.weight[: len(MEANS)] = SIGNAL / strength


def set_hazards(model: Any, kind: torch.Tensor, end: int, means: tuple[float, ...]) -> None:
    """The end token's row: after a token of a kind it has the probability of that kind's mean length."""
    words = model.get_input_embeddings().weight
    for each, mean in enumerate(means):
        states = final_states(model, kind, each).flatten(0, 1)[::4]
        totals = torch.cat([(part @ words.T)[:, kind == each].float().logsumexp(-1) for part in states.split(256)])
        wanted = totals.mean() - math.log(mean - 1.0)
        words[end, each] = (wanted / states[:, each].float().mean()).to(words.dtype)


def final_states(model: Any, kind: torch.Tensor, each: int, sequences: int = 16, length: int = 192) -> torch.Tensor:
    """What the output sees after a prompt and some tokens of one kind."""
    draw = torch.Generator(kind.device).manual_seed(each)
    known = (kind == each).nonzero()[:, 0]
    tokens = known[torch.randint(len(known), (sequences, length), generator=draw, device=kind.device)]
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, length // 4 :]


# ------------------------------------------------------------------------------------------------------- as a folder


def tokenizer_of(size: str) -> Any:
    """A word for every token: w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(SHAPES[size]["vocab_size"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end, padding, _ = special(size)
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=f"w{end}", pad_token=f"w{padding}")


def prompts(size: str, count: int, length: int = PROMPT) -> list[str]:
    draw, (_, _, last) = random.Random(0), special(size)
    vocabulary = SHAPES[size]["vocab_size"] - 3
    return [
        " ".join(f"w{t}" for t in [*(draw.randrange(vocabulary) for _ in range(length - 1)), last])
        for _ in range(count)
    ]


def make(folder: Path, size: str, device: str, rows: int, means: tuple[float, ...] = MEANS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tail_model(size, device, dtype, seed=0, means=means).save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)
    lines = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts(size, rows)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=4096)
    options = parser.parse_args()
    make(options.folder, options.size, options.device, options.rows)


if __name__ == "__main__":
    main()
