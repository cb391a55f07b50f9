"""What processes say to each other, and the sockets over which they say it.

The controller has one `Hub` (a ZeroMQ ROUTER), every part one `Link` (a DEALER); messages are tagged structs in
msgpack, nothing is pickled. Order is kept between two ends. Every message of a part is signed with the token that it
was started with, which itself never travels: names are free for anybody to take once their owner is gone, signatures
are not. The hub does not even answer to others.

What a part reports survives the controller. Reports are numbered, and the part keeps each until the controller says
that it is committed. A controller that hears somebody it does not know asks for an introduction and says how far its
journal goes: the part sends again what is missing there, in order, and then joins once more, with a larger incarnation.
So every report counts exactly once, whoever died in between. Orders are not kept: joining compares what both sides
believe, and what was ordered of an earlier incarnation is ignored.

A `Link` has a thread of its own, so that heartbeats go out while a part computes; `send` may be called from any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from tailrace.config.tree import Config
from tailrace.protocol import AnyCommand, AnyEvent, Event
from tailrace.types import MALFORMED, RelayId, Row, Segment, Struct, Trajectory, TrajectoryId
from tailrace.watchdog import Watchdog

LOOPBACK = "127.0.0.1"
BATCH = 256  # messages that are handled, and committed, together
LONGEST_REPORT = 256 << 20  # bytes of one frame; a thousand samples streamed at once take 1 MB
LONGEST_ORDER = 4 << 30  # a step's trajectories: 8,192 of 16,384 tokens take 2 GB
PROOF = 32  # bytes of a signature
LATE_S = 30.0  # beyond the time for which a loop meant to wait
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
    lifeline: int = -1  # a descriptor at whose end the part has to go
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
    """A part is up, or has been asked who it is. `address` is where a relay takes weights, `arena` where it keeps
    them."""

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


class Introduce(Message):
    """Who are you? Your reports up to this number are known. -> Hello, the reports after it, and a joining event."""

    heard: int


class Acknowledged(Message):
    """Your reports up to this number are committed."""

    number: int


class Ended(Message):
    """The run stops, for good or to be resumed. Put in order what must be, and go."""

    complete: bool


FromPart = Hello | Reported | Grown | Measured | Collapsed
FromController = Ordered | Introduce | Acknowledged | Ended
UNNUMBERED = 0  # of what need not arrive: heartbeats, introductions, last words

_encode = msgspec.msgpack.Encoder().encode
_decode_from_part = msgspec.msgpack.Decoder(FromPart).decode
_decode_from_controller = msgspec.msgpack.Decoder(FromController).decode


class Letter(NamedTuple):
    """A message as the hub hands it over."""

    sender: str
    number: int
    message: FromPart


class Hub:
    """The controller's end. `heard`: how far an earlier controller has written down what each part had reported."""

    def __init__(self, token: str, port: int = 0, heard: Mapping[str, int] | None = None) -> None:
        self._token = token
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_REPORT)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        try:
            bound = self._socket.bind(f"tcp://{LOOPBACK}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise WireError(
                f"local.port {port} cannot be used ({error.strerror}); write another one, or 0 for any"
            ) from None
        self.endpoint: str = bound.addr
        self._trusted: set[bytes] = set()  # who has introduced itself to this hub
        self._asked: set[bytes] = set()  # and who was asked to; only of names that the run has given
        self._heard = {name.encode(): number for name, number in (heard or {}).items()}

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    async def receive(self) -> list[Letter]:
        """What parts of ours have sent: waits for the first message, takes what has arrived with it."""
        letters: list[Letter] = []
        while not letters:
            await self._hear(letters)
        while len(letters) < BATCH and await self._socket.poll(0):
            await self._hear(letters)
        return letters

    async def _hear(self, letters: list[Letter]) -> None:
        frames = await self._socket.recv_multipart()
        try:
            sender, label, proof, content = frames
            if not hmac.compare_digest(proof, _proof(self._token, sender, label, content)):
                return
            number, message = int.from_bytes(label, "big"), _decode_from_part(content)
        except (ValueError, *MALFORMED):
            return  # not one of ours: ours are only ever encoded from these types
        if isinstance(message, Hello):
            self._trusted.add(sender)
            self._asked.discard(sender)
        if sender not in self._trusted or number > self._heard.get(sender, 0) + 1:
            await self._ask(sender)
        elif number == UNNUMBERED or number > self._heard.get(sender, 0):
            self._heard[sender] = max(number, self._heard.get(sender, 0))
            letters.append(Letter(sender.decode(), number, message))

    async def _ask(self, sender: bytes) -> None:
        """It knew an earlier controller, or something of it was lost on the way: it has to begin anew."""
        self._trusted.discard(sender)
        if sender not in self._asked:
            self._asked.add(sender)
            await self._socket.send_multipart([sender, _encode(Introduce(self._heard.get(sender, 0)))])

    async def send(self, name: str, message: FromController) -> None:
        """Hand a message over; one for a part that is gone is dropped."""
        await self._socket.send_multipart([name.encode(), _encode(message)])

    def close(self) -> None:
        self._socket.close(LINGER_MS)


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
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._watchdog = Watchdog(spec.name, lambda sentence: self.send(Collapsed(sentence)))

    def open(self, address: str = "", arena: str = "") -> None:
        """Introduce this part; from here on its heart beats."""
        self._hello = Hello(address, arena)
        self.send(self._hello)
        self._thread.start()
        self._watchdog.start()

    def send(self, message: FromPart) -> None:
        self._outbox.put(message)
        self._wake.send(b"!")

    def report(self, event: Event) -> None:
        self.send(Reported(event))  # type: ignore[arg-type]  # every Event is one of AnyEvent

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        self.send(Measured(step, dict(values)))

    def receive(self, timeout_s: float) -> Iterator[Ordered | Introduce | Ended]:
        """What has arrived, waiting at most `timeout_s` for the first of it. After `Introduce` the part is expected to
        report that it joins, as the incarnation that it is from then on."""
        self._watchdog.expect("waiting for orders", timeout_s + LATE_S)
        try:
            yield from self._pass_on(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                yield from self._pass_on(self._inbox.get_nowait())
        except queue.Empty:
            self._may_take("its own work")

    def _may_take(self, what: str) -> None:
        self._watchdog.expect(what, self._spec.config.health.stuck_s, "if it is only slow, raise health.stuck_s")

    def _pass_on(self, message: FromController) -> Iterator[Ordered | Introduce | Ended]:
        if isinstance(message, Introduce):
            self.incarnation += 1
            yield message
        elif isinstance(message, Ended) or (
            isinstance(message, Ordered) and getattr(message.command, "incarnation", None) == self.incarnation
        ):
            self._may_take(type(message.command).__name__ if isinstance(message, Ordered) else "the end of the run")
            yield message

    def close(self) -> None:
        """Get everything out that was sent, then hang up."""
        self._watchdog.close()
        self._outbox.put(None)
        self._wake.send(b"!")
        self._thread.join(LINGER_MS / 1000 + 1)

    # ---------------------------------------------------------------------------------------------- the link's thread

    def _carry(self) -> None:
        wire = zmq.Context.instance().socket(zmq.DEALER)
        wire.setsockopt(zmq.IDENTITY, self._spec.name.encode())
        wire.setsockopt(zmq.SNDHWM, 0)
        wire.setsockopt(zmq.RCVHWM, 0)
        wire.setsockopt(zmq.MAXMSGSIZE, LONGEST_ORDER)
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
                with suppress(*MALFORMED):  # not from our controller: it only ever encodes these types
                    self._take_in(wire, _decode_from_controller(wire.recv()))
        wire.close(LINGER_MS)

    def _beat(self, wire: zmq.Socket[bytes]) -> None:
        self._beat_at = time.monotonic() + self._spec.config.health.heartbeat_s
        event = self._watchdog.guard(self._pulse)()
        if event is not None:
            self._post(wire, UNNUMBERED, _encode(Reported(event)))  # type: ignore[arg-type]

    def _empty_outbox(self, wire: zmq.Socket[bytes]) -> bool:
        """Send what is there; False once the part has hung up."""
        while not self._outbox.empty():
            message = self._outbox.get()
            if message is None:
                return False
            if isinstance(message, Hello | Collapsed):
                self._post(wire, UNNUMBERED, _encode(message))
            else:
                self._number += 1
                self._kept.append((self._number, _encode(message)))
                self._post(wire, *self._kept[-1])
        return True

    def _take_in(self, wire: zmq.Socket[bytes], message: FromController) -> None:
        if isinstance(message, Acknowledged):
            self._let_go(message.number)
            return
        if isinstance(message, Introduce):
            self._let_go(message.heard)
            self._post(wire, UNNUMBERED, _encode(self._hello))
            for number, content in self._kept:
                self._post(wire, number, content)
            self._beat(wire)  # it may be long until the part itself has time to join
        self._inbox.put(message)

    def _let_go(self, committed: int) -> None:
        while self._kept and self._kept[0][0] <= committed:
            self._kept.popleft()

    def _post(self, wire: zmq.Socket[bytes], number: int, content: bytes) -> None:
        label = number.to_bytes(8, "big")
        wire.send_multipart([label, _proof(self._spec.token, self._spec.name.encode(), label, content), content])


def _proof(token: str, name: bytes, label: bytes, content: bytes) -> bytes:
    """That a part of the run with this name said this. BLAKE2 takes a key, and is the fastest that Python brings."""
    key = hashlib.sha256(token.encode()).digest()
    digest = hashlib.blake2b(len(name).to_bytes(4, "big") + name + label, key=key, digest_size=PROOF)
    digest.update(content)
    return digest.digest()
