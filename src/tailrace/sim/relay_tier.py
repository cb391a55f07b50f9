"""The relay tier in virtual time: the trainer pushes to the master, each relay forwards what its targets lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.protocol import Drop, Publish, Route, VersionStored
from tailrace.sim.nodes import SimRelay
from tailrace.types import Version

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation


class RelayTier:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        relay = simulation.config.relay
        self._hop = simulation.costs.hop(len(simulation.relays), 1 if relay.topology == "chain" else relay.fan_out)

    def route(self, command: Route) -> None:
        relay = self.sim.relays[command.relay]
        if (
            relay.incarnation != command.incarnation
            or command.epoch <= relay.route_epoch
            or self.sim.faults.is_cut(relay)
        ):
            return
        relay.route_epoch = command.epoch
        relay.targets = command.targets
        for version in relay.versions:
            self._forward(relay, version, self.sim.costs.transfer)

    def _forward(self, relay: SimRelay, version: Version, seconds: float) -> None:
        """Send a version on to every target that has not got it and is not just getting it."""
        for id in relay.targets:
            target = self.sim.relays[id]
            coming = target.incoming.get(version)
            if version in target.versions or (coming and self.sim.relays[coming[0]].life == coming[1]):
                continue
            target.incoming[version] = (relay.id, relay.life)
            self.sim.kernel.after(seconds, self._received, relay, relay.life, target, target.life, version)

    def _received(self, relay: SimRelay, sender: int, target: SimRelay, receiver: int, version: Version) -> None:
        """A transfer is complete, if both ends lived through it and could reach each other."""
        if target.incoming.get(version) == (relay.id, sender):
            del target.incoming[version]
        intact = relay.alive and relay.life == sender and target.alive and target.life == receiver
        if intact and not self.sim.faults.is_cut(relay) and not self.sim.faults.is_cut(target):
            self._store(target, version, self._hop)

    def _store(self, relay: SimRelay, version: Version, forward_s: float) -> None:
        relay.versions[version] = None
        self.sim.tell(relay, VersionStored(relay.id, relay.incarnation, version))
        self._forward(relay, version, forward_s)

    def drop(self, command: Drop) -> None:
        relay = self.sim.relays[command.relay]
        if relay.incarnation == command.incarnation:
            relay.versions.pop(command.version, None)

    def publish(self, command: Publish) -> None:
        """The trainer stalls while it pushes; the master forwards once it has all (it reshards first)."""
        trainer, now = self.sim.trainer, self.sim.kernel.now
        if not trainer.alive or trainer.incarnation != command.incarnation or self.sim.faults.is_cut(trainer):
            return
        seconds = self.sim.costs.push()
        trainer.stall_s += seconds
        trainer.pushes += 1
        trainer.free_at = max(trainer.free_at, now) + seconds
        relay = self.sim.relays[command.relay]
        self.sim.kernel.at(trainer.free_at, self._pushed, trainer.life, relay, relay.life, command.version)

    def _pushed(self, sender: int, relay: SimRelay, receiver: int, version: Version) -> None:
        trainer = self.sim.trainer
        intact = trainer.alive and trainer.life == sender and relay.alive and relay.life == receiver
        if intact and not self.sim.faults.is_cut(relay):
            self._store(
                relay,
                version,
                0.0 if self.sim.config.colocated else self.sim.costs.broadcast_start(len(self.sim.relays)),
            )
