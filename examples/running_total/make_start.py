"""Makes the start of the default recipe: a tiny Llama that can add up labelled digits, but is careless.

    python examples/running_total/make_start.py [--out examples/running_total/start]

It learns by supervised learning in three lessons: careful chains of thought for short prompts, then for prompts of any
length, then a mix of habits, in which most chains are sloppy or bare guesses. The mix is what it samples from in the
end. So it knows how to be right and seldom is: reinforcement learning has something to find, and nothing to learn that
is not there. The same call makes the same weights on the same machine, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tailrace.envs.running_total import LABELS, Item, RunningTotalOptions, draw_items, is_held_out, next_label, render

SLIPS = {"misread": 0.09, "miscount": 0.12, "skip": 0.09, "stop": 0.06}  # of the sloppy, at each item
SPECIAL = ("<pad>", "<eos>", "<unk>")  # the first tokens
CONTEXT = 640  # tokens; the longest prompt and a completion of 320 fit
BATCH_TOKENS = 4096  # padding included
POOL = 1024  # samples that are sorted by length together, so that a batch pads little

Sample = tuple[list[str], list[str]]  # words of the prompt, words of the completion


@dataclass(frozen=True)
class Lesson:
    habits: dict[str, float]  # and their shares
    options: RunningTotalOptions  # of the prompts
    steps: int
    learning_rate: float
    enough: float = 0.0  # it ends early when the loss stays below this


LESSONS = (
    Lesson(
        {"careful": 1.0},
        RunningTotalOptions(median=3.0, sigma=0.6, most=8),
        steps=2000,
        learning_rate=3e-3,
        enough=0.02,
    ),
    Lesson({"careful": 1.0}, RunningTotalOptions(), steps=800, learning_rate=3e-3),
    Lesson({"careful": 0.2, "sloppy": 0.55, "guess": 0.25}, RunningTotalOptions(), steps=200, learning_rate=1e-3),
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: a label, a digit or a sign."""
    words = [*SPECIAL, *"0123456789", "=", ".", *LABELS]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **special)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},  # slow turns: labels are looked up from afar
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
    )
    return LlamaForCausalLM(config)


def write_chain(items: list[Item], habit: str, generator: random.Random) -> list[str]:
    """What someone with this habit writes after the prompt, the answer included."""
    if habit == "guess":
        return [".", str(generator.randrange(10))]
    words: list[str] = []
    running = 0
    for label, digit in items:
        slip = draw_slip(habit, generator)
        if slip == "stop":
            return [*words, ".", str(running)]
        if slip != "skip":
            seen = generator.randrange(10) if slip == "misread" else digit
            running = generator.randrange(10) if slip == "miscount" else (running + seen) % 10
            words += [label, str(seen), str(running)]
    return [*words, next_label(items), ".", str(running)]


def draw_slip(habit: str, generator: random.Random) -> str:
    chances = SLIPS if habit == "sloppy" else {}
    names, weights = [*chances, ""], [*chances.values(), 1 - sum(chances.values())]
    return generator.choices(names, weights)[0]


def draw_sample(lesson: Lesson, generator: random.Random) -> Sample:
    """A prompt that is not held out, and a completion."""
    while True:
        items = draw_items(lesson.options, generator)
        if not is_held_out(prompt := render(items)):
            habit = generator.choices(list(lesson.habits), list(lesson.habits.values()))[0]
            return prompt.split(), [*write_chain(items, habit, generator), "<eos>"]


def draw_batches(lesson: Lesson, generator: random.Random) -> Iterator[list[Sample]]:
    """Batches of samples of similar length, without end."""
    while True:
        pool = sorted((draw_sample(lesson, generator) for _ in range(POOL)), key=_length)
        batches: list[list[Sample]] = [[]]
        for sample in pool:
            if (len(batches[-1]) + 1) * _length(sample) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(sample)
        yield from generator.sample(batches, len(batches))


def _length(sample: Sample) -> int:
    return len(sample[0]) + len(sample[1])


def to_tensors(samples: list[Sample], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded tokens, and what to predict: the completions (-100: nothing)."""
    width = max(map(_length, samples))
    tokens = torch.full((len(samples), width), SPECIAL.index("<pad>"))
    targets = torch.full((len(samples), width), -100)
    for place, (prompt, completion) in enumerate(samples):
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(prompt + completion))
        tokens[place, : len(ids)] = ids
        targets[place, len(prompt) : len(ids)] = ids[len(prompt) :]
    return tokens, targets


def teach(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lesson: Lesson, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_decay(step, lesson.steps))
    began, recent = time.monotonic(), deque([float("inf")] * 20, maxlen=20)
    batches = draw_batches(lesson, random.Random(seed))
    for step, batch in enumerate(islice(batches, lesson.steps), start=1):
        recent.append(learn(model, optimizer, *to_tensors(batch, tokenizer)))
        schedule.step()
        done = max(recent) < lesson.enough
        if step % 50 == 0 or done:
            print(f"  step {step}  loss {fmean(recent):.4f}  {time.monotonic() - began:.0f} s", flush=True)
        if done:
            return


def warm_up_and_decay(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def learn(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor):
    logits = model(tokens.to(model.device)).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten().to(model.device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the start weights of the default recipe.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    for number, lesson in enumerate(LESSONS):
        print(f"lesson {number + 1}: {lesson.steps} steps")
        teach(model, tokenizer, lesson, seed=options.seed + number)
    model.to(torch.bfloat16).save_pretrained(options.out)  # type: ignore[arg-type]
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
