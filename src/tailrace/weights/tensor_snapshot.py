"""A `WeightSnapshot` of torch's tensors.

On a GPU the copy is made within the device, which takes milliseconds; the slow copy to the host then runs beside the
next training step. Where the GPU has no room, the copy goes to host memory at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tailrace.weights.shard import ShardLayout
from tailrace.weights.snapshot import NewSnapshot, Tensors, WeightSnapshot

log = logging.getLogger(__name__)

NO_ROOM = (
    "no room on the GPU for a copy of the weights ({gb:.1f} GB): training stops while they are copied to the host; "
    "leave that much of its memory free"
)


class TensorSnapshot(WeightSnapshot):
    """`device`: where the buffer is, None for host memory. From a device it is copied to the host once, and only when
    its bytes are asked for."""

    def __init__(self, layout: ShardLayout, device: torch.device | None = None) -> None:
        super().__init__(layout)
        self.on_device = device is not None
        size = layout.part.size
        self.memory = _host_memory(size) if device is None else _device_memory(size, device)
        self.memory[: len(layout.header)] = torch.tensor(list(layout.header), dtype=torch.uint8)
        self.tensors = layout.views_of(self.memory)
        self._host = None if self.on_device else self.memory

    def copy_from(self, tensors: Tensors) -> None:
        with torch.no_grad(), _one_thread():
            super().copy_from(tensors)
        synchronize()

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name].copy_(tensor, non_blocking=True)

    def _on_host(self) -> np.ndarray:
        if self._host is None:
            self._host = _host_memory(self.part.size)
        if self.on_device:
            self._host.copy_(self.memory)
        return self._host.numpy()


def on_device_if_it_fits(device: torch.device | None) -> NewSnapshot:
    """How snapshots are made: on the device, if there is one and it has room."""

    def new(layout: ShardLayout) -> TensorSnapshot:
        if device is not None:
            try:
                return TensorSnapshot(layout, device)
            except torch.OutOfMemoryError:
                log.warning(NO_ROOM.format(gb=layout.part.size / 1e9))
        return TensorSnapshot(layout)

    return new


def _host_memory(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _device_memory(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread copies nearly as fast as several, and far faster while replicas keep the cores busy: several wait for
    each other at every tensor, and each wait costs a scheduling delay."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize() -> None:
    """Wait for the trainer's own stream, but not for a version that is being published."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
