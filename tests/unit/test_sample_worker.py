"""The process of a store, started as a run starts it, with a test in the place of the controller."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec

from sample_stores import DEADLINE_S, grant, ids_in, once_durable, piece, tokens_of
from tailrace.config import with_values
from tailrace.config.tree import Config
from tailrace.protocol import Event, FetchPrompts, Forget, PromptsAdded, SamplesLost, StoreJoined
from tailrace.samples.client import SampleClient
from tailrace.samples.messages import AssignmentLost, Fetched, Piece
from tailrace.store.run import RunStore
from tailrace.types import Prompt
from tailrace.wire.keys import Keyring, sample_key
from tailrace.wire.messages import (
    Accused,
    Assigned,
    ComponentSpec,
    Ended,
    FromComponent,
    FromController,
    Garbled,
    Hello,
    Ordered,
    Reconcile,
    Reported,
    StoreAddress,
)
from tailrace.wire.server import ControlServer

KEYS = Keyring(bytes(32), "ab" * 32)
CONFIG = with_values(
    Config(),
    {"model.preset": "qwen2.5-7b", "rollout.engine": "emulated", "workload.prompt_tokens": 5, "run.archive": False},
)


class StoreProcess:
    """One start of the store, and what it tells its controller."""

    def __init__(self, server: ControlServer, folder: Path, incarnation: int) -> None:
        self._server = server
        self._lifeline, self._held = os.pipe()
        spec = ComponentSpec(
            "store", 0, incarnation, server.endpoint, KEYS.token, str(folder), CONFIG, lifeline=self._lifeline
        )
        self.spec = msgspec.structs.replace(spec, key=KEYS.of(spec.name).hex())
        self._messages: list[FromComponent | Garbled] = []
        command = [sys.executable, "-m", "tailrace.runtime.component"]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(self._lifeline,))
        assert self.child.stdin is not None
        self.child.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        self.child.stdin.close()

    async def order(self, message: FromController) -> None:
        await self._server.send(self.spec.name, message)

    async def says(self, kind: type[FromComponent] | type[Event]) -> FromComponent | Event:
        """The next message or event of this kind."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._messages:
                    message = self._messages.pop(0)
                    found = message.event if isinstance(message, Reported) else message
                    if isinstance(found, kind):
                        return found
                self._messages += [letter.message for letter in await self._server.receive()]

    def client(self, name: str, place: str) -> SampleClient:
        one = SampleClient(name)
        key = sample_key(bytes.fromhex(self.spec.key), name).hex()
        one.connect([StoreAddress(0, f"tcp://{place}", "", key)])
        one.open()
        return one

    def end(self) -> None:
        os.close(self._held)
        os.close(self._lifeline)
        self.child.kill()
        self.child.wait(DEADLINE_S)


@asynccontextmanager
async def started(server: ControlServer, folder: Path, incarnation: int) -> AsyncIterator[tuple[StoreProcess, str]]:
    process = StoreProcess(server, folder, incarnation)
    try:
        hello = await process.says(Hello)
        assert isinstance(hello, Hello)
        assert await process.says(StoreJoined) == StoreJoined(0, incarnation)
        yield process, hello.address
    finally:
        process.end()


async def soon(true: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.01)


async def first_life(server: ControlServer, folder: Path) -> None:
    async with started(server, folder, 1) as (process, place):
        await process.order(Ordered(FetchPrompts(2, 2)))
        assert await process.says(PromptsAdded) == PromptsAdded(2, (Prompt(2, 5), Prompt(3, 5)))
        replica, results = process.client("replica-0/1", place), list[Fetched | AssignmentLost]()
        replica.fetch(1, 1)
        await process.order(Assigned((grant(1), grant(2), grant(3))))
        await soon(lambda: results.extend(replica.poll()) or results)
        assert isinstance(results[0], Fetched)
        assert (results[0].row.id, len(results[0].row.ids)) == (3, 5)
        done: list[int] = []
        for id in (1, 2, 3):
            replica.append(id, 1, 0, [piece(id, 0, 100)])
            once_durable(replica, id, 1, lambda id=id: done.append(id))
        await soon(lambda: len(done) == 3)
        await process.order(Ordered(Forget((2,))))
        liar = process.client("replica-1/1", place)
        liar.append(1, 1, 100, [Piece(0, bytes(4), bytes(4))])
        accused = await process.says(Accused)
        assert accused == Accused("replica-1/1", "tokens of t1, which it was not given")
        liar.close(0.0)
        replica.close(0.0)


async def second_life(server: ControlServer, folder: Path) -> None:
    async with started(server, folder, 2) as (process, place):
        await process.order(Reconcile((grant(1, attempt=2, resume=True),), keep=(3, 77)))
        assert await process.says(SamplesLost) == SamplesLost(0, 2, (77,))
        replica, done = process.client("replica-0/2", place), list[int]()
        replica.append(1, 2, 100, [piece(1, 100, 120)])
        once_durable(replica, 1, 2, lambda: done.append(1))
        await soon(lambda: done)
        trainer = process.client("trainer-0/1", place)
        samples = await asyncio.to_thread(lambda: list(trainer.read([3, 1])))
        assert [ids_in(sample) for sample in samples] == [tokens_of(3, 0, 100).tolist(), tokens_of(1, 0, 120).tolist()]
        trainer.close(0.0)
        replica.close(0.0)
        await process.order(Ended(complete=True))
        assert await asyncio.to_thread(process.child.wait, DEADLINE_S) == 0
        assert not (folder / "samples-0.db-wal").exists()


async def third_life(server: ControlServer, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "samples-0.db")) as connection, connection:
        connection.execute("UPDATE segments SET tokens = zeroblob(length(tokens)) WHERE trajectory_id = 1")
    async with started(server, folder, 3) as (process, place):
        await process.order(Assigned((grant(1, attempt=3, resume=True),)))
        replica = process.client("replica-0/3", place)
        replica.fetch(1, 3)
        assert await process.says(SamplesLost) == SamplesLost(0, 3, (1,))
        replica.close(0.0)


def test_a_killed_store_goes_on_with_its_file_and_says_which_samples_are_damaged(tmp_path: Path) -> None:
    async def scene() -> None:
        server = ControlServer(KEYS)
        with RunStore.create(tmp_path / "run", CONFIG):
            await first_life(server, tmp_path / "run")
            await second_life(server, tmp_path / "run")
            await third_life(server, tmp_path / "run")
        await server.close()

    asyncio.run(scene())
