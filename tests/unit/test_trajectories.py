"""What run.db knows of trajectories: only the newest attempt counts, and rewards come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.config import load
from tailrace.obs.story import render_known
from tailrace.protocol import Request, TrajectoryMeta
from tailrace.store.journal import JournalError
from tailrace.store.run import RunStore
from tailrace.store.trajectories import TrajectoryTable, known_trajectories


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "run", load([], ["--model.preset", "qwen2.5-7b"])) as store:
        yield store


@pytest.fixture
def table(store: RunStore) -> TrajectoryTable:
    return store.trajectories


def begin(table: TrajectoryTable, trajectory: int = 3, attempt: int = 1, store: int = 0) -> None:
    table.assign([Request(trajectory, attempt, 1, 0, 10, attempt > 1, 0, store)])


def finish(table: TrajectoryTable, trajectory: int = 3, attempt: int = 1, reward: float | None = 0.5) -> bool:
    return table.finish(TrajectoryMeta(trajectory, attempt, 5, 2, 3, "stop", reward))


@pytest.mark.parametrize("reward", [-0.0, 1e308, -1e308, 5e-324, -5e-324, True, 3, np.float32(0.1), np.float64(-0.0)])
def test_any_finite_reward_comes_back(store: RunStore, reward: float) -> None:
    begin(store.trajectories)
    assert finish(store.trajectories, reward=reward)
    store.close(complete=False)
    with RunStore.reopen(store.folder) as again:
        assert repr(again.trajectories.results([3])[3].reward) == repr(float(reward) or 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(table: TrajectoryTable, reward: float) -> None:
    begin(table)
    with pytest.raises(JournalError, match=r"t3 cannot be stored with a reward of -?(nan|inf)"):
        finish(table, reward=reward)
    assert finish(table, reward=1.0)


@pytest.mark.parametrize("damage", ["reward = 0.0", "tokens = 6", "oldest = 1", "newest = 2"])
def test_what_was_damaged_on_the_disk_is_refused(store: RunStore, damage: str) -> None:
    begin(store.trajectories)
    finish(store.trajectories, reward=1.0)
    assert store.trajectories.results([3]) == {3: (1.0, (2, 3), 5)}
    store._database.execute(f"UPDATE trajectories SET {damage} WHERE id = 3")
    with pytest.raises(JournalError, match="how t3 ended is not as it was written"):
        store.trajectories.results([3])


def test_what_is_missing_is_refused(table: TrajectoryTable) -> None:
    with pytest.raises(JournalError, match="t9 is missing"):
        table.results([9])


def test_late_reports_are_ignored(table: TrajectoryTable) -> None:
    assert not finish(table, 9)  # never heard of
    begin(table)
    begin(table, attempt=2)
    assert not finish(table, attempt=1)
    assert not table.fail(3, 1, "too late")
    assert finish(table, attempt=2, reward=0.5)
    assert not finish(table, attempt=2, reward=1.0)
    assert table.results([3])[3].reward == 0.5


def test_after_a_crash_only_the_newest_attempt_counts(store: RunStore) -> None:
    begin(store.trajectories)
    begin(store.trajectories, attempt=2)
    store.close(complete=False)
    with RunStore.reopen(store.folder) as again:
        assert not finish(again.trajectories, attempt=1)
        assert finish(again.trajectories, attempt=2)


def test_one_that_is_dropped_does_not_finish_any_more(table: TrajectoryTable) -> None:
    begin(table)
    table.forget([3], archived=True, ending="stale")
    assert not finish(table)


def test_one_that_was_lost_with_its_store_may_begin_anew_in_another(store: RunStore) -> None:
    table = store.trajectories
    begin(table, store=1)
    finish(table)
    table.forget([3], archived=True, ending="lost")
    begin(table, attempt=2)
    assert finish(table, attempt=2, reward=0.25)
    store.commit()
    (known,) = known_trajectories(store.folder, "trajectory", 3)
    assert (known.state, known.store, known.payload, known.reward) == ("finished", 0, "live", 0.25)


def test_what_is_known_can_be_told(store: RunStore) -> None:
    table = store.trajectories
    begin(table)
    finish(table)
    begin(table, 4)
    table.fail(4, 1, "the reward hung")
    begin(table, 5)
    begin(table, 6)
    finish(table, 6)
    table.trained([6], step=4)
    table.forget([6], archived=False)
    store.commit()
    assert render_known(known_trajectories(store.folder, "prompt", 0)).splitlines() == [
        "     now      t3, finished, 5 tokens, versions 2 to 3, stop, reward 0.5",
        "     now      t4, failed, the reward hung",
        "     now      t5, running",
        "     now      t6, trained in step 4, 5 tokens, tokens deleted, versions 2 to 3, stop, reward 0.5",
    ]
