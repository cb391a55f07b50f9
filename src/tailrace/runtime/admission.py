"""Other machines that want to take part: which may join, what is answered to their offers, and when they are gone."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from tailrace.config.tree import Config
from tailrace.protocol import Dismiss, HostJoined, WorkerRefused
from tailrace.release import __version__
from tailrace.runtime.hosts import Host, Hosts
from tailrace.runtime.local import HostRecord
from tailrace.runtime.placement import refusal
from tailrace.runtime.run_control import RunControl
from tailrace.wire.keys import worker_of
from tailrace.wire.messages import MOST_REPLICAS, OFFER_S, Dismissed, FromController, Offer, Wanted
from tailrace.wire.server import ControlServer

EVER = 16_384  # replicas that a run remembers: a number is never used again
DISMISSED = 1024  # machines that are remembered
OF_A_STRANGER = 64  # replicas of one at a time
COMINGS = 256  # of its machines


class HostComponents(Protocol):
    """Whoever knows the components that run there."""

    def note_those_elsewhere(self) -> None: ...

    def host_joined(self) -> None: ...

    def host_left(self, host: Host, reason: str) -> None: ...


class HostAdmission:
    def __init__(
        self, config: Config, hosts: Hosts, server: ControlServer, control: RunControl, components: HostComponents
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._server = server
        self._control = control
        self._components = components
        self._reassure_at = 0.0
        self._dismissed: dict[str, str] = {}  # machines, and why: a worker that is started again has a new name

    def _post(self, name: str, message: FromController) -> None:
        self._control.then(self._server.send(name, message))

    def offered(self, name: str, offer: Offer) -> None:
        host = self._hosts.present.get(name)
        if name in self._dismissed:  # it may not have heard of it yet
            self._post(name, Dismissed(self._dismissed[name]))
        elif offer.leaving or not (offer.replicas or offer.ranks):
            if host is not None:
                self._components.host_left(host, f"its host left: {offer.reason}" if offer.reason else "its host left")
            self._post(name, Wanted(()))
        elif host is not None:
            self._answer(host, offer)
        elif why_not := self._not_for_strangers(name, offer) or self._no_room_for(offer):
            self._control.note(f"{name} may not join: {why_not}")
            self._dismiss(name, why_not)
        else:
            self._answer(self._welcome(name, offer), offer)

    def _answer(self, host: Host, offer: Offer) -> None:
        """What is wanted there."""
        wanted = host.hear(offer.components)
        with suppress(OSError):  # no descriptor for that now: the next offer comes soon
            self._components.note_those_elsewhere()
            self._post(host.name, wanted)

    def refuse_host(self, name: str, what: str) -> None:
        if name in self._dismissed:
            return
        self._control.note(f"{name} is dropped: it sent {what}")
        if worker := worker_of(name):
            self._control.tell(WorkerRefused(worker, what))
        self._dismiss(name, f"the run has dropped this machine, because it sent {what}")
        host = self._hosts.present.get(name)
        if host is not None:
            self._components.host_left(host, f"it was dropped, because it sent {what}")

    def dismiss_worker(self, command: Dismiss) -> None:
        """All machines of a stranger; control knows that they are gone."""
        self._control.note(f"the worker {command.worker} is sent away: {command.reason}")
        for host in [one for one in self._hosts.present.values() if one.worker == command.worker]:
            self.send_away(host, command.reason)

    def send_away(self, host: Host, reason: str) -> None:
        self._dismiss(host.name, reason)
        self._components.host_left(host, reason)

    def _dismiss(self, name: str, reason: str) -> None:
        self._dismissed[name] = reason
        while len(self._dismissed) > DISMISSED:
            del self._dismissed[next(iter(self._dismissed))]
        self._post(name, Dismissed(reason))

    def _not_for_strangers(self, name: str, offer: Offer) -> str:
        """They take prompts and hand in trajectories, and nothing else."""
        if not worker_of(name):
            return ""
        if not self._config.strangers.checkers:
            return "this run takes no strangers, because nobody would check them (strangers.checkers)"
        if offer.ranks or offer.store:
            return "a worker with a key of its own generates and nothing else; join without --ranks and --store"
        return self._too_many_of(worker_of(name), offer)

    def _too_many_of(self, worker: str, offer: Offer) -> str:
        """One of them must not use up what there is for all."""
        present = sum(len(host.trace.replicas) for host in self._hosts.present.values() if host.worker == worker)
        if present + offer.replicas > OF_A_STRANGER:
            return f"a worker with a key of its own may bring {OF_A_STRANGER} replicas, so there is room for fewer"
        known = self._control.state.strangers.workers.get(worker)
        if known is not None and len(known.hosts) >= COMINGS:
            return f"this worker has come and gone {COMINGS} times; ask for another key"
        return ""

    def _no_room_for(self, offer: Offer) -> str:
        """Why this machine cannot join."""
        if offer.release != __version__:
            return f"this run is of Tailrace {__version__}, the worker of {offer.release}; install the same there"
        present = sum(len(host.trace.replicas) for host in self._hosts.present.values())
        if present + offer.replicas > MOST_REPLICAS:
            room = MOST_REPLICAS - present
            return f"this run takes {MOST_REPLICAS:,} replicas of other machines, so there is room for {room:,} more"
        if len(self._control.state.fleet.replicas) + offer.replicas > EVER:
            return f"machines with {EVER:,} replicas in all have come and gone, and this run takes no more"
        return refusal(self._config, offer.ranks, offer.interfaces) if offer.ranks else ""

    def _welcome(self, name: str, offer: Offer) -> Host:
        """A machine that is new, or has been away for too long, gets numbers that nobody has had."""
        state, present = self._control.state, self._hosts.present.values()
        hosts = [self._config.local.relays - 1, *state.relays.relays, *[host.id for host in present]]
        given = [id for host in present for id in host.trace.replicas]
        first = 1 + max([self._config.local.replicas - 1, *state.fleet.replicas, *given])
        replicas = tuple(range(first, first + offer.replicas))
        record = HostRecord(name, 1 + max(hosts), replicas, offer.store, offer.ranks, offer.interfaces)
        host = self._hosts.add(record)
        salt = secrets.randbits(48) if host.worker else 0
        room = (offer.store, offer.ranks, offer.site)
        self._control.tell(HostJoined(host.id, replicas, *room, host.worker, salt))
        self._components.host_joined()
        return host

    def find_silent_hosts(self) -> None:
        ages = [(host, self._server.liveness.age_s(host.name)) for host in self._hosts.present.values()]
        for host, age_s in ages:
            if age_s >= self._patience_with(host):
                self._components.host_left(host, f"nothing was heard of its host for {age_s:.1f} s")

    def _patience_with(self, host: Host) -> float:
        """What it generates is leased to it. Ranks of the trainer are not: the others would wait for them."""
        health = self._config.health
        patience = health.strikes * max(health.heartbeat_s, OFFER_S)
        return patience if host.trace.ranks else max(health.lease_s, patience)

    async def hear_endings(self) -> None:
        """While the run ends: of the ranks that are on other machines. Nothing new is begun there."""
        while True:
            for name, _, message in await self._server.receive():
                host = self._hosts.present.get(name)
                if host is not None and isinstance(message, Offer):
                    await self._server.send(name, replace(host.hear(message.components), specs=()))

    async def reassure_hosts(self) -> None:
        """They give up a controller that is not heard of: while their offers cannot be taken in, they hear from time to
        time what they have been told before."""
        if self._control.now >= self._reassure_at:
            self._reassure_at = self._control.now + OFFER_S
            for host in self._hosts.present.values():
                await self._server.send(host.name, Wanted(host.wanted))
