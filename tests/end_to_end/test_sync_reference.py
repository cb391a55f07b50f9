"""The reference program: it samples as a run does, its log-probs are right, and its steps teach the model."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.config.load import load
from tailrace.config.tree import Sampling
from tailrace.engines import sampling
from tailrace.envs.prompts import Prompts
from tailrace.envs.running_total import LABELS, RunningTotal
from tailrace.envs.tasks import build_task
from tailrace.trainer.advantages import grpo

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--threads", "1", "--prompts-per-step", "3", "--group-size", "4", "--mini-batches", "2", "--eval-rows", "0"]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return import_module("sync_reference")


@pytest.fixture
def model(program: ModuleType) -> Any:
    return AutoModelForCausalLM.from_pretrained(program.START, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(program: ModuleType) -> Any:
    return AutoTokenizer.from_pretrained(program.START)


@pytest.fixture
def groups(program: ModuleType, tokenizer: Any) -> list[list[Any]]:
    return program.make_groups(0, RunningTotal({}, 0), tokenizer, program.parse(SMALL))


def test_every_word_of_the_task_is_one_token_and_comes_back(tokenizer: Any):
    text = " ".join([*LABELS, *"0123456789", ".", "="])
    tokens = tokenizer(text)["input_ids"]
    assert len(set(tokens)) == len(text.split())
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_prompts_come_in_the_order_of_a_run(program: ModuleType, tokenizer: Any):
    recipe = load([EXAMPLES / "running_total" / "running_total.toml"], ["--run.seed", "3"])
    rows = Prompts(build_task(recipe), tokenizer, recipe).rows(9_998, 4)  # over the end of an attempt
    ours = [program.row_at(place, RunningTotal({}, 3), tokenizer, 3) for place in range(9_998, 10_002)]
    assert [(row.id, row.tokens, row.columns["answer"]) for row in rows] == [
        (row.id, row.tokens, row.columns["answer"]) for row in ours
    ]


def test_a_token_is_drawn_as_the_engine_draws_it(program: ModuleType, groups: list[list[Any]]):
    samples = [one for group in groups for one in group]
    logits = 3 * torch.randn(len(samples), 143, generator=torch.Generator().manual_seed(0))
    ids, places = [one.trajectory for one in samples], [len(one.sequence) for one in samples]
    tokens, logprobs = sampling.sample(logits, 5, ids, places, Sampling())
    assert program.draw(logits, samples, seed=5)[:, 0].tolist() == tokens.tolist()
    assert [one.logprobs[0] for one in samples] == pytest.approx(logprobs, abs=1e-5)


def test_a_sample_does_not_depend_on_its_batch(program: ModuleType, model: Any, groups: list[list[Any]]):
    together = [sample for group in groups for sample in group]
    alone = [program.Sample(sample.trajectory, sample.row) for sample in together]
    program.generate(model, together, seed=0, max_tokens=60)
    for sample in alone:
        program.generate(model, [sample], seed=0, max_tokens=60)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in together]


def test_log_probs_are_those_of_one_forward_pass(program: ModuleType, model: Any, groups: list[list[Any]]):
    samples = [sample for group in groups for sample in group]
    program.generate(model, samples, seed=0, max_tokens=60)
    for sample in samples:
        with torch.no_grad():
            logprobs = model(torch.tensor([sample.sequence])).logits[0].log_softmax(-1)
        expected = [logprobs[sample.row.length - 1 + at, token] for at, token in enumerate(sample.tokens)]
        assert torch.allclose(torch.tensor(sample.logprobs), torch.stack(expected), atol=1e-4)


def test_a_step_makes_what_was_rewarded_more_likely(program: ModuleType, model: Any, groups: list[list[Any]]):
    group = groups[0]
    program.generate(model, group, seed=0, max_tokens=60)
    for number, sample in enumerate(group):
        sample.tokens, sample.logprobs, sample.reward = sample.tokens[:1], sample.logprobs[:1], float(number == 0)
    group[0].tokens = [5]  # a digit, with which nobody else begins
    before = _first_token_probability(model, group[0])
    group[0].logprobs = [math.log(before)]
    program.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), [group], program.parse(SMALL))
    assert _first_token_probability(model, group[0]) > before


def _first_token_probability(model: Any, sample: Any) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([sample.row.ids.tolist()])).logits[0, -1].softmax(-1)[sample.tokens[0]])


def test_advantages_are_those_of_the_trainer(program: ModuleType, groups: list[list[Any]]):
    rewards = [1.0, 0.0, 0.0, 0.5]
    for sample, reward in zip(groups[0], rewards, strict=True):
        sample.reward = reward
    program.set_advantages(groups[0])
    assert [sample.advantage for sample in groups[0]] == pytest.approx(grpo(np.array(rewards)).tolist())
    program.set_advantages(groups[1][:1])
    assert groups[1][0].advantage == 0.0


def test_a_group_with_one_reward_teaches_nothing(program: ModuleType, groups: list[list[Any]]):
    program.set_advantages(groups[0])
    assert {sample.advantage for sample in groups[0]} == {0.0}


def test_the_dump_numbers_prompts_and_trajectories_through(program: ModuleType, tmp_path: Path):
    program.run(program.parse([*SMALL, "--steps", "2", "--dump", str(tmp_path / "batches.json")]))
    batches = json.loads((tmp_path / "batches.json").read_text())
    flat = [sample for batch in batches for sample in batch]
    assert [len(batch) for batch in batches] == [12, 12]
    assert [trajectory for _, trajectory, _, _ in flat] == list(range(24))
    assert [place for place, _, _, _ in flat] == [number // 4 for number in range(24)]
    assert {reward for *_, reward in flat} == {0.0, 1.0}


def test_the_start_is_careless_and_heavy_tailed(program: ModuleType, model: Any, tokenizer: Any):
    figures = program.evaluate(model, RunningTotal({}, 0), tokenizer, program.parse(["--eval-rows", "256"]))
    assert 0.3 < figures["accuracy"] < 0.45
    assert figures["p99_tokens"] >= 8 * figures["median_tokens"]
