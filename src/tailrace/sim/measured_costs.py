"""How long things take where it has been measured: the costs of `[costs]`, which `tailrace fit` takes from a real run.

They stand for the processes of one machine (`[local]`), so nothing here knows of GPUs, and nothing costs money.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from tailrace.config.tree import Config
from tailrace.sim.cost_model import CostModel, config_of_kind


class MeasuredCostModel(CostModel):
    """The figures of a machine in place of a cluster's arithmetic; what relays send each other is reckoned as there."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.figures = config.costs
        self.decode_per_kv_token = config.costs.decode_kv_token
        self.prefill_per_token = config.costs.prefill_token
        self.prefill_per_token2 = 0.0

    def _decode_base(self, running: int) -> float:
        return self.figures.decode_step + self.figures.decode_sequence * running

    @cached_property
    def kv_capacity(self) -> int:
        return self.config.rollout.kv_tokens or self.figures.kv_tokens

    @cached_property
    def roofline(self) -> int:
        rollout = self.config.rollout
        return rollout.roofline_batch or self.figures.flat_batch or rollout.max_running

    def train(self, lengths: list[int]) -> float:
        return self.figures.train_mini_batch + self.figures.train_token * sum(lengths)

    def train_at_best(self, lengths: list[int], times: float, mini_batches: int) -> float:
        return mini_batches * self.figures.train_mini_batch + times * self.figures.train_token * sum(lengths)

    def push(self) -> float:
        return self.figures.publish

    def pull(self, remote: bool) -> float:
        return self.figures.load

    @property
    def dollars_per_hour(self) -> float:
        return 0.0


class PoolCosts(NamedTuple):
    """Replicas that are alike, and what theirs costs."""

    costs: CostModel
    replicas: int


def pools_of(config: Config) -> list[PoolCosts]:
    """The replicas of a config by kind of card; one pool where there is one kind."""
    if not config.kinds:
        return [PoolCosts(cost_model_of(config), config.replicas)]
    counts = Counter(dict.fromkeys(config.kinds, 0))
    for host in config.fleet_hosts:
        counts[host.kind] += host.replicas
    return [PoolCosts(CostModel(config_of_kind(config, kind)), count) for kind, count in counts.items() if count]


def cost_model_of(config: Config) -> CostModel:
    """Measured where there are measurements, else from first principles."""
    return MeasuredCostModel(config) if config.costs.measured else CostModel(config)
