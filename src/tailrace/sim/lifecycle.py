"""How the modelled processes start, join the controller, die and connect again."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.config.tree import Faults
from tailrace.protocol import Assignment, Event, RelayJoined, ReplicaJoined, Start, TrainerJoined
from tailrace.sim.clock import VirtualClock
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet, SimProcess, SimRelay, SimReplica, SimTrainer
from tailrace.sim.result import Meter


@dataclass
class Lifecycle:
    settings: Faults
    clock: VirtualClock
    fleet: SimFleet
    network: Network
    meter: Meter

    def start(self, command: Start) -> None:
        process = self.fleet.process(command.role, command.id)
        if process.restarting:
            return
        if process.alive:
            self.kill(process)
        if command.restart == 1 and process.incarnation == 0:
            self._come_up(process)  # the beginning of the run: everybody is there
        else:
            process.restarting = True
            self.clock.after(self.settings.restart_s, self._come_up, process)

    def _come_up(self, process: SimProcess) -> None:
        process.restarting = False
        process.alive = True
        process.outbox.clear()
        if isinstance(process, SimTrainer):
            process.step, process.mini_batch = process.saved, 0
            process.free_at = self.clock.now
        self._join(process)

    def _join(self, process: SimProcess) -> None:
        """Introduce a process that has started, or that has found the controller again."""
        process.incarnation += 1
        if isinstance(process, SimReplica):
            process.abandon_pull()
        self.network.send(process, self._introduction(process))

    def _introduction(self, process: SimProcess) -> Event:
        if isinstance(process, SimRelay):
            return RelayJoined(process.id, process.incarnation, tuple(process.versions))
        if isinstance(process, SimReplica):
            capacity, roofline = process.engine.costs.kv_capacity, process.engine.costs.roofline
            work = [*process.engine.held.values(), *process.scoring.values()]
            held = tuple([Assignment(one.trajectory, one.attempt) for one in work])
            room = (capacity, roofline, held, process.price)
            return ReplicaJoined(process.id, process.incarnation, process.host, process.version, *room)
        trainer = self.fleet.trainer
        return TrainerJoined(trainer.incarnation, trainer.step, trainer.mini_batch)

    def kill(self, process: SimProcess) -> None:
        """What it had in memory is gone; what was stored of its samples stays."""
        process.die(self.clock.now)
        if isinstance(process, SimReplica):
            self.meter.mark(process, "lost", self.clock.now)

    def reconnect_all(self) -> None:
        for process in (self.fleet.trainer, *self.fleet.relays, *self.fleet.replicas):
            self.reconnect(process)

    def reconnect(self, process: SimProcess) -> None:
        """What a process could not send arrives now, and then it introduces itself anew."""
        if not process.alive or self.network.holds_back(process):
            return
        held_back, process.outbox = process.outbox, []
        for event in held_back:
            self.network.arrive(process, event)
        self._join(process)
