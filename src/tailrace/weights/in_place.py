"""Writes weight versions from the trainer's GPU straight into the shared memory of a relay on the same host.

The relay sends a `WriteTarget` to the publisher, which asks `InPlaceWriter` to write there. The files are few and are
reused, so everything slow is done once: mapping, allocating memory, and registering it with CUDA so that the GPU writes
to it at the speed of the link. Where memory cannot be registered, threads with pinned buffers copy.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from threading import Lock

import torch

from tailrace.types import Version
from tailrace.weights.messages import WriteTarget
from tailrace.weights.pinned_copy import PinnedCopier
from tailrace.weights.region import NotOnThisHostError, allocate

REGISTER_BYTES = 128 << 20  # registered and copied at once: registering holds up the trainer's own CUDA calls
COPY_BYTES = 1 << 30  # that threads copy before memory for the next ones is allocated
PORTABLE = 1  # cudaHostRegisterPortable


class InPlaceWriter:
    """Keeps the files that one trainer has mapped. Two versions may be written at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copier = device, PinnedCopier(device)
        self._regions: dict[tuple[int, int], RelayRegion] = {}  # by device number and inode
        self._lock = Lock()

    def write(self, target: WriteTarget, version: Version, source: torch.Tensor) -> Iterator[int]:
        """Copy a version's bytes from the device. Yields how many are written."""
        with self._lock:
            self._close_deleted()
            region = self._region(target, len(source))
        return region.write(version, source)

    def close(self) -> None:
        with self._lock:
            for region in self._regions.values():
                region.close()
            self._regions.clear()

    def _region(self, target: WriteTarget, size: int) -> RelayRegion:
        path = Path(target.path)
        found = path.stat() if path.exists() else None
        if found is None or found.st_ino != target.inode or found.st_size != size:
            raise NotOnThisHostError(f"{path} is not on this host")
        key = (found.st_dev, found.st_ino)
        if key not in self._regions:
            try:
                self._regions[key] = RelayRegion(path, size, self._device, self._copier)
            except OSError as error:
                raise NotOnThisHostError(f"{path} cannot be written: {error.strerror}") from None
        return self._regions[key]

    def _close_deleted(self) -> None:
        """A file that the relay has deleted occupies memory only because it is mapped here."""
        for key, region in list(self._regions.items()):
            if region.is_deleted() and not region.writing:
                self._regions.pop(key).close()


class RelayRegion:
    """One file of a relay. Its first `_allocated` bytes have memory, the first `_registered` are known to CUDA."""

    def __init__(self, path: Path, size: int, device: torch.device, copier: PinnedCopier) -> None:
        self.writing = False
        self._folder, self._size, self._device, self._copier = path.parent, size, device, copier
        self._file = os.open(path, os.O_RDWR)
        self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self._allocated = self._registered = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def is_deleted(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def close(self) -> None:
        for start in range(0, self._registered, REGISTER_BYTES):
            _unregister(self._memory.data_ptr() + start)
        self._registered = 0
        os.close(self._file)

    def write(self, version: Version, source: torch.Tensor) -> Iterator[int]:
        self.writing = True
        try:
            done = 0
            if self._stream is not None:
                done = yield from self._copy_registered(version, source, self._stream)
            yield from self._copy_with_threads(version, source, done)
        finally:
            if self._stream is not None:
                self._stream.synchronize()
            self.writing = False

    def _copy_registered(
        self, version: Version, source: torch.Tensor, stream: torch.cuda.Stream
    ) -> Generator[int, None, int]:
        """The GPU writes. Returns how far: to the end, or to where memory could not be registered."""
        copies: deque[tuple[torch.cuda.Event, int]] = deque()
        start = 0
        while start < self._size and self._register(version, start):
            end = min(start + REGISTER_BYTES, self._size)
            with torch.cuda.stream(stream):
                self._memory[start:end].copy_(source[start:end], non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # waiting must not take a core
            copied.record(stream)
            copies.append((copied, end))
            while copies and copies[0][0].query():
                yield copies.popleft()[1]
            start = end
        for copied, end in copies:
            copied.synchronize()
            yield end
        return start

    def _copy_with_threads(self, version: Version, source: torch.Tensor, start: int) -> Iterator[int]:
        """What is left from `start` on."""
        for first in range(start, self._size, COPY_BYTES):
            end = min(first + COPY_BYTES, self._size)
            self._allocate(version, end)
            for count in self._copier.to_host([(self._memory[first:end], source[first:end])]):
                yield first + count

    def _register(self, version: Version, start: int) -> bool:
        """The next `REGISTER_BYTES` from `start` on; False if CUDA refuses."""
        if start < self._registered:
            return True
        end = min(start + REGISTER_BYTES, self._size)
        self._allocate(version, end)
        if not _register(self._memory.data_ptr() + start, end - start, self._device):
            return False
        self._registered = end
        return True

    def _allocate(self, version: Version, end: int) -> None:
        if end > self._allocated:
            allocate(self._file, self._allocated, end - self._allocated, self._folder, version)
            self._allocated = end


def _register(address: int, count: int, device: torch.device) -> bool:
    runtime = torch.cuda.cudart()
    assert runtime is not None
    with torch.cuda.device(device):
        return int(runtime.cudaHostRegister(address, count, PORTABLE)) == 0


def _unregister(address: int) -> None:
    runtime = torch.cuda.cudart()
    assert runtime is not None
    runtime.cudaHostUnregister(address)
