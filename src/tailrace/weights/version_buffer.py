"""A weight version in shared memory while it is written: one writer, any number of readers behind it.

Relays and replicas get one from `SharedMemory.create`. The thread that receives the version fills it; threads that
forward it read what is verified so far and wait for more. None of them holds up another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Condition

from tailrace.types import Version, label
from tailrace.weights.channel import Channel, ChannelError
from tailrace.weights.checksum import RunningChecksum
from tailrace.weights.region import MappedVersion, Region, SharedMemoryError, allocate

TAKEOVER_S = 3.0  # without weights from the sender; then another one may take over


class InterruptedVersionError(ChannelError):
    """The version is not complete here and nobody sends the rest, so it cannot be forwarded."""


class VersionBuffer:
    """A version from its first byte until it is dropped.

    The writer calls `claim` for the next memory, fills it, and calls `confirm` with the checksums of its pieces. If
    `in_place`, another process of this host writes, which has no checksums to compare with because nothing came over a
    network; then `advance` says how far it is. `seal` makes the version visible to other processes if its checksum is
    right. A version whose sender is gone is `paused`: its bytes stay, and another sender with the same `content_id` may
    resume it.
    """

    def __init__(
        self,
        version: Version,
        region: Region,
        seal: Callable[[VersionBuffer, str], MappedVersion],
        in_place: bool = False,
        content_id: str = "",
        generation: int = 0,
    ) -> None:
        self.version, self.region, self.size = version, region, region.size
        self.in_place, self.content_id, self.generation = in_place, content_id, generation
        self.written = 0
        self.mapped: MappedVersion | None = None  # once it is sealed
        self._sender: Channel | None = None
        self._resume_by = math.inf  # on the monotonic clock, while it is paused
        self._interrupted = ""  # why it will never be complete
        self._seal = seal
        self._data = region.buffer
        self._checksum = RunningChecksum(region.buffer, parallel=in_place)
        self._changed = Condition()

    # --------------------------------------------------------------------------------------------------------- sender

    @property
    def sealed(self) -> bool:
        return self.mapped is not None

    @property
    def arriving(self) -> bool:
        return self._sender is not None and not self.sealed

    @property
    def paused(self) -> bool:
        return self._sender is None and not self.sealed

    def resume(self, sender: Channel) -> None:
        self._sender, self._resume_by = sender, math.inf

    def pause(self, seconds: float) -> None:
        """Its sender is gone. Readers wait this long for another one."""
        self._sender, self._resume_by = None, time.monotonic() + seconds

    def offer_takeover(self) -> None:
        """Another sender offers this version: disconnect the present one if it seems dead."""
        if self._sender is not None and time.monotonic() - self._sender.weights_received_at > TAKEOVER_S:
            self._sender.abort()

    def cancel(self) -> None:
        """It is dropped while it arrives: the next call of the writer raises."""
        self._interrupted = f"{label('version', self.version)} was dropped while it was received"

    # --------------------------------------------------------------------------------------------------------- writer

    def claim(self, count: int) -> memoryview:
        """The next `count` bytes, or what is left, backed by memory."""
        self._check_wanted()
        end = min(self.size, self.written + count)
        allocate(self.region.file, self.written, end - self.written, self.region.path.parent, self.version)
        return self._data[self.written : end]

    def confirm(self, count: int, checksums: bytes) -> bool:
        """The next `count` bytes are written. False if their pieces have other checksums: then they must be resent."""
        self._check_wanted()
        valid = self._checksum.verify(self.written + count, checksums)
        if valid:
            self._grow(count)
        return valid

    def advance(self, count: int) -> None:
        """The next `count` bytes are written; there are no checksums to compare with."""
        self._check_wanted()
        self._checksum.advance(self.written + count)
        self._grow(count)

    def seal(self, checksum: str = "") -> MappedVersion:
        """Make it a version; `checksum` is what the first sender computed."""
        self._check_wanted()
        name = label("version", self.version)
        if self.written < self.size:
            raise SharedMemoryError(f"{name} is incomplete: {self.written:,} of {self.size:,} bytes arrived")
        found = self._checksum.digest()
        if found != checksum and not self.in_place:
            raise SharedMemoryError(f"{name} was damaged in transit: its checksum is not the one it was sent with")
        mapped = self._seal(self, found)
        with self._changed:
            self.mapped, self._data = mapped, mapped.buffer  # readers of the writable mapping may go on
            self._changed.notify_all()
        self._checksum.release_buffer()
        del self.region
        return mapped

    def discard(self) -> None:
        """Free the memory of a version that will not be completed; its readers get an error."""
        self.region.delete()
        with self._changed:
            self._interrupted = self._interrupted or self._broken_off()
            self._changed.notify_all()

    def _grow(self, count: int) -> None:
        with self._changed:
            self.written += count
            self._changed.notify_all()

    def _check_wanted(self) -> None:
        if self._interrupted:
            raise InterruptedVersionError(self._interrupted)

    # -------------------------------------------------------------------------------------------------------- readers

    def ready(self, position: int, timeout_s: float) -> memoryview:
        """The verified bytes from `position` on; empty if none come in time."""
        self._wait(lambda: self._checksum.hashed > position, timeout_s)
        return self._data[position : self._checksum.hashed]

    def checksums(self, start: int, end: int) -> bytes:
        return self._checksum.checksums(start, end)

    def checksum(self, timeout_s: float) -> str:
        """Known once it is sealed here, so that a damaged version is confirmed to nobody; empty until then."""
        self._wait(lambda: self.sealed, timeout_s)
        return self.mapped.checksum if self.mapped else ""

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """While it is arriving, its own channel has the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or holds(), timeout_s)
        if self._interrupted:
            raise InterruptedVersionError(self._interrupted)
        if time.monotonic() > self._resume_by:
            raise InterruptedVersionError(self._broken_off())

    def _broken_off(self) -> str:
        return f"{label('version', self.version)} was interrupted after {self.written:,} bytes"
