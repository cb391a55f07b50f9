"""Commands of control that a component carries out: who gets each, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.control.state import State
from tailrace.protocol import (
    TRAINER,
    Command,
    Drop,
    Evaluate,
    FetchPrompts,
    Forget,
    Generate,
    KeepCheckpoints,
    LoadWeights,
    Publish,
    Route,
    Train,
)
from tailrace.runtime.components import FIRST_STORE, Components
from tailrace.runtime.grants import granted
from tailrace.store.trajectories import TrajectoryTable
from tailrace.wire.messages import FromController, Ordered


class Orders:
    """`trajectories`: the table in `run.db`, which has to know what is assigned and what is forgotten. All is sent once
    the transaction is committed."""

    def __init__(self, components: Components, trajectories: TrajectoryTable, archive: bool) -> None:
        self._components = components
        self._trajectories = trajectories
        self._archive = archive
        self._ways: dict[type[Command], Callable[[State, Any], None]] = {
            Drop: lambda _, command: self._send("relay", command.relay, Ordered(command)),
            FetchPrompts: lambda _, command: self._send("store", FIRST_STORE, Ordered(command)),
            Evaluate: self._generate,
            Forget: self._forget,
            Generate: self._generate,
            KeepCheckpoints: lambda _, command: self._send("trainer", TRAINER, Ordered(command)),
            LoadWeights: self._load_weights,
            Publish: self._publish,
            Route: self._route,
            Train: self._train,
        }

    def send(self, state: State, command: Command) -> None:
        self._ways.get(type(command), self._to_replica)(state, command)

    def _to_replica(self, _: State, command: Any) -> None:
        self._send("replica", command.replica, Ordered(command))

    def _generate(self, state: State, command: Generate | Evaluate) -> None:
        """The stores first: a replica has to find its prompts and prefixes there, and may write there."""
        self._trajectories.assign(command.requests)
        for store in {request.store for request in command.requests}:
            self._send("store", store, granted(state.ledger, command, store))
        self._to_replica(state, command)

    def _load_weights(self, _: State, command: LoadWeights) -> None:
        relay = self._components.get("relay", command.relay)
        if relay is not None:  # else control is about to hear that it is gone
            addresses = self._components.addresses((command.relay,))
            self._send("replica", command.replica, Ordered(command, addresses=addresses, arena=relay.arena))

    def _train(self, _: State, command: Train) -> None:
        ids = [id for group in command.groups for id in group.trajectories]
        results = self._trajectories.results(ids)
        rewards = {id: result.reward for id, result in results.items()}
        versions = {id: result.versions for id, result in results.items() if result.versions is not None}
        tokens = {id: result.tokens for id, result in results.items() if result.tokens is not None}
        self._send("trainer", TRAINER, Ordered(command, rewards=rewards, versions=versions, tokens=tokens))

    def _publish(self, _: State, command: Publish) -> None:
        addresses = self._components.publish_addresses(command.relay)
        if command.relay in addresses:
            self._send("trainer", TRAINER, Ordered(command, addresses=addresses))

    def _route(self, _: State, command: Route) -> None:
        addresses = self._components.addresses(command.targets)
        self._send("relay", command.relay, Ordered(command, addresses=addresses))

    def _forget(self, state: State, command: Forget) -> None:
        self._trajectories.forget(command.trajectories, self._archive, command.reason)
        for store in state.stores.stores:
            self._send("store", store, Ordered(command))

    def _send(self, role: str, id: int, message: FromController) -> None:
        self._components.send(role, id, message)
