"""The controller in virtual time: the real control plane, in a process that may die and be restored.

It dies between writing an event to its journal and sending the commands that came of it. It is restored from a snapshot
and the events after it, and every process that outlived it connects again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.protocol import Command, ControllerRestarted, Event, SetTimer, TimerFired
from tailrace.sim.clock import VirtualClock
from tailrace.sim.network import Network

SNAPSHOT_EVERY = 200  # events
Observer = Callable[[float, Event, list[Command]], None]


@dataclass
class SimController:
    config: Config
    clock: VirtualClock
    network: Network
    random: Random
    observers: Sequence[Observer]
    restored: Callable[[], None]  # called when one that died is back: everybody has to connect to it again
    heard_at: Callable[[str, int], float]  # when somebody was last heard

    def __post_init__(self) -> None:
        self.plane = ControlPlane(self.config)
        self.handled = 0  # events
        self._listening_since = 0.0  # when the present controller was there again
        self._life = 0  # grows when it dies
        self._dies_next = False
        self._keeps_journal = self.config.faults.controller_per_hour > 0
        self._snapshot = self.plane.snapshot() if self._keeps_journal else b""
        self._tail: list[tuple[float, Event]] = []  # the journal since the snapshot

    def handle(self, event: Event) -> list[Command]:
        """The commands that are sent; none if it dies before it can send them."""
        now = self.clock.now
        self.handled += 1
        commands = self.plane.handle(now, event)
        for observe in self.observers:
            observe(now, event, commands)
        if self._keeps_journal:
            self._journal(now, event)
        return [] if self.network.controller_down else commands

    def kill(self) -> None:
        """It dies with the next event that it handles."""
        self._dies_next = True

    def set_timer(self, command: SetTimer) -> None:
        self.clock.at(command.at, self._fire, command.timer, self._life)

    def _fire(self, timer: str, life: int) -> None:
        if life != self._life:
            return
        if timer == "health":
            self.network.inbox.append(self.plane.heartbeats(self._silence))
        self.network.inbox.append(TimerFired(timer))

    def _silence(self, role: str, id: int) -> float:
        """How long nothing was heard of somebody, while there was a controller to hear it."""
        return self.clock.now - max(self.heard_at(role, id), self._listening_since)

    def _journal(self, now: float, event: Event) -> None:
        self._tail.append((now, event))
        if len(self._tail) >= SNAPSHOT_EVERY:
            self._snapshot = self.plane.snapshot()
            self._tail.clear()
        if self._dies_next:
            self._dies_next = False
            self.network.controller_down = True
            self._life += 1
            self.clock.after(self.random.expovariate(1 / self.config.faults.restart_s), self._restore)

    def _restore(self) -> None:
        plane = ControlPlane.restore(self.config, self._snapshot)
        for now, event in self._tail:
            plane.handle(now, event)
        assert plane.snapshot() == self.plane.snapshot(), "snapshot and journal tail give back the same controller"
        self.plane = plane
        self.network.controller_down = False
        self._listening_since = self.clock.now
        self.network.inbox.appendleft(ControllerRestarted())
        self.restored()
