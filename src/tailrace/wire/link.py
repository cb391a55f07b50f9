"""A part's end of the wire.

It has a thread of its own, so that heartbeats go out while the part computes; `send` may be called from any thread.
"""

from __future__ import annotations

import hmac
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import zmq

from tailrace.protocol import Event
from tailrace.types import MALFORMED
from tailrace.watchdog import Watchdog
from tailrace.wire.door import bring_key
from tailrace.wire.messages import (
    ORDER,
    UNNUMBERED,
    Acknowledged,
    Collapsed,
    Ended,
    FromController,
    FromPart,
    Hello,
    Introduce,
    Measured,
    Offer,
    Ordered,
    Reported,
    Spec,
    decode_from_controller,
    encode,
    sign,
)

LONGEST_ORDER = 4 << 30  # a step's trajectories: 8,192 of 16,384 tokens take 2 GB
LATE_S = 30.0  # beyond the time for which a loop meant to wait
LINGER_MS = 2000  # how long a closing part tries to get its last words out


class Link:
    """A part's end: `send` and `report` at any time, `receive` what has come, `pulse` gives the heartbeat."""

    def __init__(self, spec: Spec, pulse: Callable[[], Event | None] = lambda: None) -> None:
        self.incarnation = spec.incarnation  # grows with every controller that this part meets
        self._spec = spec
        self._pulse = pulse
        self._hello = Hello()
        self._number = UNNUMBERED  # of the last report
        self._kept: deque[tuple[int, bytes]] = deque()  # reports that are not known to be committed
        self._beat_at = 0.0
        self._inbox: queue.SimpleQueue[FromController] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[FromPart | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._watchdog = Watchdog(spec.name, lambda sentence: self.send(Collapsed(sentence)))

    def open(self, address: str = "", arena: str = "") -> None:
        """Introduce this part; from here on its heart beats."""
        self._hello = Hello(address, arena)
        self.send(self._hello)
        self._thread.start()
        self._watchdog.start()

    def send(self, message: FromPart) -> None:
        self._put(message)

    def report(self, event: Event) -> None:
        self.send(Reported(event))  # type: ignore[arg-type]  # every Event is one of AnyEvent

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        self.send(Measured(step, dict(values)))

    def receive(self, timeout_s: float) -> Iterator[Ordered | Introduce | Ended]:
        """What has arrived, waiting at most `timeout_s` for the first of it. After `Introduce` the part is expected to
        report that it joins, as the incarnation that it is from then on."""
        for message in self.listen(timeout_s):
            if isinstance(message, Introduce):
                self.incarnation += 1
                yield message
            elif isinstance(message, Ended) or (
                isinstance(message, Ordered) and getattr(message.command, "incarnation", None) == self.incarnation
            ):
                self._may_take(type(message.command).__name__ if isinstance(message, Ordered) else "the end of the run")
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
        self._put(None)
        self._thread.join(LINGER_MS / 1000 + 1)

    def _put(self, message: FromPart | None) -> None:
        """Never waits: the thread that would have to make room may be the one that sends."""
        self._outbox.put(message)
        with suppress(BlockingIOError):  # full of calls that were not heard yet: the thread will wake up anyway
            self._wake.send(b"!")

    # ---------------------------------------------------------------------------------------------- the link's thread

    def _carry(self) -> None:
        wire = zmq.Context.instance().socket(zmq.DEALER)
        wire.setsockopt(zmq.IDENTITY, self._spec.name.encode())
        wire.setsockopt(zmq.SNDHWM, 0)
        wire.setsockopt(zmq.RCVHWM, 0)
        wire.setsockopt(zmq.MAXMSGSIZE, LONGEST_ORDER)
        if self._spec.door:
            bring_key(wire, self._spec.door, self._spec.token)
        wire.setsockopt(zmq.IPV6, "[" in self._spec.endpoint)
        wire.connect(self._spec.endpoint)
        poller = zmq.Poller()
        poller.register(wire, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while self._empty_outbox(wire):
            if time.monotonic() >= self._beat_at:
                self._beat(wire)
            ready = dict(poller.poll(int(max(0.0, self._beat_at - time.monotonic()) * 1000) + 1))
            if self._woken.fileno() in ready:
                self._woken.recv(65536)
            if wire in ready:
                self._hear(wire)
        wire.close(LINGER_MS)

    def _hear(self, wire: zmq.Socket[bytes]) -> None:
        frames, name = wire.recv_multipart(), self._spec.name.encode()
        with suppress(ValueError, *MALFORMED):  # not from our controller: it signs, and only ever encodes these types
            signature, content = frames
            if hmac.compare_digest(signature, sign(self._spec.token, name, ORDER, content)):
                self._take_in(wire, decode_from_controller(content))

    def _beat(self, wire: zmq.Socket[bytes]) -> None:
        self._beat_at = time.monotonic() + self._spec.config.health.heartbeat_s
        event = self._watchdog.guard(self._pulse)()
        if event is not None:
            self._post(wire, UNNUMBERED, encode(Reported(event)))  # type: ignore[arg-type]

    def _empty_outbox(self, wire: zmq.Socket[bytes]) -> bool:
        """Send what is there; False once the part has hung up."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                return False
            if isinstance(message, Hello | Offer | Collapsed):
                self._post(wire, UNNUMBERED, encode(message))
            else:
                self._number += 1
                self._kept.append((self._number, encode(message)))
                self._post(wire, *self._kept[-1])
        return True

    def _take_in(self, wire: zmq.Socket[bytes], message: FromController) -> None:
        if isinstance(message, Acknowledged):
            self._let_go(message.number)
            return
        if isinstance(message, Introduce):
            self._let_go(message.heard)
            self._post(wire, UNNUMBERED, encode(self._hello))
            for number, content in self._kept:
                self._post(wire, number, content)
            self._beat(wire)  # it may be long until the part itself has time to join
        self._inbox.put(message)

    def _let_go(self, committed: int) -> None:
        while self._kept and self._kept[0][0] <= committed:
            self._kept.popleft()

    def _post(self, wire: zmq.Socket[bytes], number: int, content: bytes) -> None:
        label = number.to_bytes(8, "big")
        wire.send_multipart([label, sign(self._spec.token, self._spec.name.encode(), label, content), content])
