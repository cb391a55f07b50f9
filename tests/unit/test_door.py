"""Who gets in where other machines may join: nobody without the key of the run, and nothing that was overheard."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from tailrace.config.tree import Config, Health
from tailrace.protocol import Alive
from tailrace.wire.door import REFUSALS, Door, JoinKey, knock, public_key
from tailrace.wire.hub import Hub, Letter
from tailrace.wire.link import Link
from tailrace.wire.messages import Hello, Reported, Spec, WireError, sign

SECRET = bytes(range(32))
TOKEN = "ab" * 32
OTHER = "cd" * 32
KEY = JoinKey(public_key(SECRET), TOKEN)
QUICK = Config(health=Health(heartbeat_s=0.05))
DEADLINE_S = 20.0


@contextmanager
def hub() -> Iterator[Hub]:
    made = Hub(TOKEN, door=Door(SECRET, TOKEN))
    try:
        yield made
    finally:
        made.close()


def link_to(endpoint: str, token: str = TOKEN, door: str = KEY.door, id: int = 0) -> Link:
    spec = Spec("relay", id, 1, endpoint, token, "", QUICK, door=door)
    link = Link(spec, lambda: Alive("relay", id, 1))
    link.open()
    return link


async def heard_of(hub: Hub, name: str) -> set[str]:
    """Everybody who was heard until this one was."""
    names: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while name not in names:
            names |= {letter.sender for letter in await hub.receive()}
    return names


def test_who_has_the_key_is_heard_and_nobody_else():
    plain, own_key, other_run = {"door": ""}, {"token": OTHER}, {"door": public_key(bytes(32))}
    strangers = (plain, own_key, other_run)

    async def scene() -> None:
        with hub() as door:
            refusals = door._socket.get_monitor_socket(sum(REFUSALS))
            for number, wrong in enumerate(strangers, start=1):
                stranger = link_to(door.endpoint, id=number, **wrong)
                async with asyncio.timeout(DEADLINE_S):
                    await refusals.recv_multipart()  # it has come to the door, and was sent away
                await asyncio.to_thread(stranger.close)
            friend = link_to(door.endpoint)
            assert await heard_of(door, "relay-0/1") == {"relay-0/1"}
            door._socket.disable_monitor()
            await asyncio.to_thread(friend.close)

    asyncio.run(scene())


def answer(endpoint: str, key: JoinKey, within_s: float = 5.0) -> str:
    try:
        knock(endpoint, key, within_s)
    except WireError as error:
        return str(error)
    return "come in"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (KEY, "come in"),
        (JoinKey(KEY.door, OTHER), "refused this join key"),
        (JoinKey(public_key(bytes(32)), TOKEN), "refused this join key"),
    ],
)
def test_a_knock_is_answered_with_a_sentence(key: JoinKey, words: str):
    async def scene() -> str:
        with hub() as door:
            return await asyncio.to_thread(answer, door.endpoint, key)

    assert words in asyncio.run(scene())


def test_where_nobody_listens_the_sentence_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert f"nobody answered at 127.0.0.1:{port} within 0.3 s" in answer(f"tcp://127.0.0.1:{port}", KEY, 0.3)


def test_what_was_overheard_is_worthless_when_it_is_sent_again():
    """Somebody between the two records all bytes of a good connection and plays them to the hub once more."""

    async def scene() -> None:
        with hub() as door:
            recorded = bytearray()
            with socket.create_server(("127.0.0.1", 0)) as between:
                threading.Thread(target=_pass_on, args=(between, door.port, recorded), daemon=True).start()
                link = link_to(f"tcp://127.0.0.1:{between.getsockname()[1]}")
                await heard_of(door, "relay-0/1")
                link.close()
            while await door._socket.poll(200):
                await door._socket.recv_multipart()
            assert TOKEN.encode() not in recorded
            with socket.create_connection(("127.0.0.1", door.port)) as liar:
                liar.sendall(recorded)
                assert not await door._socket.poll(1000)

    asyncio.run(scene())


def _pass_on(between: socket.socket, port: int, recorded: bytearray) -> None:
    caller, _ = between.accept()
    with caller, socket.create_connection(("127.0.0.1", port)) as hub:
        threading.Thread(target=_copy, args=(hub, caller, bytearray()), daemon=True).start()
        _copy(caller, hub, recorded)


def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    try:
        while piece := source.recv(65536):
            seen += piece
            target.sendall(piece)
    except OSError:
        pass


def test_a_forged_message_on_an_open_door_needs_the_token_too():
    """Without a door, on the loopback, the token is what counts."""

    async def scene() -> list[Letter]:
        plain = Hub(TOKEN)
        forger = zmq.Context.instance().socket(zmq.DEALER)
        forger.setsockopt(zmq.IDENTITY, b"relay-0/1")
        forger.connect(plain.endpoint)
        encode = msgspec.msgpack.Encoder().encode
        for message in (Reported(Alive("relay", 0, 1)), Hello(), Reported(Alive("relay", 0, 1))):
            content, name = encode(message), b"relay-0/1"
            forger.send_multipart([bytes(8), sign(OTHER, name, bytes(8), content), content])
        friend = link_to(plain.endpoint, door="", id=1)
        try:
            assert await heard_of(plain, "relay-1/1") == {"relay-1/1"}
        finally:
            friend.close()
            forger.close(0)
            plain.close()
        return []

    asyncio.run(scene())


def test_a_join_key_is_one_line_and_anything_else_is_refused():
    assert JoinKey.read(f"{KEY}\n") == KEY
    for text in ("", "join", "ab.cd", str(KEY)[:-1], str(KEY).upper(), f"{KEY}{KEY}", os.urandom(64).hex()):
        with pytest.raises(WireError, match="no join key"):
            JoinKey.read(text)
