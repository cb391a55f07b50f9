"""A machine that has the key of a run and lies: as itself, and as the parts that it is asked to start.

It joins as `tailrace worker` does, gets the specifications of its components, and then says in their names, and in that
of others as far as it can, what nobody should. Whatever it says, the run has to drop it and go on.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import suppress
from typing import Any

import msgspec

from tailrace import __version__
from tailrace.protocol import (
    Checkpointed,
    Finished,
    Heartbeats,
    HostLeft,
    Late,
    LinkFailed,
    Parked,
    Progressed,
    PromptsAdded,
    PullFailed,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    SampleFailed,
    SamplesLost,
    Stop,
    StoreJoined,
    StoreLost,
    TimerFired,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.types import Prompt
from tailrace.wire.connection import Connection
from tailrace.wire.keys import JoinKey, host_key
from tailrace.wire.messages import (
    Accused,
    Collapsed,
    ComponentSpec,
    Hello,
    Introduce,
    Measured,
    Offer,
    Receipt,
    Reported,
    Wanted,
    WireError,
    decode_from_controller,
)

WITHIN_S = 10.0


class Liar:
    def __init__(self, endpoint: str, key: JoinKey, draw: random.Random) -> None:
        self.endpoint = endpoint
        self.key = key
        self.draw = draw
        self.said = 0

    def come_and_lie(self) -> str:
        """What was done, in words; empty if the run did not let it in."""
        name = f"host-{secrets.randbits(48)}/1"
        try:
            with self._call(name, host_key(self.key.token, name)) as machine:
                specs = self._join(machine)
                self._impersonate()
                for spec in specs:
                    self._lie_as(spec)
                self._say(machine, self.draw.choice(self._of_a_machine()))
                machine.close(1.0)
        except (OSError, WireError):
            return f"{self.said} lies" if self.said else ""
        return f"{self.said} lies as a machine and {len(specs)} parts"

    # --------------------------------------------------------------------------------------------------------- speaking

    def _call(self, name: str, key: bytes) -> Connection:
        return Connection(self.endpoint, name, key, self.key.fingerprint, WITHIN_S)

    def _say(self, wire: Connection, message: Any, number: int = 0) -> None:
        content = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        wire.send(number, content)
        until = time.monotonic() + WITHIN_S
        while wire.has_unsent and time.monotonic() < until:
            wire.flush()
        self.said += 1

    def _join(self, machine: Connection) -> list[ComponentSpec]:
        """Be asked to start a relay, a store and a replica."""
        until, specs = time.monotonic() + WITHIN_S, dict[str, ComponentSpec]()
        while len(specs) < 3 and time.monotonic() < until:
            self._say(machine, Hello())
            self._say(machine, Offer(__version__, 1, store=True))
            time.sleep(0.2)
            for content in machine.receive():
                message = decode_from_controller(content)
                specs |= {spec.name: spec for spec in message.specs} if isinstance(message, Wanted) else {}
        return list(specs.values())

    def _impersonate(self) -> None:
        """With the key that it has, as somebody else: nobody opens."""
        for name in ("trainer-0/1", "replica-0/1", "relay-0/1", "store-0/1"):
            for key in (host_key(self.key.token, name), self.key.token.encode(), bytes(32)):
                try:
                    self._call(name, key).close()
                except (OSError, WireError):
                    continue
                raise AssertionError(f"somebody else may speak as {name}")

    def _lie_as(self, spec: ComponentSpec) -> None:
        """Come up as an honest component would, then lie until one is hung up on."""
        with suppress(OSError, WireError), self._call(spec.name, bytes.fromhex(spec.key)) as wire:
            honest = {"relay": _relay, "store": _store, "replica": _replica}[spec.role](spec)
            of_role = {"relay": self._of_a_relay, "store": self._of_a_store, "replica": self._of_a_replica}
            lies = of_role[spec.role](spec)
            for number, message in enumerate([*honest, *self.draw.sample(lies, 3)]):
                self._say(wire, message, 0 if isinstance(message, Hello | bytes) else number)
                time.sleep(0.05)
                for content in wire.receive():
                    assert not isinstance(decode_from_controller(content), Introduce)

    # ------------------------------------------------------------------------------------------------------------- lies

    def _of_anybody(self) -> list[Any]:
        return [
            Reported(HostLeft(0, "I say so")),
            Reported(TrainerLost(1, "I say so")),
            Reported(ReplicaLost(0, 1, "I say so")),
            Reported(RelayLost(0, 1, "I say so")),
            Reported(TimerFired("health")),
            Reported(Trained(1, 0, 0)),
            Reported(Checkpointed(1, 2**50)),
            Reported(TrainerJoined(9, 0)),
            Offer(__version__, 1000),
            msgspec.msgpack.encode(Stop("I say so", True)),
            self.draw.randbytes(40),
        ]

    def _of_a_machine(self) -> list[Any]:
        own = [Hello("127.0.0.1:1", "/"), Measured(0, {"x": 1.0}), Collapsed("no", True), Offer(__version__, 0)]
        return [one for one in self._of_anybody() if not isinstance(one, Offer)] + own

    def _of_a_replica(self, spec: ComponentSpec) -> list[Any]:
        some, id = self.draw.randrange(40), spec.id
        foreign = TrajectoryMeta(some, 1, 3, 0, 0, "stop", 1.0)
        return [
            *self._of_anybody(),
            Reported(Finished(id, foreign)),
            Reported(Finished(id, foreign), (Receipt("store-0/1", some, 1, 3, 0, 0, bytes(32)),)),
            Reported(Finished(0, foreign)),
            Reported(SampleFailed(0, some, 1, "I say so")),
            Reported(Parked(id, spec.incarnation, (foreign,))),
            Reported(WeightsLoaded(id, spec.incarnation, 2**30)),
            Reported(PullFailed(0, 1, 0, "I say so", True)),
            Reported(ReplicaJoined(0, 9, 0, 0, 1, 1)),
            Reported(Progressed(0, 1, 2**52, 0, 0)),
            Measured(0, {"engine/steps": float("inf")}),
            Collapsed("I say so", True),
        ]

    def _of_a_relay(self, spec: ComponentSpec) -> list[Any]:
        return [
            *self._of_anybody(),
            Hello("nowhere at all", "x"),
            Reported(VersionStored(0, 1, 0)),
            Reported(LinkFailed(0, 1, spec.id, "I say so")),
            Reported(RelayJoined(0, 9)),
            Reported(Heartbeats((Late("trainer", 0, 1, 1e6),))),
            Collapsed("I say so", True),
        ]

    def _of_a_store(self, spec: ComponentSpec) -> list[Any]:
        some = self.draw.randrange(40)
        return [
            *self._of_anybody(),
            Hello("127.0.0.1:9", "/dev/shm/nothing"),
            Accused(self.draw.choice(("trainer-0/1", "replica-0/1", "store-0/1", "relay-0/1")), "I say so"),
            Reported(SamplesLost(0, 1, (some, some + 1))),
            Reported(SamplesLost(spec.id, spec.incarnation, (some, some + 1))),
            Reported(PromptsAdded(0, (Prompt(0, 2**40),))),
            Reported(StoreJoined(0, 9)),
            Reported(StoreLost(0, 1, "I say so")),
            Collapsed("I say so", True),
        ]


def _store(spec: ComponentSpec) -> list[Any]:
    return [Hello("127.0.0.1:9"), Reported(StoreJoined(spec.id, spec.incarnation))]


def _relay(spec: ComponentSpec) -> list[Any]:
    return [Hello("127.0.0.1:9", "/dev/shm/nothing"), Reported(RelayJoined(spec.id, spec.incarnation))]


def _replica(spec: ComponentSpec) -> list[Any]:
    return [Hello(), Reported(ReplicaJoined(spec.id, spec.incarnation, spec.host, -1, 2000, 8))]
