"""Signs of life: heartbeats as small datagrams, received in a thread of the controller that does nothing else.

    datagram   tag, counter, incarnation, length of the name, name, what it waits for

A component's client sends one per heartbeat, also while the component computes, to the UDP port with the number of the
controller's TCP port. The tag is BLAKE2b, keyed with what both ends have derived from the component's own key and from
the nonces of their present connection (`Session.beat_key`), so that nothing counts that was forged, repeated, or
recorded on an earlier connection. Names that have no proven connection are not looked at any further.

Frames on the connection are signs of life too, heard by the controller's event loop. Either channel has a clock of its
own, which stands still while nobody listens to it: a controller that was stopped, or a loop that was blocked, finds
nobody older for that.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from contextlib import suppress
from hashlib import blake2b

TAG = 16  # bytes
BODY = struct.Struct(">QQB")  # counter, incarnation, length of the name that follows
PERSON = b"tailrace beat 1"  # of the hash, so that it is of no use for anything else
LARGEST = 512  # bytes of a datagram
LONGEST_WAIT = 200  # characters of what a component waits for
TURN_S = 0.02  # how often the thread looks: many datagrams are taken at once, so they wake nobody one by one
AT_ONCE = 1024  # datagrams in a turn; more are strangers', and a flood must not take the controller's time
LATE_S = 0.2  # a turn that comes later than this was not listening all the while
BUFFER = 4 << 20  # bytes; some 5,000 datagrams, should the thread not be scheduled for a moment
MOST_LEFT = 1 << 14  # names without a connection of which the last sign is remembered


class ListeningClock:
    """Seconds in which somebody listened. Whoever does says so again and again (`turn`); a gap counts as `LATE_S`."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._last_turn = time.monotonic()

    def turn(self) -> None:
        self._counted, self._last_turn = self.read(), time.monotonic()

    def skip(self) -> None:
        """Nobody has listened since the last turn."""
        self._last_turn = time.monotonic()

    def read(self) -> float:
        return self._counted + min(time.monotonic() - self._last_turn, LATE_S)


class BeatSender:
    """A component's end, for one connection. A datagram that cannot be sent is lost like any other."""

    def __init__(self, connection: socket.socket, name: str, key: bytes) -> None:
        self._name, self._key = name.encode(), key
        self._counter = 0
        self._socket = socket.socket(connection.family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with suppress(OSError):
            self._socket.connect(connection.getpeername())

    def send(self, incarnation: int, waiting_for: str = "") -> None:
        self._counter += 1
        with suppress(OSError):
            self._socket.send(datagram(self._key, self._name, self._counter, incarnation, waiting_for))

    def close(self) -> None:
        self._socket.close()


def datagram(key: bytes, name: bytes, counter: int, incarnation: int, waiting_for: str = "") -> bytes:
    body = BODY.pack(counter, incarnation, len(name)) + name + waiting_for[:LONGEST_WAIT].encode()
    return _tag(key, body) + body


def _tag(key: bytes, body: bytes) -> bytes:
    return blake2b(body, key=key, digest_size=TAG, person=PERSON).digest()


class _Heard:
    """What is remembered of one name."""

    __slots__ = ("asked_at", "beat_at", "counter", "frame_at", "incarnation", "key")

    def __init__(self) -> None:
        self.key = b""  # of its datagrams; empty: none count
        self.counter = self.incarnation = 0  # of the last datagram
        self.beat_at = self.frame_at = 0.0  # when something last came, by the clock of each channel
        self.asked_at: float | None = None  # to send its heartbeats as frames


class Liveness:
    """The controller's end. `admit`, `leave`, `frame` and `waits` are for the server; times are in seconds."""

    def __init__(self, listening: socket.socket) -> None:
        """`listening`: the TCP socket, whose address the datagrams come to. Without that port there are none."""
        self.waiting: dict[str, str] = {}  # who is held up, and by what
        self._records: dict[str, _Heard] = {}
        self._left: dict[str, None] = {}  # the names among these that have no connection, the first that left first
        self._beats, self._frames = ListeningClock(), ListeningClock()
        self._socket = socket.socket(listening.family, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._socket.setblocking(False)
        with suppress(OSError):  # somebody else has it: then heartbeats come on the connections
            self._socket.bind(listening.getsockname()[:2])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)
        self._socket.close()

    # --------------------------------------------------------------------------------------------------- connections

    def admit(self, name: str, key: bytes) -> None:
        """This name has been proven on a new connection; `key` is that of its datagrams, empty if it sends none."""
        self._left.pop(name, None)
        record = self._records[name] = _Heard()
        record.beat_at, record.frame_at = self._beats.read(), self._frames.read()
        record.key = key

    def leave(self, name: str) -> None:
        """Its connection has ended. What it sends on its own does not count: it could not be told anything."""
        self._records[name].key = b""
        self.waiting.pop(name, None)
        self._left[name] = None
        if len(self._left) > MOST_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest], self._records[oldest]

    def frame(self, name: str) -> None:
        """Something has come over its connection."""
        record = self._records.get(name)
        if record is not None:
            record.frame_at = self._frames.read()

    def waits(self, name: str, waiting_for: str) -> None:
        """What it says it waits for; empty: for nothing. It goes to the log and to the page."""
        readable = "".join([letter for letter in waiting_for if letter.isprintable()])
        if readable:
            self.waiting[name] = readable
        else:
            self.waiting.pop(name, None)

    # ----------------------------------------------------------------------------------------------------- who is late

    def age_s(self, name: str) -> float:
        """How long ago it was last heard, by the clock of either channel."""
        record = self._records.get(name)
        if record is None:
            return self._frames.read()
        return min(self._beats.read() - record.beat_at, self._frames.read() - record.frame_at)

    def loop_turns(self, reading: bool) -> None:
        """Said by the event loop, several times a second. `reading`: it takes frames in."""
        if reading:
            self._frames.turn()
        else:
            self._frames.skip()

    def to_ask(self, patience_s: float) -> dict[str, bool]:
        """Who has to send its heartbeats over its connection from now on (True), because its datagrams have not come
        for so long, and who need not any more."""
        now, answer = self._beats.read(), dict[str, bool]()
        for name, record in self._records.items():
            without = bool(record.key) and now - record.beat_at > patience_s
            if without != (record.asked_at is not None):
                record.asked_at = self._frames.read() if without else None
                answer[name] = without
        return answer

    @property
    def without_datagrams(self) -> list[str]:
        """Who has been heard over its connection since it was asked to, and not otherwise."""
        asked = [(name, one, one.asked_at) for name, one in self._records.items() if one.key]
        return [name for name, one, asked_at in asked if asked_at is not None and one.frame_at > asked_at]

    # ------------------------------------------------------------------------------------------------------ the thread

    def _receive(self) -> None:
        while not self._closing.wait(TURN_S):
            self._beats.turn()
            with suppress(BlockingIOError):
                for _ in range(AT_ONCE):
                    self._take(self._socket.recv(LARGEST))

    def _take(self, received: bytes) -> None:
        tag, body = received[:TAG], received[TAG:]
        try:
            counter, incarnation, length = BODY.unpack_from(body)
            name = body[BODY.size : BODY.size + length].decode("ascii")
        except (struct.error, UnicodeDecodeError):
            return
        record = self._records.get(name)
        key = record.key if record is not None else b""
        if record is None or not key or counter <= record.counter or incarnation < record.incarnation:
            return
        if hmac.compare_digest(tag, _tag(key, body)):
            record.counter, record.incarnation = counter, incarnation
            record.beat_at = self._beats.read()
            self.waits(name, body[BODY.size + length :].decode(errors="replace"))
