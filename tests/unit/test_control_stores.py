"""Sample stores: one that dies comes back with everything; one that is lost for good costs its samples."""

from __future__ import annotations

from typing import Any

import pytest

from drive import Drive, config, only
from tailrace.config.tree import SCHEDULES, Schedule
from tailrace.protocol import (
    Cancel,
    Checkpointed,
    FetchPrompts,
    Forget,
    HostJoined,
    HostLeft,
    LoadWeights,
    Publish,
    RelayJoined,
    RelayLost,
    ReplicaLost,
    Start,
    Stop,
    StoreJoined,
    StoreLost,
    Train,
    TrainerJoined,
    TrainerLost,
    TrainFailed,
    VersionStored,
)

GUEST = 1  # a machine that joined with replica 1, relay 1 and sample store 1


def fleet(kind: Any = "trajectory") -> Drive:
    """Replica 0 writes to store 0, replica 1 to the store of its own machine."""
    schedule = Schedule(kind=kind, max_staleness=100, max_inflight=4)
    drive = Drive(config(prompts=2, size=2, schedule=schedule), replicas=1, stores=1)
    drive.tell(HostJoined(GUEST, (1,), store=True))
    return drive.join_all()


def test_a_replica_writes_to_the_store_of_its_own_machine():
    drive = fleet()
    assert {one.store for one in drive.running(0)} == {0}
    assert {one.store for one in drive.running(1)} == {GUEST}


def test_a_store_that_dies_is_started_again_and_nothing_is_generated_anew():
    drive = fleet()
    before = {(one.trajectory, one.attempt) for one in drive.running()}
    drive.tell(StoreLost(0, 1, "it was killed"))
    drive.keep_alive()
    assert [(one.role, one.id) for one in drive.tick(5.0) if isinstance(one, Start)] == [("store", 0)]
    drive.tell(StoreJoined(0, 2))
    assert {(one.trajectory, one.attempt) for one in drive.running()} == before


def test_a_store_that_is_back_is_asked_again_for_the_prompts_that_were_on_their_way():
    drive = Drive(config(), stores=1)
    asked = drive.orders(FetchPrompts)
    assert drive.tell(StoreJoined(0, 1)) == asked


def test_what_a_lost_store_had_is_generated_anew_wherever_it_was():
    drive = fleet()
    finished = drive.running(1)[0]
    drive.finish(finished)
    had = [finished, *drive.running(1)]
    drive.tell(HostLeft(GUEST, "it was switched off"))
    lost = only(drive.sent, Forget)
    assert (set(lost.trajectories), lost.reason) == ({one.trajectory for one in had}, "regenerate")
    for _ in range(3):
        drive.finish_all(0)
    again = drive.orders_of(had)
    assert all(new.attempt > old.attempt and not new.resume for new, old in zip(again, had, strict=True))


def test_a_sample_that_moved_away_is_cancelled_when_its_store_is_lost():
    drive = fleet()
    drive.tell(StoreLost(GUEST, 1, "its disk is full"))
    sample = drive.plane.state.ledger.samples[drive.running(0)[0].trajectory]
    sample.store = GUEST  # as if it had begun there and been moved here by repack
    drive.tell(HostLeft(GUEST, "it was switched off"))
    assert [one.trajectory for order in drive.orders(Cancel) for one in order.samples if order.replica == 0] == [
        sample.id
    ]


def trained_in_two_stores(drive: Drive) -> Train:
    """A step of which one group is in each store."""
    drive.finish_all()
    order = drive.orders(Train)[-1]
    assert {store for group in order.groups for store in group.stores or (0,)} == {0, GUEST}
    return order


def test_what_was_picked_and_cannot_be_fetched_is_generated_anew_and_another_group_takes_its_place():
    drive = fleet()
    order = trained_in_two_stores(drive)
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.tell(TrainFailed(1, order.step, order.mini_batch, "store 1 is gone"))
    lost = next(group for group in order.groups if GUEST in group.stores)
    assert drive.plane.state.ledger.groups[lost.group].state == "open"
    for _ in range(3):
        drive.finish_all(0)
    again = drive.orders(Train)[-1]
    assert (again.step, again.mini_batch, len(again.groups)) == (order.step, order.mini_batch, 2)
    assert [one for one in order.groups if one is not lost] == [one for one in again.groups if one in order.groups]
    assert drive.plane.state.ledger.tally.lost == 0


def test_a_round_that_was_over_goes_on_where_its_samples_are_lost():
    """The next one would wait for ever for the step that they are to make."""
    drive = fleet("one_step")
    drive.finish_all()
    order = drive.orders(Train)[-1]
    drive.finish_all()
    assert not drive.running(), "two rounds are generated, and the third needs version 1"
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.tell(TrainFailed(1, order.step, order.mini_batch, "store 1 is gone"))
    drive.finish_all()
    again = drive.orders(Train)[-1]
    assert (again.step, len(again.groups), {store for one in again.groups for store in one.stores}) == (0, 2, set())


def test_what_a_restarted_trainer_has_to_repeat_is_replaced_where_it_was_lost():
    drive = fleet()
    order = trained_in_two_stores(drive)
    drive.train()
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.tell(TrainerLost(1, "killed"))
    drive.tell(TrainerJoined(2, 0))
    for _ in range(4):
        drive.finish_all(0)
    again = next(one for one in drive.orders(Train) if one.incarnation == 2)
    kept = [group for group in order.groups if GUEST not in group.stores]
    assert list(again.groups[: len(kept)]) == kept
    assert len(again.groups) == 2
    drive.train()
    tally = drive.plane.state.ledger.tally
    assert (tally.trained, tally.lost) == (2, 1)


def lose_all_memory(drive: Drive) -> None:
    """The machine that joined is gone, and all others begin anew: nobody has weights but the trainer's checkpoint."""
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.tell(ReplicaLost(0, 1, "killed"))
    drive.tell(RelayLost(0, 1, "killed"))
    drive.tell(TrainerLost(1, "killed"))
    drive.tell(RelayJoined(0, 2))
    drive.join(0, incarnation=2, version=-1)
    drive.tell(TrainerJoined(2, 0))


def steps_of(drive: Drive, incarnation: int) -> list[tuple[int, int]]:
    return [(one.step, len(one.groups)) for one in drive.orders(Train) if one.incarnation == incarnation]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_where_nobody_has_weights_a_trainer_that_lacks_data_publishes_the_version_it_is_at(kind):
    """It would wait for ever for data that need the version that it cannot make without them."""
    drive = fleet(kind)
    trained_in_two_stores(drive)
    drive.train()
    lose_all_memory(drive)
    published = drive.orders(Publish)[-1]
    assert (published.incarnation, published.version) == (2, 0)
    drive.tell(VersionStored(0, 2, 0))
    drive.load(0)
    while not steps_of(drive, 2):
        drive.finish_all(0)
    drive.train()
    published = drive.orders(Publish)[-1]
    assert (published.incarnation, published.version) == (2, 1)
    drive.tell(VersionStored(0, 2, 1))
    for _ in range(3):
        drive.finish_all(0)
        if drive.orders(LoadWeights)[-1].version == 1:
            drive.load(0)
    assert steps_of(drive, 2) == [(0, 2), (1, 2)]


def test_a_trainer_that_repeats_what_is_still_there_publishes_no_old_version():
    drive = fleet()
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.finish_all()
    drive.finish_all()
    drive.train()
    lose_all_memory(drive)
    assert steps_of(drive, 2) == [(0, 2)]
    assert [one.version for one in drive.orders(Publish) if one.incarnation == 2] == []
    drive.train()
    assert [one.version for one in drive.orders(Publish) if one.incarnation == 2] == [1]


def test_a_round_makes_one_group_more_for_each_that_was_lost_after_it_was_trained():
    drive = fleet("sync")
    trained_in_two_stores(drive)
    drive.train()
    drive.tell(HostLeft(GUEST, "it was switched off"))
    drive.tell(TrainerLost(1, "killed"))
    drive.tell(TrainerJoined(2, 0))
    drive.finish_all()
    drive.train()
    drive.store_everywhere(1)
    drive.load(0)
    drive.finish_all()
    assert [(one.step, len(one.groups)) for one in drive.orders(Train) if one.incarnation == 2] == [(0, 2), (1, 2)]


def test_what_two_checkpoints_cover_may_be_lost():
    drive = fleet()
    trained_in_two_stores(drive)
    drive.train()
    drive.tell(Checkpointed(1, 1))
    drive.tell(HostLeft(GUEST, "it was switched off"))
    assert drive.plane.state.ledger.tally.lost == 0


def test_the_run_ends_when_the_first_store_cannot_be_started_any_more():
    drive = fleet()
    for incarnation in range(1, 6):
        drive.tell(StoreLost(0, incarnation, "the disk is full"))
        drive.keep_alive()
        drive.tick(100.0)
    assert "the sample store is lost" in drive.orders(Stop)[0].reason
    assert "the disk is full" in drive.orders(Stop)[0].reason
