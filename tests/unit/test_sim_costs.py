"""The cost model: what experts, fp8, hosts and exchanges cost, and figures of cards that a file overrides."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.config import Config, ConfigError, load, with_values
from tailrace.config.tree import Efficiency
from tailrace.sim.cost_model import (
    EAGER_MIXTURE_S,
    ENGINE_MEMORY,
    LAYER_S,
    LINKED_ALL_REDUCE_S,
    NETWORK_ALL_REDUCE_S,
    CostModel,
)


def cluster(preset: str = "qwen2.5-7b", **values: Any) -> Config:
    base = load([], f"--model.preset {preset} --cluster.gpu H100 --cluster.gpus 128 --split.trainer_gpus 64".split())
    return with_values(base, {key.replace("__", "."): value for key, value in values.items()})


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    loads = CostModel(cluster("qwen3-30b-a3b", split__tensor_parallel=2)).loads
    shares = [loads.read_share(tokens) for tokens in (1, 8, 64, 512)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(3.353 / 30.53, rel=0.01)
    assert shares[-1] > 0.99


def test_tiles_of_experts_fill_with_the_batch() -> None:
    loads = CostModel(cluster("qwen3-30b-a3b", split__tensor_parallel=2)).loads
    assert loads.padding(1) > loads.padding(256) > loads.padding(4096) == 1.0
    assert CostModel(cluster()).loads.padding(1) == 1.0


def test_graphs_have_a_shorter_floor() -> None:
    eager, graph = (CostModel(cluster(efficiency__decoding=mode)).decode_fixed for mode in ("eager", "graph"))
    assert eager / graph == pytest.approx(LAYER_S["eager"] / LAYER_S["graph"])
    mixture = CostModel(cluster("qwen3-30b-a3b", efficiency__decoding="eager"))
    assert mixture.decode_fixed / mixture.model.layers == pytest.approx(EAGER_MIXTURE_S)


def test_fp8_generation_halves_what_is_read_and_leaves_more_room() -> None:
    bf16, fp8 = (CostModel(cluster(model__rollout_bytes_per_weight=size)) for size in (2, 1))
    assert fp8.decode_weights == bf16.decode_weights / 2
    assert fp8.kv_capacity > bf16.kv_capacity
    assert fp8.push() == bf16.push()


def test_ways_on_several_hosts_share_the_reading_and_pay_for_the_way_between_them() -> None:
    large = {"cluster__gpus": 1024, "split__trainer_gpus": 512}
    within, beyond = (CostModel(cluster("llama-3.1-405b", **large, split__tensor_parallel=ways)) for ways in (8, 16))
    linked = CostModel(cluster("llama-3.1-405b", **large, split__tensor_parallel=16, cluster__linked_gpus=72))
    assert beyond.decode_weights == pytest.approx(within.decode_weights / 2)
    call = Efficiency().host_call_us * 1e-6
    assert linked.decode_fixed == pytest.approx(within.decode_fixed + call + 2 * 126 * (LINKED_ALL_REDUCE_S - 12e-6))
    assert beyond.decode_fixed == pytest.approx(within.decode_fixed + call + 2 * 126 * (NETWORK_ALL_REDUCE_S - 12e-6))


def test_a_key_head_that_several_cards_have_takes_room_on_each() -> None:
    eight, sixteen = (CostModel(cluster("llama-3.1-405b", split__tensor_parallel=ways)) for ways in (8, 16))
    assert sixteen.kv_bytes_per_token == 2 * eight.kv_bytes_per_token


def test_an_engine_has_the_share_of_a_card_that_is_written() -> None:
    usual, half = (CostModel(cluster(rollout__memory=share)).kv_capacity for share in (0.0, 0.44))
    assert usual == CostModel(cluster(rollout__memory=ENGINE_MEMORY)).kv_capacity > 2 * half


def test_activations_that_are_computed_again_cost_a_pass() -> None:
    kept, again = (
        CostModel(cluster(trainer__recompute=on, trainer__forward_passes=0, trainer__tokens_per_batch=4096))
        for on in (False, True)
    )
    assert again.train([4096] * 1024) == pytest.approx(kept.train([4096] * 1024) * 4 / 3, rel=0.01)


def test_the_exchange_is_hidden_behind_arithmetic_until_it_is_longer() -> None:
    lengths = [4096] * 1024
    fast, slower, slowest = (
        CostModel(cluster(cluster__gpu_network_gbytes_per_s=rate)).train(lengths) for rate in (400, 200, 0.1)
    )
    assert slower == pytest.approx(fast, rel=0.02)
    assert slowest > 10 * fast
    relays = CostModel(cluster(cluster__network_gbytes_per_s=1)).train(lengths)
    assert relays == fast  # what relays send is another matter


def test_ranks_that_are_balanced_over_a_step_wait_for_each_other_in_a_mini_batch() -> None:
    lengths = [4000, 100, 100, 100] * 64
    even, uneven = (CostModel(cluster(trainer__balance=over)).train(lengths) for over in ("mini_batch", "step"))
    assert uneven == pytest.approx(even * 4000 / 1075, rel=0.1), "every fourth sequence is on the same rank"


def test_pipeline_stages_wait_for_the_first_pack_and_after_the_last() -> None:
    alone, staged = (
        CostModel(cluster(split__trainer_parallel=4, trainer__tokens_per_batch=4096,
                          split__trainer_pipeline_parallel=stages)).train([4096] * 128)
        for stages in (1, 4)
    )  # fmt: skip
    assert staged / alone == pytest.approx((8 + 3) / 8, rel=0.02)


def test_a_trainer_on_cards_with_little_arithmetic_reaches_more_of_it() -> None:
    """What is bound by memory takes a smaller share of the time."""
    reached = {}
    for card in ("H800", "H20"):
        costs = CostModel(cluster(cluster__gpu=card))
        reached[card] = 1 / (costs.train([4096] * 1024) * costs.trainer_gpu.flops)
    assert reached["H20"] > 1.3 * reached["H800"]


def test_a_trainer_that_shares_its_cards_is_slower() -> None:
    apart, shared = (
        CostModel(cluster(cluster__gpus=gpus, split__trainer_gpus=trainer, split__colocated=colocated)).train(
            [4096] * 1024
        )
        for gpus, trainer, colocated in ((128, 64, False), (64, 0, True))
    )
    assert shared == pytest.approx(apart / Efficiency().colocated, rel=0.02)


def test_every_pack_of_a_mixture_has_a_floor() -> None:
    large, small = (
        CostModel(cluster("qwen3-30b-a3b", split__tensor_parallel=2, trainer__tokens_per_batch=size)).train(
            [1024] * 512
        )
        for size in (65536, 1024)
    )
    assert small > 2 * large


def test_larger_packs_of_forward_passes_have_fewer_floors() -> None:
    as_many, larger, none = (
        CostModel(cluster("qwen3-30b-a3b", split__tensor_parallel=2, trainer__tokens_per_batch=1024, **settings)).train(
            [1024] * 512
        )
        for settings in (
            {"trainer__forward_passes": 2},
            {"trainer__forward_passes": 2, "trainer__forward_tokens_per_batch": 4096},
            {"trainer__forward_passes": 0},
        )
    )
    assert none < larger < as_many


def test_a_trainer_at_best_is_never_slower_than_one_with_uneven_ranks() -> None:
    costs, lengths = CostModel(cluster()), [100] * 500 + [30_000]
    assert costs.train_at_best(lengths, 1.0, 1) < costs.train(lengths)


def test_a_file_overrides_figures_and_prices_of_cards() -> None:
    cheap = cluster(cluster__cards__H100__dollars_per_hour=1.0)
    assert CostModel(cheap).dollars_per_hour == 128
    assert CostModel(cheap).gpu.memory_bytes == 80e9
    with pytest.raises(ConfigError, match="lacks memory_gbytes_per_s, tflops"):
        CostModel(cluster(cluster__gpu="X1", cluster__cards__X1__memory_gbytes=100))
    with pytest.raises(ConfigError, match="no figure of a card"):
        CostModel(cluster(cluster__cards__H100__price=1))


def test_a_setting_may_differ_per_schedule() -> None:
    config = cluster(
        trainer__forward_passes=2, schedule__kind="partial", per_schedule__partial__trainer__forward_passes=0
    )
    assert config.trainer.forward_passes == 0
    assert with_values(config, {"schedule.kind": "sync"}).trainer.forward_passes == 2
    with pytest.raises(ConfigError, match="cannot differ between schedules"):
        cluster(per_schedule__sync__schedule__kind="partial")
    with pytest.raises(ConfigError, match="forward_passes is 'x'"):
        cluster(per_schedule__sync__trainer__forward_passes="x")
