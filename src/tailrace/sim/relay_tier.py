"""The relay tier in virtual time: the trainer pushes to the master, each relay forwards what its targets lack."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.config.tree import Config
from tailrace.protocol import Drop, Publish, Route, VersionStored
from tailrace.sim.clock import VirtualClock
from tailrace.sim.cost_model import CostModel
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet, SimRelay
from tailrace.types import Version


@dataclass
class RelayTier:
    config: Config
    clock: VirtualClock
    costs: CostModel
    fleet: SimFleet
    network: Network

    def __post_init__(self) -> None:
        relay, relays = self.config.relay, len(self.fleet.relays)
        self._hop_s = self.costs.hop(relays, relay.fan_out if relay.topology == "tree" else 1)
        self._first_s = 0.0 if self.config.colocated else self.costs.broadcast_start(relays)
        self._free_at: dict[tuple[str, str], float] = {}  # links between sites

    def route(self, command: Route) -> None:
        relay = self.fleet.relays[command.relay]
        current = relay.incarnation == command.incarnation and command.revision > relay.route_revision
        if not current or self.network.is_cut(relay):
            return
        relay.route_revision = command.revision
        relay.targets = command.targets
        for version in relay.versions:
            self._forward(relay, version, self.costs.transfer)

    def _forward(self, relay: SimRelay, version: Version, seconds: float) -> None:
        """Send a version on to every target that has not got it and is not just getting it."""
        for id in relay.targets:
            target = self.fleet.relays[id]
            coming = target.incoming.get(version)
            if version in target.versions or (coming and self.fleet.relays[coming[0]].life == coming[1]):
                continue
            target.incoming[version] = (relay.id, relay.life)
            seconds = self._crossing_s(relay, target, version, seconds)
            self.clock.after(seconds, self._received, relay, relay.life, target, target.life, version)

    def _crossing_s(self, relay: SimRelay, target: SimRelay, version: Version, seconds: float) -> float:
        """Until the target has all. A relay passes chunks on while they arrive, so over a link between sites only what
        is slower there than on the way so far comes on top; and one version crosses after the other."""
        before, transfer = relay.took_s.get(version, 0.0), self.costs.transfer
        if relay.site != target.site:
            link = self.costs.between(relay.site, target.site)
            transfer = max(transfer, self.config.model.weight_bytes / link.bytes_per_s)
            ends = max(self.clock.now - before, self._free_at.get((relay.site, target.site), 0.0)) + transfer
            self._free_at[relay.site, target.site] = ends
            seconds = max(seconds, ends - self.clock.now) + link.latency_s
        target.took_s[version] = max(before, transfer)
        return seconds

    def _received(self, relay: SimRelay, sender: int, target: SimRelay, receiver: int, version: Version) -> None:
        """A transfer is complete, if both ends lived through it and could reach each other."""
        if target.incoming.get(version) == (relay.id, sender):
            del target.incoming[version]
        intact = relay.alive and relay.life == sender and target.alive and target.life == receiver
        if intact and not self.network.is_cut(relay) and not self.network.is_cut(target):
            self._store(target, version, self._hop_s)

    def _store(self, relay: SimRelay, version: Version, forward_s: float) -> None:
        relay.versions[version] = None
        self.network.send(relay, VersionStored(relay.id, relay.incarnation, version))
        self._forward(relay, version, forward_s)

    def drop(self, command: Drop) -> None:
        relay = self.fleet.relays[command.relay]
        if relay.incarnation == command.incarnation:
            relay.versions.pop(command.version, None)
            relay.took_s.pop(command.version, None)

    def publish(self, command: Publish) -> None:
        """The trainer stalls while it pushes; the master forwards once it has all (it reshards first)."""
        trainer = self.fleet.trainer
        if not trainer.alive or trainer.incarnation != command.incarnation or self.network.is_cut(trainer):
            return
        seconds = self.costs.push()
        trainer.stall_s += seconds
        trainer.pushes += 1
        trainer.free_at = max(trainer.free_at, self.clock.now) + seconds
        relay = self.fleet.relays[command.relay]
        self.clock.at(trainer.free_at, self._pushed, trainer.life, relay, relay.life, command.version)

    def _pushed(self, sender: int, relay: SimRelay, receiver: int, version: Version) -> None:
        trainer = self.fleet.trainer
        intact = trainer.alive and trainer.life == sender and relay.alive and relay.life == receiver
        if intact and not self.network.is_cut(relay):
            self._store(relay, version, self._first_s)
