"""What a run has spent on replicas that have a price, folded from its journal: each costs while it is to generate.

Who is sent home is not counted, also while it finishes what it has in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tailrace.protocol import (
    Activate,
    Command,
    Event,
    GiveUp,
    HostJoined,
    HostLeft,
    PriceChanged,
    ReplicaJoined,
    ReplicaLost,
)
from tailrace.types import HostId, ReplicaId


class Spent(msgspec.Struct, frozen=True):
    dollars: float = 0.0
    dollars_of_all: float = 0.0  # had nobody been sent home
    sent_home: int = 0  # times

    def __bool__(self) -> bool:
        return self.dollars_of_all > 0.0

    def __str__(self) -> str:
        all_ = f"{self.dollars_of_all:,.4g} with all replicas at work"
        return f"{self.dollars:,.4g} dollars ({all_}); {self.sent_home:,} times one was sent home"


class _Hired(msgspec.Struct):
    """A replica that is there. `price`: dollars per hour."""

    incarnation: int
    price: float
    since: float
    works: bool = True


class Spending:
    def __init__(self) -> None:
        self._there: dict[ReplicaId, _Hired] = {}
        self._hosts: dict[HostId, tuple[ReplicaId, ...]] = {}
        self._prices: dict[ReplicaId, tuple[float, float]] = {}  # what it said when it joined, and the present one
        self._dollars = self._dollars_of_all = 0.0
        self._sent_home = 0
        self._now = 0.0
        self._handlers: dict[type[Event | Command], Callable[[Any], None]] = {
            HostJoined: lambda event: self._hosts.update({event.host: event.replicas}),
            HostLeft: self._host_left,
            ReplicaJoined: self._join,
            ReplicaLost: lambda event: self._leave(event.replica, event.incarnation),
            GiveUp: lambda command: self._leave(command.id, command.incarnation, command.role),
            PriceChanged: self._price_changed,
            Activate: self._activate,
        }

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._now = now
        for message in (event, *commands):
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)

    def total(self, now: float) -> Spent:
        """Until now."""
        self._now = now
        for replica in self._there:
            self._count(replica)
        return Spent(self._dollars, self._dollars_of_all, self._sent_home)

    def _join(self, event: ReplicaJoined) -> None:
        """One that says the same as before keeps a price that was set since."""
        said, price = self._prices.get(event.replica, (0.0, 0.0))
        if event.price != said:
            said = price = event.price
        self._prices[event.replica] = said, price
        self._count(event.replica)
        self._there[event.replica] = _Hired(event.incarnation, price, self._now)

    def _host_left(self, event: HostLeft) -> None:
        for replica in self._hosts.pop(event.host, ()):
            self._leave(replica)

    def _leave(self, replica: ReplicaId, incarnation: int | None = None, role: str = "replica") -> None:
        there = self._there.get(replica)
        if role == "replica" and there is not None and incarnation in (None, there.incarnation):
            self._count(replica)
            del self._there[replica]

    def _price_changed(self, event: PriceChanged) -> None:
        for replica in event.replicas:
            self._prices[replica] = self._prices.get(replica, (0.0, 0.0))[0], event.price
            there = self._count(replica)
            if there is not None:
                there.price = event.price

    def _activate(self, command: Activate) -> None:
        self._sent_home += not command.active
        there = self._count(command.replica)
        if there is not None:
            there.works = command.active

    def _count(self, replica: ReplicaId) -> _Hired | None:
        """What it has cost until now."""
        there = self._there.get(replica)
        if there is not None:
            dollars = there.price * (self._now - there.since) / 3600.0
            self._dollars += dollars if there.works else 0.0
            self._dollars_of_all += dollars
            there.since = self._now
        return there
