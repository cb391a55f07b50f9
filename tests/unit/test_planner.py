"""The planner: the balance by hand, a search that never loses to its start, and a plain no where async does not pay."""

import json

import msgspec
import pytest

from tailrace.config import ConfigError, load, render, with_values
from tailrace.lengths import LengthLaw
from tailrace.planner import plan, plan_json, render_plan, theory
from tailrace.planner.balance import balance, round_seconds, stream_seconds
from tailrace.planner.report import fragment
from tailrace.planner.search import Effort, Search, simulate, theories_of
from tailrace.planner.search_space import SearchPoint, Space
from tailrace.sim.cost_model import CostModel
from tailrace.sim.simulation import Simulation

SMALL = {
    "model.preset": "qwen2.5-1.5b",
    "cluster.gpu": "H100",
    "cluster.gpus": 16,
    "workload.prompts_per_step": 32,
    "workload.group_size": 4,
    "workload.prompt_tokens": 128,
    "workload.max_completion_tokens": 8192,
    "workload.lengths.median": 600,
    "workload.lengths.sigma": 1.0,
    "split.trainer_gpus": 12,
}
EVEN = {  # every completion is short and equally long, and training reads a long prompt
    "efficiency.colocated": 1.0,  # and loses nothing by sharing its cards
    "workload.lengths.law": "fixed",
    "workload.lengths.median": 0,
    "workload.lengths.sigma": 0,
    "workload.lengths.mean": 64,
    "workload.prompt_tokens": 4096,
    "workload.prompts_per_step": 256,
    "model.preset": "qwen2.5-7b",
    "cluster.gpus": 8,
    "split.trainer_gpus": 7,
}
BUDGET = 20


def config_with(**changes):
    values = SMALL | changes
    return load([], [word for key, value in values.items() for word in (f"--{key}", str(value))])


@pytest.fixture(scope="module")
def small_plan():
    return plan(config_with(), simulations=BUDGET, processes=1)


@pytest.fixture(scope="module")
def even_plan():
    return plan(config_with(**EVEN), simulations=BUDGET, processes=1)


@pytest.mark.parametrize(
    ("m_t", "eta_t", "m_g", "eta_g", "share"),
    [(1, 1.0, 1, 1.0, 0.5), (1, 1.0, 1, 3.0, 0.25), (8, 0.5, 2, 2.0, 0.5), (4, 3.0, 1, 3.0, 0.8)],
)
def test_theta_star_by_hand(m_t, eta_t, m_g, eta_g, share):
    assert balance(m_t, eta_t, m_g, eta_g) == pytest.approx(share)
    theta = balance(m_t, eta_t, m_g, eta_g)
    assert m_t * eta_t / theta == pytest.approx(m_g * eta_g / (1 - theta))


def test_the_theory_is_consistent():
    found = theory(config_with())
    per_gpu = 32 * 4 / 16
    assert found.theta_star == pytest.approx(balance(found.m_t, found.eta_t, found.m_g, found.eta_g))
    assert found.async_step_s == pytest.approx(per_gpu * (found.m_t * found.eta_t + found.m_g * found.eta_g), rel=1e-3)
    assert found.speed_up == pytest.approx(found.sync_step_s / found.async_step_s)
    assert found.tail_speed_up > found.speed_up >= 1.0


def test_batches_that_are_always_full_take_a_step_s_samples_faster_than_a_round_with_its_tail():
    config, narrow = config_with(), config_with(**{"rollout.max_running": 4})
    assert stream_seconds(config) < round_seconds(config)
    assert stream_seconds(config) < stream_seconds(narrow) < round_seconds(narrow)


def test_the_theory_knows_the_two_memory_limits():
    """A model that leaves a shared card no room needs more ways in sync, and decodes smaller batches there."""
    found = theory(
        config_with(
            **{
                "model.preset": "qwen2.5-32b",
                "split.tensor_parallel": 1,
                "cluster.gpu": "H200",
                "cluster.gpus": 64,
                "workload.prompts_per_step": 4096,
            }
        )
    )
    assert found.batch_g > found.batch_g_sync
    assert found.speed_up > 1.0


def test_more_training_work_asks_for_a_larger_trainer():
    light, heavy = theory(config_with()), theory(config_with(**{"trainer.forward_passes": 5}))
    assert heavy.theta_star > light.theta_star


def test_the_plan_is_at_least_as_good_as_its_start_and_as_the_users_config(small_plan):
    config = config_with()
    starts = [Space(config, theories_of(config)).config_of(point, 10) for point in _starts(config)]
    rates = [result.tokens_per_s for result in map(simulate, starts) if result]
    assert small_plan.result.tokens_per_s >= 0.99 * max(rates)
    assert small_plan.result.tokens_per_s >= 0.99 * small_plan.own.result.tokens_per_s
    assert small_plan.result.tokens_per_s >= small_plan.baseline.result.tokens_per_s
    assert small_plan.simulations <= BUDGET


def searched(config, rate):
    """A search whose simulator is `rate(config, long)`."""
    some = Simulation(with_values(config, {"run.steps": 2})).run()
    effort = Effort(BUDGET, 4, 10)

    def evaluate(configs):
        return [msgspec.structs.replace(some, tokens_per_s=rate(each, each.run.steps == 10)) for each in configs]

    search = Search(config, theories_of(config), effort, evaluate, lambda *_: None)
    search.screen()
    search.tune_best()
    return search.conclude()


def test_the_plan_does_not_lose_to_a_start_that_short_runs_underrate():
    """It has its place among the finalists even where all the others are taken by points that screened better."""
    config = config_with()
    trajectory = next(point for point in _starts(config) if point.kind == "trajectory")
    start = Space(config, theories_of(config)).config_of(trajectory, 10)

    def rate(each, long):
        if each.schedule.kind != start.schedule.kind:
            return 10.0
        is_start = each.split == start.split and each.schedule == start.schedule
        return (200.0 if long else 100.0) if is_start else 110.0

    assert searched(config, rate).result.tokens_per_s == 200


def test_the_plan_does_not_lose_to_a_synchronous_config_that_short_runs_underrate():
    config = config_with(**{"schedule.kind": "sync", "split.tensor_parallel": 2})

    def rate(each, long):
        if each.schedule.kind != "sync":
            return 10.0
        return 120.0 if long and each.split.tensor_parallel == 2 else 100.0 / each.split.tensor_parallel

    found = searched(config, rate)
    assert found.own
    assert found.result.tokens_per_s == found.own.result.tokens_per_s == found.baseline.result.tokens_per_s == 120
    assert found.best == config


def _starts(config):
    return Space(config, theories_of(config)).starts()


def test_a_long_tail_asks_for_asynchrony(small_plan):
    assert small_plan.async_helps
    assert small_plan.gain > 1.05
    assert small_plan.best.schedule.kind != "sync"
    assert 0 < small_plan.theta_star < 1
    assert "times the throughput of synchronous training" in render_plan(small_plan)


def test_equal_lengths_and_much_training_ask_for_none(even_plan):
    text = render_plan(even_plan)
    assert not even_plan.async_helps
    assert even_plan.best.schedule.kind == "sync"
    assert "Asynchrony will not help here" in text
    assert "Training dominates" in text
    assert "no tail" in text


def test_the_users_bound_on_staleness_is_kept():
    found = plan(config_with(**{"schedule.max_staleness": 1}), simulations=16, processes=1)
    for each in (found.best, *(other.config for other in found.alternatives)):
        assert each.schedule.max_staleness <= 1
    assert found.result.staleness.max <= 1


def test_the_batch_and_the_model_stay_the_users(small_plan):
    allowed = {"split", "schedule"}
    changes = plan_json(small_plan)["best"]["changes"]
    assert changes
    assert {key.partition(".")[0] for key in changes} <= allowed


@pytest.mark.parametrize("which", ["small_plan", "even_plan"])
def test_the_fragment_makes_the_plan_of_the_users_file(which, request, tmp_path):
    found = request.getfixturevalue(which)
    (tmp_path / "mine.toml").write_text(render(found.asked, only_changed=True))
    (tmp_path / "plan.toml").write_text(fragment(found.asked, found.best))
    assert load([tmp_path / "mine.toml", tmp_path / "plan.toml"]) == found.best
    assert fragment(found.asked, found.best) in render_plan(found)


def test_the_same_plan_on_one_and_on_two_processes(small_plan):
    again = plan(config_with(), simulations=BUDGET, processes=2)
    assert again == small_plan


def test_the_object_for_programs_is_json(small_plan, even_plan):
    for found in (small_plan, even_plan):
        shown = json.loads(json.dumps(plan_json(found)))
        assert shown["gain"] == found.gain
        assert shown["best"]["result"]["tokens_per_s"] == found.result.tokens_per_s
        assert shown["reasons"]


def test_progress_rises_to_its_total():
    seen = []
    plan(config_with(), lambda done, total, text: seen.append((done, total, text)), simulations=16, processes=1)
    counts = [done for done, _, _ in seen]
    assert counts == sorted(counts)
    assert all(done <= total and text for done, total, text in seen)


def test_one_gpu_is_shared():
    found = plan(config_with(**{"cluster.gpus": 1, "split.trainer_gpus": 0}), simulations=16, processes=1)
    assert found.best.colocated
    assert "1 GPU shared" in render_plan(found)


def test_a_fleet_that_followed_from_the_settings_is_said_when_they_change():
    config = load([], ["--model.preset", "qwen2.5-1.5b", "--split.trainer_gpus", "30"])
    assert config.cluster.gpus == 32
    best = with_values(config, {"split.trainer_gpus": 4})
    assert "gpus = 32" in fragment(config, best)


def test_a_model_that_fits_nowhere_is_refused_in_a_sentence():
    config = config_with(**{"model.preset": "llama-3.1-405b"})
    with pytest.raises(ConfigError, match=r"40[56]B parameters"):
        plan(config, simulations=16, processes=1)


def test_two_kinds_of_cards_keep_their_split():
    config = config_with(**{"cluster.gpu": "H20", "cluster.trainer_gpu": "H100", "split.trainer_gpus": 4})
    found = plan(config, simulations=16, processes=1)
    assert found.best.trainer_gpus == 4
    assert not found.baseline.config.colocated


def test_points_that_cannot_work_are_skipped():
    config = config_with()
    search = Search(config, {}, Effort(16, 2, 3), lambda configs: [simulate(each) for each in configs], lambda *_: None)
    search._try([SearchPoint("trajectory", 5, 4, 0, 4), SearchPoint("one_step", 1, 4, 0, 0)], "bad points")
    assert not search.found
    assert "tensor_parallel" in search.refusal


def test_a_colocated_wish_is_kept():
    config = with_values(config_with(), {"split.colocated": True})
    found = plan(config, simulations=16, processes=1)
    assert found.best.colocated


def test_the_balance_of_a_large_fleet_takes_no_more_work_than_that_of_a_small_one(monkeypatch):
    asked = []
    base, group = CostModel.decode_base, LengthLaw.group
    monkeypatch.setattr(CostModel, "decode_base", lambda *words: (asked.append("step"), base(*words))[1])
    monkeypatch.setattr(LengthLaw, "group", lambda *words: (asked.append("group"), group(*words))[1])
    work = []
    for gpus in (16, 100_000):
        asked.clear()
        assert theories_of(config_with(**{"cluster.gpus": gpus, "split.trainer_gpus": gpus // 2}))
        work.append(len(asked))
    assert 0 < work[1] <= 2 * work[0]
