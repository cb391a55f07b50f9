"""What a process has of a real GPU: its place in the machine, the one that it sees, its share of the memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tailrace.config.dealing import deal_here, visible
from tailrace.config.tree import Config, Local, Rollout, Workload
from tailrace.engines.native import NativeEngine
from tailrace.model.device import survey_apart
from tailrace.model.numa import cpu_numbers, numa_of, pci_address
from trainer_cases import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_survey_knows_where_the_cards_are() -> None:
    cards = survey_apart().cards
    assert len(cards) == torch.cuda.device_count()
    assert len(pci_address(0).split(":")) == 3
    assert (cards[0].node, cards[0].cpus) == numa_of(pci_address(0))
    assert all(number < 4096 for number in cpu_numbers(cards[0].cpus))


def test_a_process_sees_the_cards_that_it_was_dealt() -> None:
    last = torch.cuda.device_count() - 1
    code = "import torch; print(torch.cuda.device_count())"
    environment = os.environ | visible((last,), os.environ)
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "1\n"


def test_the_pools_of_two_replicas_and_the_trainers_share_fit_on_one_card() -> None:
    config = Config(
        local=Local(replicas=2),
        rollout=Rollout(max_running=1024, threads=0),
        workload=Workload(prompt_tokens=64, max_completion_tokens=10**6),
    )
    deal = deal_here(config, survey_apart().cards[:1])
    assert sum(one.memory for one in (*deal.replicas, *deal.ranks)) <= 1
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_allocated()
    engine = _engine(config, deal.replicas[0].memory)
    assert torch.cuda.memory_allocated() - before <= deal.replicas[0].memory * total
    assert engine.kv_capacity


def _engine(config: Config, memory: float) -> Any:
    model: Any = tiny_model(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )  # heads that kernels take
    model = model.to(device="cuda", dtype=torch.bfloat16)
    return NativeEngine(model, lambda tokens: "", (), config, 7, memory)
