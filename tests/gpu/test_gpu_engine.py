"""The native engine on a GPU: the tokens of the CPU path, log-probs within rounding, new weights in mid-decode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from buffers import added, ids_of, job_of
from tailrace.config.tree import Config, Rollout, Sampling, Workload
from tailrace.engines.base import Job
from tailrace.engines.native import NativeEngine
from trainer_cases import long_rope, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 1000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # far from uniform logits, so that rounding decides few argmaxes
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {"qwen2": Qwen2Config(**SHAPE), "qwen3": Qwen3Config(**SHAPE)}
PROMPTS = (1, 15, 16, 17, 40, 64, 100, 129, 200)


def random_model(seed: int, family: str = "qwen2") -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.float32).eval()


def engine(model: Any, device: str, dtype: torch.dtype, temperature: float = 0.0) -> NativeEngine:
    config = Config(
        sampling=Sampling(temperature=temperature),
        rollout=Rollout(kv_tokens=16384, prefill_tokens=96, max_running=64),
        workload=Workload(prompt_tokens=256, max_completion_tokens=256),
    )
    placed = copy.deepcopy(model).to(device=device, dtype=dtype)
    return NativeEngine(placed, lambda tokens: "", (), config, seed=7)


def jobs(longest: int = 60) -> list[Job]:
    draw = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(VOCABULARY, (length,), generator=draw).tolist()) for length in PROMPTS]
    return [job_of(at, at, prompt, len(prompt), 5 + (at * 13) % longest) for at, prompt in enumerate(prompts)]


Found = dict[int, tuple[list[int], list[float]]]


def play(engine: NativeEngine, work: list[Job], found: Found | None = None) -> Found:
    found = {job.id: ([], []) for job in work} if found is None else found
    for job in work:
        engine.submit(job)
    for _ in range(5000):
        if not (engine.stats().running or engine.stats().waiting):
            engine.check()
            return found
        take(engine, found)
    raise AssertionError("the engine does not come to an end")


def take(engine: NativeEngine, found: Found) -> None:
    for each in added(engine.step()):
        found[each.id][0].extend(each.tokens)
        found[each.id][1].extend(each.logprobs)


def reference(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def errors(found: Found, exact: Any) -> torch.Tensor:
    work = {job.id: job for job in jobs()}
    return torch.cat(
        [
            torch.tensor(logprobs) - reference(exact, ids_of(work[id]), tokens)
            for id, (tokens, logprobs) in found.items()
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_cpu_path(family):
    model = random_model(11, family)
    here, there = (play(engine(model, device, torch.float32), jobs()) for device in ("cpu", "cuda"))
    same = sum(here[id][0] == there[id][0] for id in here)
    assert same >= len(here) - 1  # one near tie may fall the other way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_log_probs_are_as_near_to_float32_as_those_of_transformers(dtype):
    half = random_model(12).to(device="cuda", dtype=dtype)
    exact = copy.deepcopy(half).float()
    found = play(engine(half, "cuda", dtype, temperature=1.0), jobs())
    work = {job.id: job for job in jobs()}
    plain = torch.cat(
        [
            reference(half, ids_of(work[id]), tokens) - reference(exact, ids_of(work[id]), tokens)
            for id, (tokens, _) in found.items()
        ]
    )
    own = errors(found, exact)
    assert own.abs().mean() <= 1.5 * plain.abs().mean() + 1e-4
    assert (own.exp() - 1 - own).mean() < 1e-3


def test_the_same_request_gets_the_same_tokens_in_any_company():
    model = random_model(13)
    together = play(engine(model, "cuda", torch.float32, temperature=1.0), jobs())
    alone = [play(engine(model, "cuda", torch.float32, temperature=1.0), [job]) for job in jobs()[:4]]
    assert sum(together[id][0] == one[id][0] for one in alone for id in one) >= len(alone) - 1


def test_new_weights_take_effect_while_sequences_are_being_decoded():
    old, new = random_model(14), random_model(15)
    running, work = engine(old, "cuda", torch.float32), jobs()
    found: Found = {job.id: ([], []) for job in work}
    for job in work:
        running.submit(job)
    while not all(tokens for tokens, _ in found.values()):
        take(running, found)
    before = {id: len(tokens) for id, (tokens, _) in found.items()}
    running.load_weights(1, dict(new.named_parameters()))
    play(running, [], found)
    placed = new.to("cuda")
    for job in work:
        tokens, logprobs = found[job.id]
        exact = reference(placed, ids_of(job), tokens)[before[job.id] :]
        torch.testing.assert_close(torch.tensor(logprobs[before[job.id] :]), exact, atol=2e-3, rtol=0)


def test_a_withdrawn_sequence_goes_on_elsewhere_with_the_same_tokens():
    model = random_model(16)
    whole = play(engine(model, "cuda", torch.float32, temperature=1.0), jobs())
    first, second = (engine(model, "cuda", torch.float32, temperature=1.0) for _ in range(2))
    found: Found = {job.id: ([], []) for job in jobs()}
    for job in jobs():
        first.submit(job)
    while not all(tokens for tokens, _ in found.values()):
        take(first, found)
    play(second, first.withdraw(found), found)
    assert sum(found[id][0] == whole[id][0] for id in whole) >= len(whole) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_a_long_rope_model_go_by_their_own_length_on_a_gpu(dtype: torch.dtype) -> None:
    shape = {"hidden_size": 256, "head_dim": 64, "initializer_range": 0.1, "tie_word_embeddings": False}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model: Any = tiny_model("phi3", **shape, **ends, **long_rope(20, 64))
    model = model.to("cuda", dtype)
    draw = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(1, 48, (n,), generator=draw).tolist()) for n in (3, 12, 19, 25)]
    work = [job_of(n, n, prompt, len(prompt), 16) for n, prompt in enumerate(prompts)]
    found = play(engine(model, "cuda", dtype), work)
    model.set_attn_implementation("eager")
    for job in work:
        tokens, logprobs = found[job.id]
        row = [*ids_of(job), *tokens]
        for place, logprob in enumerate(logprobs, job.length):
            with torch.no_grad():
                logits = model(torch.tensor([row[:place]], device="cuda"), use_cache=False).logits[0, -1]
            wanted = float(logits.float().log_softmax(-1)[row[place]])
            assert logprob == pytest.approx(wanted, abs=1e-3 if dtype is torch.float32 else 0.3)
