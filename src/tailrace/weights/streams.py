"""One hop of a version: offers it to a relay over one connection, or over several where one does not fill the link.

The trainer's publisher and the relays' forwarders use it. Several connections are stripes of the version, which the
receiver assembles like any other parts. TCP fills a link of rate R and round trip T only if it may have R * T bytes
under way, and systems allow it a few megabytes. The round trip is known from the start; what the link carried of one
version says how many streams the next one needs. More than that would be slower: a chain of relays passes on whole
pieces, and with n streams the first one takes n times as long to arrive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

from tailrace.weights.channel import STALL_S, Address, Channel, ChannelError, connect
from tailrace.weights.messages import ReceivingElsewhere
from tailrace.weights.part import STRIPE_BLOCK, Part, stripes
from tailrace.weights.transfer import CHUNK, Bases, Lender, OfferResult, VersionSource, offer

ROUND_TRIP_S = 0.01  # that one stream is good for, where nothing is known of the rate
WINDOW = 3 << 19  # bytes that one stream may have under way at least, by the usual limits of systems
MOST_STREAMS = 8

Send = Callable[[Channel, VersionSource], OfferResult]


class Stripe:
    """What one of several streams carries of a source: a `VersionSource` itself. All of its blocks are whole pieces, so
    their checksums are those of the source."""

    def __init__(self, source: VersionSource, stripe: Part) -> None:
        self.version, self.content_id, self.generation = source.version, source.content_id, source.generation
        self.part = source.part.of_part(stripe)
        self._source, self._stripe = source, stripe

    def ready(self, position: int, timeout_s: float) -> memoryview:
        place = next(self._stripe.segments(position, self._stripe.size))
        return self._source.ready(place.start, timeout_s)[: place.end - place.start]

    def checksums(self, start: int, end: int) -> bytes:
        return b"".join([self._source.checksums(*place) for place in self._stripe.segments(start, end)])

    def checksum(self, timeout_s: float) -> str | None:
        return self._source.checksum(timeout_s)


class Hop:
    """Connections to relays, which stay open for the next version. `streams`: 0 for as many as the round trip asks for.
    `congestion`: TCP's algorithm on them, if the system has it. `bytes_sent` counts weights."""

    def __init__(
        self,
        token: bytes,
        chunk: int = CHUNK,
        streams: int = 0,
        stall_s: float = STALL_S,
        lender: Lender | None = None,
        congestion: str = "",
    ) -> None:
        self._token, self._chunk, self._streams, self._stall_s = token, chunk, streams, stall_s
        self._lender, self._congestion = lender, congestion
        self._lock = Lock()  # guards the next five
        self._channels: set[Channel] = set()  # in use
        self._idle: dict[Address, list[Channel]] = {}
        self._aborted = ""
        self._rates: dict[Address, float] = {}  # bytes per second of the last version that was large enough to tell
        self._sent = 0  # bytes, by connections that are not in use any more
        self.bytes_sent = 0

    @contextmanager
    def open(self, address: Address) -> Iterator[Channel]:
        """A connection that `abort` ends; an open one if there is. After an error it is closed."""
        channel = self._take(address) or self._connect(address)
        weights, sent = channel.weight_bytes_sent, channel.bytes_sent
        try:
            if not channel.authenticated:
                channel.call(self._token, address.fingerprint)
            yield channel
            self._keep(address, channel)
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._channels.discard(channel)
                self.bytes_sent += channel.weight_bytes_sent - weights
                self._sent += channel.bytes_sent - sent

    def close(self) -> None:
        """Of connections that nobody uses."""
        with self._lock:
            idle, self._idle = [each for kept in self._idle.values() for each in kept], {}
        for channel in idle:
            channel.close()

    def _connect(self, address: Address) -> Channel:
        channel = connect(address, self._stall_s)
        channel.set_congestion(self._congestion)
        return self._use(channel)

    def _take(self, address: Address) -> Channel | None:
        with self._lock:
            kept = self._idle.pop(address, [])
            quiet = [channel for channel in kept if channel.is_quiet()]
            self._idle[address] = quiet[1:]
        for channel in kept:
            if channel not in quiet:
                channel.close()
        return self._use(quiet[0]) if quiet else None

    def _use(self, channel: Channel) -> Channel:
        with self._lock:
            if not self._aborted:
                self._channels.add(channel)
                return channel
        channel.close()
        raise ChannelError(self._aborted)

    def _keep(self, address: Address, channel: Channel) -> None:
        with self._lock:
            if not (self._aborted or channel.aborted):
                self._idle.setdefault(address, []).append(channel)
                return
        channel.close()

    def offer(
        self,
        channel: Channel,
        address: Address,
        source: VersionSource,
        from_trainer: bool = False,
        destination: str = "",
        bases: Bases | None = None,
    ) -> OfferResult:
        """Over this connection to `address`, and over more if need be; as `transfer.offer`."""

        def send(open_channel: Channel, part: VersionSource) -> OfferResult:
            return offer(open_channel, part, self._chunk, from_trainer, destination, self._lender, bases)

        began, sent = time.monotonic(), self._sent + channel.bytes_sent
        count = streams_for(channel, source.part.size, self._streams, self._rates.get(address))
        result = send(channel, source) if count == 1 else self._in_stripes(channel, address, source, count, send)
        self._measured(address, self._sent + channel.bytes_sent - sent, time.monotonic() - began)
        return result

    def _measured(self, address: Address, size: int, seconds: float) -> None:
        if size >= STRIPE_BLOCK and seconds:
            with self._lock:
                self._rates[address] = size / seconds

    def _in_stripes(
        self, channel: Channel, address: Address, source: VersionSource, count: int, send: Send
    ) -> OfferResult:
        """All end if one fails: then the next attempt resumes all of them."""
        failures: list[ChannelError] = []

        def stream(opened: AbstractContextManager[Channel], stripe: Part) -> OfferResult | None:
            try:
                with opened as own:
                    return send(own, Stripe(source, stripe))
            except ChannelError as error:
                failures.append(error)
                self._disconnect()
                return None

        connections = [nullcontext(channel), *[self.open(address) for _ in range(count - 1)]]
        with ThreadPoolExecutor(count, thread_name_prefix="stream") as pool:
            results = list(pool.map(stream, connections, stripes(source.part.size, count)))
        if failures:
            raise failures[0]
        return _together([result for result in results if result is not None])

    def abort(self, reason: str) -> None:
        """End all connections, also those that are about to be made."""
        with self._lock:
            self._aborted = reason
        self._disconnect()
        self.close()

    def _disconnect(self) -> None:
        with self._lock:
            for channel in self._channels:
                channel.abort()


def streams_for(channel: Channel, size: int, streams: int = 0, rate: float | None = None) -> int:
    """How many connections this one should be, for so many bytes; `rate`: what the last ones carried per second."""
    needed = 1.0
    if not channel.is_local():
        needed = channel.round_trip_s / ROUND_TRIP_S if rate is None else rate * channel.round_trip_s / WINDOW
    return max(1, min(streams or math.ceil(min(needed, MOST_STREAMS)), size // STRIPE_BLOCK))


def _together(results: list[OfferResult]) -> OfferResult:
    """What one connection would have answered."""
    waiting = [result for result in results if isinstance(result, ReceivingElsewhere)]
    return waiting[0] if waiting else results[0]
