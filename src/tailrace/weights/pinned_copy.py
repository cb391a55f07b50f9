"""Fast copies between a device and pageable host memory, beside whatever the device computes.

The CUDA driver copies from and to pageable memory with one thread, and holds up other work. Here several threads each
have a pinned buffer and a stream: while one waits for the device link, others copy in host memory. The trainer's
publisher and the rollout engines use it, from a background thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import local
from typing import NamedTuple

import torch

BUFFER_BYTES = 8 << 20  # small enough that a pinned buffer stays in the CPU cache between its two copies
MAX_THREADS = 8  # one copies 8 to 12 GB/s in host memory, the link takes 55

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]  # target, source


class CopyTask(NamedTuple):
    """At most one buffer of bytes, as views of two tensors."""

    target: torch.Tensor
    source: torch.Tensor


class PinnedBuffer:
    """Page-locked host memory and the stream that copies from and to it."""

    def __init__(self, device: torch.device, size: int) -> None:
        gpu = device.type == "cuda"
        with torch.cuda.device(device) if gpu else nullcontext():
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
        self._stream = torch.cuda.Stream(device) if gpu else None
        self._copied = torch.cuda.Event(blocking=True) if gpu else None  # waiting must not take a core

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between the device and this buffer; waits for it."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            target.copy_(source, non_blocking=True)
        if self._stream is not None and self._copied is not None:
            self._copied.record(self._stream)
            self._copied.synchronize()


class PinnedCopier:
    """The caller synchronizes with whatever wrote the source on the device: the streams here wait for no other."""

    def __init__(self, device: torch.device, threads: int = 0, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`threads`: 0 for one per core, up to `MAX_THREADS`."""
        threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._device, self._buffer_bytes = device, buffer_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pinned-copy")
        self._of_thread = local()  # each thread allocates its buffer with its first copy, and keeps it

    def to_device(self, pairs: Pairs) -> Iterator[int]:
        """Copy pairs of (target, source) from host memory. Yields how many bytes are copied, in order."""
        return self._run(self._copy_to_device, pairs)

    def to_host(self, pairs: Pairs) -> Iterator[int]:
        return self._run(self._copy_to_host, pairs)

    def _run(self, copy: Callable[[CopyTask], int], pairs: Pairs) -> Iterator[int]:
        copied = 0
        for count in self._pool.map(copy, self._tasks(pairs)):
            copied += count
            yield copied

    def _tasks(self, pairs: Pairs) -> Iterator[CopyTask]:
        for target, source in pairs:
            target_bytes, source_bytes = as_bytes(target), as_bytes(source)
            for start in range(0, len(source_bytes), self._buffer_bytes):
                piece = slice(start, start + self._buffer_bytes)
                yield CopyTask(target_bytes[piece], source_bytes[piece])

    def _copy_to_device(self, task: CopyTask) -> int:
        buffer = self._buffer()
        pinned = buffer.memory[: len(task.source)]
        _copy_in_host(pinned, task.source)
        buffer.copy(task.target, pinned)
        return len(task.source)

    def _copy_to_host(self, task: CopyTask) -> int:
        buffer = self._buffer()
        pinned = buffer.memory[: len(task.source)]
        buffer.copy(pinned, task.source)
        _copy_in_host(task.target, pinned)
        return len(task.source)

    def _buffer(self) -> PinnedBuffer:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = PinnedBuffer(self._device, self._buffer_bytes)
        return self._of_thread.buffer


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


def _copy_in_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """memcpy: without torch's own threads, and without the GIL."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))
