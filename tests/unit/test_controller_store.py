"""What the controller lets into the store, and what it does while it cannot write there."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import aclosing
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.config import Config, load
from tailrace.protocol import TimerFired
from tailrace.runtime import controller as module
from tailrace.runtime.components import RunHandle
from tailrace.runtime.controller import Controller, PendingEvent
from tailrace.runtime.hosts import Host
from tailrace.runtime.local import HostRecord
from tailrace.store.errors import JournalError
from tailrace.store.run import RunStore
from tailrace.store.waiting import Locked
from tailrace.wire.keys import Keyring
from tailrace.wire.messages import ComponentSpec, Wanted


@pytest.fixture
def config() -> Config:
    emulated = ["--rollout.engine", "emulated", "--trainer.engine", "emulated", "--costs.decode_step", "0.001"]
    return load([], ["--model.preset", "qwen2.5-7b", "--health.heartbeat_s", "0.1", *emulated])


class Held:
    """A controller whose database another program has locked, for as long as the test wants; nothing is started."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.store = RunStore.create(folder, config)
        observer: Any = SimpleNamespace(see=lambda *_: None, measure=lambda *_: None)
        self.controller = Controller(self.store, config, RunHandle(Keyring(bytes(32), "token"), -1), observer)
        self.sent: list[tuple[str, Any]] = []
        self.controller.server.send = self._send  # type: ignore[method-assign]
        self.store.commit()
        self.shell = sqlite3.connect(folder / "run.db", isolation_level=None)
        self.shell.execute("BEGIN IMMEDIATE")
        self.watchdog: Any = SimpleNamespace(expect=lambda *_: None)

    async def _send(self, name: str, message: Any) -> None:
        self.sent.append((name, message))

    async def aclose(self) -> None:
        self.shell.close()
        await self.controller.server.close()
        self.store.close(complete=False)


def test_while_it_is_held_up_nobody_is_found_silent_and_other_machines_hear_from_it(
    tmp_path: Path, config: Config
) -> None:
    async def scene() -> None:
        async with aclosing(Held(tmp_path / "run", config)) as held:
            controller, parts = held.controller, held.controller.components
            host = Host(HostRecord("host-1/1", 1, (2,)))
            host.assign(ComponentSpec("replica", 2, 1, "", "", "", config))
            parts._hosts.present["host-1/1"] = host
            beginning = asyncio.create_task(controller._begin(held.watchdog))
            await asyncio.sleep(0.3)
            controller._due(controller.now, partial(controller._fire, "lunch"))
            assert controller.held_up
            assert not controller._events, "first everybody is heard"
            assert held.sent[0] == ("host-1/1", Wanted(("replica-2/1",)))
            held.shell.execute("ROLLBACK")
            assert await beginning
            controller._due(inf, partial(controller._fire, "lunch"))
            assert list(controller._events) == [PendingEvent(TimerFired("lunch"))]

    asyncio.run(scene())


@pytest.mark.parametrize("ending", ["interrupt", "crash", "patience"])
def test_a_wait_for_the_database_ends(tmp_path: Path, config: Config, ending: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "Locked", lambda path, say: Locked(path, say, patience_s=0.2))

    async def scene() -> None:
        async with aclosing(Held(tmp_path / "run", config)) as held:
            beginning = asyncio.create_task(held.controller._begin(held.watchdog))
            await asyncio.sleep(0.05)
            if ending == "interrupt":
                held.controller.interrupt()
                assert not await beginning
            elif ending == "crash":
                held.controller._crash = OSError("deaf")
                with pytest.raises(OSError, match="deaf"):
                    await beginning
            else:
                with pytest.raises(JournalError, match="has been locked by process"):
                    await beginning

    asyncio.run(scene())
