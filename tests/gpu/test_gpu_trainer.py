"""The learner on a GPU: its gradients are those of the CPU, and bf16 arithmetic stays near them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailrace.trainer.step import Learner
from trainer_cases import group, settings, tiny_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GROUPS = [group(1), group(2), group(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which every attention kernel takes."""
    return tiny_folder(tmp_path_factory.mktemp("tiny"), head_dim=64, hidden_size=128, initializer_range=0.1)


def trained(folder: Path, device: str, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one step, and what it measured."""
    learner = Learner(settings(folder, device=device, precision=precision, learning_rate=1e-3, tokens_per_batch=4096))
    measured = learner.train_part(0, 0, GROUPS)
    return {name: tensor.float().cpu().clone() for name, tensor in learner.weights()}, measured


def test_a_step_in_float32_measures_what_it_measures_on_the_cpu(folder):
    here, there = (trained(folder, device, "float32")[1] for device in ("cpu", "cuda"))
    for name in ("loss", "grad_norm", "entropy"):
        assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name


def test_a_step_in_bfloat16_stays_near_float32(folder):
    exact, half = (trained(folder, "cuda", precision)[1] for precision in ("float32", "bfloat16"))
    assert half["loss"] == pytest.approx(exact["loss"], rel=0.05, abs=5e-3)
    assert half["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


def test_a_step_changes_every_weight_matrix(folder):
    before = {name: tensor.float().cpu().clone() for name, tensor in Learner(settings(folder, device="cpu")).weights()}
    after, _ = trained(folder, "cuda", "bfloat16")
    still = [name for name, tensor in after.items() if tensor.ndim == 2 and torch.equal(tensor, before[name])]
    assert not still
