"""The learner on a GPU: its gradients are those of the CPU, and bf16 arithmetic stays near them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from trainer_cases import group, long_rope, poisoned, settings, tiny_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GROUPS = [group(1), group(2), group(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which every attention kernel takes."""
    return tiny_folder(tmp_path_factory.mktemp("tiny"), head_dim=64, hidden_size=128, initializer_range=0.1)


def trained(folder: Path, device: str, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one step, and what it measured."""
    learner = Learner(settings(folder, device=device, precision=precision, learning_rate=1e-3, tokens_per_batch=4096))
    measured = learner.train_mini_batch(0, 0, *in_memory(GROUPS))
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


def test_everything_at_once_in_bfloat16_stays_near_float32(tmp_path):
    """Compiled blocks, activations made again, a critic with values of the step's start, Long RoPE on both sides of its
    limit, a dual clip, and weights that are looked at after every update."""
    shape = {"head_dim": 64, "hidden_size": 256, "initializer_range": 0.05}
    rope = long_rope(18, 64)
    model = tiny_folder(tmp_path, "phi3", **shape, **rope)
    more = {"mini_batches": 2, "loss": "decoupled_ppo", "advantage": "gae", "recompute": True, "tokens_per_batch": 4096}
    found = {}
    for device, precision in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        learner = Learner(settings(model, device=device, precision=precision, learning_rate=1e-4, **more))
        assert learner.switch == 18
        learner.warm_up()
        found[device, precision] = [learner.train_mini_batch(0, part, *in_memory(GROUPS)) for part in range(2)]
    exact = found["cpu", "float32"]
    for there, close in ((found["cuda", "float32"], 1e-3), (found["cuda", "bfloat16"], 0.2)):
        for mine, theirs in zip(there, exact, strict=True):
            assert (mine["skipped"], mine["nonfinite_weights"]) == (0, 0)
            for name in ("entropy", "grad_norm", "critic_grad_norm", "value_loss", "mismatch_kl"):
                assert mine[name] == pytest.approx(theirs[name], rel=close, abs=1e-3), name


def test_an_update_that_is_not_finite_is_left_out_on_a_gpu(folder):
    learner = Learner(settings(folder, device="cuda", precision="bfloat16"))
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    assert learner.train_mini_batch(0, 0, *in_memory([poisoned(2)]))["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert learner.train_mini_batch(1, 0, *in_memory(GROUPS))["skipped"] == 0
