"""Evaluation while training: who is given what, under which version, and what comes of it."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from drive import Drive, config, only
from tailrace.config.tree import SCHEDULES, Config, EvalSettings, Run
from tailrace.control.evaluation import is_due
from tailrace.protocol import (
    Command,
    EvalSetsOpened,
    Evaluate,
    Finished,
    Forget,
    KeepCheckpoints,
    LoadWeights,
    RecordEvaluation,
    ReplicaLost,
    Request,
    SampleFailed,
    Stop,
    TrajectoryMeta,
)
from tailrace.scoring import EvalSet, PromptScore, summed_up
from tailrace.types import EVALUATION


def evaluated(kind: str = "trajectory", steps: int = 100, **settings: Any) -> Config:
    return config(kind, eval=EvalSettings(**{"every": 1, **settings}), run=Run(steps=steps))


class Evaluating(Drive):
    """With one set of two prompts; whatever is given out is remembered until it has ended."""

    def __init__(self, config: Config, replicas: int = 2) -> None:
        super().__init__(config, replicas)
        self.given: dict[int, tuple[int, int, Request]] = {}  # replica and version
        self.tell(EvalSetsOpened((EvalSet("held_out", 2),)))

    def tell(self, event: Any, after: float = 0.0) -> list[Command]:
        commands = super().tell(event, after)
        for order in [one for one in commands if isinstance(one, Evaluate)]:
            self.given |= {one.trajectory: (order.replica, order.version, one) for one in order.requests}
        return commands

    def verdict(self, trajectory: int, reward: float = 1.0, newest: int | None = None) -> list[Command]:
        replica, version, request = self.given.pop(trajectory)
        meta = TrajectoryMeta(trajectory, request.attempt, 7, version, newest or version, "stop", reward)
        return self.tell(Finished(replica, meta))

    def evaluate(self, *rewards: float) -> list[Command]:
        """All that is given out comes back with these rewards in turn, until the evaluation is over."""
        last: list[Command] = []
        for reward in cycle(rewards):
            last = self.verdict(min(self.given), reward)
            if any(isinstance(one, RecordEvaluation) for one in last):
                break
        return last


def step(drive: Drive) -> None:
    """One more version, everywhere."""
    made = drive.plane.state.training.version
    if drive.plane.state.fetching:
        drive.fetch()
    drive.finish_all()
    drive.train()
    drive.store_everywhere(made + 1)


def test_it_is_due_every_so_many_versions_and_before_and_after():
    settings = evaluated(steps=10, every=4)
    assert [version for version in range(11) if is_due(settings, version)] == [0, 4, 8, 10]
    without = config(eval=EvalSettings(every=4), run=Run(steps=10, evaluate=False))
    assert [version for version in range(11) if is_due(without, version)] == [4, 8]


def test_nothing_is_evaluated_unless_it_is_asked_for():
    drive = Drive(config()).join_all()
    drive.tell(EvalSetsOpened((EvalSet("held_out", 2),)))
    step(drive)
    assert not drive.orders(Evaluate)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_replica_keeps_its_version_until_its_samples_have_ended(kind):
    drive = Evaluating(evaluated(kind, every=100), replicas=1)
    drive.join_all()
    order = only(drive.sent, Evaluate)
    assert (order.version, [one.prompt for one in order.requests]) == (0, [EVALUATION, EVALUATION + 1])
    drive.finish_all()
    drive.train()
    drive.store_everywhere(1)
    drive.finish_all()
    assert not drive.orders(LoadWeights), "it waits, with newer weights at hand"
    drive.verdict(EVALUATION)
    assert not drive.orders(LoadWeights)
    assert only(drive.verdict(EVALUATION + 1), RecordEvaluation).version == 0
    drive.finish_all()
    assert [order.version for order in drive.orders(LoadWeights)] == [1]


def test_what_was_generated_under_two_versions_does_not_count():
    drive = Evaluating(evaluated(), replicas=1)
    drive.join_all()
    drive.plane.state.training.version = 1
    drive.verdict(EVALUATION, newest=1)
    drive.verdict(EVALUATION + 1)
    assert drive.given[EVALUATION][2].attempt == 2, "it is generated again"


def test_a_lost_replica_s_samples_are_evaluated_by_another():
    drive = Evaluating(evaluated(samples=1))
    drive.join_all()
    assert {replica for replica, _, _ in drive.given.values()} == {0, 1}
    (lost,) = [trajectory for trajectory, (replica, _, _) in drive.given.items() if replica == 0]
    drive.tell(ReplicaLost(0, 1, "it died"))
    drive.evaluate(1.0)
    assert drive.orders(Evaluate)[-1].replica == 1
    assert [one.trajectory for one in drive.orders(Evaluate)[-1].requests] == [lost]
    assert only(drive.sent, RecordEvaluation).results[0].accuracy == 1.0


def lose_version_0(drive: Evaluating) -> None:
    """In the middle of its evaluation; there is another one by then."""
    drive.verdict(EVALUATION)
    step(drive)
    for replica in (0, 1):
        drive.tell(ReplicaLost(replica, 1, "it died"))
    drive.plane.state.relays.relays[0].versions.remove(0)
    del drive.plane.state.relays.holders[0]
    drive.join(0, incarnation=2, version=1)


def test_a_version_that_is_evaluated_out_of_turn_may_be_the_best_and_its_checkpoint_is_kept_until_that_is_known():
    drive = Evaluating(evaluated(every=100, keep_best=1))
    drive.join_all()
    lose_version_0(drive)
    told = [(one.versions, one.judged) for one in drive.orders(KeepCheckpoints)]
    assert told == [((1,), -1)]


def test_if_the_version_is_gone_the_newest_is_evaluated_instead():
    drive = Evaluating(evaluated(every=100))
    drive.join_all()
    lose_version_0(drive)
    assert drive.orders(Evaluate)[-1].version == 1
    assert drive.orders(Evaluate)[-1].requests[0].trajectory > EVALUATION + 1, "with numbers of its own"


def test_a_sample_whose_judge_fails_for_good_counts_as_wrong():
    drive = Evaluating(evaluated(), replicas=1)
    drive.join_all()
    for _ in range(drive.plane.config.groups.max_failures):
        replica, _, request = drive.given.pop(EVALUATION)
        drive.tell(SampleFailed(replica, EVALUATION, request.attempt, "it hung"))
        if EVALUATION + 1 in drive.given:
            drive.verdict(EVALUATION + 1)
    result = only(drive.sent, RecordEvaluation).results[0]
    assert (result.accuracy, result.failed, result.mean_reward) == (0.5, 1, 1.0)


def test_payloads_are_freed_prompt_by_prompt():
    drive = Evaluating(evaluated(samples=2), replicas=1)
    drive.join_all()
    drive.evaluate(1.0)
    freed = [one.trajectories for one in drive.orders(Forget) if one.reason == "evaluated"]
    assert freed == [(EVALUATION, EVALUATION + 1), (EVALUATION + 2, EVALUATION + 3)]


def test_the_trainer_is_told_which_checkpoints_are_the_best():
    drive = Evaluating(evaluated("partial", keep_best=2), replicas=1)
    drive.join_all()
    for rewards in ((0.0,), (1.0,), (1.0, 0.0), (0.0,)):
        drive.evaluate(*rewards)
        step(drive)
        drive.load(0)
    told = [(one.versions, one.judged) for one in drive.orders(KeepCheckpoints)]
    assert told == [((0,), 0), ((1, 0), 1), ((1, 2), 2), ((1, 2), 3)]


def test_it_stops_early_when_nothing_gets_better():
    drive = Evaluating(evaluated("partial", patience=2), replicas=1)
    drive.join_all()
    for rewards in ((1.0, 0.0), (1.0,), (1.0,)):
        drive.evaluate(*rewards)
        step(drive)
        drive.load(0)
    assert not drive.orders(Stop)
    drive.evaluate(0.0)
    assert "no better than v1 (1.000; eval.patience)" in only(drive.sent, Stop).reason


def test_the_last_version_is_evaluated_before_the_run_ends():
    drive = Evaluating(evaluated(steps=1), replicas=1)
    drive.join_all()
    drive.evaluate(0.0)
    drive.finish_all()
    drive.train()
    assert not drive.orders(Stop)
    drive.store_everywhere(1)
    drive.load(0)
    ended = drive.evaluate(1.0)
    assert only(ended, RecordEvaluation).version == 1
    assert only(ended, Stop).reason == "all steps are done"


def test_pass_at_k_is_the_chance_that_one_of_k_is_right():
    scores = [PromptScore(scored=4, right=right) for right in (0, 1, 4)]
    result = summed_up("held_out", scores, 4)
    assert result.accuracy == pytest.approx(5 / 12)
    assert result.passed == pytest.approx({1: 5 / 12, 2: (0 + 0.5 + 1) / 3, 4: 2 / 3})
    assert set(result.metrics) >= {"eval/held_out/avg@4", "eval/held_out/pass@4", "eval/held_out/reward"}
