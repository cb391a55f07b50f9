"""The vault gives back every token and log-prob as it was, and only the newest assignment may write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tailrace.store.vault import Vault, _crc, held

from tailrace.config import load
from tailrace.obs.story import render_held
from tailrace.store.journal import JournalError, JournalWriter
from tailrace.store.run import RunStore
from tailrace.types import Row, Segment, Trajectory, id_bytes

PROMPTS = [
    Row(0, id_bytes((5, 6, 7)), "what is 2 + 2?", {"answer": "4"}),
    Row(1, id_bytes((8,)), [{"role": "user", "content": "wie geht’s?"}], {"answer": None, "hints": [1, 2.5]}),
]
TOOL = Segment.of(None, (40, 41))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "run", load([], ["--model.preset", "qwen2.5-7b"])) as store:
        store.vault.add_prompts(PROMPTS)
        yield store


@pytest.fixture
def vault(store: RunStore) -> Vault:
    return store.vault


def sampled(version: int, *tokens: int) -> Segment:
    return Segment.of(version, tokens, [-token / 7 for token in tokens])


def begin(vault: Vault, trajectory: int = 3, epoch: int = 1, resume: bool = False) -> None:
    vault.assign(trajectory, epoch, group=1, prompt=0, resume=resume)


def test_a_trajectory_comes_back_as_it_went_in(vault: Vault) -> None:
    begin(vault)
    pieces = [sampled(2, 0, 2**31 - 1), TOOL, sampled(3, 9)]
    assert vault.append(3, 1, pieces[:2])
    assert vault.append(3, 1, pieces[2:])
    assert vault.finish(3, 1, "stop", 0.1)
    assert vault.prefix(3) == tuple(pieces)
    assert vault.read([3]) == [Trajectory(3, 1, 0, (Segment.of(None, (5, 6, 7)), *pieces), "stop", 0.1)]


@pytest.mark.parametrize("reward", [-0.0, 1e308, -1e308, 5e-324, -5e-324, True, 3, np.float32(0.1), np.float64(-0.0)])
def test_any_finite_reward_comes_back(store: RunStore, reward: float) -> None:
    begin(store.vault)
    assert store.vault.finish(3, 1, "stop", reward)
    store.close(complete=False)
    with RunStore.reopen(store.folder) as again:
        assert repr(again.vault.read([3])[0].reward) == repr(float(reward) or 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(store: RunStore, reward: float) -> None:
    begin(store.vault)
    with pytest.raises(JournalError, match=r"t3 cannot be stored with a reward of -?(nan|inf)"):
        store.vault.finish(3, 1, "stop", reward)
    assert store.vault.finish(3, 1, "stop", 1.0)


def written_by_an_earlier_release(store: RunStore, reward: float) -> None:
    """Its checksum was of the number as Python had it, whatever SQLite made of it."""
    begin(store.vault)
    store.vault.finish(3, 1, "stop", 0.0)
    values = (reward, _crc(3, "stop", reward))
    store._database.execute("UPDATE trajectories SET reward = ?, crc = ? WHERE id = 3", values)


def test_a_minus_zero_of_an_earlier_release_is_read(store: RunStore) -> None:
    written_by_an_earlier_release(store, -0.0)
    assert store.vault.read([3])[0].reward == 0.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_what_an_earlier_release_stored_without_a_number_is_refused_in_a_sentence(store: RunStore, reward) -> None:
    written_by_an_earlier_release(store, reward)
    with pytest.raises(JournalError, match=r"the reward of t3 is not a finite number, .* begin a new run"):
        store.vault.read([3])


def test_neighbours_of_one_version_are_one_segment(vault: Vault) -> None:
    begin(vault)
    for token in range(5):
        vault.append(3, 1, [sampled(4, token)])
    vault.append(3, 1, [TOOL, Segment.of(None, ()), TOOL, sampled(4, 5)])
    assert vault.prefix(3) == (sampled(4, 0, 1, 2, 3, 4), Segment.of(None, (40, 41, 40, 41)), sampled(4, 5))


def test_trajectories_are_read_in_the_order_asked_for(vault: Vault) -> None:
    for id in range(600):
        vault.assign(id, 1, id // 4, id % 2, resume=False)
        vault.append(id, 1, [sampled(0, id)])
    asked = list(range(598, 0, -3))
    read = vault.read(asked)
    assert [one.id for one in read] == asked
    assert [one.segments for one in read[:2]] == [
        (Segment.of(None, (5, 6, 7)), sampled(0, 598)),
        (Segment.of(None, (8,)), sampled(0, 595)),
    ]


def test_a_moved_trajectory_goes_on_from_its_prefix(vault: Vault) -> None:
    begin(vault)
    vault.append(3, 1, [sampled(1, 10)])
    begin(vault, epoch=2, resume=True)
    vault.append(3, 2, [sampled(1, 11)])
    assert vault.prefix(3) == (sampled(1, 10, 11),)


def test_one_that_begins_anew_has_nothing_left(vault: Vault) -> None:
    begin(vault)
    vault.append(3, 1, [sampled(1, 10)])
    vault.fail(3, 1, "the tool hung")
    begin(vault, epoch=2)
    assert vault.prefix(3) == ()
    vault.append(3, 2, [sampled(2, 12)])
    assert vault.read([3])[0].segments[1:] == (sampled(2, 12),)


def test_late_words_are_ignored(vault: Vault) -> None:
    assert not vault.append(9, 1, [sampled(0, 1)])  # never heard of
    begin(vault)
    begin(vault, epoch=2, resume=True)
    assert not vault.append(3, 1, [sampled(0, 1)])
    assert not vault.finish(3, 1, "stop", 1.0)
    assert not vault.fail(3, 1, "too late")
    assert vault.finish(3, 2, "stop", 0.5)
    assert not vault.append(3, 2, [sampled(0, 1)])
    assert not vault.finish(3, 2, "length", 1.0)
    assert vault.read([3])[0].segments[1:] == ()
    assert vault.read([3])[0].reward == 0.5


def test_prompts_are_kept_as_they_were_first_given(vault: Vault) -> None:
    vault.add_prompts([Row(0, id_bytes((99,)), "another", {})])
    assert [vault.row(0), vault.row(1)] == PROMPTS


def test_the_tokens_of_what_is_forgotten_are_archived_or_deleted(store: RunStore) -> None:
    vault = store.vault
    for id, archive in ((0, True), (1, False)):
        begin(vault, id)
        vault.append(id, 1, [sampled(0, 7)])
        vault.finish(id, 1, "stop", 1.0)
        vault.trained([id], step=4)
        assert len(vault.read([id])[0].segments) == 2  # a trainer that was lost may ask for it again
        vault.forget([id], archive)
    assert vault.prefix(0) == (sampled(0, 7),)
    assert vault.prefix(1) == ()
    store.commit()
    kept, gone = held(store.folder, "group", 1)
    assert (kept.state, kept.step, kept.payload, kept.tokens) == ("trained", 4, "archived", 1)
    assert (gone.state, gone.step, gone.payload, gone.tokens) == ("trained", 4, "deleted", 0)


def test_a_running_one_that_is_dropped_grows_no_further(vault: Vault) -> None:
    begin(vault)
    vault.forget([3], archive=True, ending="stale")
    assert not vault.append(3, 1, [sampled(0, 7)])


def test_after_a_crash_only_the_newest_assignment_may_write(store: RunStore) -> None:
    begin(store.vault)
    begin(store.vault, epoch=2, resume=True)
    store.vault.assign(4, 1, 1, 0, resume=False)
    store.vault.finish(4, 1, "stop", 1.0)
    store.close(complete=False)
    with RunStore.reopen(store.folder) as again:
        assert not again.vault.append(3, 1, [sampled(0, 7)])
        assert again.vault.append(3, 2, [sampled(0, 8)])
        assert not again.vault.append(4, 1, [sampled(0, 7)])


def test_what_the_vault_knows_can_be_told(store: RunStore) -> None:
    begin(store.vault)
    store.vault.append(3, 1, [sampled(2, 7, 8), TOOL, sampled(3, 9)])
    store.vault.finish(3, 1, "stop", 0.5)
    begin(store.vault, 4)
    store.vault.fail(4, 1, "the reward hung")
    store.commit()
    assert render_held(held(store.folder, "prompt", 0)).splitlines() == [
        "     vault    t3, finished, 5 tokens, versions 2 to 3, stop, reward 0.5",
        "     vault    t4, failed, 0 tokens, the reward hung",
    ]
    assert held(store.folder, "replica", 0) == []


def test_a_simulated_run_has_no_vault(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, load([], ["--model.preset", "qwen2.5-7b"])):
        pass
    assert held(tmp_path, "trajectory", 0) == []
