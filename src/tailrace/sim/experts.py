"""A mixture of experts in a decode step: which share of the weights a batch reads, and how full its tiles are.

Each token is routed to `experts_per_token` of a layer's experts. A few tokens read few experts; many read all, with a
few rows for each, and a matrix product computes whole tiles of rows. A dense model reads everything and wastes nothing.
"""

from __future__ import annotations

from tailrace.config.tree import Model

TILE = 64  # rows that a grouped matrix product computes at least


class ExpertLoads:
    def __init__(self, model: Model) -> None:
        self.used_share = model.used_share
        self.mixture = model.expert_parameters > 0
        self._experts = model.experts
        self._expert_share = model.expert_parameters / model.parameters if self.mixture else 0.0
        self._arithmetic_share = model.expert_parameters * self.used_share / model.active if self.mixture else 0.0

    def read_share(self, tokens: int) -> float:
        """Of all weights, those that a batch of so many tokens reads."""
        return 1.0 - self._expert_share * (1.0 - self.used_share) ** tokens if self.mixture else 1.0

    def padding(self, tokens: int) -> float:
        """How many times the arithmetic of full tiles a batch takes: an expert with one row computes a whole one."""
        if not self._experts or not self.mixture:
            return 1.0
        reached = 1.0 - (1.0 - self.used_share) ** tokens  # share of the experts with any token
        rows_each = self.used_share * tokens / reached
        return 1.0 + self._arithmetic_share * (max(1.0, TILE / rows_each) - 1.0)
