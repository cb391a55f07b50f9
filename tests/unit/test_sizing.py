"""Sizing a cluster: a rank's memory by hand and as measured, placement against brute force, refusals whose advice
works, and commands that fit the hosts."""

import json
import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.config import Config, ConfigError, load, with_values
from tailrace.config.tree import Cluster, Model, Trainer
from tailrace.planner.launch_command import launch_command
from tailrace.planner.limits import check_limits, enough_cards, fewest_ways
from tailrace.planner.placement import NodeGroup, exact_splits, placements, ways_to_try
from tailrace.planner.sizing import TrainerSize, engine_bytes, fewest_ranks, longest_sequence, room, size, token_budgets
from tailrace.planner.sizing_report import render_sizing, settings_toml, sizing_json
from tailrace.sim.cost_model import CostModel
from tailrace.sim.gpus import find
from tailrace.sim.sharding import arithmetic_s, exchange, frozen_policies, rank_memory

ROOT = Path(__file__).parents[2]


def config_of(**settings: Any) -> Config:
    return load([], [word for key, value in settings.items() for word in (f"--{key}", str(value))])


def cluster(preset: Any, gpus: Any, per_host: Any = 8, gpu: Any = "H100", **settings: Any) -> Config:
    base = {"model.preset": preset, "cluster.gpus": gpus, "cluster.gpus_per_host": per_host, "cluster.gpu": gpu}
    short = {"workload.prompts_per_step": 8, "workload.group_size": 4, "workload.max_completion_tokens": 4096}
    return config_of(**(base | short | settings))


def trained(config: Config) -> TrainerSize:
    found = size(config)
    assert found
    assert found.trainer
    return found.trainer


# ------------------------------------------------------------------------------------------------------ a rank's memory


def test_weights_gradients_and_moments_fall_with_the_ranks():
    config = cluster("qwen2.5-7b", 8)
    one, four = (rank_memory(config, ranks, ranks, 1024, True) for ranks in (1, 4))
    for name, share in (("weights", 4), ("gradients", 4), ("moments", 8), ("snapshot", 2)):
        assert getattr(one, name) == pytest.approx(share * config.model.parameters)
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    assert four.activations == one.activations


def test_hybrid_divides_by_the_ranks_of_a_host_alone():
    config = cluster("qwen2.5-7b", 32)
    hybrid = rank_memory(config, 32, 8, 1024, True)
    assert hybrid.moments == pytest.approx(8 * config.model.parameters / 8)
    assert hybrid.snapshot == pytest.approx(config.model.weight_bytes / 32)  # every rank still sends its own share


@pytest.mark.parametrize(
    ("settings", "copies"),
    [({}, 1), ({"trainer.mini_batches": 1}, 0), ({"trainer.kl": 0.1}, 2), ({"trainer.loss": "grpo"}, 0)],
)
def test_policies_that_the_loss_looks_back_at_are_counted(settings, copies):
    assert frozen_policies(cluster("qwen2.5-7b", 8, **settings)) == copies


@pytest.mark.parametrize("case", ["plain, 32k, recomputed", "plain, 16k"])
def test_a_measured_peak_is_predicted(case):
    """Of the unsharded trainer on an H200, without a snapshot: `benchmarks/gpu/trainer.py`."""
    rows = json.loads((ROOT / "benchmarks/results/gpu_trainer.json").read_text())["cases"]
    row = next(each for each in rows if each["name"] == case)
    config = cluster("qwen2.5-1.5b", 8, **{"trainer.loss": "grpo"})
    memory = rank_memory(config, 1, 1, row["tokens_at_the_end"], row["recompute"])
    assert (memory.total - memory.snapshot) / 1e9 == pytest.approx(row["peak_gb"], rel=0.06)


def test_a_mixture_of_experts_holds_all_of_them_and_computes_with_few():
    dense, sparse = cluster("qwen3-32b", 64), cluster("qwen3-30b-a3b", 64)
    assert rank_memory(sparse, 64, 64, 8192, True).weights > 0.9 * rank_memory(dense, 64, 64, 8192, True).weights
    assert arithmetic_s(sparse, 8192, False) < 0.2 * arithmetic_s(dense, 8192, False)
    assert exchange(sparse, 64, 8, "full").gather_s > 0.9 * exchange(dense, 64, 8, "full").gather_s


# ------------------------------------------------------------------------------------------------------------ exchange


def by_hand(network):
    model = Model(parameters=1e9, layers=10, hidden=1000, heads=10)
    return Config(model=model, cluster=Cluster(gpu="H100", gpus=16, network_gbytes_per_s=network))


def test_collectives_within_a_host_run_at_the_cards_links():
    link = 450e9 * 0.8
    found = exchange(by_hand(100), 8, 8, "full")
    assert found.gather_s == pytest.approx(2e9 * 7 / 8 / link)
    assert found.reduce_s == pytest.approx(4e9 * 7 / 8 / link)
    assert found == exchange(by_hand(1), 8, 8, "full")


def test_collectives_over_hosts_run_at_the_network():
    full, hybrid = exchange(by_hand(10), 16, 8, "full"), exchange(by_hand(10), 16, 8, "hybrid")
    assert full.gather_s == pytest.approx(2e9 / 2 / 10e9)
    assert full.reduce_s == pytest.approx(4e9 / 2 / 10e9)
    assert hybrid.gather_s == pytest.approx(2e9 * 7 / 8 / 360e9)
    assert hybrid.reduce_s == pytest.approx(4e9 * 7 / 8 / 360e9 + 2 * 4e9 / 2 / 10e9)
    assert full.pass_s(1) == pytest.approx(3 * full.gather_s + full.reduce_s)


def test_a_slow_network_asks_for_hybrid_and_a_full_card_forbids_it():
    slow = {"cluster.network_gbytes_per_s": 1, "split.trainer_gpus": 16, "trainer.mini_batches": 1}
    assert trained(cluster("qwen2.5-7b", 24, **slow)).sharding == "hybrid"
    assert trained(cluster("qwen2.5-32b", 24, **slow, **{"split.tensor_parallel": 2})).sharding == "full"


def test_what_fits_as_it_is_stays_as_it_is():
    found = trained(cluster("qwen2.5-1.5b", 8, gpu="H200", **{"split.trainer_gpus": 4}))
    assert (found.sharding, found.recompute, found.tokens_per_batch) == ("full", False, Trainer().tokens_per_batch)


def test_a_pack_is_as_long_as_the_longest_sequence_at_least():
    config = cluster("qwen2.5-7b", 8, **{"workload.max_completion_tokens": 30000})
    assert min(token_budgets(config)) == longest_sequence(config) == 30512


# ----------------------------------------------------------------------------------------------------------- placement

SHAPES = [(gpus, per_host) for per_host in (1, 2, 3, 4, 5, 6, 8) for gpus in range(2, 25) if gpus % per_host == 0]


def placed_by_force(gpus, per_host, ways):
    """Trainer sizes of every assignment of whole hosts, all alike or each of one kind, in which no card is unused."""
    hosts = gpus // per_host
    kinds = [(m, r) for m in range(per_host + 1) for r in range(per_host + 1) if m + r * ways == per_host]
    alike = {hosts * m for m, r in kinds if m and r}
    pure = [kind for kind in kinds if not (kind[0] and kind[1])]
    apart = {sum(m for m, _ in chosen) for chosen in product(pure, repeat=hosts)} if hosts <= 6 and hosts > 1 else set()
    return {size for size in alike | apart if 0 < size < gpus}


@pytest.mark.parametrize(("gpus", "per_host"), [shape for shape in SHAPES if 1 < shape[0] / shape[1] <= 6])
def test_splits_are_those_that_can_be_placed(gpus, per_host):
    config = cluster("qwen2.5-14b", gpus, per_host, gpu="B300")
    for ways in ways_to_try(config):
        assert set(exact_splits(config, ways)) == placed_by_force(gpus, per_host, ways)


@pytest.mark.parametrize(("gpus", "per_host"), SHAPES)
def test_a_placement_takes_no_more_cards_than_there_are(gpus, per_host):
    config = cluster("qwen2.5-14b", gpus, per_host, gpu="B300")
    for ways in ways_to_try(config):
        for trainer in range(1, gpus - ways + 1):
            tried = with_split(config, trainer_gpus=trainer, tensor_parallel=ways)
            for placed in placements(tried):
                assert placed.nodes * per_host == gpus
                assert all(group.ranks + group.replicas * ways <= per_host for group in placed.groups)
                assert min(placed.ranks, placed.replicas) > 0
                if trainer in exact_splits(config, ways):
                    assert (placed.ranks, placed.replicas) == (trainer, (gpus - trainer) // ways)


@pytest.mark.parametrize(("gpus", "per_host"), [(9, 8), (20, 8), (7, 8), (11, 4), (23, 6)])
def test_hosts_of_which_the_last_is_smaller_are_filled(gpus, per_host):
    config = cluster("qwen2.5-14b", gpus, per_host, gpu="B300")
    hosts = [min(per_host, gpus - first) for first in range(0, gpus, per_host)]
    for ways in ways_to_try(config):
        for trainer in range(1, gpus - ways + 1):
            (placed,) = placements(with_split(config, trainer_gpus=trainer, tensor_parallel=ways))
            taken = sorted((g.ranks + g.replicas * ways for g in placed.groups for _ in range(g.nodes)), reverse=True)
            assert placed.ranks == trainer
            assert all(used <= cards for used, cards in zip(taken, hosts, strict=False))
            assert (trainer in exact_splits(config, ways)) == (sum(taken) == gpus)
        assert ways > 1 or exact_splits(config, ways) == list(range(1, gpus))


def with_split(config, **values):
    return msgspec.structs.replace(config, split=msgspec.structs.replace(config.split, **values))


def test_one_host_trains_alone_where_that_saves_the_network():
    """Eight ranks on one host, rather than one on each of eight: both leave 56 cards to replicas."""
    found = size(cluster("qwen2.5-7b", 64, **{"split.trainer_gpus": 8, "cluster.network_gbytes_per_s": 5}))
    assert found
    assert found.placement.groups == (NodeGroup(1, 8, 0), NodeGroup(7, 0, 8))


def test_a_replica_larger_than_a_host_has_no_command():
    config = cluster("llama-3.1-405b", 512, **{"split.tensor_parallel": 16, "split.trainer_gpus": 256})
    found = launch_command(config, size(config))
    assert not found.commands
    assert "larger than a host" in found.notes[0]


@pytest.mark.parametrize(("per_host", "ways"), [(8, [1, 2, 4, 8]), (6, [1, 2, 4]), (5, [1, 2, 4]), (7, [1, 2, 4])])
def test_ways_divide_the_heads_and_fit_odd_hosts(per_host, ways):
    assert ways_to_try(cluster("llama-3.1-8b", 4 * per_host, per_host)) == ways  # 32 heads, 8 of them keys


def test_ways_that_leave_a_part_of_a_key_head_are_left_out():
    config = cluster("qwen2.5-7b", 14, 7)  # 28 heads, 4 of them keys: seven ways divide the one but not the other
    assert ways_to_try(config) == [1, 2, 4]


# ------------------------------------------------------------------------------------------------------------- refusals

CASES = [
    (preset, gpus, per_host, gpu, longest)
    for preset in ("qwen2.5-14b", "qwen2.5-72b", "qwen3-30b-a3b", "qwen3-235b-a22b", "llama-3.1-405b")
    for gpus, per_host in ((1, 8), (6, 6), (10, 5), (64, 8))
    for gpu in ("RTX-4090", "H200")
    for longest in (2048, 16384)
]


def refusal(preset: Any, gpus: Any, per_host: Any, gpu: Any, **settings: Any) -> str:
    try:
        check_limits(cluster(preset, gpus, per_host, gpu, **settings))
    except ConfigError as error:
        return str(error)
    return ""


def advised(sentence):
    """Each piece of advice as options, from `write A and B, or C`."""
    for choice in filter(None, sentence.partition("; write ")[2].split(", or ")):
        pairs = [part.replace(" (fp8)", "").split(" = ") for part in choice.split(" and ")]
        yield {key: value.strip('"') for key, value in pairs}


def test_what_does_not_fit_is_refused_with_what_would():
    refused = 0
    for preset, gpus, per_host, gpu, longest in CASES:
        sentence = refusal(preset, gpus, per_host, gpu, **{"workload.max_completion_tokens": longest})
        if not sentence:
            continue
        refused += 1
        assert re.search(r"\d+(\.\d+)?B parameters", sentence)
        choices = list(advised(sentence))
        assert choices, sentence
        for values in choices:
            changed = {"workload.max_completion_tokens": longest} | values
            cards = int(changed.pop("cluster.gpus", gpus)), per_host, changed.pop("cluster.gpu", gpu)
            assert refusal(preset, *cards, **changed) == "", sentence
    assert refused > 40


def test_a_model_that_no_card_holds_is_refused_without_advice():
    huge = {"model.parameters": 1e14, "model.layers": 100, "model.hidden": 100_000, "model.heads": 100}
    assert "no card of the catalogue" in refusal("qwen2.5-7b", 8, 8, "H100", **huge)


@pytest.mark.parametrize("preset", ["qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b", "llama-3.1-405b"])
@pytest.mark.parametrize("gpu", ["A100-40GB", "H100", "B300"])
def test_the_fewest_ranks_are_those_of_a_search(preset, gpu):
    config = cluster(preset, 8, gpu=gpu)
    longest = longest_sequence(config)
    fits = (n for n in range(1, 3000) if rank_memory(config, n, n, longest, True).total <= room(config))
    assert fewest_ranks(config) == next(fits, 0)


def test_the_least_cluster_is_enough_and_one_host_less_is_not():
    config = cluster("qwen2.5-72b", 8)
    gpus = enough_cards(config)
    check_limits(cluster("qwen2.5-72b", gpus))
    with pytest.raises(ConfigError, match=r"at least \d+ H100"):
        check_limits(cluster("qwen2.5-72b", gpus - 8))


def test_shared_cards_hold_both_roles():
    config = cluster("qwen2.5-1.5b", 1)
    found = size(config)
    assert found
    assert found.trainer
    assert found.placement.shared
    assert found.trainer.memory.total + engine_bytes(config) <= find("H100").memory_bytes
    share = launch_command(config, found).settings["rollout.memory"]
    assert engine_bytes(config) <= share * 80e9 <= 80e9 - found.trainer.memory.total


def test_on_shared_cards_the_trainer_takes_no_more_than_it_needs():
    shared, apart = (cluster("qwen2.5-1.5b", 8, **{"schedule.kind": kind}) for kind in ("sync", "trajectory"))
    assert trained(shared).memory.total < trained(apart).memory.total
    assert trained(shared).recompute is False  # which would take longer


def test_a_replica_is_as_large_as_the_model_needs():
    assert fewest_ways(cluster("qwen2.5-7b", 8)) == 1
    assert fewest_ways(cluster("qwen2.5-72b", 64)) == 4
    assert fewest_ways(cluster("llama-3.1-405b", 64, gpu="H200")) == 8
    assert fewest_ways(cluster("llama-3.1-405b", 64)) == 0


# ------------------------------------------------------------------------------------------------------------- commands


def test_one_box_is_started_with_train_and_its_settings_load(tmp_path):
    config = cluster("qwen2.5-7b", 8, **{"split.trainer_gpus": 4})
    found = launch_command(config, size(config), ["mine.toml"])
    assert found.commands == ("tailrace train mine.toml",)
    (tmp_path / "run.toml").write_text(settings_toml(found.settings))
    run = load([tmp_path / "run.toml"], ["--model.preset", "qwen2.5-7b"])
    assert (run.trainer.ranks, run.local.replicas, run.rollout.engine) == (4, 4, "native")


HALF = {"split.trainer_gpus": 16, "split.tensor_parallel": 2, "workload.prompts_per_step": 512}


def test_hosts_that_are_alike_are_launched_with_one_command():
    config = cluster("qwen2.5-32b", 32, **HALF)
    found = launch_command(config, size(config), ["mine.toml"])
    assert found.commands == ("tailrace launch ray mine.toml --nodes 4 --replicas-per-node 2 --ranks-per-node 4",)
    assert tomllib.loads(settings_toml(found.settings)) == {
        "trainer": {"ranks": 16, "sharding": "full", "recompute": True},
        "rollout": {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}},
    }
    assert any("trainer.interface" in note for note in found.notes)


def test_hosts_of_one_role_are_launched_and_joined():
    config = cluster("llama-3.1-405b", 512, gpu="H200", **{"split.trainer_gpus": 256, "split.tensor_parallel": 8})
    found = launch_command(config, size(config), ["big.toml"])
    assert found.commands[0] == "tailrace launch ray big.toml --nodes 32 --replicas-per-node 0 --ranks-per-node 8"
    assert found.commands[1].startswith("tailrace worker --join HOST:PORT --replicas 1 ")
    assert found.settings["trainer.ranks"] == 256


def test_more_ranks_than_a_run_takes_are_not_launched():
    config = cluster("qwen2.5-7b", 4096, **{"split.trainer_gpus": 2048})
    assert "1,024" in launch_command(config, size(config)).notes[0]


def test_measured_processes_are_trained_as_they_are():
    config = with_values(load([ROOT / "examples/heavy_tail.toml"]), {})
    assert config.costs.measured
    assert launch_command(config, None, ["a.toml"]).commands == ("tailrace train a.toml",)


def test_the_report_and_its_object_say_the_same():
    config = cluster("qwen2.5-32b", 32, **HALF)
    sizing = size(config)
    assert sizing
    assert sizing.trainer
    command = launch_command(config, sizing)
    text = "\n".join(render_sizing(sizing, command))
    shown = json.loads(json.dumps(sizing_json(sizing, command)))
    assert "Weight publish, 65.5 GB" in text
    assert "FSDP2 over 16 ranks" in text
    assert shown["publish"]["rank"]["sent"] == pytest.approx(65.5e9 / 16, rel=1e-3)
    assert shown["trainer"]["memory"]["total"] == sizing.trainer.memory.total
    assert shown["placement"]["groups"] == [{"nodes": 4, "ranks": 4, "replicas": 2}]
    assert shown["launch"]["commands"] == list(command.commands)


# ----------------------------------------------------------------------------------------------------------- simulator


OWN_HOST = {"cluster.gpus_per_host": 24}


def test_weights_enter_a_host_once_where_every_card_trains_whole_sequences():
    """Weights in three passes and float32 gradients, and one layer of that: at the network's rate, or at the links'."""
    alone = {"split.trainer_gpus": 16, "cluster.gpu_network_gbytes_per_s": 10}
    slow, fast = (CostModel(cluster("qwen2.5-7b", 24, **alone, **extra)).train([]) for extra in ({}, OWN_HOST))
    moved = (3 + 2 + 3 / 28) * cluster("qwen2.5-7b", 24).model.weight_bytes
    assert slow == pytest.approx(moved / 8e9)
    assert fast == pytest.approx(moved / 360e9)


def test_ways_fetch_their_parts_apart():
    parts = {"split.trainer_gpus": 16, "cluster.gpu_network_gbytes_per_s": 10, "split.trainer_parallel": 8}
    config = cluster("qwen2.5-7b", 24, **parts)
    assert CostModel(config).train([]) == pytest.approx((3 + 3 / 28) * config.model.weight_bytes / 8 / (8e9 / 8))


def test_more_ways_than_key_heads_keep_copies_of_them():
    two, four = (CostModel(cluster("qwen2.5-1.5b", 8, **{"split.tensor_parallel": ways})) for ways in (2, 4))
    assert four.kv_bytes_per_token == 2 * two.kv_bytes_per_token  # two key heads on four cards
