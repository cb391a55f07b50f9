"""Crowds of strangers: whoever listens has few descriptors for them, keeps some for itself, and hears its own
components."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tailrace.config.tree import Config, Health
from tailrace.wire import descriptors
from tailrace.wire.client import ControlClient
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring, host_key
from tailrace.wire.messages import ComponentSpec, Measured
from tailrace.wire.server import ControlServer
from tailrace.wire.session import Opening
from tailrace.wire.tls import Identity

KEYS = Keyring(bytes(32), "ab" * 32)
LIMIT, CROWD = 160, 3000
DEADLINE_S = 60.0
CHILD = """
import asyncio, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
from tailrace.wire import descriptors
from tailrace.wire.server import ControlServer
from tailrace.wire.keys import Keyring
from tailrace.wire.tls import Identity

async def main():
    keys = Keyring(bytes(32), "ab" * 32)
    server = ControlServer(keys, identity=Identity(keys.identity) if {tls} else None)
    print(server.port, flush=True)
    least = {limit}
    async def look():
        global least
        while True:
            held = []
            try:
                while len(held) < 200:
                    held += os.pipe()
            except OSError:
                pass
            least = min(least, len(held))
            for each in held:
                os.close(each)
            await asyncio.sleep(0.01)
    task = asyncio.create_task(look())
    while True:
        for letter in await server.receive():
            print(letter.sender, least, flush=True)

least = 10**6
asyncio.run(main())
"""


@contextmanager
def listening(tls: bool) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process that may have few descriptors; it prints whom it hears and how many it always had to
    spare."""
    program = CHILD.format(limit=LIMIT, tls=tls)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


@contextmanager
def crowd(port: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Strangers that connect, say so much, and then nothing."""
    callers: list[socket.socket] = []
    try:
        for _ in range(CROWD):
            with suppress(OSError):
                callers.append(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
                callers[-1].sendall(first)
        yield callers
    finally:
        for caller in callers:
            caller.close()


def part(port: int) -> ControlClient:
    config, key = Config(health=Health(heartbeat_s=0.05)), KEYS.of("relay-0/1").hex()
    client = ControlClient(ComponentSpec("relay", 0, 1, f"tcp://127.0.0.1:{port}", KEYS.token, "", config, key=key))
    client.open()
    return client


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)  # the beginning of a TLS handshake


@pytest.mark.parametrize(
    ("tls", "first"),
    [(False, b""), (False, Opening("trainer-0/1").named), (True, b""), (True, HELLO)],
    ids=["silent", "with the name of a component", "silent, encrypted", "in a handshake"],
)
def test_thousands_of_strangers_leave_the_hub_its_descriptors_and_its_ears(tls: bool, first: bytes) -> None:
    with listening(tls) as (child, port), crowd(port, first):
        assert child.stdout is not None
        client = part(port)
        name, spare = child.stdout.readline().split()
        assert name == "relay-0/1"
        assert int(spare) >= descriptors.RESERVE
        client.close()


def test_a_component_that_was_there_is_heard_all_the_while() -> None:
    with listening(tls=False) as (child, port):
        client = part(port)
        assert child.stdout is not None
        assert child.stdout.readline().split()[0] == "relay-0/1"
        with crowd(port, b""):
            for number in range(60):
                client.measure(number, {"strangers": CROWD})
            heard = [child.stdout.readline().split()[0] for _ in range(60)]
        assert set(heard) == {"relay-0/1"}
        client.close()


def test_strangers_have_little_time_and_the_oldest_makes_room_first(monkeypatch) -> None:
    monkeypatch.setattr("tailrace.wire.listener.GREET_S", 0.3)

    async def scene() -> None:
        server = ControlServer(KEYS)
        _, silent = await asyncio.open_connection("127.0.0.1", server.port)
        _, drips = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(DEADLINE_S):
            while len(server._listener.strangers) < 2:
                await asyncio.sleep(0.01)
            for letter in Opening("trainer-0/1").named:
                drips.write(bytes([letter]))
                await asyncio.sleep(0.01)
            while server._listener.callers:
                await asyncio.sleep(0.01)
        silent.close()
        drips.close()
        await server.close()

    asyncio.run(scene())


def test_what_waits_to_be_handled_is_bounded_and_nothing_of_it_is_lost(monkeypatch) -> None:
    """A component that has much to say while the controller is busy is not read from for a while."""
    monkeypatch.setattr("tailrace.wire.server.WAITING_BYTES", 100_000)
    many = 200

    async def scene() -> None:
        server = ControlServer(KEYS)
        client = part(server.port)
        for number in range(many):
            client.measure(number, {f"{name}" * 20: 0.0 for name in range(100)})
        async with asyncio.timeout(DEADLINE_S):
            while server._has_room.is_set():
                await asyncio.sleep(0.01)
            assert server._waiting_bytes < 100_000 + 50_000
            steps: list[int] = []
            while len(steps) < many:
                letters = await server.receive()
                steps += [one.message.step for one in letters if isinstance(one.message, Measured)]
        assert steps == list(range(many))
        await asyncio.to_thread(client.close)
        await server.close()

    asyncio.run(scene())


def test_who_has_the_token_cannot_keep_components_out_by_calling_as_many_machines(monkeypatch) -> None:
    monkeypatch.setattr("tailrace.wire.server.MACHINES", 3)

    async def scene() -> None:
        identity = Identity(KEYS.identity)
        server = ControlServer(KEYS, identity=identity)

        def machine(number: int) -> Connection:
            name = f"host-{number}/1"
            return Connection(server.endpoint, name, host_key(KEYS.token, name), identity.fingerprint)

        wires = [await asyncio.to_thread(machine, number) for number in range(10)]
        async with asyncio.timeout(DEADLINE_S):
            while len(server._listener.callers) > 3:
                await asyncio.sleep(0.01)
            assert len(server._peers) == 3
            client = part(server.port)
            while "relay-0/1" not in {letter.sender for letter in await server.receive()}:
                pass
        await asyncio.to_thread(client.close)
        for wire in wires:
            wire.close()
        await server.close()

    asyncio.run(scene())


def test_the_limit_is_raised_to_what_the_system_grants_and_strangers_get_a_share_of_it() -> None:
    program = """
import resource
from tailrace.wire import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (70, 300))
descriptors.raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE), *descriptors.shares())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(300, 300) 59 177"
