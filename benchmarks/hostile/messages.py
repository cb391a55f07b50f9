"""Decoders of messages: wire, judges, relays, and the layout of weights that travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hostile.inputs import Decode


def examples() -> tuple[list[Any], list[Any]]:
    """One of everything that components and controller say."""
    from tailrace import protocol
    from tailrace.wire import messages as wire

    events = [_example(each) for each in msgspec.inspect.type_info(protocol.AnyEvent).types]  # type: ignore[attr-defined]
    commands = [_example(each) for each in msgspec.inspect.type_info(protocol.AnyCommand).types]  # type: ignore[attr-defined]
    up = [wire.Hello("127.0.0.1:1", "/dev/shm/arena"), wire.Measured(1, {"loss": 0.5}), wire.Collapsed("no", True)]
    up += [wire.Offer("0.1.0", 2, True, {"replica-3/1": "", "relay-1/1": "was killed"})]
    up += [wire.Beat("store 0"), wire.Accused("replica-1/1", "tokens of t7"), *map(wire.Reported, events)]
    grants = (wire.Grant(0, 7, 2, 3, 4, True, 1), wire.Grant(1, 8, 1, 3, 4))
    down = [wire.Ended(True), wire.Assigned(grants), wire.Reconcile(grants, (1, 2), {1: (1, 30)}, (9,), (4, 5))]
    down += [wire.StoreAddresses((wire.StoreAddress(0, "tcp://127.0.0.1:1", "", "ab" * 32),), (1,)), wire.Introduce(3)]
    down += [wire.Ordered(commands[0], {1: 0.5, 2: None}, {1: (0, 2)}, {1: 30}, {0: "127.0.0.1:1"}, "arena")]
    return up, down + [wire.Ordered(command) for command in commands]


def _example(kind: Any) -> Any:
    """A value of a struct, made of small valid values."""
    match kind:
        case msgspec.inspect.StructType():
            return kind.cls(**{field.name: _example(field.type) for field in kind.fields})
        case msgspec.inspect.UnionType():
            return _example(kind.types[0])
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.IntType():
            return 3
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.StrType():
            return "word"
        case msgspec.inspect.BytesType():
            return b"12345678"
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return (
                [_example(kind.item_type)]
                if isinstance(kind, msgspec.inspect.ListType)
                else (_example(kind.item_type),)
            )
        case msgspec.inspect.TupleType():
            return tuple(_example(each) for each in kind.item_types)
        case msgspec.inspect.DictType():
            return {_example(kind.key_type): _example(kind.value_type)}
        case msgspec.inspect.NoneType():
            return None
        case _:
            return 1


def hub(_: Path) -> tuple[list[bytes], Decode]:
    """Frames of somebody who has proven its name."""
    from collections import deque

    from tailrace.wire.messages import Garbled
    from tailrace.wire.server import ControlServer

    class Peer:
        name, introduced, asked, is_host = "replica-0/1", True, False, False

    one: Any = object.__new__(ControlServer)
    one._heard, one._received, one._arrived = {}, deque(), asyncio.Event()
    one._sizes, one._waiting_bytes = deque(), 0
    one.liveness = _liveness()

    def decode(data: bytes) -> bool:
        one._hear(Peer, 0, data)
        assert "".join(one.liveness.waiting.values()).isprintable(), "what it waits for cannot be shown"
        return not one._received or not isinstance(one._received.pop().message, Garbled)  # a heartbeat is no message

    return [msgspec.msgpack.encode(each) for each in examples()[0]], decode


def _liveness() -> Any:
    """What the controller knows of heartbeats, without a socket and a thread."""
    from tailrace.wire.liveness import ListeningClock, Liveness

    one: Any = object.__new__(Liveness)
    one.waiting, one._records, one._left = {}, {}, {}
    one._beats, one._frames = ListeningClock(), ListeningClock()
    return one


def heartbeats(_: Path) -> tuple[list[bytes], Decode]:
    """Datagrams of anybody, and half of them signed by a component: without its signature none counts."""
    from tailrace.wire.liveness import TAG, _tag, datagram

    one, key, name = _liveness(), bytes(range(32)), "replica-0/1"
    seeds = [datagram(key, name.encode(), 7, 1), datagram(key, name.encode(), 9, 2, "store 0: 8.1 MB not yet stored")]

    def decode(data: bytes) -> bool:
        signed = data in seeds or len(data) % 2 == 0
        one.admit(name, key)
        one._take(_tag(key, data[TAG:]) + data[TAG:] if signed else data)
        assert one.waiting.get(name, "").isprintable(), "what it waits for cannot be shown"
        heard = one._records[name].counter > 0
        assert signed or not heard, "a datagram counts that nobody has signed"
        return heard

    return seeds, decode


def hub_stranger(_: Path) -> tuple[list[bytes], Decode]:
    """The first bytes of a connection, from somebody who has no key: nobody is ever let in."""
    from tailrace.wire.keys import Keyring
    from tailrace.wire.listener import Caller, Listener
    from tailrace.wire.session import PROOF, Opening, StrangerError

    class Writer:
        def write(self, data: bytes) -> None:
            pass

    one: Any = object.__new__(Listener)
    one._key_of = Keyring(bytes(32), "ab" * 32).of
    loop = asyncio.new_event_loop()
    caller: Any = object.__new__(Caller)

    async def greet(data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await one._greet(caller, reader, Writer(), "")
        raise AssertionError("a stranger was let in")

    def decode(data: bytes) -> bool | None:
        try:
            loop.run_until_complete(greet(data))
        except (StrangerError, asyncio.IncompleteReadError):
            return None if data in seeds else False

    names = ("trainer-0/1", "replica-0/1", "host-5/1", "x" * 64)
    seeds = [Opening(name).named + bytes(PROOF) for name in names]
    return seeds, decode


def link(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.wire.messages import decode_from_controller

    return [msgspec.msgpack.encode(each) for each in examples()[1]], lambda data: bool(decode_from_controller(data))


def judge_replies(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.base import Faulted, Observed, Scored
    from tailrace.envs.judge_wire import Frames, Judged, Ready, Refused, frame, reply_in

    def decode(data: bytes) -> None:
        frames = Frames()
        for start in range(0, len(data), 1000):
            for each in frames.feed(data[start : start + 1000]):
                reply_in(each)

    answers = [Judged(1, Scored(1.0), 0.1), Judged(2, Observed("4"), 0.1), Judged(3, Faulted("late"), 1.0)]
    return [frame(each) for each in (Ready(), Refused("no"), *answers)], decode


def judge_questions(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.base import Row, Turn
    from tailrace.envs.judge_wire import Question

    decoder = msgspec.msgpack.Decoder(list[Question])
    row = Row(1, b"", "2 + 2", {"answer": 4})
    asked = [Question(1, row, (Turn("policy", "4"), Turn("environment", "no")))]
    return [msgspec.msgpack.encode(asked)], lambda data: bool(decoder.decode(data) or True)


class _Stream:
    """A socket on which some bytes arrive, and then the other side hangs up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def recv_into(self, room: memoryview) -> int:
        piece = self.data[self.place : self.place + len(room)]
        room[: len(piece)] = piece
        self.place += len(piece)
        return len(piece)

    def send(self, data: memoryview) -> int:
        return len(data)

    def setsockopt(self, *_: object) -> None:
        pass

    def settimeout(self, *_: object) -> None:
        pass


def _relay_words() -> list[Any]:
    from tailrace.weights.messages import AnyMessage

    return [_example(each) for each in msgspec.inspect.type_info(AnyMessage).types]  # type: ignore[attr-defined]


def relay_stream(_: Path) -> tuple[list[bytes], Decode]:
    """Bytes from somebody who may not even know the token."""
    from tailrace.weights.channel import MAGIC, Channel

    def decode(data: bytes) -> None:
        Channel(_Stream(data), "peer", 1.0).answer(b"token")  # type: ignore[arg-type]

    # Our own nonce is drawn anew each time, so nobody's message is ever right: the greeting alone can be.
    start = MAGIC + bytes(32) + (10).to_bytes(4, "big") + bytes(32)
    return [start + msgspec.msgpack.encode(each) for each in _relay_words()], _never(decode)


def _never(decode: Callable[[bytes], None]) -> Decode:
    """For a decoder that refuses its seeds too."""
    from tailrace.weights.channel import TokenError

    def wrapped(data: bytes) -> bool | None:
        try:
            return decode(data)
        except TokenError:
            return None

    return wrapped


def relay_messages(_: Path) -> tuple[list[bytes], Decode]:
    """Bytes from somebody who knows the token and signs whatever it sends."""
    import hmac

    from tailrace.weights.channel import Channel

    def decode(data: bytes) -> None:
        tag = hmac.digest(b"", b"caller" + bytes(8) + data, "sha256")
        channel = Channel(_Stream(len(data).to_bytes(4, "big") + tag + data), "peer", 1.0)  # type: ignore[arg-type]
        channel._sides = (b"callee", b"caller")
        channel.receive("a request")

    return [msgspec.msgpack.encode(each) for each in _relay_words()], decode


def layout(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.weights.layout import WeightLayout

    def whole(layout: WeightLayout) -> bytes:
        return layout.header + bytes(layout.size - len(layout.header))

    def decode(data: bytes) -> None:
        WeightLayout.read(data).arrays(data)

    two = WeightLayout.of(["a.weight", "b"], ["float32", "bfloat16"], [(2, 3), (4,)])
    return [whole(two), whole(WeightLayout.of(["x"], ["int8"], [(0,)])), whole(WeightLayout.of([], [], []))], decode
