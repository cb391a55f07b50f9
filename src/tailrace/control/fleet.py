"""The rollout manager's memory: every replica, what it holds, what it generates under, and how much room it has.

    replica:  lost -> ready <-> pulling            pulling: loads a version from a relay
                      ready -> releasing -> ready  releasing: hands its work back, for repack
              any live state -> away -> ready      away: cut off, on a machine that joined; it keeps what it has
              any  -> lost -> (started again) ... -> quarantined, with the reason
              any  -> departed, with its host

Owned by the plane. Choices that need the whole picture (when to pull, what to feed) are made there; this file answers
questions about single replicas and picks the ones with room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal

import msgspec

from tailrace.control import kinds
from tailrace.control.kinds import Kind, ReplicaFigures
from tailrace.control.ledger import NONE, NOWHERE
from tailrace.control.speed import DecodeCosts, Speed
from tailrace.protocol import EngineWork, ReplicaJoined, UpdateChoice
from tailrace.types import HostId, RelayId, ReplicaId, TrajectoryId, Version

ReplicaState = Literal["lost", "ready", "pulling", "releasing", "away", "quarantined", "departed"]


class Replica(msgspec.Struct):
    id: ReplicaId
    host: HostId = NOWHERE
    incarnation: int = 0
    state: ReplicaState = "lost"
    since: float = 0.0  # when it came into this state
    last_seen: float = 0.0
    version: Version = NONE
    use_first: bool = False  # work under this version before pulling another: they come as fast as it can pull
    target: Version = NONE  # while pulling
    source: RelayId = NONE  # while pulling
    source_incarnation: int = 0  # of that relay, when the pull was ordered
    kv_capacity: int = 0
    roofline: int = 0
    kv_tokens: int = 0  # as last reported
    pledged: int = 0  # tokens given to it since that report
    waiting: int = 0  # as last reported
    work: EngineWork | None = None  # as last reported
    reported_at: float = 0.0
    speed: Speed = msgspec.field(default_factory=Speed)  # of its own engine
    costs: DecodeCosts | None = None  # at the last look; None: not known yet
    rate: float = 0.0  # tokens per second in a batch of usual size; 0: not known yet
    kind: int = 0  # of the fleet's kinds
    kv_checked: int = 0  # at the last look for repack
    choice: UpdateChoice = "drain"  # about the version `chosen_for`
    chosen_for: Version = NONE
    chosen_with: int = 0  # samples that it had in hand then
    batch: int = 0  # how many samples its present batch began with
    assigned: dict[TrajectoryId, None] = {}  # what it generates, or has waiting
    scoring: dict[TrajectoryId, bool] = {}  # what judges have there; True: for good, it will not be generated again
    evaluating: dict[TrajectoryId, None] = {}  # samples of an evaluation: it keeps its version until they have ended
    finished_at: float = -1.0  # when a sample last came to a good end
    failures: int = 0  # samples since then that came to a bad end
    failing_since: float = 0.0
    worker: str = ""  # a stranger's, who has the key of this name
    leased: bool = False  # of a machine that joined: cut off, it keeps what it has for `health.lease_s`
    lease_until: float = 0.0  # while it is away
    due: dict[TrajectoryId, float] = {}  # of a stranger: when each of its samples is to be handed in
    checks: bool = False  # it checks and judges what strangers hand in, and generates nothing for itself
    price: float = 0.0  # dollars per hour
    said_price: float = 0.0  # when it joined
    resting: bool = False  # sent home, because cheaper ones are enough
    restarts: int = 0
    restart_at: float = 0.0
    reason: str = ""

    @property
    def live(self) -> bool:
        return self.state in ("ready", "pulling", "releasing", "away")

    @property
    def own(self) -> bool:
        """It generates, and what it says of itself is believed: it is no stranger's, and no checker."""
        return not (self.worker or self.checks)

    @property
    def works(self) -> bool:
        """It is asked to generate."""
        return self.live and self.state != "away" and not (self.resting or self.checks)

    @property
    def given_up(self) -> bool:
        return self.state in ("quarantined", "departed")

    @property
    def unfinished(self) -> int:
        """Samples of which something may still be generated there."""
        return len(self.assigned) + (list(self.scoring.values()).count(False) if self.scoring else 0)

    def to_generate(self) -> Iterator[TrajectoryId]:
        """Those samples."""
        return chain(self.assigned, (id for id, final in self.scoring.items() if not final))

    def holds(self) -> Iterator[TrajectoryId]:
        return chain(self.assigned, self.scoring)

    def drop(self, id: TrajectoryId) -> None:
        """It does not have this any more."""
        del (self.scoring if id in self.scoring else self.assigned)[id]
        self.due.pop(id, None)

    @property
    def steps(self) -> int:
        """Decode steps of its engine, as last reported."""
        return self.work.steps if self.work else 0

    @property
    def kv_load(self) -> int:
        return self.kv_tokens + self.pledged

    def enter(self, state: ReplicaState, now: float) -> None:
        self.state = state
        self.since = now


class Fleet(msgspec.Struct):
    replicas: dict[ReplicaId, Replica] = {}
    on_host: dict[HostId, list[ReplicaId]] = {}
    hungry: dict[ReplicaId, None] = {}  # ready replicas that could take more than they were given
    moves: dict[ReplicaId, ReplicaId] = {}  # releasing replica -> where its work is to go
    live: int = 0
    away: int = 0  # of these
    offered: Version = NONE  # newest version that all replicas were told to load (schedule `partial`)
    speed: Speed = msgspec.field(default_factory=Speed)
    batch: float = 1.0  # samples of a replica when its speed was last looked at
    kinds: list[Kind] = msgspec.field(default_factory=lambda: [Kind()])  # of live replicas

    def join(self, now: float, event: ReplicaJoined) -> Replica:
        replica = self.replicas.get(event.replica)
        if replica is None:
            replica = self.replicas[event.replica] = Replica(event.replica)
        self.house(replica, event.host)
        if not replica.live:
            self.live += 1
        self.away -= replica.state == "away"
        self.moves.pop(replica.id, None)
        replica.incarnation = event.incarnation
        replica.version, replica.use_first = event.version, False
        replica.kv_capacity = event.kv_capacity
        replica.roofline, replica.resting = event.roofline, False
        if event.price != replica.said_price:  # else one that was set since holds
            replica.price = replica.said_price = event.price
        replica.work, replica.chosen_for = None, NONE
        replica.speed, replica.costs, replica.rate = Speed(), None, 0.0
        replica.kv_tokens = replica.pledged = replica.waiting = replica.kv_checked = 0
        replica.last_seen = replica.reported_at = now
        replica.failures = 0
        replica.reason = ""
        replica.enter("ready", now)
        self.sort_out()
        return replica

    def sort_out(self) -> None:
        """Who is of which kind: somebody has come or gone, or more is known of their speeds. What strangers say of
        theirs changes nobody's work: they get as much as the slowest of the others."""
        live = [one for one in self.replicas.values() if one.live and not one.worker]
        live = [one for one in live if one.own] or live  # checkers alone: strangers generate by their figures
        tails = [one.costs.step_s(1, 0) if one.costs else 0.0 for one in live]
        measured = [
            ReplicaFigures(one.rate, one.kv_capacity, tail, one.works) for one, tail in zip(live, tails, strict=True)
        ]
        self.kinds, numbers = kinds.sort_out(measured)
        numbered = dict(zip([one.id for one in live], numbers, strict=True))
        for replica in self.replicas.values():
            replica.kind = numbered.get(replica.id, 0)
        self.kinds[0].members += sum(one.works for one in self.replicas.values() if one.worker)

    def pace(self, replica: Replica) -> float:
        """How fast it is against the mean of the fleet; 1 where all are alike."""
        return self.kinds[replica.kind].pace

    def hungry_pace(self, replica: Replica) -> float:
        """Of all that could take more, this one at least."""
        if len(self.kinds) == 1:
            return max(1, len(self.hungry))
        return max(self.pace(replica), sum(self.pace(self.replicas[id]) for id in self.hungry))

    def measure(self, samples: int, kv: float) -> None:
        """How fast each is, by what it has reported, with its share of so many samples, or as many as its KV holds."""
        usual, working = self.speed.costs(), max(1, sum(kind.members for kind in self.kinds))
        fit = min(kind.kv_capacity for kind in self.kinds) / kv if kv else samples
        self.batch = max(1.0, min(fit, samples / working))
        for replica in self.replicas.values():
            replica.costs = replica.speed.costs_near(usual) if usual is not None else None
            replica.rate = replica.costs.rate(self.batch, self.batch * kv) if replica.costs else 0.0
        self.sort_out()

    def fastest_first(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Where all are alike, as they come."""
        return sorted(replicas, key=lambda one: -self.pace(one)) if len(self.kinds) > 1 else list(replicas)

    def tail_s(self, replica: Replica) -> float:
        """Of a decode step with one sample; the same for all where they are alike."""
        return self.kinds[replica.kind].tail_s if len(self.kinds) > 1 else 1.0

    def costs(self, replica: Replica) -> DecodeCosts | None:
        """Of its own engine where replicas differ, else of all of them."""
        return (replica.costs if len(self.kinds) > 1 else None) or self.speed.costs()

    def house(self, replica: Replica, host: HostId) -> None:
        """A replica may come back on another host than it was lost on."""
        if replica.host != host:
            if replica.host != NOWHERE:
                self.on_host[replica.host].remove(replica.id)
            self.on_host.setdefault(host, []).append(replica.id)
            replica.host = host

    def current(self, id: ReplicaId, incarnation: int) -> Replica | None:
        """The replica, if this incarnation of it is the living one."""
        replica = self.replicas.get(id)
        if replica is None or replica.incarnation != incarnation or not replica.live:
            return None
        return replica

    def cut_off(self, now: float, replica: Replica, until: float, reason: str) -> None:
        """It is given nothing more until it is back."""
        self.away += 1
        self.hungry.pop(replica.id, None)
        self.moves.pop(replica.id, None)
        replica.reason, replica.lease_until = reason, until
        replica.enter("away", now)
        self.sort_out()

    def lose(self, now: float, replica: Replica, reason: str) -> None:
        self.live -= 1
        self.away -= replica.state == "away"
        self.hungry.pop(replica.id, None)
        self.moves.pop(replica.id, None)
        replica.reason, replica.resting = reason, False
        replica.assigned, replica.scoring, replica.due = {}, {}, {}
        replica.enter("lost", now)
        self.sort_out()

    def ready(self) -> Iterator[Replica]:
        """Who can be given something that others may have begun: a stranger sees nobody's samples but its own."""
        return (one for one in self.replicas.values() if one.state == "ready" and one.own and not one.resting)


def roomiest(
    replicas: Iterable[Replica], sizes: list[int], kv_share: float, pace: Callable[[Replica], float]
) -> list[ReplicaId | None]:
    """A replica for each of `sizes` (tokens of KV), always the one with the lowest share in use for its pace; None: no
    room."""
    heap = [
        (one.kv_load / one.kv_capacity / pace(one), one.id, one.kv_load, one.kv_capacity, pace(one)) for one in replicas
    ]
    heapq.heapify(heap)
    chosen: list[ReplicaId | None] = []
    for size in sizes:
        if heap and heap[0][2] + size <= heap[0][3] * kv_share:
            _, id, load, capacity, speed = heap[0]
            heapq.heapreplace(heap, ((load + size) / capacity / speed, id, load + size, capacity, speed))
            chosen.append(id)
        else:
            chosen.append(None)
    return chosen
