"""The other machines of a run, as the controller sees them: who has joined, and which components are to run there.

A machine joins by an `Offer` (see `agent`), gets a number, and is answered which components are `Wanted` there. Both
are said again and again, so that neither side has to remember what the other one did: after a restart of the
controller, or a message that was lost, the next exchange puts everything right. To the rest of the controller a process
over there is a child like any other (`Distant`): it ends, or is told to.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from tailrace.runtime.local import HostRecord
from tailrace.runtime.placement import Machine
from tailrace.types import HostId
from tailrace.wire.keys import worker_of
from tailrace.wire.messages import ComponentSpec, Wanted

LONGEST = 1000  # characters of how something ended


class Distant:
    """A process on another machine, known by what is said of it there. `adopted`: it was begun for an earlier
    controller."""

    pid = started = 0

    def __init__(self, spec: ComponentSpec, adopted: bool = False) -> None:
        self.spec = spec
        self.wanted = True
        self._may_begin = not (adopted and spec.role == "trainer")
        self.ended = asyncio.Event()
        self.how = ""

    def send(self, number: int) -> None:
        """A signal. It takes effect with the next answer to its host."""
        self.wanted = self.wanted and number not in (signal.SIGTERM, signal.SIGKILL)

    def is_gone(self, components: Mapping[str, str]) -> bool:
        """By what its host says. What is missing there is begun, unless it is not wanted any more, or is a rank of a
        trainer that is at work, which the others would not wait for."""
        name = self.spec.name
        return bool(components.get(name)) or (name not in components and not (self.wanted and self._may_begin))

    def end(self, how: str) -> None:
        self.how = how
        self.ended.set()


class Host:
    """A machine that has joined. `id` is that of its relay."""

    def __init__(self, trace: HostRecord) -> None:
        self.trace = trace
        self.distant: dict[str, Distant] = {}  # by the names of the components

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def id(self) -> HostId:
        return self.trace.id

    @property
    def worker(self) -> str:
        """The stranger whose machine it is; empty: it is trusted."""
        return worker_of(self.trace.name)

    @property
    def components(self) -> list[tuple[str, int]]:
        """Role and number of all that are to run there."""
        store = [("store", self.id)] if self.trace.store else []
        return [("relay", self.id), *store, *[("replica", id) for id in self.trace.replicas]]

    @property
    def machine(self) -> Machine:
        """As a place for ranks of the trainer."""
        return Machine((self.id,) * self.trace.ranks, self.trace.interfaces)

    def assign(self, spec: ComponentSpec, adopted: bool = False) -> Distant:
        """A process that is to be there."""
        return self.distant.setdefault(spec.name, Distant(spec, adopted))

    def hear(self, components: Mapping[str, str]) -> Wanted:
        """Take in what is there, and say what should be."""
        for name, distant in list(self.distant.items()):
            if distant.is_gone(components):
                distant.end(components.get(name, "ended")[:LONGEST])
                del self.distant[name]
        missing = tuple([self.distant[name].spec for name in self.wanted if name not in components])
        return Wanted(self.wanted, missing)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the components that are to be there."""
        return tuple([name for name, distant in self.distant.items() if distant.wanted])

    def leave(self, reason: str) -> None:
        for distant in self.distant.values():
            distant.end(reason)
        self.distant.clear()


class Hosts:
    def __init__(self) -> None:
        self.present: dict[str, Host] = {}
        self._of_component: dict[tuple[str, int], Host] = {}

    @property
    def traces(self) -> tuple[HostRecord, ...]:
        return tuple([host.trace for host in self.present.values()])

    def find(self, role: str, id: int) -> Host | None:
        """The one on which this component runs. The ranks of a trainer may be on several."""
        return self._of_component.get((role, id))

    @property
    def machines(self) -> list[Machine]:
        """With room for ranks, in the order in which they joined."""
        return [host.machine for host in self.present.values() if host.trace.ranks]

    def add(self, trace: HostRecord) -> Host:
        host = self.present[trace.name] = Host(trace)
        self._of_component |= dict.fromkeys(host.components, host)
        return host

    def remove(self, host: Host) -> None:
        del self.present[host.name]
        for key in host.components:
            del self._of_component[key]
