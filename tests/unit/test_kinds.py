"""Several kinds of card in one fleet: how tables become kinds, hosts and replicas, and what is refused."""

import pytest

from tailrace.config import ConfigError, with_values
from tailrace.config.kinds import gpus_in
from tailrace.config.tree import Config
from tailrace.sim.cost_model import check_fit
from tailrace.sim.gpus import find, trainer_card
from tailrace.sim.simulation import Simulation

NEAR_AND_FAR = {
    "H800": {"gpus": 12, "gpus_per_host": 8},
    "H20": {"gpus": 16, "tensor_parallel": 2},
    "abroad": {"gpu": "H20", "gpus": 8, "site": "b", "dollars_per_hour": 0.9},
}


def fleet(cards=NEAR_AND_FAR, **settings) -> Config:
    small = {
        "model.preset": "qwen2.5-1.5b",
        "cluster.cards": cards,
        "cluster.gpus": gpus_in(settings.get("cluster.cards", cards)) or 8,
        "cluster.sites": {"b": {"gbytes_per_s": 0.1, "latency_ms": 50}},
        "split.trainer_gpus": 10,
        "workload.prompts_per_step": 32,
        "workload.group_size": 8,
        "workload.max_completion_tokens": 2048,
        "workload.lengths.median": 400,
        "run.steps": 4,
    }
    return with_values(Config(), small | settings)


def test_counted_cards_are_the_fleet_and_the_first_trains():
    config = fleet()
    assert (config.cluster.gpus, config.cluster.gpu, trainer_card(config.cluster).name) == (36, "H20", "H800")
    # the trainer has a host of eight and two more cards; what is left of that host generates
    assert [(host.kind.name, host.replicas) for host in config.fleet_hosts] == [
        ("H800", 2),
        ("H20", 4),
        ("H20", 4),
        ("abroad", 8),
    ]
    assert config.replicas == 18
    assert config.replica_hosts == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, *[3] * 8]


def test_a_kind_with_a_name_of_its_own_is_a_card_of_the_catalogue_with_other_figures():
    config = fleet()
    assert find("abroad", config.cluster.cards) == find("H20")._replace(dollars_per_hour=0.9)


def test_a_relay_alone_is_where_the_trainer_is_if_nobody_generates_there():
    config = fleet({"H800": {"gpus": 8}, "abroad": {"gpu": "H20", "gpus": 8, "site": "b"}}, **{"split.trainer_gpus": 8})
    assert [(host.kind.name, host.replicas) for host in config.fleet_hosts] == [("H800", 0), ("abroad", 8)]


def test_settings_survive_being_written_down_and_read_again():
    config = fleet()
    assert with_values(config, {}) == config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"split.trainer_gpus": 13}, "there are 12 H800"),
        ({"cluster.gpus": 8}, r"cluster.gpus is 8, but \[cluster.cards\] have 36"),
        ({"cluster.trainer_gpu": "B200"}, "of which there are none; write 'H20' or 'H800' or 'abroad'"),
        ({"split.colocated": True}, "do not take turns"),
        ({"cluster.cards": {"H20": {"gpus": -1}}}, "cluster.cards.H20.gpus is -1; write a whole number of 0 or more"),
        ({"cluster.cards": {"H20": {"gpus": 32, "tensor_parallel": 16}}}, "more than a host of 8"),
        ({"cluster.cards": {"H20": {"site": "b"}}}, "write cluster.cards.H20.gpus too"),
        ({"cluster.sites": {"b": {"gbit": 1}}}, "a site has gbytes_per_s and latency_ms"),
        ({"cluster.sites": {"b": {"gbytes_per_s": 0}}}, "over which nothing arrives"),
        ({"cluster.sites": {}}, r"of which no link is known; write \[cluster.sites.b\] and below it gbytes_per_s"),
        ({"cluster.sites": {"d": {"gbytes_per_s": 1}}}, "the link of a site at which no card is; write 'b'"),
        ({"cluster.cards": {"H20": 32}}, r"cluster.cards.H20 wants a table; write \[cluster.cards.H20\]"),
        ({"cluster.cards": {"H20": {"gpus": 10**11}}}, "gpus is 100,000,000,000; write 1,000,000 or fewer"),
        ({"cluster.cards": {"": {"gpu": "H20", "gpus": 8}}}, r"a kind in \[cluster.cards\] has no name"),
        ({"cluster.cards": {"H20": {"gpus": 1}}, "split.trainer_gpus": 0}, "write cluster.cards.H20.gpus = 2"),
        ({"cluster.cards": {"H20": {"gpus": 0}}}, "have gpus = 0; write how many there are of one"),
    ],
)
def test_tables_that_cannot_work_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fleet(**settings)


def test_a_site_of_which_no_link_is_known_may_be_the_one_that_all_links_lead_to():
    named = {"H800": {"gpus": 12, "site": "home"}, "abroad": {"gpu": "H20", "gpus": 16, "site": "b"}}
    assert fleet(named).fleet_hosts[0].kind.site == "home"


@pytest.mark.parametrize(
    ("name", "table", "sentence"),
    [
        ("H2O", {}, "write H20, if you mean that, or all figures of it"),
        ("mine", {"tflops": 200}, "lacks memory_gbytes, .*; write all figures of it"),
        ("H20", {"dollars_per_hour": 1e12}, "write a number above 0 and below 1,000,000,000"),
    ],
)
def test_a_card_that_is_not_known_is_refused_with_what_it_may_have_been(name, table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find(name, {name: table | {"gpus": 8}})


def test_a_kind_on_which_the_model_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="a replica of 1 T4"):
        check_fit(fleet({"H800": {"gpus": 12}, "T4": {"gpus": 8}}, **{"model.preset": "qwen2.5-7b"}))


def test_a_mixed_fleet_is_simulated_with_each_kind_at_its_own_speed():
    simulation = Simulation(fleet(**{"schedule.kind": "partial"}))
    result = simulation.run()
    kinds = [engine.costs.gpu.name for engine in (replica.engine for replica in simulation.fleet.replicas)]
    assert kinds == ["H800"] * 2 + ["H20"] * 16
    decoded = [replica.engine.decode_steps for replica in simulation.fleet.replicas]
    assert decoded[2] > decoded[0]  # two H20 read weights faster than one H800
    assert result.dollars_per_million_tokens > 0
    hours_of = {"H800": 12 * 2.5, "H20": 16 * 1.5, "abroad": 8 * 0.9}
    assert result.dollars_per_million_tokens == pytest.approx(sum(hours_of.values()) / 3.6 / result.tokens_per_s * 1e3)


def test_a_version_reaches_a_far_site_as_late_as_its_link_says():
    simulation = Simulation(fleet(**{"run.steps": 1}))
    simulation.run()
    near, far = [max(relay.took_s.values()) for relay in (simulation.fleet.relays[2], simulation.fleet.relays[3])]
    assert near < 0.1
    assert far == pytest.approx(simulation.config.model.weight_bytes / 0.1e9)


def test_a_kind_of_which_all_cards_train_need_not_hold_a_replica():
    cards = {"H100": {"gpus": 40}, "H20": {"gpus": 16, "tensor_parallel": 4}}
    check_fit(fleet(cards, **{"model.preset": "llama-3.1-70b", "split.trainer_gpus": 40, "cluster.sites": {}}))
    with pytest.raises(ConfigError, match="a replica of 1 H100 has no room"):
        check_fit(fleet(cards, **{"model.preset": "llama-3.1-70b", "split.trainer_gpus": 36, "cluster.sites": {}}))
