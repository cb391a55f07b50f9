"""Moving weights between a device and plain host memory at the speed of the link, beside whatever the device computes.

The driver copies from and to plain memory with one thread and in the way of other work. Here several threads share the
pieces, each with a pinned buffer and a stream of its own: while one waits for the link, others copy in host memory. The
trainer's publisher and the rollout engines use it, from a thread that may wait.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import torch

PIECE = 8 << 20  # bytes: a pinned buffer stays in the cache between the link and the copy
MOST_THREADS = 8  # one copies 8 to 12 GB/s in host memory, the link takes 55

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]  # target, source


class Move(NamedTuple):
    """Bytes of one tensor, and the bytes of another that they are copied to."""

    target: torch.Tensor
    source: torch.Tensor


class Berth:
    """A pinned buffer and the stream that serves it."""

    def __init__(self, device: torch.device, size: int) -> None:
        gpu = device.type == "cuda"
        with torch.cuda.device(device) if gpu else nullcontext():
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
        self._stream = torch.cuda.Stream(device) if gpu else None
        self._arrived = torch.cuda.Event(blocking=True) if gpu else None  # waiting must not take a core

    def cross(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Over the link, and wait for it."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            target.copy_(source, non_blocking=True)
        if self._stream is not None and self._arrived is not None:
            self._arrived.record(self._stream)
            self._arrived.synchronize()


class Hauler:
    """What the device wrote before must be complete: its streams know nothing of others."""

    def __init__(self, device: torch.device, threads: int = 0, piece: int = PIECE) -> None:
        """`threads`: 0 for a good number."""
        threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
        self._piece = piece
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="haul")
        # As many as threads, each put back by the thread that took it: nobody ever waits for one.
        self._berths: SimpleQueue[Berth] = SimpleQueue()
        for _ in range(threads):
            self._berths.put(Berth(device, piece))

    def copy_in(self, pairs: Pairs) -> Iterator[int]:
        """From host memory to the device, pairs of (target, source). Yields how many bytes have arrived, in order."""
        return self._move(self._inward, pairs)

    def copy_out(self, pairs: Pairs) -> Iterator[int]:
        """From the device to host memory, the same way."""
        return self._move(self._outward, pairs)

    def _move(self, one: Callable[[Move], int], pairs: Pairs) -> Iterator[int]:
        moved = 0
        for count in self._pool.map(one, self._pieces(pairs)):
            moved += count
            yield moved

    def _pieces(self, pairs: Pairs) -> Iterator[Move]:
        for target, source in pairs:
            there, here = as_bytes(target), as_bytes(source)
            for start in range(0, len(here), self._piece):
                yield Move(there[start : start + self._piece], here[start : start + self._piece])

    def _inward(self, move: Move) -> int:
        berth = self._berths.get_nowait()
        try:
            buffer = berth.memory[: len(move.source)]
            _copy_in_host(buffer, move.source)
            berth.cross(move.target, buffer)
        finally:
            self._berths.put(berth)
        return len(move.source)

    def _outward(self, move: Move) -> int:
        berth = self._berths.get_nowait()
        try:
            buffer = berth.memory[: len(move.source)]
            berth.cross(buffer, move.source)
            _copy_in_host(move.target, buffer)
        finally:
            self._berths.put(berth)
        return len(move.source)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


def _copy_in_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Plain memcpy: without torch's own threads, and without the interpreter's lock."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))
