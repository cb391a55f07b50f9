"""Forwards versions from a relay to one target: whatever the target lacks, as long as the route says so.

One thread per target, so that a slow or dead target holds up nobody else. A version is forwarded while it arrives. A
failure is reported once per reason and retried with growing pauses: control re-routes around a dead target, and a live
one still has to be served. A failure that persists is reported as such: perhaps both ends are alive and only the
network between them is broken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Thread

from tailrace.types import RelayId, Version
from tailrace.weights.channel import Address, ChannelError
from tailrace.weights.delta_transport import DeltaBases, DeltaRates
from tailrace.weights.messages import ReceivingElsewhere, VersionSealed
from tailrace.weights.region import MappedVersion
from tailrace.weights.streams import Hop
from tailrace.weights.transfer import Lender, OfferResult
from tailrace.weights.version_buffer import InterruptedVersionError, VersionBuffer
from tailrace.weights.version_table import VersionTable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

Report = Callable[[Version, RelayId, str, bool], None]  # version, target, reason, whether the failure persists


class Forwarder(Thread):
    """Started by the node's `route`; stopped by the next route without this target, or by the node's end."""

    def __init__(
        self,
        target: RelayId,
        address: Address,
        token: bytes,
        table: VersionTable,
        report: Report,
        chunk: int,
        stall_s: float,
        streams: int = 0,
        lender: Lender | None = None,
        congestion: str = "",
    ) -> None:
        super().__init__(name=f"to relay {target}", daemon=True)
        self.target, self.address = target, address
        self._table, self._report, self._stall_s = table, report, stall_s
        self._hop = Hop(token, chunk, streams, stall_s, lender, congestion)
        self._rates = DeltaRates()
        self._delivered: set[Version] = set()
        self._held: MappedVersion | None = None  # what the target got last: kept, because it may be far behind
        self._stopped = False
        self._pause_s = FIRST_PAUSE_S
        self._reported = ""
        self._failing_since = math.inf

    def run(self) -> None:
        while (buffer := self._next()) is not None:
            self._deliver(buffer)
        self._hop.close()

    def restart(self) -> None:
        """Offer everything again: the target may have lost what it had."""
        with self._table.changed:
            self._delivered.clear()
            self._held = None
            self._pause_s = FIRST_PAUSE_S
            self._table.changed.notify_all()

    def stop(self, abort: bool = False) -> None:
        """Send no further version; the present one is completed, unless `abort`."""
        with self._table.changed:
            self._stopped = True
            self._table.changed.notify_all()
        if abort:
            self._hop.abort("the route has changed")

    def _next(self) -> VersionBuffer | None:
        """The newest version that the target lacks. This wait needs no deadline: there is nothing to do."""
        with self._table.changed:
            self._table.changed.wait_for(lambda: self._stopped or self._missing())
            return None if self._stopped else self._table.buffers[max(self._missing())]

    def _missing(self) -> set[Version]:
        return self._table.sendable() - self._delivered

    def _deliver(self, buffer: VersionBuffer) -> None:
        try:
            result = self._offer(buffer)
        except InterruptedVersionError:
            self._pause(growing=False)  # not the target's fault
        except ChannelError as error:
            self._failed(buffer.version, str(error))
        else:
            self._answered(buffer, result)

    def _offer(self, buffer: VersionBuffer) -> OfferResult:
        with self._hop.open(self.address) as channel:
            if self._stopped:
                raise ChannelError("the route has changed")
            bases = [*self._table.bases(buffer), *([self._held] if self._held else [])]
            deltas = DeltaBases(bases, buffer.size, buffer.encoded, self._rates)
            return self._hop.offer(channel, self.address, buffer, bases=deltas)

    def _answered(self, buffer: VersionBuffer, result: OfferResult) -> None:
        if isinstance(result, ReceivingElsewhere):
            self._pause(growing=False)
            return
        self._reported, self._pause_s, self._failing_since = "", FIRST_PAUSE_S, math.inf
        with self._table.changed:
            self._delivered = (self._delivered & self._table.buffers.keys()) | {buffer.version}
            if isinstance(result, VersionSealed) and not (self._held and self._held.version > buffer.version):
                self._held = buffer.mapped

    def _failed(self, version: Version, reason: str) -> None:
        now = time.monotonic()
        self._failing_since = min(self._failing_since, now)
        persistent = now - self._failing_since > self._stall_s
        if not self._stopped and (persistent or reason != self._reported):
            self._reported = reason
            self._report(version, self.target, reason, persistent)
        if persistent:
            self._failing_since = now
        self._pause(growing=True)

    def _pause(self, growing: bool) -> None:
        with self._table.changed:
            self._table.changed.wait_for(lambda: self._stopped, self._pause_s)
        if growing:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
