"""Failures in virtual time: who dies, hangs, slows down or is cut off, and when; all drawn from the run's seed.

Losses come as Poisson processes with the rates of `[faults]`. A death is sometimes seen at once (a connection breaks)
and sometimes only as silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tailrace.config.tree import Faults
from tailrace.protocol import Event, RelayLost, ReplicaLost, TrainerLost
from tailrace.sim.clock import VirtualClock
from tailrace.sim.controller import SimController
from tailrace.sim.lifecycle import Lifecycle
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet, SimProcess, SimRelay, SimReplica
from tailrace.types import HostId

SEEN_AT_ONCE = 0.5  # share of deaths that the driver notices without waiting for heartbeats
SLOW_FACTOR = 4.0


@dataclass
class FaultInjector:
    settings: Faults
    clock: VirtualClock
    random: Random
    fleet: SimFleet
    network: Network
    lifecycle: Lifecycle
    controller: SimController
    wake: Callable[[SimReplica], None]  # told of a replica whose engine runs slower or faster from now on

    def begin(self) -> None:
        """Schedule the first failure of every kind that has a rate."""
        strike: dict[str, Callable[[], None]] = {
            "replica_per_hour": self._replica,
            "host_per_hour": self._host,
            "relay_per_hour": self._relay,
            "master_per_hour": self._master,
            "trainer_per_hour": self._trainer,
            "controller_per_hour": self.controller.kill,
            "slow_per_hour": self._slow,
            "partition_per_hour": self._partition,
        }
        for name, action in strike.items():
            rate = getattr(self.settings, name)
            if rate:
                self._schedule(rate / 3600.0, action)

    def _schedule(self, rate: float, action: Callable[[], None]) -> None:
        self.clock.after(self.random.expovariate(rate), self._strike, rate, action)

    def _strike(self, rate: float, action: Callable[[], None]) -> None:
        action()
        self._schedule(rate, action)

    # --------------------------------------------------------------------------------------------------------- deaths

    def _replica(self) -> None:
        alive = [replica for replica in self.fleet.replicas if replica.alive]
        if alive:
            self._kill(self.random.choice(alive))

    def _relay(self) -> None:
        alive = [relay for relay in self.fleet.relays if relay.alive]
        if alive:
            self._kill(self.random.choice(alive))

    def _master(self) -> None:
        master = self.controller.plane.state.relays.master
        if master >= 0 and self.fleet.relays[master].alive:
            self._kill(self.fleet.relays[master])

    def _host(self) -> None:
        host = self.random.randrange(len(self.fleet.relays))
        for process in self.fleet.on_host(host):
            if process.alive:
                self._kill(process)

    def _trainer(self) -> None:
        if self.fleet.trainer.alive:
            self._kill(self.fleet.trainer)

    def _kill(self, process: SimProcess) -> None:
        self.lifecycle.kill(process)
        if self.random.random() < SEEN_AT_ONCE:
            self.network.send(None, _lost(process))

    # -------------------------------------------------------------------------------------- slowness and separation

    def _slow(self) -> None:
        replica = self.random.choice(self.fleet.replicas)
        self._slow_down(replica, SLOW_FACTOR)
        self.clock.after(self._outage_s(), self._slow_down, replica, 1.0)

    def _slow_down(self, replica: SimReplica, factor: float) -> None:
        replica.engine.advance(self.clock.now)
        replica.slow_down(factor)
        self.wake(replica)

    def _partition(self) -> None:
        """A host, or the trainer, cannot talk to the controller or to other hosts for a while."""
        host = self.random.randrange(-1, len(self.fleet.relays))
        if self.network.cut(host):
            self.clock.after(self._outage_s(), self._heal, host)

    def _heal(self, host: HostId) -> None:
        self.network.heal(host)
        for process in [self.fleet.trainer] if host == -1 else self.fleet.on_host(host):
            self.lifecycle.reconnect(process)

    def _outage_s(self) -> float:
        return self.random.expovariate(1 / self.settings.restart_s)


def _lost(process: SimProcess) -> Event:
    if isinstance(process, SimReplica):
        return ReplicaLost(process.id, process.incarnation, "its process ended")
    if isinstance(process, SimRelay):
        return RelayLost(process.id, process.incarnation, "its process ended")
    return TrainerLost(process.incarnation, "its process ended")
