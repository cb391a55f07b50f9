"""The catalogue of GPUs: names are found as people write them, and rows are plausible."""

import pytest

from tailrace.config.errors import ConfigError
from tailrace.sim.gpus import GPUS, find


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "H100"),
        ("H100_pcie", "H100-PCIe"),
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("a100", "A100-80GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_are_found_as_people_write_them(written, meant):
    assert find(written).name == meant


def test_an_unknown_card_names_the_nearest_one_and_the_way_out():
    with pytest.raises(ConfigError, match=r"did you mean MI300X.*cluster.cards.MI300"):
        find("MI300")


def test_h20_generates_like_an_h100_and_trains_like_a_small_card():
    h20, h100 = find("H20"), find("H100")
    assert h20.memory_bytes_per_s > h100.memory_bytes_per_s
    assert h20.flops < h100.flops / 6


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_row_is_in_plain_units(gpu):
    assert find(gpu.name) is gpu
    assert 16e9 <= gpu.memory_bytes <= 288e9
    assert 0.3e12 <= gpu.memory_bytes_per_s <= 8e12
    assert 65e12 <= gpu.flops <= 2.5e15
    assert 12e9 <= gpu.host_bytes_per_s <= gpu.interconnect_bytes_per_s <= 900e9
    assert 0.1 < gpu.dollars_per_hour < 20


def test_the_arithmetic_of_another_card_counts_as_far_as_products_attain_it():
    h100, gb200 = find("H100"), find("GB200")
    assert h100.flops_like_h100 == h100.flops
    assert 2.2 < gb200.flops_like_h100 / h100.flops < gb200.flops / h100.flops
