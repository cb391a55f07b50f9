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

Where other hosts may join, everything is encrypted (see `Door`), and who has no key is not heard at all.

A `Link` has a thread of its own, so that heartbeats go out while a part computes; `send` may be called from any thread.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tailrace.config.tree import Config
from tailrace.protocol import AnyCommand, AnyEvent, Event
from tailrace.types import MALFORMED, HostId, RelayId, Row, Segment, Struct, Trajectory, TrajectoryId
from tailrace.watchdog import Watchdog

LOOPBACK = "127.0.0.1"
BATCH = 256  # messages that are handled, and committed, together
LONGEST_REPORT = 256 << 20  # bytes of one frame; a thousand samples streamed at once take 1 MB
LONGEST_ORDER = 4 << 30  # a step's trajectories: 8,192 of 16,384 tokens take 2 GB
PROOF = 32  # bytes of a signature
LATE_S = 30.0  # beyond the time for which a loop meant to wait
LINGER_MS = 2000  # how long a closing part tries to get its last words out
OFFER_S = 0.5  # how often a host offers itself
MOST_REPLICAS = 1024  # that one host may offer
SIGN_OF_LIFE_MS = 2000  # between hosts
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


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
    door: str = ""  # the controller's public key; empty: links are plain, on loopback
    host: HostId = 0  # of whose relay a replica gets its weights
    listen: str = LOOPBACK  # relay: where it takes weights
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


class Offer(Message):
    """A host has room for so many replicas, 0: no longer. Said again and again, with the names of the parts that were
    started there and, of those that ended, how; so nothing has to be remembered of it, and none need arrive."""

    release: str  # of Tailrace
    replicas: Annotated[int, msgspec.Meta(ge=0, le=MOST_REPLICAS)]
    parts: dict[str, str] = msgspec.field(default_factory=dict[str, str])


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


class Wanted(Message):
    """Answer to `Offer`: these parts are to be there and no others; the specs of those that were not named in it."""

    names: tuple[str, ...]
    specs: tuple[Spec, ...] = ()


class Dismissed(Message):
    """The run has no use for this host, because of this."""

    reason: str


class Ended(Message):
    """The run stops, for good or to be resumed. Put in order what must be, and go."""

    complete: bool


FromPart = Hello | Reported | Grown | Measured | Offer | Collapsed
FromController = Ordered | Introduce | Acknowledged | Wanted | Dismissed | Ended
UNNUMBERED = 0  # of what need not arrive: heartbeats, introductions, offers, last words

_encode = msgspec.msgpack.Encoder().encode
_decode_from_part = msgspec.msgpack.Decoder(FromPart).decode
_decode_from_controller = msgspec.msgpack.Decoder(FromController).decode


# ----------------------------------------------------------------------------------------------------------- doors


class JoinKey(NamedTuple):
    """What a host needs to join a run: the token, and the key by which it knows the controller. Both are secret."""

    door: str
    token: str

    @classmethod
    def read(cls, text: str) -> JoinKey:
        """The inverse of `str`."""
        door, _, token = text.strip().partition(".")
        if not (_is_hex(door) and _is_hex(token)):
            raise WireError("this is no join key; it is in the run's folder, in join.key, as one line")
        return cls(z85.encode(bytes.fromhex(door)).decode(), token)

    def __str__(self) -> str:
        return f"{z85.decode(self.door.encode()).hex()}.{self.token}"


def _is_hex(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def public_key(secret: bytes) -> str:
    """By which the controller that has this secret is known."""
    return zmq.curve_public(z85.encode(secret)).decode()


def _client_secret(token: str) -> bytes:
    """All parts of a run have the same key; that a message is of a certain part follows from the connection."""
    return z85.encode(hashlib.sha256(b"tailrace client " + token.encode()).digest())


class Door:
    """The lock of a hub (CURVE): everything is encrypted, and only who has the run's token gets a connection."""

    def __init__(self, secret: bytes, token: str) -> None:
        self._secret = z85.encode(secret)
        self._admitted = zmq.curve_public(_client_secret(token))
        self._porter = AsyncioAuthenticator(zmq.asyncio.Context.instance())

    def lock(self, wire: zmq.Socket[Any]) -> None:
        self._porter.start()
        self._porter.configure_curve_callback(credentials_provider=self)
        wire.setsockopt(zmq.CURVE_SERVER, 1)
        wire.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        wire.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who was cut off and has connected anew is the one to talk to
        _notice_silence(wire)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this client may come in; asked by the authenticator."""
        return hmac.compare_digest(key, self._admitted)

    def close(self) -> None:
        self._porter.stop()


def _bring_key(wire: zmq.Socket[bytes], door: str, token: str) -> None:
    secret = _client_secret(token)
    wire.setsockopt(zmq.CURVE_SERVERKEY, door.encode())
    wire.setsockopt(zmq.CURVE_SECRETKEY, secret)
    wire.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    _notice_silence(wire)


def _notice_silence(wire: zmq.Socket[Any]) -> None:
    """A connection between hosts may be cut without a word; then it is made anew."""
    wire.setsockopt(zmq.HEARTBEAT_IVL, SIGN_OF_LIFE_MS)
    wire.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * SIGN_OF_LIFE_MS)


def knock(endpoint: str, key: JoinKey, within_s: float) -> None:
    """Returns if the run at this address lets us in; else a `WireError` says why not."""
    wire = zmq.Context.instance().socket(zmq.DEALER)
    _bring_key(wire, key.door, key.token)
    watching = wire.get_monitor_socket()
    reached, limit = False, time.monotonic() + within_s
    try:
        wire.connect(endpoint)
        while watching.poll(max(0, int((limit - time.monotonic()) * 1000))):
            event = parse_monitor_message(watching.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            reached = reached or event == zmq.EVENT_CONNECTED
            if event in REFUSALS or (reached and event == zmq.EVENT_DISCONNECTED):
                break
    finally:
        wire.disable_monitor()
        wire.close(0)
    where = endpoint.removeprefix("tcp://")
    if reached:
        raise WireError(f"{where} refused this join key; it takes the one in join.key of a run that goes on there now")
    raise WireError(f"nobody answered at {where} within {within_s:g} s; does the run go on, and is the address right?")


class Letter(NamedTuple):
    """A message as the hub hands it over."""

    sender: str
    number: int
    message: FromPart


class Hub:
    """The controller's end. `heard`: how far an earlier controller has written down what each part had reported.
    Without a `door` it listens on the loopback and nowhere else."""

    def __init__(
        self,
        token: str,
        port: int = 0,
        heard: Mapping[str, int] | None = None,
        door: Door | None = None,
        listen: str = LOOPBACK,
    ) -> None:
        assert door is not None or listen == LOOPBACK, "a hub for other hosts has a door"
        self._token = token
        self._door = door
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_REPORT)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if door is not None:
            door.lock(self._socket)
        self.endpoint = self._bind(listen, port)
        self._trusted: set[bytes] = set()  # who has introduced itself to this hub
        self._asked: set[bytes] = set()  # and who was asked to; only of names that the run has given
        self._heard = {name.encode(): number for name, number in (heard or {}).items()}

    def _bind(self, listen: str, port: int) -> str:
        host = f"[{listen}]" if ":" in listen else listen
        self._socket.setsockopt(zmq.IPV6, ":" in listen)
        try:
            bound = self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRNOTAVAIL or error.errno == errno.ENODEV:
                raise WireError(f"local.listen {listen} is not an address of this host; write one that is") from None
            raise WireError(
                f"local.port {port} cannot be used ({error.strerror}); write another one, or 0 for any"
            ) from None
        return bound.addr

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
        if self._door is not None:
            self._door.close()


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
        if self._spec.door:
            _bring_key(wire, self._spec.door, self._spec.token)
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
            if isinstance(message, Hello | Offer | Collapsed):
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
