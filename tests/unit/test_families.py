"""Families of models from transformers: each is computed exactly, by trainer and engine, or refused with a sentence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from buffers import added, ids_of, job_of
from tailrace.config.tree import Config, Rollout, Sampling, Workload
from tailrace.engines.base import Job
from tailrace.engines.native import NativeEngine
from tailrace.model.packed import layout
from tailrace.model.support import UnsupportedModelError
from tailrace.trainer.logprobs import Policy
from tailrace.trainer.recompute import recompute_layers
from trainer_cases import SHAPE, VOCABULARY

MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = MIXTURE | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
WINDOW = {"sliding_window": 6}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
DROPOUT = {"attention_dropout": 0.3}
OLD_DROPOUT = {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}

EXACT: dict[str, dict[str, Any]] = {
    "biogpt": {
        "hidden_dropout_prob": 0.3,
        "attention_probs_dropout_prob": 0.3,
        "activation_dropout": 0.3,
        "layerdrop": 0.3,
    },
    "cohere2": MIXED | DROPOUT,
    "deepseek_v3": LATENT,
    "ernie4_5": {},
    "exaone4": MIXED | DROPOUT,
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 8} | DROPOUT,
    "gemma4_text": MIXED | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "glm4": DROPOUT,
    "glm4_moe": MIXTURE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt2": OLD_DROPOUT | {"head_dim": None},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "granite": DROPOUT,
    "hunyuan_v1_dense": {},
    "minimax_m2": MIXTURE,
    "mixtral": MIXTURE | {"sliding_window": None} | DROPOUT,
    "olmo2": DROPOUT,
    "olmoe": MIXTURE | DROPOUT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "phi": {"resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "phi3": {"resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "qwen3_moe": MIXTURE | DROPOUT,
    "smollm3": DROPOUT,
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3, **WINDOW},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({}, "other hidden states|off by"),
    "bert": ({}, "not causal|changes its logits"),
    "bloom": ({}, "other hidden states|without the attention"),
    "deepseek_v32": (LATENT, "indexed_attention"),
    "doge": (MIXTURE, "DogeAttention makes a mask of its own"),
    "electra": ({}, r"trying it out failed \(RuntimeError|not causal"),
    "gpt_oss": (MIXTURE | MIXED, "GptOssAttention has attention sinks"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of the kind conv"),
    "llama4_text": (MIXTURE | {"moe_layers": [1], "intermediate_size_mlp": 48}, "layers of the kind chunked_attention"),
    "mamba": ({}, "layers of the kind linear_attention"),
    "nemotron": ({}, "NemotronAttention does not pass its arguments through"),
    "qwen3_next": (MIXTURE, "layers of the kind linear_attention"),
    "stablelm": ({}, "StableLmAttention does not pass its arguments through"),
    "xmod": ({}, r"trying it out failed \(ValueError: Input language unknown"),
}


def tiny(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    ends = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 128, "initializer_range": 0.3}
    shape = SHAPE | ends | {"tie_word_embeddings": False} | changes
    config = AutoConfig.for_model(
        family, **{name: value for name, value in shape.items() if value is not None or "_id" in name}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", EXACT)
def test_the_trainer_computes_single_sequences_from_packs_with_dropout_off_and_activations_made_again(
    family: str,
) -> None:
    model = tiny(family, EXACT[family])
    sequences = tokens(21, 1), tokens(12, 2)
    tables = [model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for row in sequences]
    pairs = zip(tables, sequences, strict=True)
    theirs = torch.cat([table.gather(-1, row[1:, None])[:, 0] for table, row in pairs])
    wanted = gradients(theirs, model)
    for again in (False, True):
        subject = copy.deepcopy(model)
        if again:
            recompute_layers(subject)
        row, targets = (torch.cat([each[part] for each in sequences]) for part in (slice(-1), slice(1, None)))
        mine = Policy(subject, 1.0, chunk=7)(row, layout((20, 11)), torch.arange(31), targets).logprobs
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(gradients(mine, subject), wanted, atol=1e-3, rtol=1e-3)


def gradients(logprobs: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    found = torch.autograd.grad(logprobs.cos().sum(), list(model.parameters()), allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


@pytest.mark.parametrize("family", EXACT)
def test_the_engine_samples_what_generate_samples(family: str) -> None:
    model = tiny(family, EXACT[family])
    work = [job_of(n, n, tokens(length, n).tolist(), length, 8 + n) for n, length in enumerate((1, 5, 13, 22))]
    found = generated(engine(model), work)
    for job in work:
        prompt, generate = torch.tensor([ids_of(job)]), model.generate
        options: Any = {"max_new_tokens": job.max_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert found[job.id] == generate(prompt, **options)[0, job.length :].tolist()  # type: ignore[operator]


def engine(model: PreTrainedModel) -> NativeEngine:
    config = Config(
        sampling=Sampling(temperature=0.0),
        rollout=Rollout(kv_tokens=1024, block_tokens=4, prefill_tokens=7),
        workload=Workload(prompt_tokens=40, max_completion_tokens=40),
    )
    return NativeEngine(copy.deepcopy(model), str, (), config, 7)


def generated(engine: NativeEngine, work: Sequence[Job]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for job in work:
        engine.submit(job)
    while engine.stats().running or engine.stats().waiting:
        for one in added(engine.step()):
            found.setdefault(one.id, []).extend(one.tokens)
    return found


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exact_is_refused_with_its_family_and_the_reason(family: str) -> None:
    changes, reason = REFUSED[family]
    model = tiny(family, changes)
    for attempt in (lambda one: Policy(one, 1.0, chunk=7), engine):
        with pytest.raises(UnsupportedModelError, match=f"models of the family {family} cannot be used: .*({reason})"):
            attempt(copy.deepcopy(model))


def test_attention_that_is_called_twice_a_layer_trains_but_cannot_be_paged() -> None:
    model = tiny("diffllama", {})
    Policy(copy.deepcopy(model), 1.0, chunk=7)
    with pytest.raises(UnsupportedModelError, match="its layer 0 attends more than once"):
        engine(model)


def test_a_family_without_layers_that_can_be_computed_again_is_told_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"family ctrl have no layers .* write trainer.recompute = false"):
        recompute_layers(tiny("ctrl", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48}))
