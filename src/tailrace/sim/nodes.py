"""The modelled parts of a fleet: what a replica, a relay and a trainer remember. `cluster.py` moves them."""

from __future__ import annotations

from tailrace.protocol import Event, Progressed, Train
from tailrace.sim.engine import Engine, Sequence
from tailrace.types import HostId, RelayId, ReplicaId, TrajectoryId, Version


class Node:
    """Something that lives, dies, is started again, and talks to the controller over a link that may be cut."""

    def __init__(self, host: HostId) -> None:
        self.host = host
        self.incarnation = 0  # grows when it starts, and when it finds the controller again
        self.life = 0  # grows when it dies
        self.connected_at = 0.0  # when its newest introduction arrives; nothing it says later comes before
        self.heard_at = 0.0  # when the controller last heard something of it
        self.alive = False
        self.outbox: list[Event] = []  # what could not be sent; delivered after the next reconnection
        self.restarting = False


class SimReplica(Node):
    def __init__(self, id: ReplicaId, host: HostId, engine: Engine) -> None:
        super().__init__(host)
        self.id = id
        self.engine = engine
        self.version: Version = -1
        self.wake = 0  # number of the newest wake-up: older ones are void
        self.pull = 0  # number of the newest pull
        self.pulling = False
        self.scoring: dict[TrajectoryId, Sequence] = {}  # generated to the end, and not yet scored
        self.pulled_s = 0.0
        self.pulls = 0
        self.reported: Progressed | None = None  # its load, as last reported; None: say it again


class SimRelay(Node):
    def __init__(self, id: RelayId) -> None:
        super().__init__(id)
        self.id = id
        self.versions: dict[Version, None] = {}
        self.incoming: dict[Version, tuple[RelayId, int]] = {}  # version -> who sends it (relay and its life)
        self.targets: tuple[RelayId, ...] = ()
        self.route_epoch = -1


class SimTrainer(Node):
    def __init__(self) -> None:
        super().__init__(-1)
        self.id = 0
        self.step = 0
        self.part = 0
        self.saved = 0  # steps in the newest checkpoint
        self.free_at = 0.0
        self.part_ends_at = 0.0
        self.doing: Train | None = None
        self.busy_s = 0.0
        self.stall_s = 0.0
        self.pushes = 0
