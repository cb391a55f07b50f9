"""The standing order of a relay towards one target: send it every version that it lacks, as long as the route says so.

One thread per target, so that a target that is slow or dead keeps nobody else waiting. A version that is just arriving
is sent while it arrives. A failure is reported once per reason and tried again with growing pauses, because control
re-routes around a dead target and a live one still has to be served. One that lasts is reported as such: perhaps both
ends are well and only the way between them is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Thread

from tailrace.relay.link import Address, Channel, LinkError, connect
from tailrace.relay.messages import Busy
from tailrace.relay.shelf import Parcel, ParcelError, Shelf
from tailrace.relay.transfer import Answer, offer
from tailrace.types import RelayId, Version

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

Report = Callable[[Version, RelayId, str, bool], None]  # the last: whether it has lasted for a while


class Feeder(Thread):
    """Started by the node's `route`, ended by the next route without this target, or by the node's end."""

    def __init__(
        self, target: RelayId, address: Address, token: bytes, shelf: Shelf, report: Report, chunk: int, stall_s: float
    ) -> None:
        super().__init__(name=f"to relay {target}", daemon=True)
        self.target, self.address = target, address
        self._token, self._shelf, self._report = token, shelf, report
        self._chunk, self._stall_s = chunk, stall_s
        self._served: set[Version] = set()
        self._ended = False
        self._channel: Channel | None = None
        self._pause_s = FIRST_PAUSE_S
        self._reported = ""
        self._failing_since = math.inf

    def run(self) -> None:
        while (parcel := self._next()) is not None:
            self._deliver(parcel)

    def renew(self) -> None:
        """The target may have lost what it had: offer everything again."""
        with self._shelf.changed:
            self._served.clear()
            self._pause_s = FIRST_PAUSE_S
            self._shelf.changed.notify_all()

    def end(self, abort: bool = False) -> None:
        """No further version; the one under way is completed, unless `abort`."""
        with self._shelf.changed:
            self._ended = True
            self._shelf.changed.notify_all()
        channel = self._channel
        if abort and channel is not None:
            channel.abort()

    def _next(self) -> Parcel | None:
        """The newest version that the target lacks. Waiting here is having nothing to do: it needs no deadline."""
        with self._shelf.changed:
            self._shelf.changed.wait_for(lambda: self._ended or self._lacking())
            return None if self._ended else self._shelf.parcels[max(self._lacking())]

    def _lacking(self) -> set[Version]:
        return self._shelf.deliverable() - self._served

    def _deliver(self, parcel: Parcel) -> None:
        try:
            answer = self._offer(parcel)
        except ParcelError:
            self._pause(growing=False)  # not the target's fault
        except LinkError as error:
            self._failed(parcel.version, str(error))
        else:
            self._answered(parcel.version, answer)

    def _offer(self, parcel: Parcel) -> Answer:
        with connect(self.address, self._stall_s) as self._channel:
            if self._ended:  # too early for `end` to abort it
                raise LinkError("the route has changed")
            self._channel.call(self._token, self.address.fingerprint)
            return offer(self._channel, parcel, self._chunk)

    def _answered(self, version: Version, answer: Answer) -> None:
        if isinstance(answer, Busy):
            self._pause(growing=False)
            return
        self._reported, self._pause_s, self._failing_since = "", FIRST_PAUSE_S, math.inf
        with self._shelf.changed:
            self._served = (self._served & self._shelf.parcels.keys()) | {version}

    def _failed(self, version: Version, reason: str) -> None:
        now = time.monotonic()
        self._failing_since = min(self._failing_since, now)
        lasting = now - self._failing_since > self._stall_s
        if not self._ended and (lasting or reason != self._reported):
            self._reported = reason
            self._report(version, self.target, reason, lasting)
        if lasting:
            self._failing_since = now
        self._pause(growing=True)

    def _pause(self, growing: bool) -> None:
        with self._shelf.changed:
            self._shelf.changed.wait_for(lambda: self._ended, self._pause_s)
        if growing:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
