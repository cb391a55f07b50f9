"""When checkpoints are written where nobody says how often: by their size, what they cost, and what they free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.config import load
from tailrace.protocol import Checkpointed
from tailrace.sim.simulation import Simulation
from tailrace.trainer.emulated import EmulatedState
from tailrace.trainer.pace import BYTES_PER_PARAMETER, CheckpointPace
from tailrace.trainer.rank_group import EmulatedRankGroup
from tailrace.trainer.worker import TrainerWorker
from tailrace.wire.messages import ComponentSpec, Ended

SMALL, MEDIUM, LARGE = (BYTES_PER_PARAMETER * count for count in (5e5, 1.35e8, 7e9))


def saved_at(pace: CheckpointPace, step_s: float, steps: int, save_s: float = 0.0, tokens: int = 0) -> list[int]:
    """The steps after which a run that takes so long for each would save."""
    saved, now = [], 0.0
    for step in range(1, steps + 1):
        now += step_s
        pace.trained(1, tokens)
        if pace.is_due(step, now):
            now += save_s
            pace.saved(now, save_s)
            saved.append(step)
    return saved


@pytest.mark.parametrize(
    ("size", "step_s", "save_s", "expected"),
    [
        (SMALL, 0.7, 0.01, [*range(1, 31)]),
        (MEDIUM, 20.0, 2.0, [9, 18, 27]),  # 1.6 GB: no more than 10 MB a second
        (MEDIUM, 20.0, 16.0, [9, 25]),  # a slow disk: no more than a twentieth of the time
        (LARGE, 300.0, 60.0, [6, 12, 18, 24, 30]),  # and half an hour at most
    ],
)
def test_a_checkpoint_is_due_by_its_size_and_by_what_it_costs(
    size: float, step_s: float, save_s: float, expected: list[int]
) -> None:
    assert saved_at(CheckpointPace(0, 1, size, 0.0), step_s, 30, save_s) == expected


def test_a_number_of_steps_that_is_given_is_kept_and_falls_on_published_versions() -> None:
    assert saved_at(CheckpointPace(2, 3, LARGE, 0.0), 1.0, 12) == [6, 12]
    assert saved_at(CheckpointPace(0, 3, SMALL, 0.0), 1.0, 7) == [3, 6]


def test_what_is_kept_for_a_repetition_does_not_outgrow_the_checkpoint() -> None:
    tokens = int(MEDIUM / 8 / 4)  # run.db has as many bytes after four steps
    assert saved_at(CheckpointPace(0, 1, MEDIUM, 0.0), 1.0, 12, tokens=tokens) == [4, 8, 12]


def test_three_steps_of_a_small_model_are_not_three_checkpoints() -> None:
    config = load([], ["--model.preset=smollm2-135m", "--workload.prompts_per_step=8", "--run.steps=3"])
    saved: list[Checkpointed] = []
    Simulation(config, lambda now, event, commands: saved.extend(_checkpoints(event))).run()
    assert config.trainer.checkpoint_every == 0
    assert saved == []


def _checkpoints(event: object) -> Iterator[Checkpointed]:
    if isinstance(event, Checkpointed):
        yield event


@pytest.mark.parametrize(("step", "part", "complete", "kept"), [(3, 0, False, True), (3, 1, False, False)])
def test_a_trainer_that_is_stopped_between_two_steps_saves_first(
    tmp_path: Path, step: int, part: int, complete: bool, kept: bool
) -> None:
    place = tmp_path.stat()
    emulated = ["--rollout.engine=emulated", "--trainer.checkpoint_every=1000", "--costs.decode_step=0.001"]
    spec = ComponentSpec(
        "trainer",
        0,
        1,
        "tcp://127.0.0.1:1",
        "ab" * 32,
        str(tmp_path),
        load([], emulated),
        folder_id=(place.st_dev, place.st_ino),
    )
    rank_group = EmulatedRankGroup(spec)
    worker = TrainerWorker(spec, rank_group)
    worker.step, worker.mini_batch, rank_group.learner.state = step, part, EmulatedState(step)
    assert not worker._obey(Ended(complete))
    assert (tmp_path / "checkpoints" / "state.json").exists() == kept
    rank_group.close()
