"""Failures in virtual time: who dies, hangs, slows down or is cut off, and when; all drawn from the run's seed.

Losses come as Poisson processes with the rates of `[faults]`. A death is sometimes seen at once (a connection breaks)
and sometimes only as silence. The controller dies between writing an event to its journal and sending the commands that
came of it, is restored from snapshot and journal tail, and everybody who outlived it reconnects.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    ControllerRestarted,
    Event,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    TrainerJoined,
    TrainerLost,
)
from tailrace.sim.nodes import Node, SimRelay, SimReplica
from tailrace.types import HostId

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation

SNAPSHOT_EVERY = 200  # events
SEEN_AT_ONCE = 0.5  # share of deaths that the driver notices without waiting for heartbeats
SLOW_FACTOR = 4.0


class Faults:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.config = simulation.config.faults
        self.random = random.Random(f"faults {simulation.config.run.seed}")
        self.network = self.config.delay_s > 0 or self.config.duplicate > 0
        self.controller_down = False
        self.controller_life = 0
        self.listening_since = 0.0  # when the present controller was there again
        self.count = 0
        self._cut: dict[HostId, None] = {}
        self._dies_next = False
        self._keeps_journal = self.config.controller_per_hour > 0
        self._snapshot = simulation.plane.snapshot() if self._keeps_journal else b""
        self._tail: list[tuple[float, Event]] = []

    def begin(self) -> None:
        """Schedule the first failure of every kind that has a rate."""
        strike: dict[str, Callable[[], None]] = {
            "replica_per_hour": self._replica,
            "host_per_hour": self._host,
            "relay_per_hour": self._relay,
            "master_per_hour": self._master,
            "trainer_per_hour": self._trainer,
            "controller_per_hour": self._controller,
            "slow_per_hour": self._slow,
            "partition_per_hour": self._partition,
        }
        for name, action in strike.items():
            rate = getattr(self.config, name)
            if rate:
                self._schedule(rate / 3600.0, action)

    def _schedule(self, rate: float, action: Callable[[], None]) -> None:
        self.sim.kernel.after(self.random.expovariate(rate), self._strike, rate, action)

    def _strike(self, rate: float, action: Callable[[], None]) -> None:
        self.count += 1
        action()
        self._schedule(rate, action)

    # --------------------------------------------------------------------------------------------------------- deaths

    def _replica(self) -> None:
        alive = [replica for replica in self.sim.replicas if replica.alive]
        if alive:
            self._kill(self.random.choice(alive))

    def _relay(self) -> None:
        alive = [relay for relay in self.sim.relays if relay.alive]
        if alive:
            self._kill(self.random.choice(alive))

    def _master(self) -> None:
        master = self.sim.plane.state.relays.master
        if master >= 0 and self.sim.relays[master].alive:
            self._kill(self.sim.relays[master])

    def _host(self) -> None:
        host = self.random.randrange(len(self.sim.relays))
        for node in self._on(host):
            if node.alive:
                self._kill(node)

    def _trainer(self) -> None:
        if self.sim.trainer.alive:
            self._kill(self.sim.trainer)

    def _kill(self, node: Node) -> None:
        incarnation = node.incarnation
        self.sim.kill(node)
        if self.random.random() < SEEN_AT_ONCE:
            self.sim.tell(None, _obituary(node, incarnation))

    def _on(self, host: HostId) -> list[Node]:
        return [self.sim.relays[host], *[replica for replica in self.sim.replicas if replica.host == host]]

    # -------------------------------------------------------------------------------------- slowness and separation

    def _slow(self) -> None:
        replica = self.random.choice(self.sim.replicas)
        replica.engine.advance(self.sim.kernel.now)
        replica.engine.slowdown = SLOW_FACTOR
        self.sim.rollouts.wake(replica)
        self.sim.kernel.after(self.random.expovariate(1 / self.config.restart_s), self._recover, replica)

    def _recover(self, replica: SimReplica) -> None:
        replica.engine.advance(self.sim.kernel.now)
        replica.engine.slowdown = 1.0
        self.sim.rollouts.wake(replica)

    def _partition(self) -> None:
        """A host, or the trainer, cannot talk to the controller or to other hosts for a while."""
        host = self.random.randrange(-1, len(self.sim.relays))
        if host not in self._cut:
            self._cut[host] = None
            self.sim.kernel.after(self.random.expovariate(1 / self.config.restart_s), self._heal, host)

    def _heal(self, host: HostId) -> None:
        del self._cut[host]
        for node in [self.sim.trainer] if host == -1 else self._on(host):
            self._reconnect(node)

    def is_cut(self, node: Node) -> bool:
        return node.host in self._cut

    def holds_back(self, node: Node) -> bool:
        return self.controller_down or node.host in self._cut

    def _reconnect(self, node: Node) -> None:
        """What a part could not send arrives now, and then it introduces itself anew."""
        if not node.alive or self.holds_back(node):
            return
        held_back, node.outbox = node.outbox, []
        for event in held_back:
            self.sim.arrive(node, event)
        self.sim.join(node)

    # -------------------------------------------------------------------------------------------------- the network

    def transmit(self, sender: Node | None, event: Event | None) -> None:
        """Messages overtake each other, but nobody is heard before he has introduced himself."""
        earliest = sender.connected_at if sender is not None else 0.0
        arrivals = [max(self._arrival(), earliest)]
        if self.random.random() < self.config.duplicate:
            arrivals.append(max(self._arrival(), earliest))
        for at in arrivals:
            self.sim.kernel.at(at, self.sim.arrive, sender, event)
        if sender is not None and isinstance(event, ReplicaJoined | RelayJoined | TrainerJoined):
            sender.connected_at = min(arrivals)

    def _arrival(self) -> float:
        delay = self.random.expovariate(1 / self.config.delay_s) if self.config.delay_s else 0.0
        return self.sim.kernel.now + delay

    def sample_fails(self, trajectory: int, failures: int) -> bool:
        """Each attempt is a draw of its own, wherever it is moved."""
        if not self.config.sample_failure:
            return False
        draw = random.Random(f"{self.sim.config.run.seed} {trajectory} {failures + 1}")
        return draw.random() < self.config.sample_failure

    # ------------------------------------------------------------------------------------------------- the controller

    def _controller(self) -> None:
        self._dies_next = True

    def after_event(self, event: Event) -> bool:
        """Journal what the controller has handled; True if it dies now, before its commands are sent."""
        if not self._keeps_journal:
            return False
        self._tail.append((self.sim.kernel.now, event))
        if len(self._tail) >= SNAPSHOT_EVERY:
            self._snapshot = self.sim.plane.snapshot()
            self._tail.clear()
        if self._dies_next:
            self._dies_next = False
            self.controller_down = True
            self.controller_life += 1
            self.sim.kernel.after(self.random.expovariate(1 / self.config.restart_s), self._restore_controller)
            return True
        return False

    def _restore_controller(self) -> None:
        plane = ControlPlane.restore(self.sim.config, self._snapshot)
        for now, event in self._tail:
            plane.handle(now, event)
        assert plane.snapshot() == self.sim.plane.snapshot(), "snapshot and journal tail give back the same controller"
        self.sim.plane = plane
        self.controller_down = False
        self.listening_since = self.sim.kernel.now
        self.sim.arrive_first(ControllerRestarted())
        for node in (self.sim.trainer, *self.sim.relays, *self.sim.replicas):
            self._reconnect(node)


def _obituary(node: Node, incarnation: int) -> Event:
    if isinstance(node, SimReplica):
        return ReplicaLost(node.id, incarnation, "its process ended")
    if isinstance(node, SimRelay):
        return RelayLost(node.id, incarnation, "its process ended")
    return TrainerLost(incarnation, "its process ended")
