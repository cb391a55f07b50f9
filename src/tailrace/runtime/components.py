"""The components of a run, wherever they are: started when control says so, watched until they have joined, given up
when it says so, found again after a controller that died.

Here it is known which process is which component, on this machine (`local`) or on another one that has joined (`hosts`,
`admission`). What goes wrong with a component becomes an event for control, or the end of the run if it cannot go on
without; what goes wrong on another machine is that machine's loss, never the end of the run.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from tailrace.config.dealing import Deal
from tailrace.config.tree import Config
from tailrace.logs import open_log, to_stream
from tailrace.protocol import (
    TRAINER,
    WITH_THE_RUN,
    CutOff,
    Event,
    GiveUp,
    HostLeft,
    RelayLost,
    ReplicaLost,
    Start,
    StoreLost,
    TrainerLost,
    TrainerWaits,
    WorkerRefused,
)
from tailrace.runtime.admission import HostAdmission
from tailrace.runtime.hosts import Host, Hosts
from tailrace.runtime.local import (
    SHORTAGE,
    SHORTAGE_S,
    ComponentRecord,
    ComponentRecords,
    LocalProcesses,
    Process,
    last_lines,
)
from tailrace.runtime.provision import Provision
from tailrace.runtime.ranks import TrainerRanks
from tailrace.runtime.run_control import RunControl
from tailrace.runtime.store_directory import StoreDirectory
from tailrace.store.folder import RunFolder
from tailrace.types import RelayId
from tailrace.watchdog import ask_for_stacks, is_stopped, look_at
from tailrace.wire.keys import HOST, JOIN_KEY, JoinKey, Keyring, stranger_token
from tailrace.wire.messages import (
    LOOPBACK,
    ComponentSpec,
    Ended,
    FromController,
)
from tailrace.wire.server import ControlServer

FIRST_STORE = 0
STACKS_S = 0.25  # for a component that is given up to write down where it is


class RunHandle(NamedTuple):
    """What belongs to the whole run: components know each other by the token, the controller knows them by their keys,
    and they leave when the lifeline ends."""

    keys: Keyring
    lifeline: int
    left: ComponentRecords | None = None  # by an earlier controller with the same handle; None: there was none
    deal: Deal = Deal()  # who gets which of this machine's cards


class Components:
    def __init__(
        self, config: Config, handle: RunHandle, folder: RunFolder, server: ControlServer, control: RunControl
    ) -> None:
        self.config = config
        self.handle = handle
        self.server = server
        self.control = control
        self._folder = folder
        self._hosts = Hosts()
        self._ranks = TrainerRanks(config, self._hosts, handle.keys, folder)
        self._provision = Provision(config, server.endpoint, folder.path / JOIN_KEY)
        self._ranks_wait = False  # there is no room for all of them
        self._short_since: dict[tuple[str, int], float] = {}  # when a component could first not be started
        self._local = LocalProcesses(folder, server.port, self._ended, handle.deal)
        self.admission = HostAdmission(config, self._hosts, server, control, self)
        self.stores = StoreDirectory(handle.keys, control, self._local.processes, self.send)

    @property
    def join_key(self) -> JoinKey | None:
        """What another machine needs to join; None: it cannot."""
        return JoinKey(self.server.fingerprint, self.handle.keys.token) if self.server.fingerprint else None

    def get(self, role: str, id: int) -> Process | None:
        return self._local.processes.get((role, id))

    def named(self, name: str) -> Process | None:
        role, _, number = name.partition("/")[0].rpartition("-")
        process = self.get(role, int(number)) if number.isdecimal() else None
        return process if process is not None and process.spec.name == name else None

    def age_s(self, role: str, id: int) -> float:
        """How long ago it was last heard."""
        process = self.get(role, id)
        if process is None:
            return 0.0  # that it is lost is about to be told
        return self.server.liveness.age_s(process.spec.name)

    def addresses(self, relays: tuple[RelayId, ...]) -> dict[RelayId, str]:
        """Where these take weights, as far as they are there. One that starts is not yet."""
        found = {id: self.get("relay", id) for id in relays}
        return {id: _address(process) for id, process in found.items() if process is not None and process.address}

    def publish_addresses(self, master: RelayId) -> dict[RelayId, str]:
        """Where the trainer's weights go: to the master, and to the relays on the hosts of its ranks."""
        trainer = self.get("trainer", TRAINER)
        return self.addresses((master, *(trainer.spec.rank_hosts if trainer else ())))

    def send(self, role: str, id: int, message: FromController) -> None:
        """To be sent once the books are closed. A component that is gone gets nothing: control will hear of its
        loss."""
        process = self.get(role, id)
        if process is not None and process.joined:
            self.control.then(self.server.send(process.spec.name, message))

    # --------------------------------------------------------------------------------------------------------- starting

    def start_all(self) -> None:
        """A resumed run: whoever was there is gone with the supervisor of then."""
        self._start("store", FIRST_STORE)
        self._start("trainer", TRAINER)
        for id in range(self.config.local.relays):
            self._start("relay", id)
        for id in range(self.config.local.replicas):
            self._start("replica", id)

    def start(self, command: Start) -> None:
        process = self.get(command.role, command.id)
        if process is None or process.joined or not process.alive:  # else it is on its way
            self._start(command.role, command.id)

    def _start(self, role: str, id: int) -> None:
        """Once the books are closed: nobody may be there that the journal does not know."""
        self.control.then(self._started(role, id))

    async def _started(self, role: str, id: int) -> None:
        earlier, host = self.get(role, id), self._hosts.find(role, id)
        if host is None and not self.is_ours(role, id):
            return  # its host has left
        used = earlier.spec.incarnation if earlier else 0
        spec = self._spec(role, id, 1 + max(self._known_incarnation(role, id), used))
        self._local.hosts = self._hosts.traces
        try:
            if role == "trainer":
                self._start_ranks(spec)
            else:
                self._expect(self._local.start(spec, [host.assign(spec)] if host else []))
            self._short_since.pop((role, id), None)
        except OSError as error:
            self._cannot_start(role, id, error)

    def _start_ranks(self, spec: ComponentSpec) -> None:
        """Those on other machines begin with the next answers to these."""
        specs = self._ranks.specs(spec)
        self._ranks_wait = not specs
        if specs:
            self._expect(self._local.start(specs[0], self._ranks.members(specs)))
        else:
            self.control.tell(TrainerWaits(self._provision.for_ranks(self._ranks.missing)))
            self.look_for_missing()  # now: the next look may come after somebody who brings them

    def _cannot_start(self, role: str, id: int, error: OSError) -> None:
        """There are no descriptors, no memory or no processes left. Others may give some back: it is tried again for as
        long as a start may take."""
        process, now = self.get(role, id), self.control.now
        since = self._short_since.setdefault((role, id), now)
        if process is None or (error.errno in SHORTAGE and now - since < self.config.local.start_s):
            if since == now:
                self.control.note(f"{role} {id} cannot be started ({error.strerror}); it is tried again")
            asyncio.get_running_loop().call_later(SHORTAGE_S, self._start, role, id)
        else:
            del self._short_since[role, id]
            self._not_up(process, f"could not be started: {error.strerror}")

    def _spec(self, role: str, id: int, incarnation: int) -> ComponentSpec:
        host = self._hosts.find(role, id)
        away = self.config.local.listen if self.config.relay.listen == LOOPBACK else ""
        token, worker = self.handle.keys.token, host.worker if host else ""
        spec = ComponentSpec(
            role=role,
            id=id,
            incarnation=incarnation,
            endpoint=self.server.endpoint,
            token=stranger_token(token, worker) if worker else token,
            folder=str(self._folder.path),
            folder_id=self._folder.identity,
            config=self.config,
            lifeline=self.handle.lifeline,
            host=host.id if host else id % self.config.local.relays,
            listen=away or self.config.relay.listen,
            run=self.control.run_id,
            step=self.control.state.training.version,
            worker=worker,
        )
        return replace(spec, key=self.handle.keys.of(spec.name).hex())

    def is_ours(self, role: str, id: int) -> bool:
        """A component of this machine."""
        own = {"relay": self.config.local.relays, "replica": self.config.local.replicas}
        return id < own.get(role, 1)

    def _known_incarnation(self, role: str, id: int) -> int:
        """The last one that control has heard of."""
        state = self.control.state
        records: dict[str, Any] = {
            "replica": state.fleet.replicas,
            "relay": state.relays.relays,
            "store": state.stores.stores,
            "trainer": {TRAINER: state.training},
        }
        known = records[role].get(id)
        return known.incarnation if known else 0

    # ---------------------------------------------------------------------------------------------- until it has joined

    def _expect(self, process: Process) -> None:
        """It has to join in time."""
        self.control.later(self.config.local.start_s, partial(self._overdue, process))
        self._look_after(process, 0)

    def _look_after(self, process: Process, stopped: int) -> None:
        """While it starts its heart does not beat yet: a process that was stopped is seen from outside."""
        if not self._is_starting(process):
            return
        stopped = stopped + 1 if any(is_stopped(child.pid) for child in process.children) else 0
        if stopped > self.config.health.strikes:
            process.kill()
            self._not_up(process, "was stopped before it was up")
        else:
            wait_s = self.config.health.heartbeat_s
            asyncio.get_running_loop().call_later(wait_s, self._look_after, process, stopped)

    def _overdue(self, process: Process) -> None:
        if self._is_starting(process):
            process.kill()
            log = "the logs of its hosts" if process.is_elsewhere else process.log
            self._not_up(process, f"is not up after {self.config.local.start_s:g} s (local.start_s); see {log}")

    def _is_starting(self, process: Process) -> bool:
        current = self.get(process.spec.role, process.spec.id) is process
        return current and not process.joined and not process.dismissed and not self.control.stopped

    def introduced(self, process: Process, address: str, arena: str) -> None:
        if (process.address, process.arena) != (address, arena):
            process.address, process.arena = address, arena
            self._local.write()

    def turn_away(self, name: str) -> None:
        """It has been replaced, or was started by a controller that died before it could say so."""
        if not name.startswith(HOST):
            self.control.then(self.server.send(name, Ended(complete=False)))

    # ----------------------------------------------------------------------------------------------------------- losses

    def look_for_missing(self) -> None:
        """Whether the run waits for other machines, and for how long."""
        replicas = sum(len(host.trace.replicas) for host in self._hosts.present.values())
        missing = self._ranks.missing if self._ranks_wait else 0
        for sentence in self._provision.look(self.control.now, missing, replicas):
            self.control.report(sentence)
        if overdue := self._provision.overdue(self.control.now):
            self.control.fail(overdue)

    def collapsed(self, process: Process, reason: str, expected: bool) -> None:
        """A component says why it cannot go on. If it is at work and would fail again, neither can the run. A rank may
        say so though its end is known: another one had ended before."""
        if process.dismissed:
            return
        process.dismissed = True
        for other in process.children[1:]:
            other.send(signal.SIGKILL)
        at_work = process.joined or process.spec.role == "store"  # what is wrong with its file is so the next time
        if expected and at_work and self.is_ours(process.spec.role, process.spec.id):
            self.control.fail(f"{process.title} cannot go on: {reason}")
        elif not process.joined:
            self._not_up(process, f"cannot start: {reason}", final=expected)
        else:
            self._lost(process, reason)

    def _ended(self, process: Process, how: str) -> None:
        if process.joined:
            self._lost(process, how)
        elif process.is_elsewhere:
            self._not_up(process, f"{how} before it was up")
        else:
            tail = last_lines(process.log)
            self._not_up(process, f"{how} before it was up; the end of {process.log} says:\n{tail}")

    def _not_up(self, process: Process, how: str, final: bool = False) -> None:
        """Who has been up before in this run is tried again, by control's rules; so are ranks on several machines,
        unless it is known that this comes to nothing (`final`). Without a component of its own that never was, a run
        cannot go on; without another machine it can."""
        spec = process.spec
        sentence = f"{process.title} {how}"
        host = self._hosts.find(spec.role, spec.id)
        spread = spec.role == "trainer" and process.is_elsewhere
        if self._known_incarnation(spec.role, spec.id) or (spread and not final):
            self._lost(process, how)
        elif host is not None:
            self.admission.send_away(host, sentence)
        elif self.is_ours(spec.role, spec.id):
            self.control.fail(sentence)

    def _lost(self, process: Process, reason: str) -> None:
        match process.spec.role:
            case "replica":
                self.control.tell(ReplicaLost(process.spec.id, process.incarnation, reason))
            case "relay":
                self.control.tell(RelayLost(process.spec.id, process.incarnation, reason))
            case "store":
                self.control.tell(StoreLost(process.spec.id, process.incarnation, reason))
            case _:
                self.control.tell(TrainerLost(process.incarnation, reason))

    def give_up(self, command: GiveUp) -> None:
        process = self.get(command.role, command.id)
        if process is not None and process.incarnation == command.incarnation:
            process.dismissed = True
            self._diagnose(process, command.reason)
            asyncio.get_running_loop().call_later(STACKS_S, process.kill)

    def cut_off(self, command: CutOff) -> None:
        """Should it be heard again, it has to introduce itself."""
        process = self.get(command.role, command.id)
        if process is not None and process.incarnation == command.incarnation:
            self.server.hang_up(process.spec.name)

    def _diagnose(self, process: Process, reason: str) -> None:
        """What its processes are doing, to its log; their stacks too, where they can still be had. Those on another
        machine are out of sight."""
        seen = [child for child in process.children if child.pid]
        if not seen:
            return
        with suppress(OSError), open_log(process.log) as log:
            for child in seen:
                to_stream(log).warning("%s is given up (%s): %s", process.title, reason, look_at(child.pid))
                ask_for_stacks(child.pid)

    # --------------------------------------------------------------------------------------- from an earlier controller

    def missing(self, left: ComponentRecords | None) -> list[Event]:
        """Who outlived the last controller is adopted; of the others control has to be told."""
        state, gone = self.control.state, WITH_THE_RUN
        here: set[tuple[str, int]] = set()
        if left is not None:
            gone = "it ended while the controller was away"
            self._find_hosts(left)
            here = {(one.role, one.id) for one in left.components if self._adopt(one)}
        relays = [one for one in state.relays.relays.values() if one.live and ("relay", one.id) not in here]
        replicas = [one for one in state.fleet.replicas.values() if one.live and ("replica", one.id) not in here]
        stores = [one for one in state.stores.stores.values() if one.live and ("store", one.id) not in here]
        events: list[Event] = [StoreLost(one.id, one.incarnation, gone) for one in stores]
        events += [RelayLost(one.id, one.incarnation, gone) for one in relays]
        events += [ReplicaLost(one.id, one.incarnation, gone) for one in replicas]
        events += [HostLeft(id, gone) for id in self._absent_hosts()]
        return events if ("trainer", TRAINER) in here else [*events, TrainerLost(state.training.incarnation, gone)]

    def _adopt(self, trace: ComponentRecord) -> bool:
        """True if the component lives and control has heard of it, or soon will."""
        spec, host = self._spec(trace.role, trace.id, trace.incarnation), self._hosts.find(trace.role, trace.id)
        if host is None and not self.is_ours(trace.role, trace.id):
            return False
        away = self._ranks.adopted(spec, trace) if trace.role == "trainer" else {0: host.assign(spec)} if host else {}
        process = self._local.adopt(replace(spec, rank_hosts=trace.rank_hosts), trace, away)
        known = self._known_incarnation(trace.role, trace.id)
        if known >= trace.incarnation:
            process.joined, process.incarnation = True, known
        else:
            self._expect(process)
        return process.alive and not process.dismissed

    def _find_hosts(self, left: ComponentRecords) -> None:
        """Those of which the journal knows; others are new when they are heard of."""
        for one in left.hosts:
            if one.id in self.control.state.relays.relays:
                self._hosts.add(one)
        self._local.hosts = self._hosts.traces

    def _absent_hosts(self) -> list[RelayId]:
        known = [one.id for one in self.control.state.relays.relays.values() if not one.departed]
        return [id for id in known if not self.is_ours("relay", id) and self._hosts.find("relay", id) is None]

    def refuse(self, process: Process, what: str) -> None:
        """It has sent what it must not: it is ended, and counts as lost."""
        if not process.refused:
            process.refused = True
            self.control.note(f"{process.title} is dropped: it sent {what}")
            process.kill()
            self.server.hang_up(process.spec.name)
            self._lost(process, f"it was dropped, because it sent {what}")
            if process.spec.worker:
                self.control.tell(WorkerRefused(process.spec.worker, what))

    # --------------------------------------------------------------------------------------------------- other machines

    def note_those_elsewhere(self) -> None:
        """So that a later controller finds them."""
        self._local.note_those_elsewhere()

    def host_joined(self) -> None:
        """It may have the room that the trainer waits for."""
        if self._ranks_wait:
            self.control.then(self._started_at_last())

    async def _started_at_last(self) -> None:
        if self._ranks_wait:
            await self._started("trainer", TRAINER)

    def host_left(self, host: Host, reason: str) -> None:
        """With all that was there."""
        self._hosts.remove(host)
        for key in host.components:
            process = self._local.processes.pop(key, None)
            if process is not None:
                if process.joined and not process.dismissed:
                    self._lost(process, reason)
                process.dismissed = True
                self.server.hang_up(process.spec.name)
        host.leave(reason)
        self.control.tell(HostLeft(host.id, reason))
        self._local.hosts = self._hosts.traces
        self._local.write()

    # ---------------------------------------------------------------------------------------------------------- the end

    def kill(self) -> None:
        for process in self._local.processes.values():
            process.kill()

    async def end(self, complete: bool, patience_s: float) -> None:
        """Everybody is told, and waited for; sample stores last, because others still read and write there. They may be
        on other hosts, so these come last too. The trainer, wherever it is, has a checkpoint to write."""
        everybody = list(self._local.processes.values())
        for process in everybody:
            process.dismissed = True
        away = {
            name for host in self._hosts.present.values() for name in host.distant if not name.startswith("trainer")
        }
        first = [one for one in everybody if one.spec.role != "store" and one.spec.name not in away]
        hearing = asyncio.create_task(self.admission.hear_endings())
        await self._end(first, complete, patience_s)
        hearing.cancel()
        for host in self._hosts.present.values():
            await self.server.send(host.name, Ended(complete))
            host.leave("the run has ended")  # it ends what is there
        await self._end([one for one in everybody if one not in first], complete, patience_s)
        self._local.forget()
        self._ranks.forget()

    async def _end(self, processes: list[Process], complete: bool, patience_s: float) -> None:
        for process in processes:
            if process.joined:
                await self.server.send(process.spec.name, Ended(complete))
            else:
                process.kill()
        await self._local.end(processes, patience_s)


def _address(relay: Process) -> str:
    """A stranger's has a token of its own, which whoever forwards to it derives from the stranger's name."""
    return f"{relay.address}@{relay.spec.worker}" if relay.spec.worker else relay.address
