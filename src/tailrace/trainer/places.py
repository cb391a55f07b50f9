"""Memory of a relay on the trainer's own host, into which the trainer writes versions itself, straight from its GPU.

The publisher is told a `Place` by the relay and asks `Places` to fill it. The files are few and come again and again:
everything that is slow about them is done once, which is mapping, claiming memory, and registering it with CUDA so that
the GPU can write to it at the speed of the link. Where it cannot be registered, threads with pinned buffers carry the
bytes.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch

from tailrace.errors import TailraceError
from tailrace.model.haul import Hauler
from tailrace.relay.arena import NO_ROOM, back, no_room
from tailrace.relay.messages import Place
from tailrace.types import Version

SLICE = 128 << 20  # bytes registered and copied at once: registering holds up the trainer's own calls of CUDA
HAUL = 1 << 30  # bytes that threads carry before they meet again
PORTABLE = 1  # cudaHostRegisterPortable


class NotHereError(TailraceError):
    """The file that the relay names is not on this host, or not for us."""


class Places:
    """All places that one trainer knows. Filling two of them at a time is possible."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[int, int], Site] = {}
        self._looking = Lock()

    @cached_property
    def hauler(self) -> Hauler:
        return Hauler(self.device)

    def fill(self, place: Place, version: Version, source: torch.Tensor) -> Iterator[int]:
        """Copy a version's bytes from the device. Yields how many have arrived."""
        with self._looking:
            self._forget_deleted()
            site = self._site(place, len(source))
        return site.fill(version, source)

    def close(self) -> None:
        with self._looking:
            for site in self._known.values():
                site.close()
            self._known.clear()

    def _site(self, place: Place, size: int) -> Site:
        path = Path(place.path)
        found = path.stat() if path.exists() else None
        if found is None or found.st_ino != place.inode or found.st_size != size:
            raise NotHereError(f"{path} is not on this host")
        key = (found.st_dev, found.st_ino)
        if key not in self._known:
            try:
                self._known[key] = Site(path, size, self)
            except OSError as error:
                raise NotHereError(f"{path} is not ours to write: {error.strerror}") from None
        return self._known[key]

    def _forget_deleted(self) -> None:
        """What the relay has deleted takes memory only because we have it mapped."""
        for key, site in list(self._known.items()):
            if site.is_deleted() and not site.filling:
                self._known.pop(key).close()


class Site:
    """One file. `_backed` bytes of it have memory, the first `_pinned` of them are known to CUDA."""

    def __init__(self, path: Path, size: int, places: Places) -> None:
        self.filling = False
        self._folder, self._size, self._places = path.parent, size, places
        self._file = os.open(path, os.O_RDWR)
        self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self._backed = self._pinned = 0
        self._stream: torch.cuda.Stream | None = None
        if places.device.type == "cuda":
            self._stream = torch.cuda.Stream(places.device)

    def is_deleted(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def close(self) -> None:
        for start in range(0, self._pinned, SLICE):
            _unregister(self._memory.data_ptr() + start)
        self._pinned = 0
        os.close(self._file)

    def fill(self, version: Version, source: torch.Tensor) -> Iterator[int]:
        self.filling = True
        try:
            done = 0
            if self._stream is not None:
                done = yield from self._by_link(version, source, self._stream)
            yield from self._by_hand(version, source, done)
        finally:
            if self._stream is not None:
                self._stream.synchronize()
            self.filling = False

    def _by_link(self, version: Version, source: torch.Tensor, stream: torch.cuda.Stream) -> Generator[int, None, int]:
        """The GPU writes. Returns how far: to the end, or to where memory could not be registered."""
        under_way: deque[tuple[torch.cuda.Event, int]] = deque()
        start = 0
        while start < self._size and self._pin(version, start):
            end = min(start + SLICE, self._size)
            with torch.cuda.stream(stream):
                self._memory[start:end].copy_(source[start:end], non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # waiting must not take a core
            arrived.record(stream)
            under_way.append((arrived, end))
            while under_way and under_way[0][0].query():
                yield under_way.popleft()[1]
            start = end
        for arrived, end in under_way:
            arrived.synchronize()
            yield end
        return start

    def _by_hand(self, version: Version, source: torch.Tensor, done: int) -> Iterator[int]:
        """Threads carry what is left."""
        for start in range(done, self._size, HAUL):
            end = min(start + HAUL, self._size)
            self._back(version, end)
            for count in self._places.hauler.copy_out([(self._memory[start:end], source[start:end])]):
                yield start + count

    def _pin(self, version: Version, start: int) -> bool:
        """Register the slice that starts here."""
        if start < self._pinned:
            return True
        end = min(start + SLICE, self._size)
        self._back(version, end)
        if not _register(self._memory.data_ptr() + start, end - start, self._places.device):
            return False
        self._pinned = end
        return True

    def _back(self, version: Version, end: int) -> None:
        """Claim memory up to here, so that a full host is a sentence and not a signal."""
        if end <= self._backed:
            return
        try:
            back(self._file, self._backed, end - self._backed)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise no_room(self._folder, version, self._size) from None
        self._backed = end


def _register(address: int, count: int, device: torch.device) -> bool:
    runtime = torch.cuda.cudart()
    assert runtime is not None
    with torch.cuda.device(device):
        return int(runtime.cudaHostRegister(address, count, PORTABLE)) == 0


def _unregister(address: int) -> None:
    runtime = torch.cuda.cudart()
    assert runtime is not None
    runtime.cudaHostUnregister(address)
