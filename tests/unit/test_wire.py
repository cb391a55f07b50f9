"""What a part reports counts once, whichever controllers come and go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from tailrace.config.tree import Config, Health
from tailrace.protocol import Alive, Cancel, Trained
from tailrace.wire.hub import Hub, Letter
from tailrace.wire.link import Link
from tailrace.wire.messages import ORDER, Acknowledged, Ended, Hello, Introduce, Ordered, Reported, Spec, sign

TOKEN = "secret"
DEADLINE_S = 20.0
QUICK = Config(health=Health(heartbeat_s=0.05))


def spec(hub: Hub, token: str = TOKEN) -> Spec:
    return Spec("trainer", 0, 1, hub.endpoint, token, "", QUICK)


def beating(hub: Hub, token: str = TOKEN) -> Link:
    link = Link(spec(hub, token), lambda: Alive("trainer", 0, link.incarnation))
    link.open()
    return link


async def hear(hub: Hub, enough: Callable[[list[Letter]], bool]) -> list[Letter]:
    letters: list[Letter] = []
    async with asyncio.timeout(DEADLINE_S):
        while not enough(letters):
            letters += await hub.receive()
    return letters


def steps(letters: list[Letter]) -> list[int]:
    return [one.message.event.step for one in letters if isinstance(one.message, Reported) and one.number]  # type: ignore[union-attr]


def has(*wanted: int) -> Callable[[list[Letter]], bool]:
    return lambda letters: steps(letters)[-len(wanted) :] == list(wanted)


async def replaced(hub: Hub, heard: dict[str, int]) -> Hub:
    """The controller dies, and another one listens in its place."""
    port = hub.port
    hub._socket.close(0)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return Hub(TOKEN, port, heard)
            except ValueError:
                await asyncio.sleep(0.01)


def test_a_new_controller_hears_what_the_old_one_had_not_written_down_and_nothing_twice():
    async def scene() -> None:
        hub = Hub(TOKEN)
        link = beating(hub)
        for step in range(4):
            link.report(Trained(1, step, 0))
        letters = await hear(hub, has(0, 1, 2, 3))
        assert [one.number for one in letters if one.number] == [1, 2, 3, 4]
        name = letters[0].sender
        await hub.send(name, Acknowledged(1))
        hub = await replaced(hub, {name: 2})  # it had heard four, and committed two
        link.report(Trained(1, 4, 0))
        letters = await hear(hub, has(2, 3, 4))
        assert steps(letters) == [2, 3, 4]
        assert isinstance(letters[0].message, Hello), "nobody is heard before he has introduced himself"
        link.close()
        hub.close()

    asyncio.run(scene())


def test_a_part_that_is_asked_who_it_is_becomes_a_new_incarnation_and_ignores_older_orders():
    async def scene() -> None:
        hub = Hub(TOKEN)
        link = beating(hub)
        name = (await hear(hub, bool))[0].sender
        hub = await replaced(hub, {})
        await hear(hub, bool)
        for incarnation in (1, 2):
            await hub.send(name, Ordered(Cancel(0, incarnation, ())))
        await hub.send(name, Ended(complete=False))
        came = []
        while not came or not isinstance(came[-1], Ended):
            came += await asyncio.to_thread(lambda: list(link.receive(DEADLINE_S)))
        assert [type(one) for one in came] == [Introduce, Ordered, Ended]
        assert came[1].command.incarnation == link.incarnation == 2
        link.close()
        hub.close()

    asyncio.run(scene())


def test_what_is_committed_is_not_kept():
    async def scene() -> None:
        hub = Hub(TOKEN)
        link = beating(hub)
        for step in range(3):
            link.report(Trained(1, step, 0))
        name = (await hear(hub, has(0, 1, 2)))[0].sender
        await hub.send(name, Acknowledged(2))
        async with asyncio.timeout(DEADLINE_S):
            while [number for number, _ in link._kept] != [3]:
                await asyncio.sleep(0.01)
        link.close()
        hub.close()

    asyncio.run(scene())


def test_a_part_that_has_much_to_say_at_once_does_not_wait_for_its_own_heart_nor_its_heart_for_it():
    """More than the pipe that wakes the link's thread can hold; and that thread sends, too, when the heart beats."""
    many = 3000

    async def scene() -> None:
        hub, said = Hub(TOKEN), threading.Event()

        def pulse() -> Alive:
            said.wait(DEADLINE_S)  # the thread that empties the pipe is busy
            link.measure(0, {"beats": 1.0})
            return Alive("trainer", 0, 1)

        link = Link(spec(hub), pulse)
        link.open()
        burst = threading.Thread(target=lambda: [link.report(Trained(1, step, 0)) for step in range(many)], daemon=True)
        burst.start()
        await asyncio.to_thread(burst.join, DEADLINE_S / 4)
        assert not burst.is_alive()
        said.set()
        assert steps(await hear(hub, has(many - 1))) == list(range(many))
        link.close()
        hub.close()

    asyncio.run(scene())


def test_a_stranger_is_neither_heard_nor_answered():
    async def scene() -> None:
        hub = Hub(TOKEN)
        link = beating(hub, "another run's")
        link.report(Trained(1, 0, 0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await hub.receive()
        assert not hub._trusted
        assert not hub._asked, "whoever comes with ever new names costs nothing"
        link.close()
        hub.close()

    asyncio.run(scene())


def test_the_name_of_a_part_that_is_gone_is_of_no_use_without_the_token():
    async def scene() -> None:
        name = "trainer-0/1"
        hub = Hub(TOKEN, heard={name: 1})
        hub._trusted.add(name.encode())  # it had introduced itself before it died
        thief = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        thief.setsockopt(zmq.IDENTITY, name.encode())
        thief.connect(hub.endpoint)
        content = msgspec.msgpack.encode(Reported(Trained(1, 1, 0)))
        for forged in (b"", bytes(32), sign("another run's", name.encode(), bytes(7) + b"\2", content)):
            await thief.send_multipart([bytes(7) + b"\2", forged, content])
        await thief.send_multipart([bytes(7) + b"\2", content])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await hub.receive()
        await thief.send_multipart([bytes(7) + b"\2", sign(TOKEN, name.encode(), bytes(7) + b"\2", content), content])
        await hear(hub, has(1))  # it did get through: only the proof was missing
        thief.close(0)
        hub.close()

    asyncio.run(scene())


def test_the_port_of_a_controller_that_is_gone_is_of_no_use_without_the_token():
    usurper = zmq.Context.instance().socket(zmq.ROUTER)
    usurper.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    port = usurper.bind_to_random_port("tcp://127.0.0.1")
    link = Link(Spec("trainer", 0, 1, f"tcp://127.0.0.1:{port}", TOKEN, "", QUICK))
    link.open()
    name = usurper.recv_multipart()[0]
    order = msgspec.msgpack.encode(Ended(complete=True))
    for forged in (
        [],
        [b""],
        [bytes(32)],
        [sign("another run's", name, ORDER, order)],
        [sign(TOKEN, b"x", ORDER, order)],
    ):
        usurper.send_multipart([name, *forged, order])
    last = msgspec.msgpack.encode(Ended(complete=False))
    usurper.send_multipart([name, sign(TOKEN, name, ORDER, last), last])
    assert next(link.listen(DEADLINE_S)) == Ended(complete=False)
    link.close()
    usurper.close(0)
