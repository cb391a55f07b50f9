"""What a relay holds and what is arriving: the one piece of state that its threads share.

A `Parcel` is a version, from its first byte on: the thread that receives it fills it, any number of threads read behind
the received part and wait for more, none of them can hold up another. The `Shelf` is the set of parcels; whoever waits
for something new to send waits on `changed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

from tailrace.relay.arena import Mapped, Writer
from tailrace.relay.link import STALL_S, Channel, LinkError
from tailrace.relay.messages import Offer, Place
from tailrace.types import Version, label

OVERTAKE_S = 3.0  # without weights


class ParcelError(LinkError):
    """The version broke off on its way here, so it cannot be sent on."""


class Parcel:
    """A version that is arriving or sealed: a `Sink` for its receiver, a `Source` for everyone it is sent on to.

    Between two senders it is neither: what has come of it stays, and those who send it on wait for more.
    """

    def __init__(self, writer: Writer, offer: Offer, channel: Channel, stall_s: float = STALL_S) -> None:
        self.version, self.size = writer.version, writer.size
        self.edition, self.reign = offer.edition, offer.reign
        self.sealed: Mapped | None = None
        self.unwanted = False  # dropped while it was arriving
        self._lost = False
        self._channel: Channel | None = channel  # over which it comes
        self._waits_since = 0.0
        self._writer = writer
        self._stall_s = stall_s
        self._grown = Condition()

    @property
    def arriving(self) -> bool:
        return self._channel is not None and self.sealed is None

    @property
    def waits(self) -> bool:
        """For somebody who sends the rest."""
        return self._channel is None and self.sealed is None

    def goes_on_with(self, offer: Offer) -> bool:
        """Whether what is offered is the rest of this."""
        return (offer.edition, offer.size) == (self.edition, self.size) and not offer.here

    def resume(self, channel: Channel) -> None:
        self._channel = channel

    def pause(self) -> None:
        """Its sender is gone."""
        self._channel = None
        self._waits_since = time.monotonic()

    # -------------------------------------------------------------------------------------- the thread that receives

    @property
    def written(self) -> int:
        return self._writer.written

    def claim(self, count: int) -> memoryview:
        self.check_wanted()
        return self._writer.claim(count)

    def place(self) -> Place:
        return Place(str(self._writer.path), self._writer.memory.inode)

    def check_wanted(self) -> None:
        if self.unwanted:
            raise ParcelError(f"{label('version', self.version)} was dropped while it arrived")

    def confirm(self, count: int, sums: bytes) -> bool:
        self.check_wanted()
        right = self._writer.confirm(count, sums)
        if right:
            self._tell()
        return right

    def advance(self, count: int) -> None:
        self.check_wanted()
        self._writer.advance(count)
        self._tell()

    def seal(self, checksum: str) -> None:
        """Without a checksum if it was written in place."""
        sealed = self._writer.seal(checksum)
        with self._grown:
            self.sealed = sealed
            self._grown.notify_all()

    def discard(self) -> None:
        """It is lost, and those who send it on learn so."""
        self._writer.discard()
        with self._grown:
            self._lost = True
            self._grown.notify_all()

    def overtake(self) -> None:
        """Somebody else offers this version: if its present sender seems dead, leave it, and be asked again."""
        if self._channel is not None and time.monotonic() - self._channel.moved > OVERTAKE_S:
            self._channel.abort()

    def _tell(self) -> None:
        with self._grown:
            self._grown.notify_all()

    # ---------------------------------------------------------------------------------------- threads that send it on

    def ready(self, position: int, patience_s: float) -> memoryview:
        self._wait(lambda: self._writer.summed > position, patience_s)
        return self._writer.buffer[position : self._writer.summed]

    def sums(self, start: int, end: int) -> bytes:
        return self._writer.sums.sums(start, end)

    def checksum(self, patience_s: float) -> str:
        """Known once it is sealed here, so a version that is damaged is not confirmed to anyone."""
        self._wait(lambda: self.sealed is not None, patience_s)
        return self.sealed.checksum if self.sealed else ""

    def _wait(self, there: Callable[[], bool], patience_s: float) -> None:
        """While it is arriving, the deadline is that of its own link."""
        with self._grown:
            self._grown.wait_for(lambda: self._lost or there(), patience_s)
        if self._lost or (self.waits and time.monotonic() - self._waits_since > self._stall_s):
            raise ParcelError(f"{label('version', self.version)} broke off after {self.written:,} bytes")


class Shelf:
    """Guard every access with `changed`, and notify it after every change."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.parcels: dict[Version, Parcel] = {}
        self.dropped: set[Version] = set()  # not to be taken back from a relay that drops them later

    def put(self, parcel: Parcel) -> None:
        with self.changed:
            self.parcels[parcel.version] = parcel
            self.dropped.discard(parcel.version)
            self.changed.notify_all()

    def get(self, version: Version) -> Parcel | None:
        with self.changed:
            return self.parcels.get(version)

    def take_away(self, version: Version) -> None:
        with self.changed:
            self.parcels.pop(version, None)
            self.changed.notify_all()

    def deliverable(self) -> set[Version]:
        """What is here, or on its way here."""
        return {version for version, parcel in self.parcels.items() if not parcel.waits}

    def sealed(self) -> tuple[Version, ...]:
        with self.changed:
            return tuple(sorted(version for version, parcel in self.parcels.items() if parcel.sealed))
