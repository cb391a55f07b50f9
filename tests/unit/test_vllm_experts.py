"""The experts of a mixture on their way into vLLM: their names, and what each rank should have of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailrace.engines.vllm_process import vllm_messages

sys.path.insert(0, str(Path(vllm_messages.__file__).parent))  # as in vLLM's Python
import vllm_experts

EXPERTS, HIDDEN, SIZE = 4, 6, 8
LAYER = "model.layers.3.mlp.experts"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    shapes = {"gate_up_proj": (EXPERTS, 2 * SIZE, HIDDEN), "down_proj": (EXPERTS, HIDDEN, SIZE)}
    found = {f"{LAYER}.{leaf}": torch.rand(shape) for leaf, shape in shapes.items()}
    return found | {
        "model.layers.3.mlp.gate.weight": torch.rand(EXPERTS, HIDDEN),
        "model.norm.weight": torch.rand(HIDDEN),
    }


def checkpoint(tensors: dict[str, torch.Tensor], names: vllm_experts.ExpertNames) -> dict[str, torch.Tensor]:
    return dict(one for name in tensors for one in vllm_experts.as_checkpoint(name, tensors, names))


def test_vllm_gets_the_experts_one_by_one_under_the_names_of_checkpoints(tensors: dict[str, torch.Tensor]):
    qwen = checkpoint(tensors, vllm_experts.QWEN)
    assert len(qwen) == 2 + 3 * EXPERTS
    assert torch.equal(qwen[f"{LAYER}.2.up_proj.weight"], tensors[f"{LAYER}.gate_up_proj"][2, SIZE:])
    mixtral = checkpoint(tensors, vllm_experts.MIXTRAL)
    block = "model.layers.3.block_sparse_moe"
    assert torch.equal(mixtral[f"{block}.experts.1.w1.weight"], tensors[f"{LAYER}.gate_up_proj"][1, :SIZE])
    assert torch.equal(mixtral[f"{block}.experts.3.w2.weight"], tensors[f"{LAYER}.down_proj"][3])
    assert {f"{block}.gate.weight", "model.norm.weight"} <= set(mixtral)
    assert vllm_experts.in_file(f"{block}.experts.routed_experts") == LAYER


def test_experts_that_lie_the_other_way_round_keep_their_name(tensors: dict[str, torch.Tensor]):
    turned = {name: one.mT if one.dim() == 3 else one for name, one in tensors.items()}
    assert set(checkpoint(turned, vllm_experts.QWEN)) == set(tensors)


def rank(tensors: dict[str, torch.Tensor], owned: list[int], part: slice, kernel: str = "TRITON") -> Any:
    """A layer of vLLM that has this part of these experts, in this order."""
    gate, up = tensors[f"{LAYER}.gate_up_proj"][owned].chunk(2, dim=1)
    down = tensors[f"{LAYER}.down_proj"][owned]
    places = torch.full((EXPERTS,), -1, dtype=torch.int32)
    places[owned] = torch.arange(len(owned), dtype=torch.int32)
    ranks = SimpleNamespace(tp_size=SIZE // (part.stop - part.start), tp_rank=part.start // (part.stop - part.start))
    return SimpleNamespace(
        w13_weight=torch.nn.Parameter(torch.cat([gate[:, part], up[:, part]], dim=1)),
        w2_weight=torch.nn.Parameter(down[:, :, part].clone()),
        expert_map=None if len(owned) == EXPERTS else places,
        moe_config=SimpleNamespace(moe_parallel_config=ranks),
        quant_method=SimpleNamespace(unquantized_backend=SimpleNamespace(name=kernel)),
    )


def differences(module: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    parts = list(vllm_experts.expert_parts(LAYER, module, tensors, HIDDEN))
    assert [name for name, _, _ in parts] == [f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"]
    return [name for name, wanted, found in parts if not torch.equal(wanted, found)]


@pytest.mark.parametrize("owned", [[0, 1, 2, 3], [1, 3], [3, 0]])
@pytest.mark.parametrize("part", [slice(0, 8), slice(0, 4), slice(4, 8)])
def test_each_rank_is_read_back_and_one_stale_number_is_found(
    owned: list[int], part: slice, tensors: dict[str, torch.Tensor]
):
    module = rank(tensors, owned, part)
    assert differences(module, tensors) == []
    with torch.no_grad():
        module.w2_weight[-1, 2, 3] += 1e-6
    assert differences(module, tensors) == [f"{LAYER}.down_proj"]


def test_experts_of_an_unknown_kernel_are_not_said_to_be_read_back(tensors: dict[str, torch.Tensor]):
    module = rank(tensors, [0, 1, 2, 3], slice(0, 8), "FLASHINFER_TRTLLM")
    assert list(vllm_experts.expert_parts(LAYER, module, tensors, HIDDEN)) == []
    turned = {name: one.mT if one.dim() == 3 else one for name, one in tensors.items()}
    assert list(vllm_experts.expert_parts(LAYER, rank(tensors, [0], slice(0, 8)), turned, HIDDEN)) == []
