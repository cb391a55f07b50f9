"""A real controller whose components are played by a test: no processes and no sockets, but all else is there, from the
decoder of the server to run.db. Honest components answer every order; then somebody says what it should not."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.tree import Config
from tailrace.envs.sources import Blanks
from tailrace.protocol import (
    Event,
    FetchPrompts,
    Finished,
    LoadWeights,
    Parked,
    PromptsAdded,
    Publish,
    PublishFailed,
    RelayJoined,
    Release,
    ReplicaJoined,
    StoreJoined,
    Train,
    Trained,
    TrainerJoined,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.runtime.components import RunHandle
from tailrace.runtime.controller import Controller
from tailrace.runtime.local import Process
from tailrace.store.run import RunStore
from tailrace.types import Prompt
from tailrace.wire.keys import Keyring, signed_receipt
from tailrace.wire.messages import UNNUMBERED, Beat, ComponentSpec, Hello, Offer, Ordered, Receipt, Reported, Wanted
from tailrace.wire.server import ReceivedMessage

KEYS = Keyring(bytes(32), "ab" * 32)


class Child:
    """A process that is not there."""

    pid = started = 0

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.how = "was killed by signal 9"

    def send(self, number: int) -> None:
        if number == 9:
            self.ended.set()


class Unseen:
    """An observer that sees nothing."""

    def see(self, *_: Any) -> None:
        pass

    def measure(self, *_: Any) -> None:
        pass


class Line:
    """What a server has of a connection, without one."""

    def __init__(self, name: str) -> None:
        self.name, self.is_host = name, name.startswith("host-")
        self.introduced = self.asked = False

    def send(self, message: Any) -> None:
        pass


class Played:
    """Use inside a running loop; `close` at the end."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.store = RunStore.create(folder, config)
        self.controller = Controller(self.store, config, RunHandle(KEYS, -1), Unseen())  # type: ignore[arg-type]
        self.controller._log = (folder / "controller.log").open("w")
        local: Any = self.controller.components._local
        local._begin = self._begin
        server: Any = self.controller.server
        server.send = self._sent
        self.orders: list[tuple[str, Any]] = []
        self.numbers: dict[str, Iterator[int]] = {}
        self.lines: dict[str, Line] = {}
        self.wanted: Wanted = Wanted(())  # by the machine that has joined
        self.prompts = Blanks(config)

    def _begin(self, process: Process) -> None:
        process.children += [Child() if isinstance(one, ComponentSpec) else one for one in process.members]

    async def _sent(self, name: str, message: Any) -> None:
        self.orders.append((name, message))

    # --------------------------------------------------------------------------------------------------------- driving

    async def start(self) -> None:
        """Everybody is there and at work."""
        for event in self.controller._beginning:
            self.controller.tell(event)
        await self.turn()
        for process in self.processes("store", "relay", "trainer", "replica"):
            await self.join(process)
        await self.settle()

    async def turn(self) -> None:
        """One turn of the controller's loop."""
        controller = self.controller
        controller._take_turn(until=math.inf)
        self.store.commit()
        outbox, controller._outbox = controller._outbox, []
        for doing in outbox:
            await doing

    async def settle(self, most: int = 12) -> None:
        """Orders are obeyed until there are none; samples are not finished by this."""
        for _ in range(most):
            await self.turn()
            orders, self.orders = self.orders, []
            for name, message in orders:
                self.obey(name, message)
            self.hand_on()

    def hand_on(self) -> None:
        """What the master has, the other relays get."""
        relays = self.controller.state.relays
        held = relays.relays[relays.master].versions if relays.master >= 0 else []
        for relay in [one for one in relays.relays.values() if one.live]:
            for version in set(held) - set(relay.versions):
                name = self.process("relay", relay.id).spec.name
                self.report(name, VersionStored(relay.id, relay.incarnation, version))

    def obey(self, name: str, message: Any) -> None:
        if isinstance(message, Wanted):
            self.wanted = message
        if not isinstance(message, Ordered):
            return
        match message.command:
            case LoadWeights(replica, incarnation, version):
                self.report(name, WeightsLoaded(replica, incarnation, version))
            case Publish(incarnation, version, relay):
                master = self.controller.components.get("relay", relay)
                if master is None:
                    self.report(name, PublishFailed(incarnation, version, relay, "it is gone"))
                else:
                    self.report(master.spec.name, VersionStored(relay, master.incarnation, version))
            case FetchPrompts(start, count):
                prompts = tuple([Prompt(row.id, row.length) for row in self.prompts.rows(start, count)])
                self.report(name, PromptsAdded(start, prompts))
            case Train(incarnation, step, part):
                self.report(name, Trained(incarnation, step, part))
            case Release(replica, incarnation):
                self.report(name, Parked(replica, incarnation, ()))
            case _:
                pass  # samples are finished by the test

    async def revive(self) -> None:
        """Whoever was dropped is started again, as control would after a while."""
        for process in self.processes("store", "relay", "trainer", "replica"):
            if process.dismissed:
                self.controller.components._start(process.spec.role, process.spec.id)
                await self.turn()
                await self.join(self.process(process.spec.role, process.spec.id))

    # -------------------------------------------------------------------------------------------------------- speaking

    def processes(self, *roles: str) -> list[Process]:
        all_ = self.controller.components._local.processes
        return [process for role in roles for (kind, _), process in sorted(all_.items()) if kind == role]

    def process(self, role: str, id: int) -> Process:
        found = self.controller.components.get(role, id)
        assert found is not None
        return found

    async def join(self, process: Process) -> None:
        spec = process.spec
        address = f"127.0.0.1:{4000 + spec.id}"
        places = {"relay": (address, "/dev/shm/arena"), "store": (address,)}
        self.say(spec.name, Hello(*places.get(spec.role, ())))
        match spec.role:
            case "relay":
                self.report(spec.name, RelayJoined(spec.id, spec.incarnation))
            case "store":
                self.report(spec.name, StoreJoined(spec.id, spec.incarnation))
            case "trainer":
                self.report(spec.name, TrainerJoined(spec.incarnation, self.controller.state.training.version))
            case _:
                self.report(spec.name, ReplicaJoined(spec.id, spec.incarnation, spec.host, -1, 4000, 64))
        await self.turn()

    async def welcome(self, name: str = "host-77/1", replicas: int = 1, store: bool = False) -> None:
        """A machine joins, and what is wanted there comes up."""
        from tailrace import __version__

        self.say(name, Hello())
        offer = Offer(__version__, replicas, store)
        for _ in range(2):
            self.say(name, offer)
            await self.turn()
            await self.turn()
        for process in self.processes("store", "relay", "replica"):
            if not process.joined:
                await self.join(process)
        await self.settle()

    def report(self, name: str, event: Event, *receipts: Receipt) -> None:
        self.say(name, Reported(event, receipts))  # type: ignore[arg-type]

    def receipt(self, meta: TrajectoryMeta, store: str = "store-0/1", **other: Any) -> Receipt:
        """Of a store that has all that is said of a sample, or something else."""
        values = {"tokens": meta.tokens, "oldest": meta.oldest, "newest": meta.newest} | other
        return signed_receipt(store, KEYS.of(store), meta.id, meta.attempt, **values)

    def say(self, name: str, message: Any) -> None:
        """Through the server, as bytes. What need not arrive has no number."""
        numbered = not isinstance(message, Beat | Hello | Offer)
        number = next(self.numbers.setdefault(name, itertools.count(1))) if numbered else UNNUMBERED
        self.say_bytes(name, msgspec.msgpack.encode(message), number)

    def say_bytes(self, name: str, content: bytes, number: int = UNNUMBERED) -> None:
        server: Any = self.controller.server
        server._hear(self.lines.setdefault(name, Line(name)), number, content)
        letters: list[ReceivedMessage] = list(server._received)
        server._received.clear()
        for sender, heard, message in letters:
            self.store.hear(sender, heard)
            self.controller._hear(sender, message)

    def running(self, replica: int) -> list[tuple[int, int]]:
        """Trajectory and attempt of all that a replica has."""
        samples = [s for s in self.controller.state.ledger.samples.values() if s.replica == replica]
        return [(s.id, s.attempt) for s in samples]

    def finish(self, replica: int, trajectory: int, attempt: int, tokens: int) -> None:
        version = self.controller.state.fleet.replicas[replica].version
        meta = TrajectoryMeta(trajectory, attempt, tokens, version, version, "stop", 1.0)
        self.report(self.process("replica", replica).spec.name, Finished(replica, meta), self.receipt(meta))

    # ------------------------------------------------------------------------------------------------------------- end

    @property
    def goes_on(self) -> bool:
        controller = self.controller
        return not controller.stopped and controller.error is None and not controller.state.stopped

    @property
    def notes(self) -> str:
        return (self.store.folder / "controller.log").read_text()

    async def close(self) -> None:
        self.controller._log.close()
        self.controller.lag.close()
        await self.controller.server.close()
        for doing in self.controller._outbox:
            doing.close()
        self.store.close(complete=False)
