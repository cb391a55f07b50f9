"""Scores in chunks, against the dense computation."""

from __future__ import annotations

import pytest
import torch

from tailrace.model.packed import layout
from tailrace.model.support import UnsupportedModelError
from tailrace.trainer.logprobs import Policy
from trainer_cases import VOCABULARY, tiny_model


def dense(model, tokens, temperature):
    model.set_attn_implementation("eager")
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float() / temperature
    table = logits.log_softmax(-1)
    return table.gather(-1, tokens[1:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("llama", 0.6), ("gemma2", 1.3), ("cohere", 1.0)])
def test_values_and_gradients_equal_the_dense_computation(family, temperature):
    softcap = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None} if family == "gemma2" else {}
    model = tiny_model(family, **softcap)
    tokens = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(1))
    theirs = dense(model, tokens, temperature)
    policy = Policy(model, temperature, chunk=5)
    mine = policy(tokens[:-1], layout((23,)), torch.arange(23), tokens[1:])[:2]
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    factor = torch.linspace(-1, 1, 23)
    losses = [(logprobs * factor).sum() + (entropy * factor.cos()).sum() for logprobs, entropy in (mine, theirs)]
    for ours, plain in zip(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-3)


def test_the_logits_of_only_one_chunk_exist_at_a_time():
    policy = Policy(tiny_model(), 1.0, chunk=4)
    sizes = []
    policy.model.get_submodule("lm_head").register_forward_hook(lambda _, __, out: sizes.append(out.shape[0]))
    tokens = torch.arange(30) % VOCABULARY
    policy(tokens, layout((30,)), torch.arange(10, 20), tokens[10:20]).logprobs.sum().backward()
    assert sizes == [4, 4, 2, 2, 4, 4]  # forward, and again in backward; never for the other 20 tokens


def test_no_sampled_token_is_no_trouble():
    policy = Policy(tiny_model(), 1.0, chunk=4)
    nothing = torch.zeros(0, dtype=torch.int64)
    scores = policy(torch.tensor([3]), layout((1,)), nothing, nothing)
    scores.logprobs.sum().backward()
    assert not any(p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_a_head_that_the_trainer_does_not_know_is_refused():
    model = tiny_model()
    model.config.logit_scale = 0.5  # Llama itself does not look at it
    with pytest.raises(UnsupportedModelError, match="changes its logits"):
        Policy(model, 1.0, chunk=4)
