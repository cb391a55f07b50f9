"""What a component reports counts once, whichever controllers come and go."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import msgspec
import pytest

from tailrace.config.tree import Config, Health
from tailrace.protocol import Cancel, Trained
from tailrace.wire.client import ControlClient
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring, host_key
from tailrace.wire.messages import (
    Acknowledged,
    Beat,
    ComponentSpec,
    Ended,
    Garbled,
    Hello,
    Introduce,
    Ordered,
    Reported,
)
from tailrace.wire.server import ControlServer, ReceivedMessage
from tailrace.wire.session import HEAD, NAMED, PROOF, Opening, Session, StrangerError, read_named

KEYS = Keyring(bytes(32), "ab" * 32)
NAME = "trainer-0/1"
DEADLINE_S = 20.0
QUICK = Config(health=Health(heartbeat_s=0.05))


def spec(endpoint: str, keys: Keyring = KEYS) -> ComponentSpec:
    return ComponentSpec("trainer", 0, 1, endpoint, keys.token, "", QUICK, key=keys.of(NAME).hex())


def beating(server: ControlServer) -> ControlClient:
    client = ControlClient(spec(server.endpoint))
    client.open()
    return client


async def hear(server: ControlServer, enough: Callable[[list[ReceivedMessage]], bool]) -> list[ReceivedMessage]:
    letters: list[ReceivedMessage] = []
    async with asyncio.timeout(DEADLINE_S):
        while not enough(letters):
            letters += await server.receive()
    return letters


def steps(letters: list[ReceivedMessage]) -> list[int]:
    return [one.message.event.step for one in letters if isinstance(one.message, Reported) and one.number]  # type: ignore[union-attr]


def has(*wanted: int) -> Callable[[list[ReceivedMessage]], bool]:
    return lambda letters: steps(letters)[-len(wanted) :] == list(wanted)


async def replaced(server: ControlServer, heard: dict[str, int]) -> ControlServer:
    """The controller dies, and another one listens in its place."""
    port = server.port
    await server.close()
    return ControlServer(KEYS, port, heard)


def test_a_new_controller_hears_what_the_old_one_had_not_written_down_and_nothing_twice():
    async def scene() -> None:
        server = ControlServer(KEYS)
        client = beating(server)
        for step in range(4):
            client.report(Trained(1, step, 0))
        letters = await hear(server, has(0, 1, 2, 3))
        assert [one.number for one in letters if one.number] == [1, 2, 3, 4]
        name = letters[0].sender
        await server.send(name, Acknowledged(1))
        server = await replaced(server, {name: 2})  # it had heard four, and committed two
        client.report(Trained(1, 4, 0))
        letters = await hear(server, has(2, 3, 4))
        assert steps(letters) == [2, 3, 4]
        assert isinstance(letters[0].message, Hello), "nobody is heard before he has introduced himself"
        client.close()
        await server.close()

    asyncio.run(scene())


def test_a_component_that_is_asked_who_it_is_becomes_a_new_incarnation_and_ignores_older_orders():
    async def scene() -> None:
        server = ControlServer(KEYS)
        client = beating(server)
        name = (await hear(server, bool))[0].sender
        server = await replaced(server, {})
        await hear(server, bool)
        for incarnation in (1, 2):
            await server.send(name, Ordered(Cancel(0, incarnation, ())))
        await server.send(name, Ended(complete=False))
        came = []
        while not came or not isinstance(came[-1], Ended):
            came += await asyncio.to_thread(lambda: list(client.receive(DEADLINE_S)))
        assert [type(one) for one in came] == [Introduce, Ordered, Ended]
        assert came[1].command.incarnation == client.incarnation == 2
        client.close()
        await server.close()

    asyncio.run(scene())


def test_what_is_committed_is_not_kept():
    async def scene() -> None:
        server = ControlServer(KEYS)
        client = beating(server)
        for step in range(3):
            client.report(Trained(1, step, 0))
        name = (await hear(server, has(0, 1, 2)))[0].sender
        await server.send(name, Acknowledged(2))
        async with asyncio.timeout(DEADLINE_S):
            while [number for number, _ in client._kept] != [3]:
                await asyncio.sleep(0.01)
        client.close()
        await server.close()

    asyncio.run(scene())


def test_a_component_that_has_much_to_say_at_once_does_not_wait_for_its_own_heartbeat_nor_that_for_it():
    """More than the pipe that wakes the client's thread can hold; and that thread sends, too, with every heartbeat."""
    many = 3000

    async def scene() -> None:
        server, said = ControlServer(KEYS), threading.Event()

        def load() -> None:
            said.wait(DEADLINE_S)  # the thread that empties the pipe is busy
            client.measure(0, {"beats": 1.0})

        client = ControlClient(spec(server.endpoint), load)
        client.open()
        burst = threading.Thread(
            target=lambda: [client.report(Trained(1, step, 0)) for step in range(many)], daemon=True
        )
        burst.start()
        await asyncio.to_thread(burst.join, DEADLINE_S / 4)
        assert not burst.is_alive()
        said.set()
        assert steps(await hear(server, has(many - 1))) == list(range(many))
        client.close()
        await server.close()

    asyncio.run(scene())


async def nothing_is_heard(server: ControlServer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await server.receive()


def call(server: ControlServer, name: str, key: bytes) -> Connection:
    return Connection(server.endpoint, name, key)


def say(wire: Connection, message: object, number: int = 0) -> None:
    wire.send(number, msgspec.msgpack.encode(message))
    wire.flush()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (NAME, KEYS.of("trainer-0/2")),  # an earlier start of the same component
        (NAME, KEYS.of("replica-0/1")),  # another part
        (NAME, host_key(KEYS.token, NAME)),  # a machine that joined
        (NAME, bytes(32)),
        ("host-7/1", KEYS.of("host-7/1")),  # where no machine may join
        ("trainer-\n/1", KEYS.of("trainer-\n/1")),
        ("é", KEYS.of("é")),
    ],
)
def test_nobody_speaks_in_the_name_of_another(name, key):
    async def scene() -> None:
        server = ControlServer(KEYS)
        with pytest.raises(StrangerError):
            await asyncio.to_thread(call, server, name, key)
        assert not server._peers
        await server.close()

    asyncio.run(scene())


def test_a_name_that_is_no_text_is_not_even_a_name():
    async def scene() -> None:
        server = ControlServer(KEYS)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(NAMED.pack(b"tailrace wire 1\n", bytes(32), 4) + b"\xff\xfe\xfd\xfc")
        assert await reader.read() == b""
        writer.close()
        client = beating(server)
        assert (await hear(server, bool))[0].sender == NAME
        client.close()
        await server.close()

    asyncio.run(scene())


def test_who_has_the_key_of_a_name_takes_it_over_and_has_to_introduce_itself_anew():
    """It was cut off and has connected again: what was lost on the way is asked for, in both directions."""

    async def scene() -> None:
        server = ControlServer(KEYS)
        first = await asyncio.to_thread(call, server, NAME, KEYS.of(NAME))
        say(first, Hello())
        say(first, Reported(Trained(1, 0, 0)), 1)
        await hear(server, has(0))
        second = await asyncio.to_thread(call, server, NAME, KEYS.of(NAME))
        say(second, Beat())
        say(second, Reported(Trained(1, 2, 0)), 3)
        asked = await asyncio.to_thread(lambda: next(arriving(second)))
        assert asked == Introduce(1)
        say(second, Hello())
        say(second, Reported(Trained(1, 1, 0)), 2)
        say(second, Reported(Trained(1, 2, 0)), 3)
        assert steps(await hear(server, has(1, 2))) == [1, 2]
        assert await asyncio.to_thread(is_hung_up_on, first)
        for wire in (first, second):
            wire.close()
        await server.close()

    asyncio.run(scene())


def is_hung_up_on(wire: Connection) -> bool:
    wire._socket.settimeout(DEADLINE_S)
    try:
        return not wire._socket.recv(1)
    except ConnectionResetError:
        return True


def arriving(wire: Connection):
    decode = msgspec.msgpack.Decoder(Introduce).decode
    while True:
        yield from (decode(content) for content in wire.receive())


@pytest.mark.parametrize("harm", ["altered", "repeated", "turned around", "of another connection"])
def test_a_frame_that_was_tampered_with_ends_the_connection(harm):
    async def scene() -> None:
        server = ControlServer(KEYS)
        wire = await asyncio.to_thread(call, server, NAME, KEYS.of(NAME))
        say(wire, Hello())
        await hear(server, bool)
        content = msgspec.msgpack.encode(Reported(Trained(1, 0, 0)))
        wire.send(1, content)
        frame = bytearray(wire._unsent.pop())
        if harm == "altered":
            frame[-1] ^= 1
        elif harm == "turned around":
            frame[: HEAD.size] = Session("controller", KEYS.of(NAME), (bytes(32), bytes(32))).head(1, content)
        elif harm == "of another connection":
            frame[: HEAD.size] = Session("component", KEYS.of(NAME), (bytes(32), bytes(32))).head(1, content)
        wire._socket.setblocking(True)
        wire._socket.sendall(frame * (2 if harm == "repeated" else 1))
        assert await asyncio.to_thread(is_hung_up_on, wire)
        letters = (await server.receive()) if harm == "repeated" else []
        assert [one.number for one in letters] == ([1] if harm == "repeated" else [])
        await nothing_is_heard(server)
        wire.close()
        await server.close()

    asyncio.run(scene())


def test_what_cannot_be_read_is_told_with_the_name_of_its_sender():
    async def scene() -> None:
        server = ControlServer(KEYS)
        wire = await asyncio.to_thread(call, server, NAME, KEYS.of(NAME))
        say(wire, Hello())
        wire.send(0, b"\xc1")
        wire.flush()
        letters = await hear(server, lambda found: len(found) == 2)
        assert (letters[1].sender, type(letters[1].message)) == (NAME, Garbled)
        wire._socket.setblocking(True)
        wire._socket.sendall(HEAD.pack(1 << 40, 0, bytes(PROOF)))
        letters = await hear(server, bool)
        assert isinstance(letters[0].message, Garbled)
        wire.close()
        await server.close()

    asyncio.run(scene())


def test_the_port_of_a_controller_that_is_gone_is_of_no_use_without_the_keys():
    """Somebody else listens there: the component tells it nothing but its name, and waits for its controller."""
    with socket.create_server(("127.0.0.1", 0)) as usurper:
        usurper.settimeout(DEADLINE_S)
        client = ControlClient(spec(f"tcp://127.0.0.1:{usurper.getsockname()[1]}"))
        client.open()
        client.report(Trained(1, 0, 0))
        for proof in (bytes(PROOF), None):
            caller, _ = usurper.accept()
            with caller:
                nonce, length = read_named(caller.recv(NAMED.size, socket.MSG_WAITALL))
                assert caller.recv(length, socket.MSG_WAITALL) == NAME.encode()
                opening = Opening()
                caller.sendall(opening.nameless)
                assert len(caller.recv(PROOF, socket.MSG_WAITALL)) == PROOF
                foreign = Session("controller", bytes(32), (nonce, opening.nonce)).proof
                caller.sendall(foreign if proof is None else proof)
                assert caller.recv(1) == b"", "not a word"
        assert not list(client.listen(0))
        client.close()
