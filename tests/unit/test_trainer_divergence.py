"""Updates that are not finite: left out, counted, and after a few of them the end, with the last good weights kept."""

from __future__ import annotations

from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailrace.config.tree import Config, Trainer
from tailrace.protocol import Train
from tailrace.store.folder import identity_of
from tailrace.trainer.checkpoint import newest, prune, save
from tailrace.trainer.divergence import DivergedError, Divergence, way_back
from tailrace.trainer.manifest import found_in
from tailrace.trainer.pace import CheckpointPace
from tailrace.trainer.reader import in_memory
from tailrace.trainer.spared import SparedSteps
from tailrace.trainer.step import Learner
from tailrace.trainer.worker import TrainerWorker
from tailrace.wire.messages import Ended, Ordered
from trainer_cases import group, poisoned, settings, tiny_folder

GOOD, BAD, IDLE = {"skipped": 0.0, "without_advantage": 0.0}, {"skipped": 1.0}, {"without_advantage": 1.0}
RUINED = GOOD | {"nonfinite_weights": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("updates", "final", "good"),
    [
        ([BAD, BAD, BAD], True, -1),
        ([GOOD, BAD, BAD], False, 0),
        ([BAD, BAD, GOOD, BAD], False, 2),
        ([BAD, IDLE, BAD, IDLE, BAD], True, -1),  # what has no advantage neither counts nor resets
        ([GOOD, IDLE, IDLE, IDLE], False, 0),
        ([GOOD, GOOD, RUINED], True, 2),
    ],
)
def test_three_updates_in_a_row_that_are_not_finite_are_the_end(updates, final, good):
    divergence = Divergence()
    told = [divergence.see(step, update) for step, update in enumerate(updates)]
    assert divergence.is_final == final
    assert divergence.good == good
    assert [bool(sentence) for sentence in told] == [update in (BAD, RUINED) for update in updates]


@pytest.mark.parametrize("more", [{}, {"advantage": "gae", "loss": "ppo"}])
def test_an_update_that_is_not_finite_changes_neither_policy_nor_critic(folder, more):
    learner = Learner(settings(folder, **more))
    learner.train_mini_batch(0, 0, *in_memory([group(1)]))
    before = everything(learner)
    measured = learner.train_mini_batch(1, 0, *in_memory([poisoned(2)]))
    assert (measured["skipped"], measured["nonfinite_weights"]) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(learner), strict=True))
    assert learner.optimiser.updates == 2
    assert learner.train_mini_batch(2, 0, *in_memory([group(2)]))["skipped"] == 0


def test_a_critic_that_is_not_finite_holds_the_policy_back_too(folder):
    learner = Learner(settings(folder, advantage="gae", loss="ppo"))
    assert learner.critic is not None
    with torch.no_grad():
        next(iter(learner.critic.parameters())).fill_(nan)
    before = [p.clone() for p in learner.model.parameters()]
    measured = learner.train_mini_batch(0, 0, *in_memory([group(1)]))
    assert measured["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_a_loss_that_is_not_finite_is_enough_though_the_gradient_is(folder):
    learner = Learner(settings(folder))
    before = everything(learner)
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert learner._update(sound=False)["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(learner), strict=True))


def test_weights_that_a_finite_gradient_has_ruined_are_noticed_at_once(folder):
    measured = Learner(settings(folder, learning_rate=1e30)).train_mini_batch(0, 0, *in_memory([group(1)]))
    assert (measured["skipped"], measured["nonfinite_weights"]) == (0, 0)  # large, but numbers
    measured = Learner(settings(folder, learning_rate=1e38)).train_mini_batch(0, 0, *in_memory([group(1)]))
    assert (measured["skipped"], measured["nonfinite_weights"]) == (0, 1)


def everything(learner: Learner) -> list[torch.Tensor]:
    parts = [learner.model, *([learner.critic] if learner.critic is not None else [])]
    moments = [tensor for _, tensor in learner.optimiser.moments()]
    return [tensor.clone() for tensor in (*(p for part in parts for p in part.parameters()), *moments)]


def checkpoints(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step-{step:08d}").mkdir()
    return folder


def test_a_checkpoint_that_no_update_has_started_from_is_put_aside(tmp_path):
    sentence = way_back(checkpoints(tmp_path, 4, 5), good=4, from_start=False, rate=1e-3)
    assert [place.name for place in found_in(tmp_path)] == ["step-00000004"]
    assert (tmp_path / "diverged-step-00000005").is_dir()
    assert f"the last good weights are version 4, in {tmp_path}/step-00000004" in sentence
    assert "--resume and --trainer.learning_rate 0.0001" in sentence


@pytest.mark.parametrize(
    ("steps", "good", "from_start", "left", "words"),
    [
        ((), -1, True, [], "those that the run started from; go on from there"),
        ((1,), 0, True, [], "those that the run started from; go on from there"),
        ((4, 5), 5, False, [4, 5], "version 5"),
        ((5,), 4, False, [5], "those that the run started from; begin a new run"),  # older data is gone
        ((2, 8, 9), 3, False, [2, 8, 9], "step-00000002; begin a new run with model.path there"),
    ],
)
def test_no_more_is_put_aside_than_a_run_can_be_resumed_without(tmp_path, steps, good, from_start, left, words):
    assert words in way_back(checkpoints(tmp_path, *steps), good, from_start, rate=1e-3)
    assert [int(place.name[5:]) for place in found_in(tmp_path)] == left


def test_the_newest_good_checkpoint_is_never_pruned(folder, tmp_path):
    learner = Learner(settings(folder))
    for step in (1, 2, 3, 8, 9):
        learner.step = step
        save(tmp_path, learner)
    prune(tmp_path, 2, good=6)
    assert [place.name for place in found_in(tmp_path)] == ["step-00000003", "step-00000008", "step-00000009"]
    assert newest(tmp_path) == tmp_path / "step-00000009"


class Scripted:
    """A rank group whose updates come out as the test says, and whose checkpoints are empty folders."""

    def __init__(self, *updates: dict[str, float]) -> None:
        self.updates = iter(updates)
        self.published: list[int] = []

    def train(self, step: int, part: int, *samples: object) -> dict[str, float]:
        return dict(next(self.updates))

    def save(self, folder: Path, step: int, good: int, spared: SparedSteps) -> None:
        checkpoints(folder, step)
        prune(folder, 2, good=good)

    def snapshot(self, version: int) -> float:
        self.published.append(version)
        return 0.0


def worker(folder: Path, *updates: dict[str, float]) -> Any:
    """One update a step, all of them given to it."""
    one: Any = TrainerWorker.__new__(TrainerWorker)
    said: list[object] = []
    config = Config(trainer=Trainer(mini_batches=1, learning_rate=0.5))
    one.spec = SimpleNamespace(config=config, folder=str(folder), folder_id=identity_of(folder), folder_mark="")
    one.rank_group, one.checkpoints, one.divergence = Scripted(*updates), folder, Divergence()
    one.controller = SimpleNamespace(incarnation=1, measure=lambda *_: None, report=said.append)
    one.pace = CheckpointPace(1, 1, 0, 0.0)
    one.samples, one.spared = None, SparedSteps(0)
    one.began_at, one.step, one.saved, one.mini_batch = 0, 0, 0, 0
    for step in range(len(updates)):
        one._obey(Ordered(Train(1, step, 0, True, ())))
    return one


def names(folder: Path) -> list[str]:
    return sorted(place.name.replace("step-0000000", "") for place in folder.iterdir())


def test_what_an_update_that_is_not_finite_has_left_is_not_saved(tmp_path):
    worker(tmp_path, GOOD, GOOD, BAD, BAD, IDLE, IDLE, IDLE)
    assert names(tmp_path) == ["1", "6", "7"]  # of 1 an update is known to have been finite


def test_the_third_in_a_row_ends_it_before_it_is_published(tmp_path, caplog):
    with pytest.raises(DivergedError, match=r"third time in a row.* version 1, in .*learning_rate 0\.05"):
        worker(tmp_path, GOOD, GOOD, BAD, BAD, BAD)
    assert names(tmp_path) == ["1", "diverged-2"]
    assert caplog.text.count("is not finite") == 3


def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path):
    with pytest.raises(DivergedError, match="an update of step 3 has left weights that are not finite"):
        worker(tmp_path, GOOD, GOOD, RUINED)
    assert names(tmp_path) == ["1", "2"]


@pytest.mark.parametrize(
    ("last", "left"), [((BAD, IDLE), ["1", "diverged-2", "diverged-4"]), ((BAD, GOOD), ["2", "4"])]
)
def test_the_newest_checkpoint_of_a_complete_run_is_a_good_one(tmp_path, last, left):
    one = worker(tmp_path, GOOD, GOOD, *last)
    one._obey(Ended(complete=True))
    assert names(tmp_path) == left
