"""Plans for several kinds of card: what each goal chooses, where it runs, and what is refused."""

from math import inf

import msgspec
import pytest
from test_kinds import fleet

from tailrace.config import ConfigError, load, with_values
from tailrace.planner.fleet_plan import are_alike, placement_of, plan_fleet
from tailrace.planner.fleet_program import FleetChoice, FleetGoal, ReplicaOption, TrainerOption
from tailrace.planner.fleet_rates import FleetFigures
from tailrace.planner.fleet_report import fleet_plan_json, notes, render_fleet_plan

pytest.importorskip("scipy")

CARDS = {"H800": {"gpus": 8}, "H20": {"gpus": 16}}


@pytest.fixture(scope="module")
def small():
    return fleet(CARDS, **{"split.trainer_gpus": 0, "cluster.sites": {}, "workload.prompts_per_step": 64})


@pytest.fixture(scope="module")
def plans(small):
    return {
        "have": plan_fleet(small, FleetGoal(), processes=1),
        "budget": plan_fleet(small, FleetGoal(budget=12.0), processes=1),
        "throughput": plan_fleet(small, FleetGoal(tokens_per_s=60_000.0), processes=1),
    }


def test_arithmetic_trains_and_bandwidth_generates(plans):
    best = plans["have"].best
    assert best.config.cluster.trainer_gpu == "H800"
    assert {host.kind.name for host in best.config.fleet_hosts if host.replicas} >= {"H20"}


def test_a_budget_is_kept_and_a_throughput_is_reached(plans):
    assert plans["budget"].best.dollars <= 12.0
    assert plans["throughput"].reached
    assert plans["throughput"].best.dollars < plans["have"].best.dollars
    assert plans["budget"].best.result.tokens_per_s < plans["have"].best.result.tokens_per_s


def test_the_best_is_the_fastest_that_the_simulator_saw(plans):
    plan = plans["have"]
    assert all(each.result.tokens_per_s <= 1.011 * plan.best.result.tokens_per_s for each in plan.others)


def test_fleets_are_alike_that_differ_by_a_few_replicas_of_many():
    one, other = ReplicaOption(0, 1, 10.0), ReplicaOption(1, 1, 10.0)
    trainer = TrainerOption(0, 8, 5000.0)
    many = FleetChoice(trainer, ((one, 300),))
    assert are_alike(many, FleetChoice(trainer, ((one, 297), (other, 2))))
    assert not are_alike(many, FleetChoice(trainer, ((one, 290),)))
    assert not are_alike(many, FleetChoice(trainer._replace(gpus=16), many.replicas))
    assert not are_alike(many, FleetChoice(trainer, ((one._replace(ways=2), 300),)))
    assert not are_alike(FleetChoice(trainer, ((one, 9),)), FleetChoice(trainer, ((one, 8),))), "one of few counts"


def test_what_is_to_be_pasted_makes_the_planned_fleet(plans, small, tmp_path):
    text = render_fleet_plan(plans["budget"])
    fragment = text.split("Paste into your config:\n\n")[1].split("\n\n     ")[0]
    (tmp_path / "base.toml").write_text('[model]\npreset = "qwen2.5-1.5b"\n[cluster.cards.H800]\ngpus = 8\n')
    (tmp_path / "plan.toml").write_text(fragment)
    made = load([tmp_path / "base.toml", tmp_path / "plan.toml"])
    assert made.kinds == plans["budget"].best.config.kinds
    assert made.trainer_gpus == plans["budget"].best.config.trainer_gpus


def test_every_card_of_the_placement_is_used_once(plans):
    for plan in plans.values():
        ranks = sum(group.nodes * group.ranks for group in plan.hosts)
        replicas = sum(group.nodes * group.replicas for group in plan.hosts)
        assert (ranks, replicas) == (plan.best.config.trainer_gpus, plan.best.config.replicas)
        assert plan.hosts == placement_of(plan.best.config)


def test_programs_get_plain_values(plans):
    found = fleet_plan_json(plans["budget"])
    assert found["goal"] == {"budget": 12.0}
    assert found["best"]["dollars_per_hour"] <= 12.0
    assert found["commands"][0].startswith("tailrace train FILE --trainer.ranks")


def test_the_commands_say_what_differs_between_hosts(small):
    """Their site, the size of their replicas; and the network of a trainer on several hosts."""
    lima = {"gpu": "H20", "gpus": 8, "site": "lima peru", "gpus_per_host": 4}
    far = {
        "model.preset": "qwen2.5-72b",
        "cluster.cards": {"H800": {"gpus": 32}, "lima": lima},
        "cluster.gpus": 40,
        "cluster.trainer_gpu": "H800",
        "cluster.sites": {"lima peru": {"gbytes_per_s": 10.0}},
        "split.trainer_gpus": 32,
    }
    plan = plan_fleet(with_values(small, far), FleetGoal(), processes=1)
    shaped = with_values(small, far | {"cluster.cards.lima.tensor_parallel": 4})
    best = msgspec.structs.replace(plan.best, config=shaped)
    plan = msgspec.structs.replace(plan, best=best, hosts=placement_of(shaped))
    first, *joining = fleet_plan_json(plan, ["my fleet.toml"])["commands"]
    assert first.startswith("tailrace train 'my fleet.toml' --trainer.ranks 32 --local.ranks 8 ")
    assert "--trainer.interface NETWORK" in first
    assert [each.split("    #")[0] for each in joining] == [
        "tailrace worker --join HOST:PORT --key join.key --replicas 0 --ranks 8",
        "tailrace worker --join HOST:PORT --key join.key --replicas 1 --site 'lima peru' --stay --wait 3600 "
        "--rollout.vllm.tensor_parallel_size 4",
    ]


def test_what_the_trainer_needs_to_fit_its_cards_is_to_be_written_too(plans):
    size = msgspec.structs.replace(plans["have"].trainer, recompute=True)
    tight = msgspec.structs.replace(plans["have"], trainer=size)
    assert fleet_plan_json(tight)["launch_settings"]["trainer.recompute"] is True
    assert "recompute = true" in render_fleet_plan(tight)


def test_one_kind_of_card_is_planned_within_a_budget_too(small):
    one = with_values(small, {"cluster.cards": {}, "cluster.gpu": "H100", "cluster.gpus": 8})
    assert plan_fleet(one, FleetGoal(budget=12.0), processes=1).best.dollars <= 12.0


@pytest.mark.parametrize(
    ("goal", "sentence"),
    [
        (FleetGoal(budget=0.5), "a trainer and a replica cost"),
        (FleetGoal(inf, 1e9), "all cards together reach about"),
        (FleetGoal(3.0, 20_000.0), "20,000 tokens/s cost .* at least; write a larger --budget"),
    ],
)
def test_a_goal_that_nothing_reaches_is_refused_with_what_would(small, goal, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_fleet(small, goal, processes=1)


def test_a_kind_with_too_little_memory_is_named_and_not_as_one_that_is_not_needed(plans):
    cards = CARDS | {"tiny": {"gpu": "T4", "gpus": 8, "memory_gbytes": 3.0}}
    too_small = FleetFigures(fleet(cards, **{"split.trainer_gpus": 0, "cluster.sites": {}})).too_small
    assert too_small == ("tiny",)
    asked = with_values(plans["have"].asked, {"cluster.cards": cards, "cluster.gpus": 32})
    said = list(notes(msgspec.structs.replace(plans["have"], asked=asked, too_small=too_small)))
    assert [note for note in said if "tiny" in note] == [
        "Too little memory for this model and its longest sequences: tiny."
    ]


def test_nor_does_one_whose_data_would_be_too_old_only_after_more_steps_than_are_usually_simulated(small):
    cards = {"H800": {"gpus": 8}, "abroad": {"gpu": "H20", "gpus": 16, "site": "b", "dollars_per_hour": 0.1}}
    late = {"cluster.sites": {"b": {"gbytes_per_s": 0.01}}, "schedule.max_staleness": 8, "cluster.trainer_gpu": "H800"}
    far = fleet(cards, **late, **{"split.trainer_gpus": 0, "workload.prompts_per_step": 64})
    best = plan_fleet(far, FleetGoal(tokens_per_s=30_000.0), processes=1).best
    assert {host.kind.site for host in best.config.fleet_hosts} == {""}


def test_a_site_that_is_too_far_for_the_staleness_bound_gets_no_work(small):
    cards = {"H800": {"gpus": 8}, "abroad": {"gpu": "H20", "gpus": 16, "site": "b", "dollars_per_hour": 0.1}}
    sizes = {"split.trainer_gpus": 0, "workload.prompts_per_step": 128}
    far = fleet(cards, **{"cluster.sites": {"b": {"gbytes_per_s": 0.001}}}, **sizes)
    best = plan_fleet(far, FleetGoal(), processes=1).best
    assert len({host.kind.site for host in best.config.fleet_hosts}) == 1


MANY_SHORT = {
    "split.trainer_gpus": 0,
    "workload.prompts_per_step": 128,
    "workload.prompt_tokens": 300,
    "workload.max_completion_tokens": 4096,
    "workload.lengths.median": 800,
    "workload.lengths.p99": 4000,
    "schedule.kind": "trajectory",
    "schedule.max_staleness": 4,
}


def test_where_answers_take_too_long_for_the_staleness_bound_more_replicas_are_planned():
    """Not less training: with fewer samples each they are sooner done."""
    cards = {name: {"gpus": 8, "dollars_per_hour": 1.0} for name in ("H100", "H20")}
    plan = plan_fleet(fleet(cards, **MANY_SHORT, **{"cluster.sites": {}}), FleetGoal(), processes=1)
    assert any(each.result.trainer_idle > 0.3 for each in plan.others), "what the program chose at first"
    assert plan.best.result.trainer_idle < 0.1


def test_a_throughput_is_reached_at_home_where_versions_come_too_late_to_what_is_cheaper():
    """At the pace that is asked for; more time would be enough."""
    lima = {"gpu": "A100-80GB", "gpus": 16, "site": "lima", "dollars_per_hour": 0.9}
    far = {
        "model.preset": "qwen2.5-7b",
        "cluster.cards": {"H800": {"gpus": 16}, "lima": lima},
        "cluster.gpus": 32,
        "cluster.sites": {"lima": {"gbytes_per_s": 0.2}},
    }
    plan = plan_fleet(fleet(**MANY_SHORT, **far), FleetGoal(tokens_per_s=40_000.0), processes=1)
    assert plan.reached
    assert len({host.kind.site for host in plan.best.config.fleet_hosts}) == 1
