"""The state of the modelled processes: what a replica, a relay and the trainer remember, and who they are together."""

from __future__ import annotations

from tailrace.config.tree import Config
from tailrace.protocol import Event, Progressed, Train
from tailrace.sim.cost_model import CostModel, config_of_kind
from tailrace.sim.engine import SimEngine, SimSequence
from tailrace.types import HostId, RelayId, ReplicaId, TrajectoryId, Version


class SimProcess:
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

    def die(self, now: float) -> None:
        """Forget what was in memory."""
        self.alive = False
        self.life += 1
        self.outbox.clear()


class SimReplica(SimProcess):
    def __init__(self, id: ReplicaId, host: HostId, engine: SimEngine, speed: float = 1.0, price: float = 0.0) -> None:
        super().__init__(host)
        self.id = id
        self.engine = engine
        self.price = price  # dollars per hour
        self._speed = speed  # against the costs of all
        self.slow_down(1.0)
        self.version: Version = -1
        self.wake = 0  # number of the newest wake-up: older ones are void
        self.pull = 0  # number of the newest pull
        self.pulling = False
        self.scoring: dict[TrajectoryId, SimSequence] = {}  # generated to the end, and not yet scored
        self.pulled_s = 0.0
        self.pulls = 0
        self.reported: Progressed | None = None  # its load, as last reported; None: say it again

    def slow_down(self, factor: float) -> None:
        """It takes so many times as long as usual."""
        self.engine.slowdown = factor / self._speed

    def abandon_pull(self) -> None:
        """A pull that was under way is void."""
        self.pull += 1
        self.pulling = False

    def die(self, now: float) -> None:
        super().die(now)
        self.engine.withdraw(now)
        self.scoring.clear()
        self.version = -1
        self.wake += 1
        self.abandon_pull()


class SimRelay(SimProcess):
    def __init__(self, id: RelayId, site: str = "") -> None:
        super().__init__(id)
        self.id = id
        self.site = site
        self.versions: dict[Version, None] = {}
        self.took_s: dict[Version, float] = {}  # how long it was at receiving a version
        self.incoming: dict[Version, tuple[RelayId, int]] = {}  # version -> who sends it (relay and its life)
        self.targets: tuple[RelayId, ...] = ()
        self.route_revision = -1

    def die(self, now: float) -> None:
        super().die(now)
        self.versions = {}
        self.took_s = {}
        self.incoming = {}
        self.targets = ()


class SimTrainer(SimProcess):
    def __init__(self) -> None:
        super().__init__(-1)
        self.id = 0
        self.step = 0
        self.mini_batch = 0
        self.saved = 0  # steps in the newest checkpoint
        self.free_at = 0.0
        self.mini_batch_ends_at = 0.0
        self.training: Train | None = None  # what it is at
        self.slowdown = 1.0  # seconds on the clock for each second of work (`cpu_sharing.py`)
        self.busy_s = 0.0
        self.stall_s = 0.0
        self.pushes = 0
        self.decoded = 0  # tokens that engines decoded, of all that it has trained on

    def die(self, now: float) -> None:
        super().die(now)
        self.training = None


class SimFleet:
    """All modelled processes of a run."""

    def __init__(self, config: Config, costs: CostModel) -> None:
        hosts, rollout = config.fleet_hosts, config.rollout
        sites = [host.kind.site for host in hosts] or [""] * config.hosts
        self.relays = [SimRelay(id, site) for id, site in enumerate(sites)]
        of_kind = {kind: CostModel(config_of_kind(config, kind)) for kind in config.kinds}
        engines = [SimEngine(of_kind[hosts[host].kind] if hosts else costs, 0.0) for host in config.replica_hosts]
        self.replicas = [
            SimReplica(id, host, engine, rollout.speed(id), rollout.price(id))
            for id, (host, engine) in enumerate(zip(config.replica_hosts, engines, strict=True))
        ]
        self.trainer = SimTrainer()

    def process(self, role: str, id: int) -> SimProcess:
        return self.trainer if role == "trainer" else self.relays[id] if role == "relay" else self.replicas[id]

    def heard_at(self, role: str, id: int) -> float:
        """When the controller last heard something of it."""
        return self.process(role, id).heard_at

    def on_host(self, host: HostId) -> list[SimProcess]:
        return [self.relays[host], *[replica for replica in self.replicas if replica.host == host]]
