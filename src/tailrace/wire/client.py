"""A component's end of the wire.

It has a thread of its own, so that heartbeats go out while the component computes; `send` may be called from any
thread. Heartbeats are datagrams (`liveness`), and frames as well where the controller asks for that. They stop while
the component's loop is stuck.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf

from tailrace.protocol import Event
from tailrace.types import MALFORMED
from tailrace.watchdog import Watchdog
from tailrace.wire.connection import RETRY_S, Connection
from tailrace.wire.liveness import LONGEST_WAIT, BeatSender
from tailrace.wire.messages import (
    UNNUMBERED,
    Acknowledged,
    Assigned,
    Beat,
    BeatHere,
    Collapsed,
    ComponentSpec,
    Ended,
    FromComponent,
    FromController,
    Hello,
    Introduce,
    Measured,
    Offer,
    Ordered,
    Receipt,
    Reconcile,
    Reported,
    StoreAddresses,
    WireError,
    decode_from_controller,
    encode,
)

LATE_S = 30.0  # beyond the time for which a loop meant to wait
LINGER_S = 2.0  # how long a closing component tries to get its last words out


class ControlClient:
    """A component's end: `send` and `report` at any time, `receive` what has come. `stats` is asked once per heartbeat,
    in its own thread; what it gives is reported if it has changed, or if an order has come since. `find_stores` is
    told there, at once, where the sample stores are: the component's loop may be waiting for one that has moved."""

    def __init__(
        self,
        spec: ComponentSpec,
        stats: Callable[[], Event | None] = lambda: None,
        find_stores: Callable[[StoreAddresses], None] = lambda _: None,
    ) -> None:
        self.incarnation = spec.incarnation  # grows with every controller that this component meets
        self.waiting_for = ""  # who holds this component up, in a few words, for people to see; set it from any thread
        self.ended = False  # the run is over: known here before the component's loop comes to it
        self._spec = spec
        self._stats = stats
        self._find_stores = find_stores
        self._reported: Event | None = None  # the stats
        self._beats_here = False  # heartbeats go over the connection too
        self._hello = Hello()
        self._number = UNNUMBERED  # of the last report
        self._kept: deque[tuple[int, bytes]] = deque()  # reports that are not known to be committed
        self._beat_at = 0.0
        self._inbox: queue.SimpleQueue[FromController] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[FromComponent | None] = queue.SimpleQueue()
        self._newest_offer: deque[Offer] = deque(maxlen=1)  # that was not sent
        self.connected_at = 0.0  # when the controller last proved who it is
        self._give_up_at = inf  # if nobody listens then, the last words are lost
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._carry, name="control", daemon=True)
        self._watchdog = Watchdog(spec.name, lambda sentence: self.send(Collapsed(sentence)))

    def open(self, address: str = "", arena: str = "") -> None:
        """Introduce this component; from here on it sends heartbeats."""
        self._hello = Hello(address, arena)
        self.send(self._hello)
        self._thread.start()
        self._watchdog.start()

    def send(self, message: FromComponent) -> None:
        self._put(message)

    def offer(self, offer: Offer) -> None:
        """For a host. Only the newest is sent: what it offered while it was cut off holds no more."""
        self._newest_offer.append(offer)
        self._wake_up()

    def report(self, event: Event, receipts: tuple[Receipt, ...] = ()) -> None:
        self.send(Reported(event, receipts))  # type: ignore[arg-type]  # every Event is one of AnyEvent

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        self.send(Measured(step, dict(values)))

    def receive(self, timeout_s: float) -> Iterator[Ordered | Assigned | Reconcile | Introduce | Ended]:
        """What has arrived, waiting at most `timeout_s` for the first of it. After `Introduce` the component is
        expected to report that it joins, as the incarnation that it is from then on."""
        for message in self.listen(timeout_s):
            if isinstance(message, Introduce):
                self.incarnation += 1
                yield message
            elif isinstance(message, Ended | Assigned | Reconcile) or (
                isinstance(message, Ordered)
                and getattr(message.command, "incarnation", self.incarnation) == self.incarnation
            ):
                self._may_take(type(message.command if isinstance(message, Ordered) else message).__name__)
                yield message

    def listen(self, timeout_s: float) -> Iterator[FromController]:
        """The same for a host, which has no incarnations and gets no orders."""
        self._watchdog.expect("waiting for orders", timeout_s + LATE_S)
        try:
            yield self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            self._may_take("its own work")

    def _may_take(self, what: str) -> None:
        self._watchdog.expect(what, self._spec.config.health.stuck_s, "if it is only slow, raise health.stuck_s")

    def close(self) -> None:
        """Get everything out that was sent, then hang up."""
        self._watchdog.close()
        self._give_up_at = time.monotonic() + LINGER_S
        self._put(None)
        self._thread.join(LINGER_S + 1)

    def _put(self, message: FromComponent | None) -> None:
        """Never waits: the thread that would have to make room may be the one that sends."""
        self._outbox.put(message)
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # full of calls that were not heard yet: the thread will wake up anyway
            self._wake.send(b"!")

    # ------------------------------------------------------------------------------------------------ its thread

    def _carry(self) -> None:
        """Connect, and connect again whenever that breaks off, until the component hangs up."""
        over = False
        while not over:
            wire = self._connect()
            if wire is None:
                over = time.monotonic() > self._give_up_at
                time.sleep(RETRY_S)
                continue
            self.connected_at = time.monotonic()
            beats = wire.beat_sender()
            try:
                over = self._converse(wire, beats)
            except (OSError, WireError):
                pass  # the controller is gone, or the way to it; another one may come
            finally:
                beats.close()
                wire.close(LINGER_S if over else 0.0)

    def _connect(self) -> Connection | None:
        spec = self._spec
        try:
            return Connection(spec.endpoint, spec.name, bytes.fromhex(spec.key), spec.fingerprint)
        except (OSError, WireError):
            return None

    def _converse(self, wire: Connection, beats: BeatSender) -> bool:
        """Until the connection breaks off (an error), or the component has hung up (True)."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        self._beat_at, self._beats_here, self._reported = 0.0, False, None
        while self._empty_outbox(wire):
            if time.monotonic() >= self._beat_at:
                self._beat(wire, beats)
            wire.flush()
            poller.register(wire, select.POLLIN | (select.POLLOUT if wire.has_unsent else 0))
            ready = dict(poller.poll(int(max(0.0, self._beat_at - time.monotonic()) * 1000) + 1))
            if self._woken.fileno() in ready:
                self._woken.recv(65536)
            for content in wire.receive():
                with suppress(*MALFORMED):  # of another release: it will be sent away for that
                    self._take_in(wire, decode_from_controller(content))
        return True

    def _beat(self, wire: Connection, beats: BeatSender) -> None:
        """The first of a connection is a frame as well: a controller that does not know this component asks who it
        is."""
        as_frame = self._beats_here or not self._beat_at
        self._beat_at = time.monotonic() + self._spec.config.health.heartbeat_s
        if self._watchdog.stuck or self._spec.role == "host":  # a host is heard by its offers
            return
        beats.send(self.incarnation, self.waiting_for)
        if as_frame:
            wire.send(UNNUMBERED, encode(Beat(self.waiting_for[:LONGEST_WAIT])))
        stats = self._stats()
        if stats is not None and stats != self._reported:
            wire.send(UNNUMBERED, encode(Reported(stats)))  # type: ignore[arg-type]
        self._reported = stats

    def _empty_outbox(self, wire: Connection) -> bool:
        """Send what is there; False once the component has hung up."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                self._send_offer(wire)
                return False
            if isinstance(message, Hello | Collapsed):
                wire.send(UNNUMBERED, encode(message))
            else:
                self._number += 1
                self._kept.append((self._number, encode(message)))
                wire.send(*self._kept[-1])
        self._send_offer(wire)
        return True

    def _send_offer(self, wire: Connection) -> None:
        """Whoever hears it may be another controller, which has to be told first who offers it."""
        while self._newest_offer:
            wire.send(UNNUMBERED, encode(self._hello))
            wire.send(UNNUMBERED, encode(self._newest_offer.popleft()))

    def _take_in(self, wire: Connection, message: FromController) -> None:
        if isinstance(message, Acknowledged):
            self._let_go(message.number)
            return
        if isinstance(message, BeatHere):
            self._beats_here, self._beat_at = message.on, 0.0
            return
        if isinstance(message, StoreAddresses):
            self._find_stores(message)
            return
        if isinstance(message, Introduce):
            self._let_go(message.heard)
            wire.send(UNNUMBERED, encode(self._hello))
            for number, content in self._kept:
                wire.send(number, content)
        self._reported = None  # control reckons with what was ordered until it hears of the stats again
        self.ended = self.ended or isinstance(message, Ended)
        self._inbox.put(message)

    def _let_go(self, committed: int) -> None:
        while self._kept and self._kept[0][0] <= committed:
            self._kept.popleft()
