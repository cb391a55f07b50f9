"""The fold over a journal agrees with control's own books, and the summary says what the run did."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tailrace.config import Config, load, with_values
from tailrace.obs import terminal
from tailrace.obs.fold import Fold
from tailrace.obs.live import LiveRun
from tailrace.obs.summary import Report, summarise, write_summary
from tailrace.protocol import (
    Command,
    ControllerRestarted,
    Event,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    GiveUp,
    HostLeft,
    JudgedTurn,
    LoadWeights,
    Progressed,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    ScoringStarted,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrainGroup,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.sim.simulation import Simulation
from tailrace.store.run import RunStore

OWN_BOX = Path(__file__).parents[2] / "examples" / "clusters" / "own_box.toml"
FAULTS = {
    "faults.replica_per_hour": 300.0,
    "faults.trainer_per_hour": 60.0,
    "faults.controller_per_hour": 60.0,
    "faults.sample_failure": 0.02,
    "faults.duplicate": 0.05,
    "faults.delay_s": 0.1,
}


def requests(*ids: int, attempt: int = 1) -> tuple[Request, ...]:
    """Two samples to a group, prompts of ten tokens."""
    return tuple([Request(id, attempt, id // 2, id // 2, 10) for id in ids])


def finished(id: int, tokens: int, oldest: int, reward: float | None, attempt: int = 1) -> Finished:
    return Finished(0, TrajectoryMeta(id, attempt, tokens, oldest, oldest, "stop", reward))


def train(step: int, *groups: int, incarnation: int = 1) -> Train:
    return Train(incarnation, step, 0, True, tuple([TrainGroup(group, (2 * group, 2 * group + 1)) for group in groups]))


# One replica and one trainer; two seconds pass between the stop and the resumption, and do not count.
RUN: list[tuple[float, Event, list[Command]]] = [
    (4.0, TrainerJoined(1, 0), []),
    (5.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [Generate(0, 1, requests(0, 1, 2, 3, 4, 5))]),
    (7.0, finished(0, 100, 0, 1.0), []),
    (7.0, finished(0, 100, 0, 1.0), []),  # a second report
    (9.0, finished(1, 200, 0, 0.0), [train(0, 0)]),
    (9.5, SampleFailed(0, 4, 1, "the reward raised"), [Generate(0, 1, requests(4, attempt=2))]),
    (11.0, Trained(1, 0, 0), []),
    (12.0, finished(2, 300, 0, 1.0), []),
    (14.0, ControllerRestarted(), []),
    (14.0, ReplicaJoined(0, 2, 0, 0, 100, 8), [LoadWeights(0, 2, 1, 0)]),
    (14.0, TrainerJoined(2, 1), []),
    (15.0, WeightsLoaded(0, 2, 1), [Generate(0, 2, requests(3, attempt=2))]),
    (17.0, finished(3, 400, 0, 1.0, attempt=2), [train(1, 1, incarnation=2)]),
    (18.0, Trained(2, 1, 0), [Forget((4, 5), "stale")]),
]


def record(folder: Path, run: list[tuple[float, Event, list[Command]]]) -> Path:
    config = load([], ["--model.preset", "qwen2.5-7b", "--workload.group_size", "2", "--run.steps", "2"])
    with RunStore.create(folder, config) as store:
        for now, event, commands in run:
            store.record(now, event, commands)
        store.meta.set("accuracy_before", "0.4")
        store.meta.set("reward_before", "-0.25")
        store.metrics.measure(11.0, 0, "trainer", {"publish/stall_s": 0.02, "loss": 1.5})
        store.metrics.measure(18.0, 1, "trainer", {"publish/stall_s": 0.04, "loss": float("nan")})
    return folder


def test_failed_samples_and_failed_attempts_are_counted_apart(tmp_path: Path) -> None:
    """One sample fails at its last attempt too, another one only once; late reports count for nothing."""

    def failed(id: int, attempt: int, failures: int) -> tuple[float, Event, list[Command]]:
        again = [Request(id, attempt + 1, id // 2, id // 2, 10, failures=failures + 1)] if failures < 2 else []
        return 6.0, SampleFailed(0, id, attempt, "the reward raised"), [Generate(0, 1, tuple(again))] if again else []

    run = [*RUN[:2], failed(4, 1, 0), failed(4, 1, 0), failed(4, 2, 1), failed(5, 1, 0), failed(4, 3, 2)]
    table = StringIO()
    summary = write_summary(record(tmp_path / "run", run), table)
    assert (summary.failed_samples, summary.failed_attempts) == (1, 4)
    assert "1; 4 attempts failed in all" in table.getvalue()
    assert summarise(tmp_path / "run").summary.ledger.failed == 0, "that is of groups"


def test_a_small_run_by_hand(tmp_path: Path) -> None:
    run = record(tmp_path / "run", RUN)
    table = StringIO()
    write_summary(run, table)
    assert json.loads((run / "summary.json").read_text()) == {
        "ended": {"state": "interrupted", "reason": ""},
        "accuracy": {"before": 0.4, "after": None},
        "mean_reward": {"before": -0.25, "after": None},
        "wall_s": 16.0,  # the clock says 18
        "steps": 2,
        "trained_groups": 2,
        "trained_samples": 4,
        "trained_tokens": 110 + 210 + 310 + 410,
        "tokens_per_s": 1040 / (16.0 - 5.0),
        "staleness": {"mean": 0.5, "p95": 1.0, "max": 1},
        "repacks": 0,
        "moved": 0,
        "publish_stall_s": pytest.approx(0.03),
        "trainer_idle": pytest.approx(7 / 10),  # for a second after the resumption there was nothing it could do
        "rollout_idle": pytest.approx(1 / 11),  # for its last second the replica has nothing to do
        "rollout_scoring": 0.0,
        "failed_samples": 0,
        "failed_attempts": 1,
        "ledger": {
            "started": 3,
            "trained": 2,
            "dropped_stale": 1,
            "filtered": 0,
            "stopped": 0,
            "failed": 0,
            "lost": 0,
            "in_flight": 0,
        },
        "spent": {"dollars": 0.0, "dollars_of_all": 0.0, "sent_home": 0},
        "savings": {
            "skipped_prompts": 0,
            "stopped_groups": 0,
            "unstarted_samples": 0,
            "left_out_samples": 0,
            "tokens": 0,
        },
        "strangers": {},
        "evaluations": [],
        "best": [],
    }
    assert (run / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out accuracy         0.400 before, - after (share of rewards above 0.5)" in table.getvalue()
    assert "held-out reward           -0.250 before, - after (mean)" in table.getvalue()
    assert "ended                     the run was interrupted and can be resumed" in table.getvalue()
    assert "3 started = 2 trained + 1 stale + 0 filtered + 0 failed + 0 in flight" in table.getvalue()


def test_trained_and_finished_tokens_are_counted_alike(tmp_path: Path) -> None:
    live = LiveRun(load([OWN_BOX], ["--schedule.kind=sync", "--workload.prompts_per_step=8", "--run.steps=2"]))
    result = Simulation(live.config, live.see).run()
    view = live.view()
    assert view.trained_samples == 2 * 8 * 8
    assert view.finished_tokens == view.trained_tokens  # a synchronous run trains all that it finishes
    assert result.decoded_tokens_per_s < result.tokens_per_s  # which has no prompts in it


def test_a_run_that_trained_nothing_has_a_summary_too(tmp_path: Path) -> None:
    begun = summarise(record(tmp_path / "begun", RUN[:2])).summary
    assert (begun.steps, begun.tokens_per_s, begun.ledger.in_flight) == (0, 0.0, 3)
    nothing = write_summary(record(tmp_path / "nothing", []))
    assert (nothing.wall_s, nothing.ledger.started) == (0.0, 0)


def scored(event: Event, reward: float) -> Event:
    if not isinstance(event, Finished):
        return event
    return msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, reward=reward))


@pytest.mark.parametrize("reward", [1e308, -1.7e308, 5e-324])
def test_rewards_and_metrics_of_any_size_can_be_shown(tmp_path: Path, reward: float) -> None:
    live = LiveRun(load([], ["--model.preset", "qwen2.5-7b", "--workload.group_size", "2"]))
    run = [(now, scored(event, reward), commands) for now, event, commands in RUN]
    for now, event, commands in run:
        live.see(now, event, commands)
    live.measure(18.0, 1, "trainer", {"loss": float("inf"), "grad_norm": float("nan"), "entropy": -0.0})
    picture = StringIO()
    Console(file=picture, width=100).print(terminal.picture(live.view(18.0), "run", 30, 100))
    write_summary(record(tmp_path / "run", run))
    assert f"reward {terminal.number(max(-1e100, min(1e100, reward)))}" in picture.getvalue()


def replica_states(report: Report) -> list[tuple[str | float, ...]]:
    return [tuple(span) for span in report.live.activity.replicas[0].timeline(report.live.seconds)]


def test_the_timeline(tmp_path: Path) -> None:
    report = summarise(record(tmp_path / "run", RUN))
    live = report.live
    assert [tuple(span) for span in live.activity.trainer.timeline(live.seconds)] == [
        ("starting", 0.0, 5.0),
        ("idle", 5.0, 9.0),
        ("training", 9.0, 11.0),
        ("idle", 11.0, 12.0),
        ("starting", 12.0, 13.0),  # resumed
        ("idle", 13.0, 15.0),
        ("training", 15.0, 16.0),
    ]
    assert replica_states(report) == [
        ("generating", 5.0, 12.0),
        ("pulling", 12.0, 13.0),
        ("generating", 13.0, 15.0),
        ("idle", 15.0, 16.0),
    ]
    assert [(step.ended, step.reward) for step in live.fold.steps] == [(11.0, 0.5), (16.0, 1.0)]


def test_waiting_for_judges_is_a_state_of_its_own(tmp_path: Path) -> None:
    def scored(*turns: JudgedTurn) -> ScoringStarted:
        return ScoringStarted(0, 1, turns)

    run = [
        *RUN[:2],
        (6.0, scored(*[JudgedTurn(id, 1, 0, final=True) for id in range(5)]), []),
        (7.0, scored(JudgedTurn(5, 1, 0)), []),
        (9.0, GenerationResumed(0, 1, (JudgedTurn(5, 1, 1),)), []),
        (10.0, scored(JudgedTurn(5, 1, 1, final=True)), []),
        (10.5, scored(JudgedTurn(5, 1, 0)), []),  # late
        (12.0, finished(5, 100, 0, 1.0), []),
        *[(13.0, finished(id, 100, 0, 1.0), []) for id in range(5)],
        (15.0, Progressed(0, 1, 0, 0, 0), []),
    ]
    report = summarise(record(tmp_path / "run", run))
    assert replica_states(report) == [
        ("generating", 5.0, 7.0),
        ("environment", 7.0, 9.0),
        ("generating", 9.0, 10.0),
        ("scoring", 10.0, 13.0),
        ("idle", 13.0, 15.0),
    ]
    assert report.summary.rollout_idle == pytest.approx(7 / 10)
    assert report.summary.rollout_scoring == pytest.approx(5 / 10)
    table = StringIO()
    write_summary(tmp_path / "run", table)
    assert "replicas 70 % (judging 50 %)" in table.getvalue()


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["calm", "faults"])
@pytest.mark.parametrize("kind", ["sync", "stream", "partial", "trajectory", "adaptive"])
def test_the_fold_agrees_with_the_ledger(kind: str, faults: dict[str, float]) -> None:
    config = simulated({"schedule.kind": kind} | faults)
    live = LiveRun(config)
    simulation = Simulation(config, live.see)
    result, state = simulation.run(), simulation.plane.state
    tally, groups = msgspec.to_builtins(state.ledger.tally), msgspec.to_builtins(live.fold.groups)
    assert groups == tally | {"in_flight": state.ledger.tally.started - state.ledger.tally.ended}
    assert live.fold.finished_tokens == state.ledger.finished_tokens
    assert (live.fold.repacks, live.fold.moved) == (state.repacks, state.moved)
    assert result.staleness.max <= live.view().staleness.max, "the result is of the steady state alone"
    assert [record.step for record in live.fold.steps] == list(range(config.run.steps))
    assert live.fold.total.groups == state.ledger.tally.trained


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["calm", "faults"])
def test_what_every_replica_has_agrees_with_control(faults: dict[str, float]) -> None:
    """Unless control knows better of a component that is gone."""
    turns = {"workload.turns.mean": 2, "workload.turns.maximum": 4, "workload.turns.latency_s": 2}
    config = simulated({"workload.reward_s": 5, "schedule.kind": "sync"} | turns | faults)
    live = LiveRun(config)

    def see(now: float, event: Event, commands: list[Command]) -> None:
        live.see(now, event, commands)
        for replica in simulation.plane.state.fleet.replicas.values():
            record = live.fold.replica(replica.id)
            if replica.live:
                assert (record.generating, record.scoring) == (len(replica.assigned), len(replica.scoring))

    simulation = Simulation(config, see)
    simulation.run()
    assert live.rollout_scoring > 0


def simulated(settings: dict[str, Any]) -> Config:
    return with_values(load([OWN_BOX]), {"run.steps": 4, "cluster.gpus": 16} | settings)


def test_people_are_told_when_nothing_can_be_learned_for_long() -> None:
    live = LiveRun(simulated({"workload.prompts_per_step": 20}))

    def left_out(groups: int) -> list[str]:
        live.see(1.0, TimerFired("health"), [Forget((0,), "filtered" if i % 2 else "stopped") for i in range(groups)])
        return [one.text for one in live.notices if "taught nothing" in one.text]

    assert not left_out(199)  # as many as in ten steps may be usual
    assert left_out(1) == ["200 groups taught nothing in a row, and the trainer has got nothing since"]
    assert len(left_out(1799)) == 1
    assert len(left_out(1)) == 2
    live.see(2.0, TimerFired("health"), [Train(1, 0, 0, True, ())])
    assert len(left_out(199)) == 2


def test_idle_shares_are_the_simulators(tmp_path: Path) -> None:
    config = simulated({"schedule.kind": "sync", "run.steps": 6})
    live = LiveRun(config)
    result = Simulation(config, live.see).run()
    assert live.trainer_idle == pytest.approx(result.trainer_idle, abs=0.02)
    assert live.rollout_idle == pytest.approx(result.rollout_idle, abs=0.02)


def test_what_is_remembered_does_not_grow_with_the_run() -> None:
    sizes: list[int] = []
    config = simulated({"run.steps": 12})
    live = LiveRun(config)

    def see(now: float, event: Event, commands: list[Command]) -> None:
        live.see(now, event, commands)
        sizes.append(len(live.fold.samples))

    Simulation(config, see).run()
    assert max(sizes[len(sizes) // 2 :]) <= 1.5 * max(sizes[: len(sizes) // 2])
    assert max(sizes) < live.fold.total.samples


def test_what_a_replica_reports_after_control_has_given_it_up_counts_nowhere() -> None:
    """Control has put its samples on the waiting list, so its ledger ignores such reports too."""
    gone: list[tuple[Event, list[Command]]] = [
        (TimerFired("health"), [GiveUp("replica", 0, 1, "no heartbeat for 2.4 s")]),
        (HostLeft(0, "its host left"), []),
        (ReplicaLost(0, 1, "its process ended"), []),
    ]
    for event, commands in gone:
        fold = Fold(load([], ["--model.preset", "qwen2.5-7b", "--workload.group_size", "2"]))
        for entry in RUN[:2]:
            fold.see(*entry)
        fold.see(6.0, event, commands)
        assert (fold.replica(0).generating, fold.samples[0].state) == (0, "lost")
        fold.see(7.0, finished(0, 100, 0, 1.0), [])
        assert (fold.ignored, fold.finished_tokens) == (True, 0)
