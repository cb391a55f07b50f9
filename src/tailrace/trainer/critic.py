"""A value for every sampled token, from the policy's own hidden state.

The critic is a small network on the policy's trunk, with the gradient cut between them. A copy of the policy would
double the memory and the passes; a head whose gradient flowed into the trunk would change the policy by an amount that
no policy loss knows of. What it costs is that values are only as good as the features the policy happens to have.

It has its own optimiser and its own file in a checkpoint, and it is never published: replicas do not need it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tailrace.config.tree import Trainer
from tailrace.trainer.optim import Optimiser


class Critic(nn.Module):
    """Starts at value zero everywhere, and the same for the same seed."""

    def __init__(self, width: int, seed: int, settings: Trainer, total: int, device: str):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
            for parameter in self.net[-1].parameters():
                nn.init.zeros_(parameter)
        self.to(device)
        self.optimiser = Optimiser(self.named_parameters(), settings.critic_learning_rate, settings, total)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.net(hidden.detach().float())[:, 0]
