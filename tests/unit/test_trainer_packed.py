"""Attention over packs, against the model's own attention over single sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tailrace.model.packed import hidden_states, install, layout
from tailrace.model.support import UnsupportedModelError
from trainer_cases import VOCABULARY, tiny_model

LENGTHS = (19, 19, 7, 1, 12)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


SHARED = 5  # tokens that the first three sequences begin with in common, where some do
PATHS = np.array([*range(19), *range(SHARED), *range(19, 33), *range(SHARED), *range(33, 48)])


@pytest.mark.parametrize("paths", [None, PATHS], ids=["apart", "folded"])
@pytest.mark.parametrize("family", MODELS)
def test_a_pack_gives_the_hidden_states_and_gradients_of_its_sequences_one_by_one(family, paths):
    model = tiny_model(family, **MODELS[family])
    path = torch.arange(sum(LENGTHS)) if paths is None else torch.from_numpy(paths)
    row = torch.randint(VOCABULARY, (int(path.max()) + 1,), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    rows = [
        model.base_model(input_ids=one[None], use_cache=False).last_hidden_state[0] for one in row[path].split(LENGTHS)
    ]
    install(model)
    mine = hidden_states(model, row, layout(LENGTHS, paths=paths))[path]
    theirs = torch.cat(rows)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    matrix = next(p for name, p in model.named_parameters() if name.endswith("layers.0.self_attn.k_proj.weight"))
    gradients = [torch.autograd.grad((h * h.detach().cos()).sum(), matrix)[0] for h in (mine, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_soft_capped_scores_are_the_same_in_blocks(monkeypatch):
    monkeypatch.setattr("tailrace.model.packed.QUERY_BLOCK", 4)
    test_a_pack_gives_the_hidden_states_and_gradients_of_its_sequences_one_by_one("gemma2", PATHS)


def test_a_sequence_does_not_see_its_neighbours():
    model = install(tiny_model())
    tokens = torch.arange(20) % VOCABULARY
    other = torch.cat([tokens[:12], tokens[12:] + 7])
    before, after = (hidden_states(model, row, layout((12, 8))) for row in (tokens, other))
    assert torch.equal(before[:12], after[:12])
    assert not torch.equal(before[12:], after[12:])


def test_recurrent_layers_are_refused():
    model = tiny_model("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        install(model)


def test_a_plain_forward_is_refused_once_the_attention_is_installed():
    with pytest.raises(UnsupportedModelError, match="pass its arguments"):
        install(tiny_model())(input_ids=torch.tensor([[1, 2, 3]]))
