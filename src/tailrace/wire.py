"""What processes say to each other, and the sockets over which they say it.

The controller has one `Hub` (a ZeroMQ ROUTER), every part one `Link` (a DEALER); messages are tagged structs in
msgpack, nothing is pickled. Order is kept between two ends. A part proves that it belongs to the run with the token
that it was started with; until then the hub hears nothing of it.

A `Link` has a thread of its own, so that heartbeats go out while a part computes; `send` may be called from any thread.
"""

from __future__ import annotations

import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import zmq
import zmq.asyncio

from tailrace.config.tree import Config
from tailrace.protocol import AnyCommand, AnyEvent, Event
from tailrace.types import RelayId, Row, Segment, Struct, Trajectory, TrajectoryId

LOOPBACK = "127.0.0.1"
BATCH = 256  # messages that are handled, and committed, together
LINGER_MS = 2000  # how long a closing part tries to get its last words out


class WireError(ValueError):
    """Why the processes of a run cannot be connected, for the person who started it."""


class Spec(Struct):
    """What a part is told when it is started: who it is and where the controller listens."""

    role: str  # replica, relay or trainer
    id: int
    incarnation: int
    endpoint: str
    token: str
    folder: str  # of the run
    config: Config
    rank: int = 0
    step: int = 0  # trainer: the last step that the controller knows to be complete
    meeting: str = ""  # trainer: where its ranks find each other

    @property
    def name(self) -> str:
        """Unique for every start, so that a message never reaches the successor of the part that it was meant for."""
        rank = f".{self.rank}" if self.rank else ""
        return f"{self.role}-{self.id}{rank}/{self.incarnation}"


# ---------------------------------------------------------------------------------------------------- from the parts


class Message(Struct, tag_field="kind", tag=True):
    """Base of all messages."""


class Hello(Message):
    """A part is up. `address` is where a relay takes weights, `arena` where it keeps them."""

    token: str
    address: str = ""
    arena: str = ""


class Reported(Message):
    """Something for the control plane."""

    event: AnyEvent


class Growth(Struct):
    """What was added to a trajectory since the last time."""

    trajectory: TrajectoryId
    epoch: int
    segments: tuple[Segment, ...]


class Grown(Message):
    """For the vault. Sent before the event that says the trajectory is finished or parked."""

    growths: tuple[Growth, ...]


class Measured(Message):
    """For the table of metrics."""

    step: int
    values: dict[str, float]


class Collapsed(Message):
    """A part gives up. `expected`: the reason is a sentence for the person who started the run, not a bug."""

    reason: str
    expected: bool = False


# ----------------------------------------------------------------------------------------------- from the controller


class Ordered(Message):
    """A command of the control plane, and the payload that it refers to."""

    command: AnyCommand
    rows: dict[int, Row] = msgspec.field(default_factory=dict[int, Row])  # Generate: prompts by id
    # Generate: what exists of resumed samples
    prefixes: dict[TrajectoryId, tuple[Segment, ...]] = msgspec.field(
        default_factory=dict[TrajectoryId, tuple[Segment, ...]]
    )
    groups: tuple[tuple[Trajectory, ...], ...] = ()  # Train: payloads in the order of the command
    addresses: dict[RelayId, str] = msgspec.field(
        default_factory=dict[RelayId, str]
    )  # Publish, Route: where relays listen
    arena: str = ""  # LoadWeights: where the version lies


class Ended(Message):
    """The run stops, for good or to be resumed. Put in order what must be, and go."""

    complete: bool


FromPart = Hello | Reported | Grown | Measured | Collapsed
FromController = Ordered | Ended

_encode = msgspec.msgpack.Encoder().encode
_decode_from_part = msgspec.msgpack.Decoder(FromPart).decode
_decode_from_controller = msgspec.msgpack.Decoder(FromController).decode


class Hub:
    """The controller's end."""

    def __init__(self, token: str, port: int = 0) -> None:
        self._token = token
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        try:
            bound = self._socket.bind(f"tcp://{LOOPBACK}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise WireError(
                f"local.port {port} cannot be used ({error.strerror}); write another one, or 0 for any"
            ) from None
        self.endpoint: str = bound.addr
        self._trusted: set[bytes] = set()

    async def receive(self) -> list[tuple[str, FromPart]]:
        """What parts of ours have sent: waits for the first message, takes what has arrived with it."""
        heard: list[tuple[str, FromPart]] = []
        while not heard:
            self._hear(heard, await self._socket.recv_multipart())
        while len(heard) < BATCH and await self._socket.poll(0):
            self._hear(heard, await self._socket.recv_multipart())
        return heard

    def _hear(self, heard: list[tuple[str, FromPart]], frames: list[bytes]) -> None:
        sender = frames[0]
        try:
            message = _decode_from_part(frames[-1])
        except msgspec.DecodeError:
            return  # not one of ours: ours are only ever encoded from these types
        if isinstance(message, Hello) and hmac.compare_digest(message.token.encode(), self._token.encode()):
            self._trusted.add(sender)
        if sender in self._trusted:
            heard.append((sender.decode(), message))

    async def send(self, name: str, message: FromController) -> None:
        """Hand a message over; one for a part that is gone is dropped."""
        await self._socket.send_multipart([name.encode(), _encode(message)])

    def close(self) -> None:
        self._socket.close(LINGER_MS)


class Link:
    """A part's end: `send` and `report` at any time, `receive` what has come, `pulse` gives the heartbeat."""

    def __init__(self, spec: Spec, pulse: Callable[[], Event | None] = lambda: None) -> None:
        self._spec = spec
        self._pulse = pulse
        self._inbox: queue.SimpleQueue[FromController] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[FromPart | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)

    def open(self, address: str = "", arena: str = "") -> None:
        """Introduce this part; from here on its heart beats."""
        self.send(Hello(self._spec.token, address, arena))
        self._thread.start()

    def send(self, message: FromPart) -> None:
        self._outbox.put(message)
        self._wake.send(b"!")

    def report(self, event: Event) -> None:
        self.send(Reported(event))  # type: ignore[arg-type]  # every Event is one of AnyEvent

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        self.send(Measured(step, dict(values)))

    def receive(self, timeout_s: float) -> Iterator[FromController]:
        """What has arrived, waiting at most `timeout_s` for the first of it."""
        try:
            yield self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Get everything out that was sent, then hang up."""
        self._outbox.put(None)
        self._wake.send(b"!")
        self._thread.join(LINGER_MS / 1000 + 1)

    def _carry(self) -> None:
        wire = zmq.Context.instance().socket(zmq.DEALER)
        wire.setsockopt(zmq.IDENTITY, self._spec.name.encode())
        wire.setsockopt(zmq.SNDHWM, 0)
        wire.setsockopt(zmq.RCVHWM, 0)
        wire.connect(self._spec.endpoint)
        poller = zmq.Poller()
        poller.register(wire, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        every, due = self._spec.config.health.heartbeat_s, 0.0
        while self._empty_outbox(wire):
            now = time.monotonic()
            if now >= due:
                due = now + every
                event = self._pulse()
                if event is not None:
                    wire.send(_encode(Reported(event)))  # type: ignore[arg-type]
            ready = dict(poller.poll(int(max(0.0, due - time.monotonic()) * 1000) + 1))
            if self._woken.fileno() in ready:
                self._woken.recv(65536)
            if wire in ready:
                self._inbox.put(_decode_from_controller(wire.recv()))
        wire.close(LINGER_MS)

    def _empty_outbox(self, wire: zmq.Socket[bytes]) -> bool:
        """Send what is there; False once the part has hung up."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                return False
            wire.send(_encode(message))
        return True
