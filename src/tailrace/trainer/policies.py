"""Weights that were once the policy's: those at the start of the training step, and those at the start of the run.

A second model would need a second forward definition and, when sharded, a second set of buffers. A `FrozenPolicy` is
one copy of the parameters (of this rank's shards) that changes places with the live ones for the length of a `with`
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class FrozenPolicy:
    """A copy of some parameters as they are now."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._live = list(parameters)
        self._kept = [local(p).detach().clone() for p in self._live]
        largest = max(self._kept, key=lambda each: each.numel())
        self._between = torch.empty_like(largest).flatten()  # made now, so that a swap back never runs out of memory

    @torch.no_grad()
    def refresh(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            kept.copy_(local(live))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is open the model has the snapshot's weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            now = self._between[: kept.numel()].view(kept.shape)
            now.copy_(local(live))
            local(live).copy_(kept)
            kept.copy_(now)


class ProximalPolicy:
    """The policy at the start of a training step, kept only for steps of several mini-batches."""

    def __init__(self, parameters: Iterable[nn.Parameter], needed: bool):
        self._parameters = list(parameters)
        self._needed = needed
        self._snapshot: FrozenPolicy | None = None
        self._step = -1

    def at(self, step: int, mini_batch: int) -> FrozenPolicy | None:
        """The snapshot that a mini-batch of a step is to be compared with; None: the weights are still the same."""
        if not self._needed or (mini_batch > 0 and self._step == step):
            return self._snapshot
        self._step = step
        if self._snapshot is None:
            self._snapshot = FrozenPolicy(self._parameters)
        else:
            self._snapshot.refresh()
        return None


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of it."""
    shard = getattr(parameter, "to_local", None)
    return shard() if shard is not None else parameter
