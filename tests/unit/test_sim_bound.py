"""What no schedule can beat, and the steady state in which schedules are measured."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.config import Config, load, with_values
from tailrace.sim.bound import bound
from tailrace.sim.result import TOLERANCE
from tailrace.sim.simulation import Simulation

BOX = (
    "--model.preset qwen2.5-1.5b --cluster.gpus 8 --split.trainer_gpus 2 --workload.prompts_per_step 32 "
    "--workload.group_size 4 --workload.max_completion_tokens 4096 --workload.lengths.median 400 "
    "--workload.lengths.sigma 0.5 --health.heartbeat_s 5 --run.steps 4 --schedule.max_staleness 100 "
    "--schedule.steps_ahead 2"
)


def box(**values: Any) -> Config:
    return with_values(load([], BOX.split()), {key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize("kind", ["sync", "one_step", "partial", "trajectory", "adaptive"])
def test_no_schedule_beats_the_bound_and_each_is_measured_in_its_steady_state(kind: str) -> None:
    result = Simulation(box(schedule__kind=kind), until_steady=True).run()
    assert 0 < result.tokens_per_s <= 1.05 * result.bound_tokens_per_s  # 32 groups a step are not the mean
    assert result.steps == 4
    assert result.warm_up >= 2
    assert result.drift <= TOLERANCE
    assert result.trained == 4 * 32


@pytest.mark.parametrize("kind", ["sync", "one_step", "partial", "adaptive"])
@pytest.mark.parametrize(("mini_batch", "limit"), [(18.0, ("trainer", "cores")), (0.5, ("cores",))])
def test_where_processes_share_cores_the_bound_knows_that_costs_are_processor_seconds(kind, mini_batch, limit) -> None:
    measured = {"decode_step": 0.04, "decode_sequence": 0.02, "prefill_token": 0.0001, "train_mini_batch": mini_batch}
    costs = {f"costs__{name}": value for name, value in measured.items()}
    shared = box(schedule__kind=kind, local__cores=2, local__replicas=3, rollout__kv_tokens=100_000, **costs)
    result = Simulation(shared, until_steady=True).run()
    assert 0.5 * result.bound_tokens_per_s < result.tokens_per_s <= 1.05 * result.bound_tokens_per_s
    assert kind == "sync" or result.limit in limit


def test_fetching_samples_delays_a_trainer_that_sets_the_pace_and_is_no_training() -> None:
    slow = {"schedule__kind": "partial", "trainer__forward_passes": 200, "schedule__publish_every": 1}
    without, fetched = (
        Simulation(box(**slow, efficiency__fetch_us=fetch), until_steady=True).run() for fetch in (0, 200_000)
    )
    assert fetched.step_s - without.step_s == pytest.approx(0.2 * 32 * 4, rel=0.1)
    assert fetched.step_s * (1 - fetched.trainer_idle) == pytest.approx(
        without.step_s * (1 - without.trainer_idle), rel=0.1
    )
    assert fetched.tokens_per_s <= 1.05 * fetched.bound_tokens_per_s


def test_a_run_of_fixed_length_has_exactly_its_steps() -> None:
    simulation = Simulation(box(schedule__kind="partial", run__steps=6))
    result = simulation.run()
    assert simulation.plane.state.training.version == 6
    assert result.warm_up + result.steps == 6
    assert result.warm_up >= 2


def test_the_limit_is_named() -> None:
    barrier = bound(box(schedule__kind="sync"))
    assert barrier.limit == "longest sample"
    assert barrier.step_s > barrier.longest_sample_s + barrier.trainer_s  # one after the other, and the change of roles
    few = bound(box(schedule__kind="partial", schedule__steps_ahead=0))
    assert few.limit == "admission"
    assert (
        bound(box(schedule__kind="partial", schedule__steps_ahead=50, trainer__forward_passes=200)).limit == "trainer"
    )
    wide = box(
        schedule__kind="partial", schedule__steps_ahead=50, split__trainer_gpus=7, workload__prompts_per_step=4096
    )
    assert bound(wide).limit == "rollout"


def test_admission_bounds_throughput_by_littles_law() -> None:
    one, three = (bound(box(schedule__kind="partial", schedule__steps_ahead=ahead)) for ahead in (0, 2))
    assert one.admission_s == pytest.approx(3 * three.admission_s)


def test_on_policy_streaming_waits_for_the_last_groups_that_are_required_and_trains_on_them_after_that() -> None:
    on_policy = {"schedule__kind": "stream", "schedule__steps_ahead": 0, "trainer__mini_batches": 4}
    steps = [bound(box(**on_policy, trainer__require_batches=count)).step_s for count in (1, 2, 4, 9)]
    assert steps[0] < steps[1] < steps[2] == steps[3]
