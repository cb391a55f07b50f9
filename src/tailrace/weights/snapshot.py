"""The trainer's copy of one weight version, from which it is published while training goes on.

`publisher.py` owns them. `tensor_snapshot.py` has those of torch's tensors; those of numpy's arrays are here, for
trainers without torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from tailrace.errors import TailraceError
from tailrace.types import Version
from tailrace.weights.checksum import RunningChecksum
from tailrace.weights.shard import ShardLayout

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]  # of torch or of numpy


class PublishError(TailraceError):
    """The weights cannot be published; the sentence says why."""


class WeightSnapshot(ABC):
    """One buffer and the part of a version in it: a `VersionSource`. `memory` are its bytes and `tensors` views of
    them."""

    on_device = False
    memory: Any
    tensors: Mapping[str, Any]

    def __init__(self, layout: ShardLayout) -> None:
        self.part = layout.part
        self.generation = 0
        self.senders = 0
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
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if name not in missing or self.tensors[name].shape != tensor.shape:
                shape = list(tensor.shape)
                raise PublishError(f"tensor '{name}' of shape {shape} is not in the layout, or was given twice")
            self._copy(name, tensor)
            missing.discard(name)
        if missing:
            raise PublishError(f"{len(missing)} tensors of the layout were not given, '{min(missing)}' among them")

    @abstractmethod
    def _copy(self, name: str, tensor: Any) -> None: ...

    @abstractmethod
    def _on_host(self) -> np.ndarray:
        """Its bytes in host memory."""
        ...

    def ready(self, position: int, timeout_s: float = 0.0) -> memoryview:
        return self._hashed_to(0).buffer[position:]

    def checksums(self, start: int, end: int) -> bytes:
        return self._hashed_to(end).checksums(start, end)

    def checksum(self, timeout_s: float = 0.0) -> str:
        return self._hashed_to(self.part.size).digest() if self.part.is_whole else ""

    def _hashed_to(self, position: int) -> RunningChecksum:
        with self._lock:
            if self._checksum is None:
                self._checksum = RunningChecksum(memoryview(self._on_host()))  # pyright: ignore[reportArgumentType]
            self._checksum.advance(position)
            return self._checksum


NewSnapshot = Callable[[ShardLayout], WeightSnapshot]


class ArraySnapshot(WeightSnapshot):
    """Of arrays in float32."""

    def __init__(self, layout: ShardLayout) -> None:
        super().__init__(layout)
        self.memory = np.zeros(layout.part.size, np.uint8)
        self.memory[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
        self.tensors = layout.arrays_of(self.memory)

    def _copy(self, name: str, tensor: np.ndarray) -> None:
        target = self.tensors[name]
        target[...] = tensor if target.dtype.kind == "f" else bfloat16_bits(tensor)

    def _on_host(self) -> np.ndarray:
        return self.memory


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Of float32, which numpy cannot convert: to the nearest, and of two as near to the even one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def new_content_id() -> str:
    """Of the bytes of a version. One that is made again, after a crash, gets another one."""
    return os.urandom(8).hex()
