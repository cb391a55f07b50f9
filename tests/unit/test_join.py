"""Who gets in where other machines may join: nobody without the key of the run, and nothing that was overheard."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tailrace.config.tree import Config, Health
from tailrace.wire.client import ControlClient
from tailrace.wire.connection import Connection, check_join_key
from tailrace.wire.keys import JoinKey, Keyring, host_key
from tailrace.wire.messages import ComponentSpec, Hello, WireError
from tailrace.wire.server import ControlServer
from tailrace.wire.session import StrangerError
from tailrace.wire.tls import Identity

KEYS = Keyring(bytes(range(32)), "ab" * 32)
OTHER = Keyring(bytes(32), "cd" * 32)
IDENTITY = Identity(KEYS.identity)
KEY = JoinKey(IDENTITY.fingerprint, KEYS.token)
QUICK = Config(health=Health(heartbeat_s=0.05))
MACHINE = "host-5/1"
DEADLINE_S = 20.0


@asynccontextmanager
async def listening() -> AsyncIterator[ControlServer]:
    made = ControlServer(KEYS, identity=IDENTITY)
    try:
        yield made
    finally:
        await made.close()


def client_of(endpoint: str, keys: Keyring = KEYS, fingerprint: str = KEY.fingerprint, id: int = 0) -> ControlClient:
    spec = ComponentSpec(
        "relay", id, 1, endpoint, keys.token, "", QUICK, key=keys.of(f"relay-{id}/1").hex(), fingerprint=fingerprint
    )
    client = ControlClient(spec)
    client.open()
    return client


async def heard_of(server: ControlServer, *awaited: str) -> set[str]:
    """Everybody who was heard until these were."""
    names: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while not names.issuperset(awaited):
            names |= {letter.sender for letter in await server.receive()}
    return names


def test_the_same_secret_gives_the_same_certificate_so_that_a_new_controller_is_known():
    assert Identity(KEYS.identity).fingerprint == IDENTITY.fingerprint
    assert Identity(OTHER.identity).fingerprint != IDENTITY.fingerprint


def test_who_has_the_key_is_heard_and_nobody_else():
    async def scene() -> None:
        async with listening() as server:
            strangers = [
                client_of(server.endpoint, id=2, keys=OTHER),  # a key of its own
                client_of(server.endpoint, id=3, fingerprint=Identity(OTHER.identity).fingerprint),  # of another run
            ]
            friend, plain = client_of(server.endpoint), client_of(server.endpoint, id=1, fingerprint="")
            heard = await heard_of(server, "relay-0/1", "relay-1/1")
            assert heard == {"relay-0/1", "relay-1/1"}, "on this machine, connections may be plain"
            await asyncio.gather(*[asyncio.to_thread(client.close) for client in (friend, plain, *strangers)])

    asyncio.run(scene())


def test_who_comes_from_another_host_has_to_encrypt(monkeypatch):
    monkeypatch.setattr("tailrace.wire.listener._is_local", lambda _: False)

    async def scene() -> None:
        async with listening() as server:
            with pytest.raises(StrangerError):
                await asyncio.to_thread(Connection, server.endpoint, "relay-0/1", KEYS.of("relay-0/1"))
            friend = client_of(server.endpoint)
            assert await heard_of(server, "relay-0/1") == {"relay-0/1"}
            await asyncio.to_thread(friend.close)

    asyncio.run(scene())


def test_the_token_proves_the_names_of_machines_and_no_others():
    async def scene() -> None:
        async with listening() as server:
            key = host_key(KEYS.token, MACHINE)
            wire = await asyncio.to_thread(Connection, server.endpoint, MACHINE, key, KEY.fingerprint)
            for name in ("relay-0/1", "replica-0/1", "trainer-0/1"):
                with pytest.raises(StrangerError):
                    await asyncio.to_thread(
                        Connection, server.endpoint, name, host_key(KEYS.token, name), KEY.fingerprint
                    )
            wire.close()

    asyncio.run(scene())


def answer(endpoint: str, key: JoinKey, within_s: float = 5.0) -> str:
    try:
        check_join_key(endpoint, MACHINE, host_key(key.token, MACHINE), key.fingerprint, within_s)
    except WireError as error:
        return str(error)
    return "come in"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (KEY, "come in"),
        (JoinKey(KEY.fingerprint, OTHER.token), "refused this join key"),
        (JoinKey(Identity(OTHER.identity).fingerprint, KEYS.token), "refused this join key"),
    ],
)
def test_a_knock_is_answered_with_a_sentence(key: JoinKey, words: str):
    async def scene() -> str:
        async with listening() as server:
            return await asyncio.to_thread(answer, server.endpoint, key)

    assert words in asyncio.run(scene())


def test_where_nobody_listens_the_sentence_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert f"nobody answered at 127.0.0.1:{port} within 0.3 s" in answer(f"tcp://127.0.0.1:{port}", KEY, 0.3)


@pytest.mark.parametrize("fingerprint", ["", KEY.fingerprint])
def test_what_was_overheard_is_worthless_when_it_is_sent_again(fingerprint: str):
    """Somebody between the two records all bytes of a good connection and plays them to the server once more."""

    async def scene() -> None:
        async with listening() as controller:
            recorded = bytearray()
            with socket.create_server(("127.0.0.1", 0)) as between:
                threading.Thread(target=_pass_on, args=(between, controller.port, recorded), daemon=True).start()
                client = client_of(f"tcp://127.0.0.1:{between.getsockname()[1]}", fingerprint=fingerprint)
                await heard_of(controller, "relay-0/1")
                await asyncio.to_thread(client.close)
            assert KEYS.token.encode() not in recorded
            assert KEYS.of("relay-0/1") not in recorded
            while controller._received or controller._peers:
                controller._received.clear()
                await asyncio.sleep(0.01)
            with socket.create_connection(("127.0.0.1", controller.port), timeout=DEADLINE_S) as liar:
                liar.sendall(recorded)
                await asyncio.to_thread(_until_hung_up, liar)
            assert not controller._received
            assert not controller._peers

    asyncio.run(scene())


def _until_hung_up(liar: socket.socket) -> None:
    try:
        while liar.recv(65536):
            pass
    except ConnectionResetError:
        pass


def _pass_on(between: socket.socket, port: int, recorded: bytearray) -> None:
    caller, _ = between.accept()
    with caller, socket.create_connection(("127.0.0.1", port)) as server:
        threading.Thread(target=_copy, args=(server, caller, bytearray()), daemon=True).start()
        _copy(caller, server, recorded)


def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    try:
        while piece := source.recv(65536):
            seen += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_machine_that_takes_nothing_is_hung_up_on_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("tailrace.wire.server.UNREAD_BY_HOST", 1 << 20)

    async def scene() -> None:
        async with listening() as server:
            wire = await asyncio.to_thread(
                Connection, server.endpoint, MACHINE, host_key(KEYS.token, MACHINE), KEY.fingerprint
            )
            while MACHINE not in server._peers:
                await asyncio.sleep(0.01)
            for _ in range(500):
                await server.send(MACHINE, Hello("x" * 100_000))  # type: ignore[arg-type]
                await asyncio.sleep(0)
            assert MACHINE not in server._peers
            wire.close()

    asyncio.run(scene())


def test_a_greeting_in_tls_that_is_none_is_hung_up_on():
    async def scene() -> None:
        async with listening() as server:
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as caller:
                caller.sendall(b"\x16\x03\x01" + bytes(200))
                await asyncio.to_thread(_until_hung_up, caller)
            with pytest.raises((ssl.SSLError, StrangerError)):
                await asyncio.to_thread(Connection, server.endpoint, MACHINE, bytes(32), KEY.fingerprint)

    asyncio.run(scene())


def test_a_join_key_is_one_line_and_anything_else_is_refused():
    assert JoinKey.read(f"{KEY}\n") == KEY
    for text in ("", "join", "ab.cd", str(KEY)[:-1], str(KEY).upper(), f"{KEY}{KEY}", os.urandom(64).hex()):
        with pytest.raises(WireError, match="no join key"):
            JoinKey.read(text)
