"""The trainer's copy of one weight version, from which it is published while training goes on.

`publisher.py` owns them. On a GPU the copy is made within the device, which takes milliseconds; the slow copy to the
host then runs beside the next training step. Where the GPU has no room, the copy goes to host memory at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

import torch

from tailrace.errors import TailraceError
from tailrace.types import Version
from tailrace.weights.checksum import RunningChecksum
from tailrace.weights.shard import ShardLayout

log = logging.getLogger(__name__)

NO_ROOM = (
    "no room on the GPU for a copy of the weights ({gb:.1f} GB): training stops while they are copied to the host; "
    "leave that much of its memory free"
)


Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class PublishError(TailraceError):
    """The weights cannot be published; the sentence says why."""


class WeightSnapshot:
    """One buffer and the part of a version in it: a `VersionSource`. `device`: where the buffer is, None for host
    memory. From a device it is copied to the host once, and only when its bytes are asked for."""

    def __init__(self, layout: ShardLayout, device: torch.device | None = None) -> None:
        self.part = layout.part
        self.on_device = device is not None
        self.generation = 0
        self.senders = 0
        size = layout.part.size
        self.memory = _host_memory(size) if device is None else _device_memory(size, device)
        self.memory[: len(layout.header)] = torch.tensor(list(layout.header), dtype=torch.uint8)
        self.tensors = layout.views_of(self.memory)
        self._host = None if self.on_device else self.memory
        self._lock = Lock()
        self.begin()

    def begin(self) -> None:
        """Its content is about to change."""
        self.version: Version = -1  # none yet
        self.content_id = new_content_id()
        self._checksum: RunningChecksum | None = None

    def copy_from(self, tensors: Tensors) -> None:
        """Copy all tensors of the layout, converted to its types. The trainer may change them when this returns."""
        missing = set(self.tensors)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        with torch.no_grad(), _one_thread():
            for name, tensor in pairs:
                if name not in missing or self.tensors[name].shape != tensor.shape:
                    shape = list(tensor.shape)
                    raise PublishError(f"tensor '{name}' of shape {shape} is not in the layout, or was given twice")
                self.tensors[name].copy_(tensor, non_blocking=True)
                missing.discard(name)
        synchronize()
        if missing:
            raise PublishError(f"{len(missing)} tensors of the layout were not given, '{min(missing)}' among them")

    def ready(self, position: int, timeout_s: float = 0.0) -> memoryview:
        return self._hashed_to(0).buffer[position:]

    def checksums(self, start: int, end: int) -> bytes:
        return self._hashed_to(end).checksums(start, end)

    def checksum(self, timeout_s: float = 0.0) -> str:
        return self._hashed_to(self.part.size).digest() if self.part.is_whole else ""

    def _hashed_to(self, position: int) -> RunningChecksum:
        """Of the bytes in host memory, which are copied there first if need be."""
        with self._lock:
            if self._checksum is None:
                self._checksum = RunningChecksum(memoryview(self._on_host().numpy()))  # pyright: ignore[reportArgumentType]
            self._checksum.advance(position)
            return self._checksum

    def _on_host(self) -> torch.Tensor:
        if self._host is None:
            self._host = _host_memory(self.part.size)
        if self.on_device:
            self._host.copy_(self.memory)
        return self._host


def new_content_id() -> str:
    """Of the bytes of a version. One that is made again, after a crash, gets another one."""
    return os.urandom(8).hex()


def new_snapshot(layout: ShardLayout, device: torch.device | None) -> WeightSnapshot:
    """On the device, if there is one and it has room."""
    if device is not None:
        try:
            return WeightSnapshot(layout, device)
        except torch.OutOfMemoryError:
            log.warning(NO_ROOM.format(gb=layout.part.size / 1e9))
    return WeightSnapshot(layout)


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
