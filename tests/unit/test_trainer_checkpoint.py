"""Checkpoints: exact, whole or not there, and readable by transformers."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace.config.tree import Config
from tailrace.trainer.checkpoint import CheckpointError, newest, prune, restore, save
from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from trainer_cases import group, settings, tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)


def with_everything(model: Path) -> Config:
    return settings(
        model, mini_batches=2, loss="decoupled_ppo", advantage="gae", kl=0.1, warmup_steps=1, decay="cosine"
    )


def train_step(learner: Learner, step: int) -> list[dict[str, float]]:
    return [learner.train_mini_batch(step, part, *in_memory([group(10 * step + part)])) for part in range(2)]


def test_a_restored_learner_goes_on_bit_for_bit(model, tmp_path):
    learner = Learner(with_everything(model))
    train_step(learner, 0)
    place = save(tmp_path, learner)
    undisturbed = train_step(learner, 1)
    again = Learner(with_everything(model))
    restore(again, place)
    assert again.step == 1
    resumed = train_step(again, 1)
    for metrics in (*undisturbed, *resumed):
        del metrics["seconds"]
    assert resumed == undisturbed
    for (name, mine), (_, theirs) in zip(again.weights(), learner.weights(), strict=True):
        assert torch.equal(mine, theirs), name


def test_another_run_takes_weights_and_moments_and_counts_anew(model, tmp_path):
    """It may have a critic that the first had not."""
    learner = Learner(settings(model))
    learner.train_mini_batch(0, 0, *in_memory([group(1)]))
    place = save(tmp_path, learner)
    other = Learner(with_everything(model))
    restore(other, place, anew=True)
    assert (other.step, other.optimiser.updates) == (0, 0)
    assert all(
        torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(other.weights(), learner.weights(), strict=True)
    )
    moments = dict(other.optimiser.moments())
    assert moments
    assert all(torch.equal(moments[name], moment) for name, moment in learner.optimiser.moments())


def test_a_checkpoint_is_a_folder_that_transformers_loads(model, tmp_path):
    learner = Learner(settings(model))
    learner.train_mini_batch(0, 0, *in_memory([group(1)]))
    place = save(tmp_path, learner)
    loaded = AutoModelForCausalLM.from_pretrained(place)
    assert all(torch.equal(tensor, loaded.get_parameter(name)) for name, tensor in learner.weights())
    names = {file.name for file in place.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors", "optimizer.safetensors", "state.json"}


def test_nobody_else_can_read_a_checkpoint(model, tmp_path):
    place = save(tmp_path / "checkpoints", Learner(settings(model)))
    modes = {file.name: file.stat().st_mode & 0o777 for file in (place.parent, place, *place.iterdir())}
    assert len(modes) > 5
    assert set(modes.values()) == {0o600, 0o700}
    assert {name for name, mode in modes.items() if mode == 0o700} == {"checkpoints", place.name}


def test_the_newest_is_found_and_old_ones_go(model, tmp_path):
    learner = Learner(settings(model))
    for step in (1, 2, 9, 10):
        learner.step = step
        save(tmp_path, learner)
    (tmp_path / ".step-00000011").mkdir()  # an interrupted save
    assert newest(tmp_path).name == "step-00000010"  # type: ignore[union-attr]
    assert newest(tmp_path, at_most_step=8).name == "step-00000002"  # type: ignore[union-attr]
    assert newest(tmp_path, at_most_step=0) is None
    assert newest(tmp_path / "nowhere") is None
    prune(tmp_path, 2, archive_every=2)
    assert sorted(place.name for place in tmp_path.iterdir())[0] == "step-00000002"
    prune(tmp_path, 2)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def test_saving_the_same_step_again_replaces_it(model, tmp_path):
    learner = Learner(settings(model))
    save(tmp_path, learner)
    learner.train_mini_batch(0, 0, *in_memory([group(1)]))
    learner.step = 0
    again = Learner(settings(model))
    restore(again, save(tmp_path, learner))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.weights(), learner.weights(), strict=True))


def test_a_write_that_fails_half_way_leaves_the_earlier_checkpoint_and_no_trace(model, tmp_path):
    learner = Learner(settings(model))
    save(tmp_path, learner)
    learner.step = 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the weights are larger
    try:
        with pytest.raises(CheckpointError, match="make room on that disk"):
            save(tmp_path, learner)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000000"]
    restore(learner, tmp_path / "step-00000000")


def test_a_disk_without_room_is_noticed_before_writing(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="MB are free"):
        save(tmp_path, Learner(settings(model)))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_restored_is_said_in_one_sentence(model, tmp_path):
    learner = Learner(settings(model))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        restore(learner, tmp_path)
    place = save(tmp_path, learner)
    other = Learner(settings(tiny_folder(tmp_path / "wider", intermediate_size=64)))
    with pytest.raises(CheckpointError, match="another model"):
        restore(other, place)
    (place / "optimizer.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(learner, place)
