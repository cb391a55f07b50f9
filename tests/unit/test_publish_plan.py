"""A predicted weight publish: bytes and seconds by hand, the broadcast against chunks moved one by one, and what has
been published and measured elsewhere."""

import json
from pathlib import Path
from statistics import median

import pytest

from tailrace.config import load
from tailrace.config.tree import RelaySettings
from tailrace.sim.chain import best_chunks, broadcast_s, farthest
from tailrace.sim.cost_model import CostModel
from tailrace.sim.publishing import LinkRates, Traffic, publish_of, publish_plan

ROOT = Path(__file__).parents[2]
LINKS = LinkRates(network=10.0, host=5.0, device=100.0, latency_s=0.0)
CHUNKED = RelaySettings(chunk_mbytes=1e-5)  # ten bytes a chunk


def test_four_ranks_on_two_hosts_by_hand():
    plan = publish_plan(100.0, ranks=4, ranks_per_host=2, relays=3, links=LINKS, relay=CHUNKED)
    assert plan.rank == Traffic(0.0, 25.0)
    assert plan.master == Traffic(100.0, 100.0)
    assert plan.relay_with_ranks == Traffic(150.0, 150.0)  # its ranks' half, passed on, and then the whole version
    assert plan.relay_without_ranks == Traffic(100.0, 100.0)
    assert plan.host_memory == 3 * 100.0 + 50.0
    assert plan.stall_s == pytest.approx((50 + 25) / 100)  # each rank reads float32 and writes half of that
    assert plan.master_s == pytest.approx(0.75 + 5.0)  # 25 bytes over a card's link; 50 over the master's
    assert plan.everywhere_s == pytest.approx(5.75 + (2 - 1 + 10) * 1.0)


def test_one_rank_sends_everything_over_its_own_link():
    plan = publish_plan(100.0, ranks=1, ranks_per_host=8, relays=1, links=LINKS)
    assert plan.rank.sent == 100.0
    assert plan.master == Traffic(100.0, 0.0)
    assert plan.relay_with_ranks is None
    assert plan.relay_without_ranks is None  # and nobody to send it on to
    assert plan.everywhere_s == plan.master_s == pytest.approx(3.0 + 100 / 5)


def test_a_relay_that_is_slower_than_its_links_is_the_limit():
    slow = publish_plan(100.0, 8, 8, 1, LINKS._replace(relay=2.0))
    assert slow.master_s == pytest.approx(slow.stall_s + 50.0)


def test_the_last_of_two_relays_sends_nothing_on():
    assert publish_plan(100.0, 8, 8, 2, LINKS).relay_without_ranks == Traffic(100.0, 0.0)
    assert publish_plan(100.0, 4, 2, 2, LINKS).relay_with_ranks == Traffic(150.0, 50.0)


def test_a_rank_sends_less_the_more_there_are_and_stalls_less():
    plans = [publish_plan(100.0, ranks, 8, 64, LINKS) for ranks in (1, 8, 64)]
    assert [plan.rank.sent for plan in plans] == [100.0, 12.5, 100 / 64]
    assert plans[0].stall_s == pytest.approx(8 * plans[1].stall_s) == pytest.approx(64 * plans[2].stall_s)
    assert {plan.master.received for plan in plans} == {100.0}


def test_all_shares_together_are_one_version():
    for ranks, per_host in ((1, 1), (7, 3), (24, 8), (256, 8)):
        plan = publish_plan(1e9, ranks, per_host, 40, LINKS)
        assert plan.rank.sent * ranks == pytest.approx(1e9)


def moved(hops: int, chunks: int, chunk_s: float) -> float:
    """Chunks through a line of links, one by one: a link takes one at a time, in order, once the one before has it."""
    free = [0.0] * hops
    for _ in range(chunks):
        arrived = 0.0
        for hop in range(hops):
            arrived = free[hop] = max(arrived, free[hop]) + chunk_s
    return free[-1] if hops else 0.0


@pytest.mark.parametrize("relays", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("chunks", [1, 7, 64])
def test_a_broadcast_takes_what_its_chunks_take_one_by_one(relays, chunks):
    hops = farthest(relays, RelaySettings())
    assert broadcast_s(hops, 2.0, 0.01, chunks) == pytest.approx(moved(hops, chunks, 0.01 + 2.0 / chunks))


@pytest.mark.parametrize("relays", [3, 17, 128])
def test_no_number_of_chunks_is_faster_than_the_best(relays):
    best = broadcast_s(relays - 1, 1.5, 25e-6, best_chunks(relays, 1.5, 25e-6))
    assert all(best <= broadcast_s(relays - 1, 1.5, 25e-6, chunks) + 1e-12 for chunks in range(1, 5000, 7))


@pytest.mark.parametrize(("relays", "hops"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_a_tree_is_as_deep_as_its_last_relay(relays, hops):
    assert farthest(relays, RelaySettings(topology="tree", fan_out=2)) == hops


def test_the_broadcast_is_that_of_the_simulator():
    config = load([ROOT / "examples/clusters/laminar_math_72b.toml"])
    plan = publish_of(config, config.trainer_gpus, 8, 128)
    assert plan.everywhere_s - plan.master_s == pytest.approx(CostModel(config).broadcast(128))


@pytest.mark.parametrize(("preset", "stall_s"), [("laminar_math_32b", 0.64), ("laminar_math_72b", 1.40)])
def test_published_pushes_are_predicted(preset, stall_s):
    config = load([ROOT / f"examples/clusters/{preset}.toml"])
    plan = publish_of(config, config.trainer_gpus, config.cluster.gpus_per_host, config.hosts)
    assert plan.master_s == pytest.approx(stall_s, rel=0.05)
    assert plan.stall_s < stall_s / 100  # ours is a copy within the card


def test_a_measured_publish_is_predicted():
    """One rank of 1.5B on an H200: `benchmarks/gpu/weights.py`."""
    config = load([], ["--model.preset", "qwen2.5-1.5b", "--cluster.gpu", "H200", "--cluster.gpus", "2"])
    measured = json.loads((ROOT / "benchmarks/results/gpu_weights.json").read_text())
    plan = publish_of(config, 1, 1, 1)
    stall_ms, copied_ms = (median(row[name] for row in measured["warm"]) for name in ("stall_ms", "copied_ms"))
    assert 1e3 * plan.stall_s == pytest.approx(stall_ms, rel=0.5)
    assert 1e3 * plan.master_s == pytest.approx(copied_ms, rel=0.15)
