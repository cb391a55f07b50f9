"""A weight version in shared memory while it is written: one writer per part, any number of readers behind them.

Relays and replicas get one from `SharedMemory.create`. The threads that receive its parts fill it; threads that forward
it read what is complete and verified from the start on, and wait for more. None of them holds up another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Condition, Lock

from tailrace.types import Version, label
from tailrace.weights.channel import Channel, ChannelError
from tailrace.weights.checksum import CHECKSUM_BYTES, PIECE, RunningChecksum, scattered_checksums
from tailrace.weights.delta import EncodedPieces
from tailrace.weights.part import Part
from tailrace.weights.region import MappedVersion, Region, SharedMemoryError, allocate

TAKEOVER_S = 3.0  # without weights from the sender; then another one may take over


class InterruptedVersionError(ChannelError):
    """The version is not complete here and nobody sends the rest, so it cannot be forwarded."""


class PartBuffer:
    """One part of a version as it arrives, from one sender at a time.

    The writer calls `claim` for the next memory, fills it, and calls `confirm` with the checksums of its pieces. If the
    version is written in place, there are none to compare with, because nothing came over a network; then `advance`
    says how far it is. A part whose sender is gone keeps its bytes, and another sender may resume it.
    """

    def __init__(self, version: VersionBuffer, part: Part) -> None:
        self.version, self.part, self.size = version, part, part.size
        self.written = 0
        self.ended = False  # its sender has said that this is all
        self.sender: Channel | None = None

    def resume(self, sender: Channel) -> None:
        self.sender, self.ended = sender, False
        self.version.resumed()

    def pause(self, seconds: float) -> None:
        """Its sender is gone. Readers of the version wait this long for another one."""
        self.sender = None
        self.version.interrupt_after(seconds)

    def disconnect(self) -> None:
        if self.sender is not None:
            self.sender.abort()

    def is_silent(self) -> bool:
        return self.sender is not None and time.monotonic() - self.sender.weights_received_at > TAKEOVER_S

    def claim(self, count: int) -> list[memoryview]:
        """The places of the next `count` bytes, or of what is left, backed by memory."""
        return [self.version.memory(*place) for place in self.part.segments(self.written, self._after(count))]

    def confirm(self, count: int, checksums: bytes) -> bool:
        """The next `count` bytes are written. False if their pieces have other checksums: then they must be resent."""
        start, end = self.written, self._after(count)
        if (
            scattered_checksums([self.version.data[first:last] for first, last in self.part.segments(start, end)])
            != checksums
        ):
            return False
        for number, position in enumerate(range(start, end, PIECE)):
            checksum = checksums[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
            self.version.give_checksum([*self.part.segments(position, min(position + PIECE, end))], checksum)
        self.advance(count)
        return True

    def advance(self, count: int) -> None:
        """The next `count` bytes are written and as they should be."""
        self.written = self._after(count)
        self.version.grow()

    def _after(self, count: int) -> int:
        return min(self.size, self.written + count)


class VersionBuffer:
    """A version from its first byte until it is dropped. `written`: bytes from its start that are complete; none before
    all parts are known.

    `end` makes it visible to other processes with the end of its last part, if its checksum is right. `in_place`:
    another process of this host writes it.
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
        self.part = Part.whole(region.size)  # of which a `VersionSource` has the bytes
        self.parts: list[PartBuffer] = []
        self.written = 0
        self.data = region.buffer
        self.mapped: MappedVersion | None = None  # once it is sealed
        self.encoded = EncodedPieces()  # for those that it is sent to as differences
        self.deltas = 0  # how many differences, one after the other, it was made by since there was a whole copy
        self.whole_only = False  # a difference has led to other bytes
        self._expected = ""  # checksum, from a sender that knows it
        self._resume_by = math.inf  # on the monotonic clock, while nobody sends
        self._interrupted = ""  # why it will never be complete
        self._seal = seal
        self._checksum = RunningChecksum(region.buffer, parallel=in_place)
        self._growing = Lock()
        self._changed = Condition()

    # -------------------------------------------------------------------------------------------------------- senders

    @property
    def sealed(self) -> bool:
        return self.mapped is not None

    @property
    def arriving(self) -> bool:
        return not self.sealed and any(each.sender is not None for each in self.parts)

    @property
    def paused(self) -> bool:
        return not self.sealed and not self.arriving

    @property
    def arrived(self) -> int:
        """Bytes of all parts."""
        return sum(each.written for each in self.parts)

    def buffer_of(self, part: Part) -> PartBuffer | None:
        """The buffer of a part, a new one if need be; None if other parts have some of its bytes."""
        found = next((each for each in self.parts if each.part == part), None)
        if found is None and not part.overlaps(each.part for each in self.parts):
            found = PartBuffer(self, part)
            self.parts.append(found)
        return found

    def whole(self) -> PartBuffer:
        """For a single writer."""
        found = self.buffer_of(self.part)
        assert found is not None
        return found

    def resumed(self) -> None:
        self._resume_by = math.inf

    def interrupt_after(self, seconds: float) -> None:
        """Tell readers, if nobody sends until then."""
        if self.paused:
            self._resume_by = time.monotonic() + seconds

    def offer_takeover(self) -> None:
        """Another sender offers it in other parts: disconnect the present ones if all of them seem dead."""
        senders = [each for each in self.parts if each.sender is not None]
        if all(each.is_silent() for each in senders):
            for each in senders:
                each.disconnect()

    def cancel(self) -> None:
        """It is dropped while it arrives: the next call of a writer raises."""
        self._interrupted = f"{label('version', self.version)} was dropped while it was received"

    # -------------------------------------------------------------------------------------------------------- writers

    def memory(self, start: int, end: int) -> memoryview:
        """A place to write to, backed by memory."""
        self._check_wanted()
        allocate(self.region.file, start, end - start, self.region.path.parent, self.version)
        return self.data[start:end]

    def give_checksum(self, segments: list[tuple[int, int]], checksum: bytes) -> None:
        """Of verified bytes in these places. If they are one piece of the version as well, it need not be hashed."""
        start, end = segments[0]
        if len(segments) == 1 and not start % PIECE and end in (start + PIECE, self.size):
            self._checksum.give(start, checksum)

    def grow(self) -> None:
        """A part has more than before."""
        self._check_wanted()
        with self._growing:
            self.written = self._complete_to()
            self._checksum.advance(self.written)
        with self._changed:
            self._changed.notify_all()

    def end(self, part: PartBuffer, checksum: str) -> bool:
        """All of a part has come; `checksum` is the version's, if the sender knows it. With the last part the version
        is sealed; returns whether it is."""
        part.ended = True
        self._expected = checksum or self._expected
        if self._all_known() and all(each.ended for each in self.parts):
            self.seal(self._expected)
        return self.sealed

    def seal(self, checksum: str = "") -> MappedVersion:
        """Make it a version; `checksum` is what the first sender computed, if that had all of it."""
        self._check_wanted()
        name = label("version", self.version)
        if self.written < self.size:
            raise SharedMemoryError(f"{name} is incomplete: {self.arrived:,} of {self.size:,} bytes arrived")
        found = self._checksum.digest()
        if found != checksum and (checksum or self._is_checksum_due()):
            raise SharedMemoryError(f"{name} was damaged in transit: its checksum is not the one it was sent with")
        mapped = self._seal(self, found)
        with self._changed:
            self.mapped, self.data = mapped, mapped.buffer  # readers of the writable mapping may go on
            self._changed.notify_all()
        self._checksum.release_buffer()
        self.parts = []  # they refer to it, and its memory has to be free as soon as nobody reads it
        del self.region
        return mapped

    def discard(self) -> None:
        """Free the memory of a version that will not be completed; its readers get an error."""
        self.region.delete()
        with self._changed:
            self._interrupted = self._interrupted or self._broken_off()
            self._changed.notify_all()

    def _complete_to(self) -> int:
        return min(each.part.place(each.written) for each in self.parts) if self._all_known() else 0

    def _all_known(self) -> bool:
        return sum(each.size for each in self.parts) == self.size

    def _is_checksum_due(self) -> bool:
        """Who sends all of it knows its checksum, unless nobody has read it yet."""
        return len(self.parts) == 1 and not self.in_place

    def _check_wanted(self) -> None:
        if self._interrupted:
            raise InterruptedVersionError(self._interrupted)

    # -------------------------------------------------------------------------------------------------------- readers

    def ready(self, position: int, timeout_s: float) -> memoryview:
        """The verified bytes from `position` on; empty if none come in time. Pieces may come in any order."""
        self._wait(lambda: self._checksum.known_from(position) > position, timeout_s)
        return self.data[position : self._checksum.known_from(position)]

    def checksums(self, start: int, end: int) -> bytes:
        return self._checksum.checksums(start, end)

    def checksum(self, timeout_s: float) -> str | None:
        """Known once it is sealed here, so that a damaged version is confirmed to nobody."""
        self._wait(lambda: self.sealed, timeout_s)
        return self.mapped.checksum if self.mapped else None

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """While it is arriving, its own channels have the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or holds(), timeout_s)
        if self._interrupted:
            raise InterruptedVersionError(self._interrupted)
        if time.monotonic() > self._resume_by:
            raise InterruptedVersionError(self._broken_off())

    def _broken_off(self) -> str:
        return f"{label('version', self.version)} was interrupted after {self.arrived:,} bytes"
