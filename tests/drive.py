"""A control plane driven by hand: tests tell it what happened and look at what it asks for."""

from __future__ import annotations

from typing import Any, TypeVar

from tailrace.config.tree import Config, Groups, Health, RelaySettings, Run, Schedule, Trainer, Workload
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Command,
    Event,
    FetchPrompts,
    Finished,
    Generate,
    GenerationResumed,
    JudgedTurn,
    LoadWeights,
    PromptsAdded,
    Publish,
    RelayJoined,
    ReplicaJoined,
    Request,
    Route,
    RunStarted,
    ScoringStarted,
    StoreJoined,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.types import Prompt

C = TypeVar("C", bound=Command)


def config(kind: Any = "trajectory", prompts: int = 2, size: int = 2, **sections: Any) -> Config:
    """Two prompts of two samples a step, unless a test needs more."""
    settings: dict[str, Any] = {
        "workload": Workload(prompts_per_step=prompts, group_size=size, prompt_tokens=10),
        "schedule": Schedule(kind=kind, max_inflight=prompts * size),
        "groups": Groups(min_survivors=1),
        "trainer": Trainer(mini_batches=1),
        "health": Health(heartbeat_s=1.0, strikes=3, backoff_s=2.0, max_restarts=3),
        "relay": RelaySettings(),
        "run": Run(steps=100),
        **sections,
    }
    return Config(**settings)


class Drive:
    """Checks every invariant after every event, and keeps all commands in `sent`."""

    def __init__(self, config: Config, replicas: int = 2, relays: int = 1, stores: int = 0) -> None:
        self.plane = ControlPlane(config)
        self.now = 0.0
        self.sent: list[Command] = []
        self.tell(RunStarted(replicas, relays, stores))

    def tell(self, event: Event, after: float = 0.0) -> list[Command]:
        self.now += after
        commands = self.plane.handle(self.now, event)
        self.plane.check()
        self.sent += commands
        return commands

    def orders(self, kind: type[C]) -> list[C]:
        return [command for command in self.sent if isinstance(command, kind)]

    # --------------------------------------------------------------------------------- what honest components would say

    def join_all(self, version: int = 0) -> Drive:
        """Everybody is there, and version 0 is everywhere."""
        state = self.plane.state
        for relay in list(state.relays.relays):
            self.tell(RelayJoined(relay, 1))
        for store in list(state.stores.stores):
            self.tell(StoreJoined(store, 1))
        self.tell(TrainerJoined(1, 0))
        self.store_everywhere(0)
        for replica in list(state.fleet.replicas):
            self.join(replica, version=version)
        self.fetch()
        return self

    def join(self, replica: int, incarnation: int = 1, version: int = 0, **fields: Any) -> list[Command]:
        hosts = max(1, len(self.plane.state.relays.relays))
        return self.tell(ReplicaJoined(replica, incarnation, replica % hosts, version, 10_000, 64, **fields))

    def fetch(self) -> None:
        wanted = self.orders(FetchPrompts)[-1]
        prompts = tuple(Prompt(id, 10) for id in range(wanted.start, wanted.start + wanted.count))
        self.tell(PromptsAdded(wanted.start, prompts))

    def store_everywhere(self, version: int) -> None:
        for relay in list(self.plane.state.relays.relays.values()):
            self.tell(VersionStored(relay.id, relay.incarnation, version))

    def load(self, replica: int) -> list[Command]:
        """It has loaded what it was told to load last."""
        order = next(order for order in reversed(self.orders(LoadWeights)) if order.replica == replica)
        return self.tell(WeightsLoaded(replica, order.incarnation, order.version))

    def running(self, replica: int | None = None) -> list[Request]:
        """The newest request of every sample that control believes to be running (there)."""
        newest = {request.trajectory: request for order in self.orders(Generate) for request in order.requests}
        samples = self.plane.state.ledger.samples.values()
        where = {s.id: s.replica for s in samples if s.state == "running"}
        return [newest[id] for id in sorted(where) if replica is None or where[id] == replica]

    def orders_of(self, requests: list[Request]) -> list[Request]:
        """The newest request of each of these samples."""
        newest = {request.trajectory: request for order in self.orders(Generate) for request in order.requests}
        return [newest[one.trajectory] for one in requests]

    def finish(self, request: Request, oldest: int | None = None) -> list[Command]:
        sample = self.plane.state.ledger.samples[request.trajectory]
        return self.tell(Finished(sample.replica, self.meta(request, sample.oldest if oldest is None else oldest)))

    def score(self, *requests: Request, turn: int = 0, final: bool = True) -> list[Command]:
        """Judges have these, all of one replica, and have had them for a while."""
        return self.tell(ScoringStarted(*self._replica_of(requests[0]), _turns(requests, turn, final)))

    def go_on(self, *requests: Request, turn: int = 1) -> list[Command]:
        """They were answered with observations."""
        return self.tell(GenerationResumed(*self._replica_of(requests[0]), _turns(requests, turn, False)))

    def _replica_of(self, request: Request) -> tuple[int, int]:
        replica = self.plane.state.ledger.samples[request.trajectory].replica
        return replica, self.plane.state.fleet.replicas[replica].incarnation

    def meta(self, request: Request, oldest: int = 0, tokens: int = 50) -> TrajectoryMeta:
        return TrajectoryMeta(request.trajectory, request.attempt, tokens, oldest, oldest, "stop")

    def finish_all(self, replica: int | None = None) -> None:
        for request in self.running(replica):
            self.finish(request)

    def train(self, after: float = 0.0) -> list[Command]:
        """The trainer has done what it was told last."""
        order = self.orders(Train)[-1]
        return self.tell(Trained(order.incarnation, order.step, order.mini_batch), after)

    def keep_alive(self) -> None:
        """For tests that are not about silence."""
        state = self.plane.state
        others = (*state.relays.relays.values(), *state.stores.stores.values(), state.training)
        for part in (*state.fleet.replicas.values(), *others):
            part.last_seen = self.now + 10_000.0

    def tick(self, seconds: float = 1.0) -> list[Command]:
        return self.tell(TimerFired("health"), after=seconds)


def _turns(requests: tuple[Request, ...], turn: int, final: bool) -> tuple[JudgedTurn, ...]:
    return tuple(JudgedTurn(one.trajectory, one.attempt, turn, final) for one in requests)


def routes(commands: list[Command]) -> dict[int, tuple[int, ...]]:
    return {command.relay: command.targets for command in commands if isinstance(command, Route)}


def only(commands: list[Command], kind: type[C]) -> C:
    (found,) = [command for command in commands if isinstance(command, kind)]
    return found


def published(drive: Drive) -> list[tuple[int, int]]:
    return [(order.version, order.relay) for order in drive.orders(Publish)]
