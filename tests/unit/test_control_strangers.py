"""Control and the strangers: what they are given, who looks at what they hand in, and what becomes of one that lies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from drive import Drive, config, only, routes
from tailrace.config.tree import EvalSettings, Groups, Local, RelaySettings, Run, Schedule, Strangers
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Activate,
    Cancel,
    CheckFailed,
    Command,
    Dismiss,
    Drop,
    EngineWork,
    EvalSetsOpened,
    Evaluate,
    Finished,
    Forget,
    HandedIn,
    HostJoined,
    HostLeft,
    LoadWeights,
    PriceChanged,
    Progressed,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    Start,
    TimerFired,
    Train,
    VersionStored,
    WeightsLoaded,
    WorkerRefused,
    WorkerRevoked,
)
from tailrace.scoring import EvalSet

CHECKER, OURS, THEIRS, HOST = 0, 1, 7, 3


def fleet(share: float = 1.0, **sections: Any) -> Drive:
    """A checker, a replica of our own, and a stranger's."""
    settings = config(
        prompts=3,
        strangers=Strangers(checkers=1, check_share=share),
        local=Local(listen="127.0.0.1", replicas=2),
        **sections,
    )
    drive = Drive(settings).join_all()
    drive.keep_alive()
    drive.tell(HostJoined(HOST, (THEIRS,), worker="alice", salt=5))
    drive.tell(RelayJoined(HOST, 1))
    drive.tell(VersionStored(HOST, 1, 0))
    drive.tell(ReplicaJoined(THEIRS, 1, HOST, -1, 10_000, 64))
    drive.load(THEIRS)
    drive.keep_alive()
    return drive


def hand_in(drive: Drive, request: Request, **changes: Any) -> list[Command]:
    return drive.tell(HandedIn(THEIRS, (drive.meta(request, **changes),)))


def sample(drive: Drive, request: Request) -> Any:
    return drive.plane.state.ledger.samples[request.trajectory]


def test_a_checker_gets_nothing_to_generate_and_a_stranger_nothing_that_others_began():
    drive = fleet()
    assert not drive.running(CHECKER)
    drive.tell(ReplicaLost(OURS, 1, "gone"))
    begun = [one for one in drive.plane.state.ledger.samples.values() if one.state == "waiting"]
    assert begun, "they wait for another of our own"
    hand_in(drive, drive.running(THEIRS)[0])
    assert all(not request.resume for request in drive.running(THEIRS))


def test_what_is_handed_in_is_scored_again_and_judged_by_a_checker_and_then_trained():
    drive = fleet()
    request = drive.running(THEIRS)[0]
    hand_in(drive, request)
    (checked,) = drive.running(CHECKER)
    assert (checked.trajectory, checked.check, checked.resume) == (request.trajectory, "draws", True)
    assert checked.attempt > request.attempt
    drive.finish(checked)
    worker = drive.plane.state.strangers.workers["alice"]
    assert (worker.handed_in, worker.scored, worker.passed) == (1, 1, 1)
    assert sample(drive, request).state == "done"


def test_a_stranger_cannot_finish_a_sample_itself_and_a_second_hand_in_changes_nothing():
    drive = fleet()
    request = drive.running(THEIRS)[0]
    hand_in(drive, request)
    before = drive.plane.snapshot()
    assert not drive.tell(Finished(THEIRS, drive.meta(request)))
    hand_in(drive, request)
    assert drive.plane.snapshot() == before


def test_which_samples_are_scored_follows_from_a_number_that_strangers_do_not_know():
    worker = fleet(share=0.25).plane.state.strangers.workers["alice"]
    scored = [id for id in range(4000) if worker.check(id, 0.25) == "draws"]
    assert 850 < len(scored) < 1150
    worker.salt = 6
    assert scored != [id for id in range(4000) if worker.check(id, 0.25) == "draws"]


def test_a_sample_is_checked_under_its_own_version_though_a_newer_one_is_there():
    drive = fleet()
    request = drive.running(THEIRS)[0]
    drive.finish_all(OURS)
    drive.train(after=5.0)
    drive.store_everywhere(1)
    drive.tell(VersionStored(HOST, 1, 1))
    assert drive.plane.state.fleet.replicas[THEIRS].version == 0, "its samples keep their version"
    checker = drive.plane.state.fleet.replicas[CHECKER]
    checker.version = 1
    orders = hand_in(drive, request)
    assert (only(orders, LoadWeights).replica, only(orders, LoadWeights).version) == (CHECKER, 0)
    drive.tell(WeightsLoaded(CHECKER, 1, 0))
    assert [one.trajectory for one in drive.running(CHECKER)] == [request.trajectory]


def test_what_needs_another_version_is_not_kept_waiting_by_what_needs_none():
    drive = fleet(share=0.5)
    worker, requests = drive.plane.state.strangers.workers["alice"], drive.running(THEIRS)
    by_check = {worker.check(one.trajectory, 0.5): one for one in requests}
    assert set(by_check) == {"draws", "turn"}
    checker = drive.plane.state.fleet.replicas[CHECKER]
    checker.version = 1
    drive.plane.state.relays.relays[0].versions = [0, 1]
    drive.plane.state.relays.holders = {0: 1, 1: 1}
    drive.plane.state.training.version = drive.plane.state.training.step = 1
    assert only(hand_in(drive, by_check["draws"]), LoadWeights).version == 0
    hand_in(drive, by_check["turn"])
    assert not drive.running(CHECKER), "it waits until the first one has its version"
    drive.tell(WeightsLoaded(CHECKER, 1, 0))
    assert {one.check for one in drive.running(CHECKER)} == {"draws", "turn"}


def test_relays_keep_one_version_more_than_the_bound_while_strangers_are_admitted():
    def kept(drive: Drive) -> int:
        for version in range(1, 9):
            drive.plane.state.training.version = drive.plane.state.training.step = version
            drive.tell(VersionStored(0, 1, version))
        return len(drive.plane.state.relays.relays[0].versions)

    schedule = Schedule(kind="trajectory", max_inflight=6, max_staleness=4)
    assert kept(fleet(schedule=schedule)) == 5
    drive = fleet(schedule=schedule)
    drive.tell(WorkerRevoked("alice", ""))
    assert kept(drive) == RelaySettings().keep_versions


def test_what_cannot_be_checked_any_more_is_generated_anew():
    drive = fleet()
    request = drive.running(THEIRS)[0]
    relay = drive.plane.state.relays.relays[0]
    drive.tell(RelayLost(0, 1, "gone"))
    drive.plane.state.training.version = drive.plane.state.training.step = 1
    drive.tell(RelayJoined(0, 2))
    drive.tell(VersionStored(0, 2, 1))
    drive.plane.state.fleet.replicas[CHECKER].version = 1
    assert relay.versions == [1]
    orders = hand_in(drive, request)
    assert only(orders, Forget).trajectories == (request.trajectory,)
    assert sample(drive, request).stranger == -1


@pytest.mark.parametrize("how", ["check", "revoked", "refused"])
def test_an_excluded_stranger_is_sent_away_and_its_work_is_generated_anew(how: str):
    drive = fleet()
    done, unchecked, *_ = drive.running(THEIRS)
    hand_in(drive, done)
    drive.finish(drive.running(CHECKER)[0])
    hand_in(drive, unchecked)
    (checked,) = drive.running(CHECKER)
    happened = {
        "check": CheckFailed(
            CHECKER, checked.trajectory, checked.attempt, "token 3 is not the one that the seed gives"
        ),
        "revoked": WorkerRevoked("alice", "lost laptop"),
        "refused": WorkerRefused("alice", "nonsense"),
    }
    orders = drive.tell(happened[how])
    assert only(orders, Dismiss).worker == "alice"
    assert set(only(orders, Forget).trajectories) == {done.trajectory, unchecked.trajectory}
    state = drive.plane.state
    assert state.fleet.replicas[THEIRS].state == "departed"
    assert state.relays.relays[HOST].departed
    assert all(one.stranger == -1 for one in state.ledger.samples.values())
    again = drive.tell(HostJoined(4, (8,), worker="alice", salt=9))
    assert [type(one) for one in again] == [Dismiss], "it does not come in again"
    assert not [one for one in again if isinstance(one, Start)]


def test_what_was_picked_for_training_before_a_lie_was_found_stays():
    drive = fleet()
    for request in drive.running(THEIRS):
        hand_in(drive, request)
    drive.finish_all(CHECKER)
    drive.finish_all(OURS)
    picked = {id for group in drive.orders(Train)[0].groups for id in group.trajectories}
    theirs = {one.id for one in drive.plane.state.ledger.samples.values() if one.stranger == THEIRS}
    assert picked & theirs
    orders = drive.tell(WorkerRevoked("alice", ""))
    assert not picked & {id for one in orders if isinstance(one, Forget) for id in one.trajectories}


def test_a_lost_strangers_tokens_are_no_prefix_for_anybody():
    drive = fleet()
    had = [one.trajectory for one in drive.running(THEIRS)]
    drive.tell(ReplicaLost(THEIRS, 1, "gone"))
    samples = drive.plane.state.ledger.samples
    assert all(samples[id].oldest == -1 or samples[id].began == samples[id].attempt for id in had)


def test_what_a_stranger_does_not_hand_in_in_time_is_generated_by_others():
    drive = fleet()
    had = drive.running(THEIRS)
    commands = drive.tell(TimerFired("health"), after=drive.plane.config.strangers.hand_in_s)
    assert {one.trajectory for one in only(commands, Cancel).samples} == {one.trajectory for one in had}
    before = drive.plane.snapshot()
    hand_in(drive, had[0])
    assert drive.plane.snapshot() == before, "it comes too late"


def test_a_checker_is_not_to_blame_for_what_a_stranger_made_so_that_its_judge_fails():
    drive = fleet(groups=Groups(min_survivors=1, max_failures=1))
    for _ in range(4):
        for request in drive.running(THEIRS):
            hand_in(drive, request)
        for checked in drive.running(CHECKER):
            drive.tell(SampleFailed(CHECKER, checked.trajectory, checked.attempt, "the reward raised"))
        drive.finish_all(OURS)
    states = drive.plane.state.fleet.replicas
    assert states[CHECKER].state == "ready"
    assert states[THEIRS].state == "quarantined"


def test_a_lost_checkers_work_goes_to_the_checker_again():
    drive = fleet()
    request = drive.running(THEIRS)[0]
    hand_in(drive, request)
    drive.tell(ReplicaLost(CHECKER, 1, "gone"))
    assert sample(drive, request).state == "handed_in"
    drive.tell(ReplicaJoined(CHECKER, 2, 0, 0, 10_000, 64))
    assert [one.trajectory for one in drive.running(CHECKER)] == [request.trajectory]


def test_a_strangers_relay_is_a_leaf_and_its_loss_changes_nothing_for_others():
    drive = fleet()
    state = drive.plane.state
    assert state.relays.master == 0
    assert state.relays.feeders == {HOST: 0}
    assert state.relays.live == 1
    assert state.relays.newest_everywhere == 0
    orders = drive.tell(RelayLost(HOST, 1, "gone"))
    assert routes(orders) == {0: ()}
    assert state.relays.source_for(HOST, 0) is None, "a stranger gets nothing from our relays by itself"


def test_a_relay_of_ours_that_dies_leaves_the_strangers_to_another():
    drive = Drive(config(strangers=Strangers(checkers=1), local=Local(listen="127.0.0.1")), relays=2).join_all()
    drive.keep_alive()
    drive.tell(HostJoined(HOST, (THEIRS,), worker="alice", salt=5))
    assert routes(drive.tell(RelayJoined(HOST, 1))) == {0: (1, HOST), HOST: ()}
    assert routes(drive.tell(RelayLost(0, 1, "gone")))[1] == (HOST,)
    drive.tell(RelayLost(1, 1, "gone"))
    assert routes(drive.tell(RelayJoined(0, 2)))[0] == (HOST,), "it waited for one of ours"


def test_what_a_stranger_says_of_itself_does_not_change_what_others_are_given():
    drive = fleet()
    theirs = drive.plane.state.fleet
    before = msgspec.msgpack.encode((theirs.kinds, theirs.speed))
    drive.tell(ReplicaJoined(THEIRS, 2, HOST, 0, 1, 1))
    for count in range(1, 9):
        drive.tell(Progressed(THEIRS, 2, 0, 0, 0, EngineWork(1e9 * count, count, count, count, count)))
    theirs.sort_out()
    assert msgspec.msgpack.encode((theirs.kinds, theirs.speed)) == before
    assert theirs.kinds[0].members == 2, "it is one of those who generate, and the checker is not"


def test_a_fast_stranger_sends_nobody_home_and_is_not_sent_home():
    drive = fleet()
    for replica, seconds in ((OURS, 4.0), (THEIRS, 0.001)):
        drive.tell(PriceChanged((replica,), 1.0))
        for count in range(1, 9):
            work = EngineWork(seconds * count, 10 * count, 40 * count, 0, 0)
            drive.tell(Progressed(replica, 1, 40, 4, 0, work))
    drive.finish_all(OURS)
    drive.train(after=10.0)
    replicas = drive.plane.state.fleet.replicas
    assert replicas[THEIRS].rate > 0.0, "what it says is known"
    assert not drive.orders(Activate)


@pytest.mark.parametrize("ending", [False, True])
def test_neither_strangers_nor_checkers_evaluate(ending: bool):
    drive = fleet(eval=EvalSettings(every=1), run=Run(steps=1 if ending else 100))
    drive.tell(EvalSetsOpened((EvalSet("held_out", 40),)))
    drive.finish_all(OURS)
    drive.train()
    drive.store_everywhere(1)
    for replica in (OURS, THEIRS):
        if drive.plane.state.fleet.replicas[replica].state == "pulling":
            drive.load(replica)
    assert {one.replica for one in drive.orders(Evaluate)} == {OURS}
    if ending:
        assert drive.plane.state.evaluation.ending
        began = [one for one in drive.plane.state.ledger.samples.values() if one.replica == THEIRS]
        assert not began, "and what a stranger had is put aside"


def test_what_a_stranger_says_of_its_place_makes_its_relay_no_relay_of_a_site():
    drive = fleet()
    drive.tell(HostJoined(4, (), site="oslo"))
    drive.tell(RelayJoined(4, 1))
    drive.tell(HostJoined(5, (), site="oslo", worker="bob", salt=5))
    assert routes(drive.tell(RelayJoined(5, 1))) == {0: (4, HOST, 5), 5: ()}, "it is fed from home"
    relays = drive.plane.state.relays
    assert relays.sites == {"oslo": [4]}
    drive.tell(RelayLost(4, 1, "gone"))
    assert relays.newest_for(4) == 0, "from the master, not from a stranger"


def test_a_snapshot_with_strangers_gives_the_same_control_back():
    drive = fleet()
    hand_in(drive, drive.running(THEIRS)[0])
    restored = ControlPlane.restore(drive.plane.config, drive.plane.snapshot())
    event = HostLeft(HOST, "left")
    assert restored.handle(drive.now, event) == drive.plane.handle(drive.now, event)
    assert not drive.orders(Drop)
