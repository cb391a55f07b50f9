"""Models whose rotary frequencies change once a sequence is past their original context: each sequence for itself.

What is right is what transformers does with one sequence alone, also when it crosses the limit while it is generated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from buffers import added, ids_of, job_of
from tailrace.config.tree import Config, Rollout, Sampling, Workload
from tailrace.engines.base import Job
from tailrace.engines.native import NativeEngine
from tailrace.model.packed import hidden_states, install, layout
from tailrace.trainer.batch import plan_mini_batch
from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from tailrace.types import Segment, Trajectory
from trainer_cases import VOCABULARY, long_rope, settings, tiny_model

LIMIT = 20  # tokens: the original context
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},  # whose generate keeps the keys of before: so it is compared with whole passes only
}


def tiny(family: str = "phi3") -> PreTrainedModel:
    ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.4}
    return tiny_model(family, **long_rope(LIMIT), **ends, **FAMILIES[family])


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: PreTrainedModel, row: Sequence[int]) -> torch.Tensor:
    """Log-probs of every token after the first, each from a pass of its own over what stands before it."""
    model.set_attn_implementation("eager")
    found = []
    with torch.no_grad():
        for end in range(1, len(row)):
            logits = model(input_ids=torch.tensor([row[:end]]), use_cache=False).logits[0, -1]
            found.append(logits.float().log_softmax(-1)[row[end]])
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_rotates_every_sequence_by_its_own_length(family):
    model = tiny(family)
    lengths = (9, 33, LIMIT, LIMIT + 1, 5)
    rows = [torch.tensor(tokens(length, length)) for length in lengths]
    with torch.no_grad():
        theirs = [model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows]
        mine = hidden_states(install(model), torch.cat(rows), layout(lengths))
    torch.testing.assert_close(mine, torch.cat(theirs), atol=1e-5, rtol=1e-5)


def trajectory(id: int, prompt: list[int], answer: list[int], reward: float) -> Trajectory:
    sampled = Segment.of(0, answer, (-1.0,) * len(answer))
    return Trajectory(id, 0, 0, (Segment.of(None, prompt), sampled), "stop", reward)


@pytest.mark.parametrize("more", [{}, {"loss": "ppo", "advantage": "gae"}])
def test_the_trainer_has_the_log_probs_of_every_token_at_the_length_that_its_sequence_had(tmp_path, more):
    """Answers that stay within the limit, cross it, and begin beyond it, two of them with the same prompt."""
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    prompt = tokens(6, 1)
    group = [
        trajectory(0, prompt, tokens(7, 2), 0.0),
        trajectory(1, prompt, tokens(31, 3), 1.0),
        trajectory(2, tokens(25, 4), tokens(9, 5), 0.5),
        trajectory(3, prompt, tokens(LIMIT - 5, 6), 0.7),
    ]
    learner = Learner(settings(tmp_path / "model", tokens_per_batch=10**6, **more))
    batch = plan_mini_batch(*in_memory([group]), learner.settings)
    (each,) = learner._micro_batches(0, 0, batch)
    found = learner.scores(each.pack).logprobs
    for place, one in enumerate(group):
        row = [token for segment in one.segments for token in segment.ids.tolist()]
        wanted = alone(model, row)[len(one.segments[0]) - 1 :]
        mine = found[torch.from_numpy(each.pack.sequence == place)]
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)
    assert learner.train_mini_batch(0, 0, *in_memory([group]))["passed_tokens"] == sum(t.sampled_tokens for t in group)


def test_packs_of_any_size_have_the_same_gradient(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    prompt = tokens(6, 1)
    group = [trajectory(n, prompt, tokens(length, n), n / 4) for n, length in enumerate((4, 30, 18, 40))]
    found = []
    for budget in (10**6, 30):
        learner = Learner(settings(tmp_path / "model", tokens_per_batch=budget))
        learner._backward(learner._micro_batches(0, 0, plan_mini_batch(*in_memory([group]), learner.settings)))
        found.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- the engine


def engine(model: PreTrainedModel, temperature: float = 0.0, **rollout: int) -> NativeEngine:
    chosen = {"kv_tokens": 1024, "block_tokens": 4, "prefill_tokens": 7} | rollout
    return NativeEngine(
        copy.deepcopy(model),
        str,
        (),
        Config(
            sampling=Sampling(temperature=temperature),
            rollout=msgspec.convert(chosen, Rollout),
            workload=Workload(prompt_tokens=40, max_completion_tokens=40),
        ),
        7,
    )


def generated(subject: NativeEngine, work: Sequence[Job]) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    found: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    for job in work:
        subject.submit(job)
    for _ in range(2000):
        if not (subject.stats().running or subject.stats().waiting):
            return found, logprobs
        for one in added(subject.step()):
            found.setdefault(one.id, []).extend(one.tokens)
            logprobs.setdefault(one.id, []).extend(one.logprobs)
        subject.check()
    raise AssertionError("not done")


def jobs() -> list[Job]:
    """Short, crossing and long ones, groups with a prompt in common, and prompts that begin alike."""
    system = tokens(12, 9)
    prompts = [system + tokens(3, 1), system + tokens(5, 2), system + tokens(14, 3), tokens(4, 4), tokens(30, 5)]
    ends = [(2, 30), (28, 3), (20, 10), (12, 40), (15, 2)]
    return [
        job_of(10 * group + sample, group, prompt, len(prompt), count)
        for group, (prompt, counts) in enumerate(zip(prompts, ends, strict=True))
        for sample, count in enumerate(counts)
    ]


@pytest.mark.parametrize("pool", [1024, 120])  # the small one preempts
@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_greedy_tokens_are_those_of_generate_whoever_else_is_in_the_batch(family, pool):
    model, work = tiny(family), jobs()
    found, _ = generated(engine(model, kv_tokens=pool), work)
    for job in work:
        prompt, generate = torch.tensor([ids_of(job)]), model.generate
        options: Any = {"max_new_tokens": job.max_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert found[job.id] == generate(prompt, **options)[0, job.length :].tolist()  # type: ignore[operator]
    assert len({token for each in found.values() for token in each}) > 15


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_log_probs_across_the_limit(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path / "model")
    work = jobs()
    found, logprobs = generated(engine(model, temperature=1.0), work)
    learner = Learner(settings(tmp_path / "model", tokens_per_batch=10**6))
    group = [trajectory(job.id, ids_of(job), found[job.id], float(n)) for n, job in enumerate(work)]
    batch = plan_mini_batch(*in_memory([group]), learner.settings)
    (each,) = learner._micro_batches(0, 0, batch)
    mine = learner.scores(each.pack).logprobs.numpy()
    for place, job in enumerate(work):
        assert mine[each.pack.sequence == place] == pytest.approx(np.array(logprobs[job.id]), abs=1e-4)


def test_a_later_turn_that_begins_beyond_the_limit_goes_on_from_nothing_that_was_kept(tmp_path):
    model = tiny()
    subject = engine(model, temperature=1.0)
    first = job_of(0, 0, tokens(10, 1), 10, 5)
    found, _ = generated(subject, [first])
    spoken = [*ids_of(first), *found[0], *tokens(12, 2)]
    second = job_of(0, 0, spoken, 10, 6)
    more, logprobs = generated(subject, [second])
    wanted = alone(model, [*spoken, *more[0]])[len(spoken) - 1 :]
    assert logprobs[0] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_model_with_dynamic_frequencies_is_used_up_to_its_own_context_where_they_do_not_change():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    lengths = {"max_position_embeddings": 24, "rope_parameters": rope}
    model = tiny_model(**lengths, eos_token_id=None, tie_word_embeddings=False)
    work = [job_of(0, 0, tokens(20, 1), 20, 40), job_of(1, 1, tokens(3, 2), 3, 8)]
    found, _ = generated(engine(model), work)
    assert [len(found[0]), len(found[1])] == [4, 8]  # up to its context
    for job in work:
        prompt, generate = torch.tensor([ids_of(job)]), model.generate
        options: Any = {"max_new_tokens": len(found[job.id]), "do_sample": False}
        assert found[job.id] == generate(prompt, **options)[0, job.length :].tolist()  # type: ignore[operator]
