"""A version as the trainer keeps it until the next one: in host memory, or on the GPU where it was made.

`publish.py` owns them. A copy within the GPU takes milliseconds, so training hardly stands still for it; what costs
time, the way to the host, is then gone beside the next step. Both are a `Source` for the link.
"""

from __future__ import annotations

import logging
import os
from threading import Lock

import torch

from tailrace.relay.checksum import Checksum
from tailrace.relay.layout import Layout
from tailrace.types import Version

log = logging.getLogger(__name__)

NO_ROOM = (
    "no room on the GPU for a copy of the weights ({gb:.1f} GB): training stands still while they are copied to the "
    "host; leave that much of its memory free"
)


class HostSnapshot:
    """One buffer in host memory and the version that lies in it."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size
        self.version: Version = -1
        self.reign = 0
        self.senders = 0
        self.sent_at = 0.0
        self._memory = torch.zeros(layout.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._bytes = memoryview(self._memory.numpy())  # pyright: ignore[reportArgumentType]
        self._bytes[: len(layout.header)] = layout.header
        self.tensors = layout.views(self._bytes)
        self._summing = Lock()
        self.begin()

    def begin(self) -> None:
        self.version, self.edition = -1, new_edition()
        self._checksum = Checksum(self._bytes)

    def take(self, whole: torch.Tensor, version: Version) -> None:
        """All bytes of a version that lies elsewhere."""
        self._memory.copy_(whole)
        self.version = version

    def ready(self, position: int, patience_s: float = 0.0) -> memoryview:
        return self._bytes[position:]

    def sums(self, start: int, end: int) -> bytes:
        with self._summing:
            self._checksum.advance(end)
        return self._checksum.sums(start, end)

    def checksum(self, patience_s: float = 0.0) -> str:
        with self._summing:
            self._checksum.advance(self.size)
        return self._checksum.digest()


class DeviceSnapshot:
    """The same on a device, header included. It comes to the host only when a relay elsewhere is to have it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.size = layout.size
        self.version: Version = -1
        self.edition = new_edition()
        self.reign = 0
        self.senders = 0
        self.sent_at = 0.0
        self.memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8).to(device)
        self.tensors = layout.windows(self.memory)
        self._layout = layout
        self._fetching = Lock()
        self._host: HostSnapshot | None = None

    def begin(self) -> None:
        self.version, self.edition = -1, new_edition()
        if self._host is not None:
            self._host.begin()

    def ready(self, position: int, patience_s: float = 0.0) -> memoryview:
        return self._fetched().ready(position)

    def sums(self, start: int, end: int) -> bytes:
        return self._fetched().sums(start, end)

    def checksum(self, patience_s: float = 0.0) -> str:
        return self._fetched().checksum()

    def _fetched(self) -> HostSnapshot:
        with self._fetching:
            self._host = self._host or HostSnapshot(self._layout)
            if self._host.version != self.version:
                self._host.take(self.memory, self.version)
            return self._host


Snapshot = HostSnapshot | DeviceSnapshot


def new_edition() -> str:
    """A word for the bytes of one snapshot: a version that is made again, after a trainer was lost, has another."""
    return os.urandom(8).hex()


def new_snapshot(layout: Layout, device: torch.device | None) -> Snapshot:
    """On that device, if there is one and it has room."""
    if device is not None:
        try:
            return DeviceSnapshot(layout, device)
        except torch.OutOfMemoryError:
            log.warning(NO_ROOM.format(gb=layout.size / 1e9))
    return HostSnapshot(layout)
