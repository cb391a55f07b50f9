"""The network between the modelled processes and the controller.

What is sent while its sender is cut off, or while the controller is down, waits in the sender's outbox. With
`faults.delay_s` and `faults.duplicate` messages are late, overtake each other and arrive twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from tailrace.config.tree import Faults
from tailrace.protocol import Event, RelayJoined, ReplicaJoined, TrainerJoined
from tailrace.sim.clock import VirtualClock
from tailrace.sim.processes import SimProcess
from tailrace.types import HostId


@dataclass
class Network:
    settings: Faults
    clock: VirtualClock
    random: Random

    def __post_init__(self) -> None:
        self.inbox: deque[Event] = deque()  # what the controller has received and not yet handled
        self.controller_down = False
        self._unreliable = self.settings.delay_s > 0 or self.settings.duplicate > 0
        self._cut: dict[HostId, None] = {}

    def send(self, sender: SimProcess | None, event: Event) -> None:
        """Send an event to the controller; None: its own process, or the driver, tells it."""
        if sender is not None and (self.controller_down or sender.host in self._cut):
            sender.outbox.append(event)
        elif self._unreliable:
            self._transmit(sender, event)
        else:
            self.arrive(sender, event)

    def beat(self, sender: SimProcess, stats: Event | None) -> None:
        """A heartbeat, and what is reported with it. One that does not get through is lost."""
        if self.holds_back(sender):
            return
        if self._unreliable:
            self._transmit(sender, stats)
        else:
            self.arrive(sender, stats)

    def arrive(self, sender: SimProcess | None, event: Event | None) -> None:
        """Whatever comes is a sign of life; None: it is nothing else."""
        if sender is not None:
            sender.heard_at = self.clock.now
        if event is not None:
            self.inbox.append(event)

    def holds_back(self, process: SimProcess) -> bool:
        return self.controller_down or process.host in self._cut

    def is_cut(self, process: SimProcess) -> bool:
        return process.host in self._cut

    def cut(self, host: HostId) -> bool:
        """Nobody on this host reaches anybody elsewhere; False if that is so already."""
        if host in self._cut:
            return False
        self._cut[host] = None
        return True

    def heal(self, host: HostId) -> None:
        del self._cut[host]

    def _transmit(self, sender: SimProcess | None, event: Event | None) -> None:
        """Messages overtake each other, but no process is heard before its introduction."""
        earliest = sender.connected_at if sender is not None else 0.0
        arrivals = [max(self._arrival(), earliest)]
        if self.random.random() < self.settings.duplicate:
            arrivals.append(max(self._arrival(), earliest))
        for at in arrivals:
            self.clock.at(at, self.arrive, sender, event)
        if sender is not None and isinstance(event, ReplicaJoined | RelayJoined | TrainerJoined):
            sender.connected_at = min(arrivals)

    def _arrival(self) -> float:
        delay = self.random.expovariate(1 / self.settings.delay_s) if self.settings.delay_s else 0.0
        return self.clock.now + delay
