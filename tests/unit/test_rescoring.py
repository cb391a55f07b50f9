"""What a stranger's engine hands in, scored again: an honest draw passes, on whatever batch it was drawn; a lie does
not."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_engine import FAMILIES, VOCABULARY, engine, run, tiny

from buffers import ids_of, job_of
from tailrace.config.tree import Config, Rollout, Sampling, Strangers, Workload
from tailrace.engines.base import Job
from tailrace.engines.native import NativeEngine

LENGTH = 40


def settings(**sampling: Any) -> Config:
    return Config(
        sampling=Sampling(**sampling),
        rollout=Rollout(kv_tokens=2048, block_tokens=4, prefill_tokens=32, precision="float32"),
        workload=Workload(prompt_tokens=40, max_completion_tokens=LENGTH),
    )


def prompts() -> list[Job]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in (1, 5, 17, 30)]
    return [job_of(10 + each, each, one, len(one), LENGTH) for each, one in enumerate(ids)]


Handed = list[tuple[Job, np.ndarray]]


def generated(by: NativeEngine) -> Handed:
    """Whole turns, and the log-probs that go with them."""
    record = run(by, prompts())
    found = [(job, record.tokens[job.id], record.logprobs[job.id]) for job in prompts()]
    return [(grown(job, tokens), np.array(logprobs, np.float32)) for job, tokens, logprobs in found]


def grown(job: Job, tokens: list[int]) -> Job:
    return job_of(job.id, job.group, ids_of(job) + tokens, job.prompt_tokens, LENGTH, job.failures)


def complaints(by: NativeEngine, handed: Handed) -> list[str]:
    return [by.complaint_about(job, logprobs, draws=True) for job, logprobs in handed]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_engine_draws_itself_passes_in_every_family(family: str):
    model = tiny(family)
    checker = engine(model, settings())
    assert complaints(checker, generated(engine(model, settings()))) == [""] * 4
    assert checker._rescoring().worst < 1e-3, "rounding is far from what is tolerated"


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_it_passes_however_it_was_sampled(sampling: dict[str, Any]):
    model, config = tiny(), settings(**sampling)
    assert complaints(engine(model, config), generated(engine(model, config))) == [""] * 4


def test_what_rounding_keeps_or_not_at_the_edge_of_top_p_is_let_pass_and_more_is_not():
    """The same distribution, cut off a little earlier or later than the checker does."""
    model = tiny()
    honest = generated(engine(model, settings(top_p=0.8)))
    near, far = Strangers(tolerance=1.0), Strangers(tolerance=0.01)
    other = msgspec.structs.replace(settings(top_p=0.5), strangers=far)
    assert any(complaints(engine(model, other), honest))
    close = msgspec.structs.replace(settings(top_p=0.79), strangers=near)
    assert complaints(engine(model, close), honest) == [""] * 4


def nudged(handed: Handed, places: list[int], nats: float) -> Handed:
    (job, logprobs), *_ = handed
    moved = logprobs.copy()
    moved[places] -= nats
    return [(job, moved)]


def test_coarse_arithmetic_may_be_further_off_at_a_few_tokens_but_not_at_many_nor_by_any_amount():
    """As bfloat16 on a GPU is: of 40 tokens one."""
    model, config = tiny(), settings()
    coarse = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, precision="bfloat16"))
    honest, checker = generated(engine(model, config)), engine(model, coarse)
    assert complaints(checker, nudged(honest, [7], 0.6)) == [""]
    assert "log-prob" in complaints(checker, nudged(honest, [7, 9], 0.6))[0]
    assert "log-prob" in complaints(checker, nudged(honest, [7], 2.1))[0]


def lies(model: Any, config: Config) -> dict[str, Handed]:
    honest, other = generated(engine(model, config)), generated(engine(model, config, seed=8))
    (job, logprobs), *_ = honest
    tokens = ids_of(job)
    tokens[20] = (tokens[20] + 1) % VOCABULARY
    raised = logprobs.copy()
    raised[7] += 0.05
    failed = [job_of(one.id, one.group, ids_of(one), one.prompt_tokens, LENGTH, 1) for one, _ in honest]
    return {
        "a token altered": [(job_of(job.id, job.group, tokens, job.prompt_tokens, LENGTH), logprobs)],
        "a log-prob altered": [(job, raised)],
        "drawn with another seed, as one of many would be": other,
        "drawn for another sample": [(job_of(99, job.group, ids_of(job), job.prompt_tokens, LENGTH), logprobs)],
        "drawn for another attempt after a failure": [
            (one, logprobs) for one, (_, logprobs) in zip(failed, honest, strict=True)
        ],
        "drawn under other weights": generated(engine(tiny(seed=1), config)),
        "cut short": [(grown(prompts()[0], ids_of(job)[1:30]), logprobs[:29])],
        "longer than it may be": [(grown(prompts()[0], [*ids_of(job)[1:], 5]), np.append(logprobs, -1.0))],
    }


@pytest.mark.parametrize("lie", lies(tiny(), settings()))
def test_a_lie_is_found(lie: str):
    model, config = tiny(), settings()
    found = complaints(engine(model, config), lies(model, config)[lie])
    assert all(found), found


def test_where_draws_are_not_checked_the_log_probs_still_are():
    """vLLM draws with numbers of its own."""
    config = settings()
    free = Config(sampling=config.sampling, rollout=config.rollout, strangers=Strangers(draws=False))
    made = lies(tiny(), config)
    checker = engine(tiny(), free)
    assert complaints(checker, made["drawn with another seed, as one of many would be"]) == [""] * 4
    assert all(complaints(checker, made["drawn under other weights"]))
    assert all(complaints(checker, made["a log-prob altered"]))


def test_what_needs_no_model_is_always_looked_at():
    model, config = tiny(), settings()
    (job, logprobs), *_ = generated(engine(model, config))
    ended = engine(model, config, eos=ids_of(job)[10:11])
    assert "goes on after the end" in ended.complaint_about(job, logprobs, draws=False)
    short = grown(prompts()[0], ids_of(job)[1:12])
    assert "not complete" in engine(model, config).complaint_about(short, logprobs[:11], draws=False)
    first = ids_of(job).index(ids_of(job)[10], 1)
    assert ended.complaint_about(grown(prompts()[0], ids_of(job)[1 : first + 1]), logprobs[:first], draws=True) == ""
