"""The wall-clock driver: carries out the control plane's commands on real processes and reports what happens.

One asyncio loop. Whatever arrives is handled in batches: events go through the control plane, payloads into the vault,
everything is committed to `run.db` in one transaction, and only then are the commands sent. So a crash at any moment
leaves a journal from which the run goes on, and nobody has ever been told what the journal does not know.

Parts outlive a controller that is killed. The next one, started by the same keeper, adopts them and asks each to join
again; what they report is counted exactly once (see `wire`), so they go on with the work that they have in hand.

Other machines may join and leave (see `hosts`). What goes wrong there is their loss, never the end of the run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from tailrace import __version__
from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    TRAINER,
    Command,
    ControllerRestarted,
    Drop,
    Event,
    FetchPrompts,
    Finished,
    Forget,
    Generate,
    GiveUp,
    HostJoined,
    HostLeft,
    LoadWeights,
    PromptsAdded,
    Publish,
    RelayJoined,
    RelayLost,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Route,
    RunStarted,
    SampleFailed,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrainerLost,
)
from tailrace.runtime.hosts import Host, Hosts
from tailrace.runtime.local import Local, Process, Trace, Traces, last_lines
from tailrace.store.run import RunStore
from tailrace.types import Prompt, RelayId, Row
from tailrace.watchdog import Watchdog, ask_for_stacks, is_stopped, look_at
from tailrace.wire.door import Door, JoinKey, public_key
from tailrace.wire.hub import Hub
from tailrace.wire.messages import (
    LOOPBACK,
    OFFER_S,
    Acknowledged,
    Collapsed,
    Dismissed,
    Ended,
    FromController,
    FromPart,
    Grown,
    Hello,
    Measured,
    Offer,
    Ordered,
    Reported,
    Spec,
    Wanted,
)

SNAPSHOT_EVERY = 5000  # events; what a resumed run has to go through again at most
ENDING_S = 60.0  # for the trainer's last checkpoint
ACKNOWLEDGE_S = 0.5  # how often parts are told what is committed
INTERRUPTED = "interrupted"
STUCK_S = 10.0  # at one thing; then the controller writes to its log where it is
STACKS_S = 0.25  # for a part that is given up to write down where it is
AGENT = "host-"  # what the names of other machines begin with


class RunError(ValueError):
    """Why a run cannot go on, for the person who started it."""


class Source(Protocol):
    """Where prompts come from. The run is over after `total` of them; None: never. Asked by one thread at a time."""

    @property
    def total(self) -> int | None: ...

    def rows(self, start: int, count: int) -> list[Row]: ...


class Observer(Protocol):
    """Whoever watches: the terminal, the summary."""

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None: ...

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None: ...


class Tie(NamedTuple):
    """What binds a run together: parts know each other by the token and leave when the lifeline ends."""

    token: str
    lifeline: int
    door: bytes = b""  # the secret key of the controller, for runs that other machines may join
    left: Traces | None = None  # by an earlier controller with the same tie; None: there was none


class Controller:
    def __init__(self, store: RunStore, config: Config, source: Source, tie: Tie, observer: Observer) -> None:
        self.store = store
        self.config = config
        self.source = source
        self.tie = tie
        self.observer = observer
        if tie.left is None:
            store.hear_anew()
        self.hub = self._hub(store.heard)
        self.hosts = Hosts()
        self.local = Local(store.folder, self.hub.port, self._process_ended)
        self.plane, self.resumed = _restored(store, config)
        self.stopped = ""
        self.error: RunError | None = None
        self._began = time.monotonic() - store.last_now
        self._events: deque[Event] = deque()
        self._outbox: list[Coroutine[Any, Any, None]] = []
        self._wake = asyncio.Event()
        self._since_snapshot = 0
        self._unacknowledged: dict[str, int] = {}  # the last committed report of each part
        self._acknowledge_at = 0.0
        self._crash: BaseException | None = None
        self._failures = 0  # samples in a row that could not be judged
        self._fetching: asyncio.Task[None] | None = None
        self._actions: dict[type[Command], Callable[[Any], None]] = {
            FetchPrompts: self._fetch_prompts,
            Generate: self._generate,
            Release: self._to_replica,
            LoadWeights: self._load_weights,
            Train: self._train,
            Publish: self._publish,
            Route: self._route,
            Drop: lambda command: self._to("relay", command.relay, Ordered(command)),
            Forget: self._forget,
            GiveUp: self._give_up,
            Start: self._start,
            SetTimer: self._set_timer,
            Stop: self._stop,
        }

    def _hub(self, heard: Mapping[str, int]) -> Hub:
        port = (self.tie.left and self.tie.left.port) or self.config.local.port
        if not self.config.local.listen:
            return Hub(self.tie.token, port, heard)
        return Hub(self.tie.token, port, heard, Door(self.tie.door, self.tie.token), self.config.local.listen)

    @property
    def join_key(self) -> JoinKey | None:
        """What another machine needs to join; None: it cannot."""
        return JoinKey(public_key(self.tie.door), self.tie.token) if self.config.local.listen else None

    @property
    def complete(self) -> bool:
        """Control has ended the run: there is nothing to resume."""
        return bool(self.plane.state.stopped) and not self.plane.state.failed and not self.error

    @property
    def now(self) -> float:
        """Seconds that this run has been running, resumptions included, pauses left out."""
        return time.monotonic() - self._began

    # ------------------------------------------------------------------------------------------------------ running

    async def run(self) -> str:
        """Until control stops the run, or somebody calls `interrupt`. Returns the reason."""
        self._events += self._taking_up() if self.resumed else [self._beginning]
        listening = asyncio.create_task(self._listen())
        listening.add_done_callback(self._deaf)
        try:
            if self.resumed and self.tie.left is None:
                self._start_everybody()
            await self._until_stopped()
            self.store.snapshot(self.store.last_seq, self.plane.snapshot())
        finally:
            listening.cancel()
            await self._end()
        if self.error:
            raise self.error
        return self.stopped

    @property
    def _beginning(self) -> RunStarted:
        return RunStarted(self.config.local.replicas, self.config.local.relays)

    def _taking_up(self) -> list[Event]:
        """Who outlived the last controller is adopted; of the others control has to be told."""
        state, gone = self.plane.state, "the run was stopped"
        here: set[tuple[str, int]] = set()
        if self.tie.left is not None:
            gone = "it ended while the controller was away"
            self._find_hosts(self.tie.left)
            here = {(one.role, one.id) for one in self.tie.left.parts if self._adopt(one)}
        relays = [one for one in state.relays.relays.values() if one.live and ("relay", one.id) not in here]
        replicas = [one for one in state.fleet.replicas.values() if one.live and ("replica", one.id) not in here]
        events: list[Event] = [ControllerRestarted()]
        events += [RelayLost(one.id, one.incarnation, gone) for one in relays]
        events += [ReplicaLost(one.id, one.incarnation, gone) for one in replicas]
        events += [HostLeft(id, gone) for id in self._absent_hosts()]
        return events if ("trainer", TRAINER) in here else [*events, TrainerLost(state.training.incarnation, gone)]

    def _adopt(self, trace: Trace) -> bool:
        """True if the part lives and control has heard of it, or soon will."""
        spec, host = self._spec(trace.role, trace.id, trace.incarnation), self.hosts.find(trace.role, trace.id)
        if host is None and not self._is_ours(trace.role, trace.id):
            return False
        process = self.local.adopt(spec, trace, host and host.place(spec))
        known = self._known_incarnation(trace.role, trace.id)
        if known >= trace.incarnation:
            process.joined, process.incarnation = True, known
        else:
            self._expect(process)
        return process.alive and not process.dismissed

    def interrupt(self) -> None:
        """Stop as soon as what is under way is written down; the run can be resumed. The second time: at once."""
        if self.stopped:
            for process in self.local.processes.values():
                process.kill()
        self.stopped = self.stopped or INTERRUPTED
        self._wake.set()

    def _deaf(self, task: asyncio.Task[None]) -> None:
        """Nothing would ever be heard again: better to end with the error than to wait."""
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._wake.set()

    async def _until_stopped(self) -> None:
        self.local.logs.mkdir(parents=True, exist_ok=True)
        with (self.local.logs / "controller.log").open("a") as log, Watchdog("the controller", _say, log) as dog:
            await self._turn_over(dog)

    async def _turn_over(self, watchdog: Watchdog) -> None:
        while not self.stopped and not self.error:
            watchdog.expect("handling events and writing them to run.db", STUCK_S, "look at the disk of the run")
            self._handle_events()
            self._unacknowledged |= self.store.commit()
            outbox, self._outbox = self._outbox, []
            watchdog.expect("sending orders and starting parts", STUCK_S)
            for sending in outbox:
                await sending
            await self._acknowledge()
            if not self._events:
                self._wake.clear()
                watchdog.expect("waiting for reports, or writing what they bring to the vault", STUCK_S)
                await self._wake.wait()
            if self._crash:
                raise self._crash

    async def _listen(self) -> None:
        while True:
            for sender, number, message in await self.hub.receive():
                self.store.hear(sender, number)
                self._hear(sender, message)
            self._wake.set()
            await asyncio.sleep(0)

    async def _acknowledge(self) -> None:
        """Parts keep their reports until they are known to be safe."""
        if self.now < self._acknowledge_at:
            return
        self._acknowledge_at = self.now + ACKNOWLEDGE_S
        committed, self._unacknowledged = self._unacknowledged, {}
        for name, number in committed.items():
            await self.hub.send(name, Acknowledged(number))

    def _handle_events(self) -> None:
        while self._events and not self.stopped:
            event, now = self._events.popleft(), self.now
            self._keep(event)
            commands = self.plane.handle(now, event)
            seq = self.store.record(now, event, commands)
            self.observer.see(now, event, commands)
            for command in commands:
                self._actions.get(type(command), self._to_replica)(command)
            self._since_snapshot += 1
            if self._since_snapshot >= SNAPSHOT_EVERY:
                self._since_snapshot = 0
                self.store.snapshot(seq, self.plane.snapshot())

    def _keep(self, event: Event) -> None:
        """What the vault has to know of an event."""
        match event:
            case Finished(_, meta):
                self._failures = 0
                self.store.vault.finish(meta.id, meta.epoch, meta.finish, meta.reward)
            case SampleFailed(_, trajectory, epoch, reason):
                self.store.vault.fail(trajectory, epoch, reason)
                self._count_failure(reason)
            case Trained(_, step, part):
                past = self.plane.state.training.past.get(step)
                groups = past.parts[part] if past and part < len(past.parts) else ()
                self.store.vault.trained([id for group in groups for id in group.trajectories], step)
            case _:
                pass

    def _count_failure(self, reason: str) -> None:
        """One sample may fail; when none succeeds any more, going on would only burn the prompts."""
        self._failures += 1
        if self._failures >= 2 * self.config.workload.group_size * self.config.groups.attempts:
            self._fail(f"{self._failures} samples in a row could not be judged; the last one because {reason}")

    async def _end(self) -> None:
        """Everybody is told, and waited for."""
        patience = ENDING_S if not self.error else 2.0
        for process in self.local.processes.values():
            if process.joined:
                await self.hub.send(process.spec.name, Ended(self.complete))
            else:
                process.kill()
        for host in self.hosts.present.values():
            await self.hub.send(host.name, Ended(self.complete))
            host.leave("the run has ended")  # it ends what is there
        await self.local.end(patience)
        self.hub.close()

    # ------------------------------------------------------------------------------------------------------ hearing

    def _hear(self, name: str, message: FromPart) -> None:
        if isinstance(message, Offer):
            self._offered(name, message)
            return
        process = self._process(name)
        if process is None:  # it has been replaced, or was started by a controller that died before it could say so
            if isinstance(message, Hello) and not name.startswith(AGENT):
                self._outbox.append(self.hub.send(name, Ended(complete=False)))
            return
        match message:
            case Hello(address, arena):
                if (process.address, process.arena) != (address, arena):
                    process.address, process.arena = address, arena
                    self.local.write()
            case Reported(event):
                if isinstance(event, ReplicaJoined | RelayJoined | TrainerJoined):
                    process.joined, process.incarnation = True, event.incarnation
                self._events.append(event)
            case Grown(growths):
                for growth in growths:
                    self.store.vault.append(growth.trajectory, growth.epoch, growth.segments)
            case Measured(step, values):
                source = process.spec.role if process.spec.role == "trainer" else f"r{process.spec.id}"
                self.store.metrics.measure(self.now, step, source, values)
                self.observer.measure(self.now, step, source, values)
            case Collapsed(reason, expected):
                self._collapsed(process, reason, expected)

    def _process(self, name: str) -> Process | None:
        return next((each for each in self.local.processes.values() if each.spec.name == name), None)

    def _collapsed(self, process: Process, reason: str, expected: bool) -> None:
        """A part says why it cannot go on. If it is at work and would fail again, neither can the run."""
        process.dismissed = True
        if not process.joined:
            self._not_up(process, f"cannot start: {reason}")
        elif expected and self._is_ours(process.spec.role, process.spec.id):
            self._fail(f"{_title(process.spec)} cannot go on: {reason}")
        else:
            self._lost(process, reason)

    def _process_ended(self, process: Process, how: str) -> None:
        if process.joined:
            self._lost(process, how)
        elif not self._is_ours(process.spec.role, process.spec.id):
            self._not_up(process, f"{how} before it was up")
        else:
            tail = last_lines(process.log)
            self._not_up(process, f"{how} before it was up; the end of {process.log} says:\n{tail}")
        self._wake.set()

    def _not_up(self, process: Process, how: str) -> None:
        """Who has been up before in this run is tried again, by control's rules. Without a part of its own that never
        was, a run cannot go on; without another machine it can."""
        spec = process.spec
        sentence = f"{_title(spec)} {how}"
        host = self.hosts.find(spec.role, spec.id)
        if self._known_incarnation(spec.role, spec.id):
            self._lost(process, how)
        elif host is not None:
            self._send_away(host, sentence)
        elif self._is_ours(spec.role, spec.id):
            self._fail(sentence)

    def _lost(self, process: Process, reason: str) -> None:
        match process.spec.role:
            case "replica":
                self._events.append(ReplicaLost(process.spec.id, process.incarnation, reason))
            case "relay":
                self._events.append(RelayLost(process.spec.id, process.incarnation, reason))
            case _:
                self._events.append(TrainerLost(process.incarnation, reason))

    def _fail(self, reason: str) -> None:
        self.error = self.error or RunError(reason)
        self._wake.set()

    # -------------------------------------------------------------------------------------------------------- hosts

    def _offered(self, name: str, offer: Offer) -> None:
        host = self.hosts.present.get(name)
        if not offer.replicas:
            if host is not None:
                self._host_left(host, "its host left")
            self._outbox.append(self.hub.send(name, Wanted(())))
        elif offer.release != __version__:
            reason = f"this run is of Tailrace {__version__}, the worker of {offer.release}; install the same there"
            self._outbox.append(self.hub.send(name, Dismissed(reason)))
        else:
            host = host or self._welcome(name, offer.replicas)
            self._outbox.append(self.hub.send(name, host.hear(self.now, offer.parts)))

    def _welcome(self, name: str, count: int) -> Host:
        """A machine that is new, or has been away for too long, gets numbers that nobody has had."""
        state, present = self.plane.state, self.hosts.present.values()
        hosts = [self.config.local.relays - 1, *state.relays.relays, *[host.id for host in present]]
        given = [id for host in present for id in host.trace.replicas]
        first = 1 + max([self.config.local.replicas - 1, *state.fleet.replicas, *given])
        host = self.hosts.add(name, 1 + max(hosts), tuple(range(first, first + count)), self.now)
        self._events.append(HostJoined(host.id, host.trace.replicas))
        return host

    def _host_left(self, host: Host, reason: str) -> None:
        del self.hosts.present[host.name]
        for place, process in list(self.local.processes.items()):
            if host.has(*place):
                if process.joined and not process.dismissed:
                    self._lost(process, reason)
                process.dismissed = True
                del self.local.processes[place]
        host.leave(reason)
        self._events.append(HostLeft(host.id, reason))
        self._write_hosts()
        self._wake.set()

    def _send_away(self, host: Host, reason: str) -> None:
        self._outbox.append(self.hub.send(host.name, Dismissed(reason)))
        self._host_left(host, reason)

    def _find_silent_hosts(self) -> None:
        patience = self.config.health.strikes * max(self.config.health.heartbeat_s, OFFER_S)
        for host in self.hosts.silent(self.now - patience):
            self._host_left(host, f"nothing was heard of its host for {self.now - host.seen:.1f} s")

    def _find_hosts(self, left: Traces) -> None:
        """Those of which the journal knows; others are new when they are heard of."""
        for one in left.hosts:
            if one.id in self.plane.state.relays.relays:
                self.hosts.add(one.name, one.id, one.replicas, self.now)
        self.local.hosts = tuple([host.trace for host in self.hosts.present.values()])

    def _absent_hosts(self) -> list[RelayId]:
        known = [one.id for one in self.plane.state.relays.relays.values() if not one.departed]
        return [id for id in known if not self._is_ours("relay", id) and self.hosts.find("relay", id) is None]

    def _write_hosts(self) -> None:
        self.local.hosts = tuple([host.trace for host in self.hosts.present.values()])
        self.local.write()

    def _is_ours(self, role: str, id: int) -> bool:
        """A part of this machine."""
        own = {"trainer": TRAINER + 1, "relay": self.config.local.relays, "replica": self.config.local.replicas}
        return id < own[role]

    # ----------------------------------------------------------------------------------------------------- commands

    def _fetch_prompts(self, command: FetchPrompts) -> None:
        """In a thread: rendering many prompts, or opening a large task, must not keep everybody waiting."""
        self._fetching = asyncio.create_task(self._fetch(command))
        self._fetching.add_done_callback(self._deaf)

    async def _fetch(self, command: FetchPrompts) -> None:
        rows, last = await asyncio.to_thread(self._read, command)
        self.store.vault.add_prompts(rows)
        prompts = tuple([Prompt(row.id, len(row.tokens)) for row in rows])
        self._events.append(PromptsAdded(command.start, prompts, last))
        self._wake.set()

    def _read(self, command: FetchPrompts) -> tuple[list[Row], bool]:
        total = self.source.total
        count = command.count if total is None else max(0, min(command.count, total - command.start))
        return self.source.rows(command.start, count), total is not None and command.start + count >= total

    def _generate(self, command: Generate) -> None:
        vault = self.store.vault
        for one in command.requests:
            vault.assign(one.trajectory, one.epoch, one.group, one.prompt, one.resume)
        prompts = {one.prompt for one in command.requests}
        rows = {id: Row(id, one.tokens, one.prompt, one.columns) for id in prompts if (one := vault.row(id))}
        prefixes = {one.trajectory: vault.prefix(one.trajectory) for one in command.requests if one.resume}
        self._to("replica", command.replica, Ordered(command, rows=rows, prefixes=prefixes))

    def _load_weights(self, command: LoadWeights) -> None:
        relay = self.local.processes.get(("relay", command.relay))
        if relay is not None:  # else control is about to hear that it is gone
            self._to(
                "replica",
                command.replica,
                Ordered(command, addresses=self._listening((command.relay,)), arena=relay.arena),
            )

    def _to_replica(self, command: Any) -> None:
        self._to("replica", command.replica, Ordered(command))

    def _train(self, command: Train) -> None:
        groups = tuple([tuple(self.store.vault.read(group.trajectories)) for group in command.groups])
        self._to("trainer", TRAINER, Ordered(command, groups=groups))

    def _publish(self, command: Publish) -> None:
        addresses = self._listening((command.relay,))
        if addresses:
            self._to("trainer", TRAINER, Ordered(command, addresses=addresses))

    def _route(self, command: Route) -> None:
        self._to("relay", command.relay, Ordered(command, addresses=self._listening(command.targets)))

    def _listening(self, relays: tuple[RelayId, ...]) -> dict[RelayId, str]:
        found = {id: self.local.processes.get(("relay", id)) for id in relays}
        return {id: process.address for id, process in found.items() if process is not None}

    def _forget(self, command: Forget) -> None:
        self.store.vault.forget(command.trajectories, self.config.run.archive, command.reason)

    def _set_timer(self, command: SetTimer) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, command.at - self.now), self._fire, command.timer, command.at)

    def _fire(self, timer: str, at: float) -> None:
        """A controller that stood still, stopped or waiting for its disk, first hears what was said meanwhile."""
        pause = self.config.health.heartbeat_s
        if self.now - at > pause:
            asyncio.get_running_loop().call_later(pause, self._fire, timer, inf)
            return
        if timer == "health":
            self._find_silent_hosts()
        self._events.append(TimerFired(timer))
        self._wake.set()

    def _stop(self, command: Stop) -> None:
        if command.failed:
            self._fail(command.reason)
        else:
            self.stopped = command.reason

    def _to(self, role: str, id: int, message: FromController) -> None:
        """To be sent once the books are closed. A part that is gone gets nothing: control will hear of its loss."""
        process = self.local.processes.get((role, id))
        if process is not None and process.joined:
            self._outbox.append(self.hub.send(process.spec.name, message))

    # ----------------------------------------------------------------------------------------------------- starting

    def _give_up(self, command: GiveUp) -> None:
        process = self.local.processes.get((command.part, command.id))
        if process is not None and process.incarnation == command.incarnation:
            process.dismissed = True
            self._diagnose(process, command.reason)
            asyncio.get_running_loop().call_later(STACKS_S, process.kill)

    def _diagnose(self, process: Process, reason: str) -> None:
        """What its processes are doing, to its log; their stacks too, where they can still be had. Those on another
        machine are out of sight."""
        if not self._is_ours(process.spec.role, process.spec.id):
            return
        with process.log.open("a") as log:
            for child in process.children:
                print(f"{_title(process.spec)} is given up ({reason}): {look_at(child.pid)}", file=log, flush=True)
                ask_for_stacks(child.pid)

    def _start(self, command: Start) -> None:
        process = self.local.processes.get((command.part, command.id))
        if process is not None and process.alive and not process.joined:
            return  # it is on its way
        self._start_part(command.part, command.id)

    def _start_everybody(self) -> None:
        """A resumed run: whoever was there is gone with the keeper of then."""
        self._start_part("trainer", TRAINER)
        for id in range(self.config.local.relays):
            self._start_part("relay", id)
        for id in range(self.config.local.replicas):
            self._start_part("replica", id)

    def _start_part(self, role: str, id: int) -> None:
        """Once the books are closed: nobody may be there that the journal does not know."""
        self._outbox.append(self._started(role, id))

    async def _started(self, role: str, id: int) -> None:
        earlier, host = self.local.processes.get((role, id)), self.hosts.find(role, id)
        if host is None and not self._is_ours(role, id):
            return  # its host has left
        used = earlier.spec.incarnation if earlier else 0
        spec = self._spec(role, id, 1 + max(self._known_incarnation(role, id), used))
        self.local.hosts = tuple([host.trace for host in self.hosts.present.values()])
        self.local.start(spec, host and host.place(spec))
        self._expect(self.local.processes[role, id])

    def _spec(self, role: str, id: int, incarnation: int) -> Spec:
        key, host = self.join_key, self.hosts.find(role, id)
        away = self.config.local.listen if self.config.relay.listen == LOOPBACK else ""
        return Spec(
            role=role,
            id=id,
            incarnation=incarnation,
            endpoint=self.hub.endpoint,
            token=self.tie.token,
            folder=str(self.store.folder.resolve()),
            config=self.config,
            lifeline=self.tie.lifeline,
            door=key.door if key else "",
            host=host.id if host else id % self.config.local.relays,
            listen=away or self.config.relay.listen,
            step=self.plane.state.training.version,
        )

    def _known_incarnation(self, role: str, id: int) -> int:
        """The last one that control has heard of."""
        state = self.plane.state
        records: dict[str, Any] = {"replica": state.fleet.replicas, "relay": state.relays.relays}
        known = state.training if role == "trainer" else records[role].get(id)
        return known.incarnation if known else 0

    def _expect(self, process: Process) -> None:
        """It has to join in time."""
        asyncio.get_running_loop().call_later(self.config.local.start_s, self._overdue, process)
        self._look_after(process, 0)

    def _look_after(self, process: Process, stopped: int) -> None:
        """While it starts its heart does not beat yet: a process that was stopped is seen from outside."""
        if not self._is_starting(process):
            return
        stopped = stopped + 1 if any(is_stopped(child.pid) for child in process.children) else 0
        if stopped > self.config.health.strikes:
            process.kill()
            self._not_up(process, "was stopped before it was up")
            self._wake.set()
        else:
            wait_s = self.config.health.heartbeat_s
            asyncio.get_running_loop().call_later(wait_s, self._look_after, process, stopped)

    def _is_starting(self, process: Process) -> bool:
        spec = process.spec
        current = self.local.processes.get((spec.role, spec.id)) is process
        return current and not process.joined and not process.dismissed and not self.stopped

    def _overdue(self, process: Process) -> None:
        if self._is_starting(process):
            process.kill()
            self._not_up(process, f"is not up after {self.config.local.start_s:g} s (local.start_s); see {process.log}")
            self._wake.set()


def _restored(store: RunStore, config: Config) -> tuple[ControlPlane, bool]:
    """The control plane where the journal left it; a fresh one if there is no journal yet."""
    if store.last_seq == 0:
        return ControlPlane(config), False
    snapshot = store.newest_snapshot()
    plane = ControlPlane.restore(config, snapshot.state) if snapshot else ControlPlane(config)
    for entry in store.entries(snapshot.seq if snapshot else 0):
        plane.handle(entry.now, entry.event)
    return plane, True


def _say(sentence: str) -> None:
    """To the terminal: the disk of the log may be what it waits for. Replacing it is for its keeper."""
    print(f"tailrace: the controller is {sentence}", file=sys.stderr, flush=True)


def _title(spec: Spec) -> str:
    return "the trainer" if spec.role == "trainer" else f"{spec.role} {spec.id}"


__all__ = ["INTERRUPTED", "Controller", "RunError", "Source", "Tie"]
