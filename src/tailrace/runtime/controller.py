"""The wall-clock driver: carries out the control plane's commands on real processes and reports what happens.

One asyncio loop. Whatever arrives is handled in batches: events go through the control plane, payloads into the vault,
everything is committed to `run.db` in one transaction, and only then are the commands sent. So a crash at any moment
leaves a journal from which the run goes on, and nobody has ever been told what the journal does not know.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

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
from tailrace.runtime.local import Local, Process, last_lines
from tailrace.store.run import RunStore
from tailrace.types import Prompt, RelayId, Row
from tailrace.wire import (
    Collapsed,
    Ended,
    FromController,
    FromPart,
    Grown,
    Hello,
    Hub,
    Measured,
    Ordered,
    Reported,
    Spec,
)

SNAPSHOT_EVERY = 5000  # events; what a resumed run has to go through again at most
ENDING_S = 60.0  # for the trainer's last checkpoint
INTERRUPTED = "interrupted"


class RunError(ValueError):
    """Why a run cannot go on, for the person who started it."""


class Source(Protocol):
    """Where prompts come from. The run is over after `total` of them; None: never."""

    total: int | None

    def rows(self, start: int, count: int) -> list[Row]: ...


class Observer(Protocol):
    """Whoever watches: the terminal, the summary."""

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None: ...

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None: ...


class Controller:
    def __init__(self, store: RunStore, config: Config, source: Source, token: str, observer: Observer) -> None:
        self.store = store
        self.config = config
        self.source = source
        self.token = token
        self.observer = observer
        self.hub = Hub(token, config.local.port)
        self.local = Local(store.folder, self._process_ended)
        self.plane, self.resumed = _restored(store, config)
        self.stopped = ""
        self.error: RunError | None = None
        self._began = time.monotonic() - store.last_now
        self._events: deque[Event] = deque()
        self._outbox: list[Coroutine[Any, Any, None]] = []
        self._addresses: dict[RelayId, tuple[str, str]] = {}  # where each relay listens, and its arena
        self._wake = asyncio.Event()
        self._since_snapshot = 0
        self._crash: BaseException | None = None
        self._failures = 0  # samples in a row that could not be judged
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
            Start: self._start,
            SetTimer: self._set_timer,
            Stop: self._stop,
        }

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
            if self.resumed:
                await self._start_everybody()
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
        """Whoever was there went with the controller of then."""
        state, gone = self.plane.state, "the run was stopped"
        events: list[Event] = [ControllerRestarted()]
        events += [RelayLost(one.id, one.incarnation, gone) for one in state.relays.relays.values() if one.live]
        events += [ReplicaLost(one.id, one.incarnation, gone) for one in state.fleet.replicas.values() if one.live]
        return [*events, TrainerLost(state.training.incarnation, gone)]

    def interrupt(self) -> None:
        """Stop as soon as what is under way is written down; the run can be resumed. The second time: at once."""
        if self.stopped:
            for process in self.local.processes.values():
                process.kill()
        self.stopped = self.stopped or INTERRUPTED
        self._wake.set()

    def _deaf(self, listening: asyncio.Task[None]) -> None:
        """Nothing would ever be heard again: better to end with the error than to wait."""
        if not listening.cancelled():
            self._crash = listening.exception()
            self._wake.set()

    async def _until_stopped(self) -> None:
        while not self.stopped and not self.error:
            self._handle_events()
            self.store.commit()
            outbox, self._outbox = self._outbox, []
            for sending in outbox:
                await sending
            if not self._events:
                self._wake.clear()
                await self._wake.wait()
            if self._crash:
                raise self._crash

    async def _listen(self) -> None:
        while True:
            for name, message in await self.hub.receive():
                self._hear(name, message)
            self._wake.set()
            await asyncio.sleep(0)

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
        await self.local.end(patience)
        self.hub.close()

    # ------------------------------------------------------------------------------------------------------ hearing

    def _hear(self, name: str, message: FromPart) -> None:
        process = self._process(name)
        if process is None:
            return  # of an incarnation that has been replaced
        match message:
            case Hello(_, address, arena):
                if process.spec.role == "relay":
                    self._addresses[process.spec.id] = address, arena
            case Reported(event):
                process.joined = process.joined or isinstance(event, ReplicaJoined | RelayJoined | TrainerJoined)
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
        """A part says why it cannot go on. If it never began, or would fail again, neither can the run."""
        process.dismissed = True
        if not process.joined:
            self._fail(f"{_title(process.spec)} cannot start: {reason}")
        elif expected:
            self._fail(f"{_title(process.spec)} cannot go on: {reason}")
        else:
            self._lost(process, reason)

    def _process_ended(self, process: Process, how: str) -> None:
        if process.joined:
            self._lost(process, how)
        else:
            tail = last_lines(process.log)
            self._fail(f"{_title(process.spec)} {how} before it was up; the end of {process.log} says:\n{tail}")
        self._wake.set()

    def _lost(self, process: Process, reason: str) -> None:
        spec = process.spec
        match spec.role:
            case "replica":
                self._events.append(ReplicaLost(spec.id, spec.incarnation, reason))
            case "relay":
                self._events.append(RelayLost(spec.id, spec.incarnation, reason))
            case _:
                self._events.append(TrainerLost(spec.incarnation, reason))

    def _fail(self, reason: str) -> None:
        self.error = self.error or RunError(reason)
        self._wake.set()

    # ----------------------------------------------------------------------------------------------------- commands

    def _fetch_prompts(self, command: FetchPrompts) -> None:
        total = self.source.total
        count = command.count if total is None else max(0, min(command.count, total - command.start))
        rows = self.source.rows(command.start, count)
        self.store.vault.add_prompts(rows)
        prompts = tuple([Prompt(row.id, len(row.tokens)) for row in rows])
        last = total is not None and command.start + count >= total
        self._events.append(PromptsAdded(command.start, prompts, last))

    def _generate(self, command: Generate) -> None:
        vault = self.store.vault
        for one in command.requests:
            vault.assign(one.trajectory, one.epoch, one.group, one.prompt, one.resume)
        prompts = {one.prompt for one in command.requests}
        rows = {id: Row(id, one.tokens, one.prompt, one.columns) for id in prompts if (one := vault.row(id))}
        prefixes = {one.trajectory: vault.prefix(one.trajectory) for one in command.requests if one.resume}
        self._to("replica", command.replica, Ordered(command, rows=rows, prefixes=prefixes))

    def _load_weights(self, command: LoadWeights) -> None:
        _, arena = self._addresses[command.relay]
        self._to("replica", command.replica, Ordered(command, arena=arena))

    def _to_replica(self, command: Any) -> None:
        self._to("replica", command.replica, Ordered(command))

    def _train(self, command: Train) -> None:
        groups = tuple([tuple(self.store.vault.read(group.trajectories)) for group in command.groups])
        self._to("trainer", TRAINER, Ordered(command, groups=groups))

    def _publish(self, command: Publish) -> None:
        self._to("trainer", TRAINER, Ordered(command, addresses=self._listening((command.relay,))))

    def _route(self, command: Route) -> None:
        self._to("relay", command.relay, Ordered(command, addresses=self._listening(command.targets)))

    def _listening(self, relays: tuple[RelayId, ...]) -> dict[RelayId, str]:
        return {id: self._addresses[id][0] for id in relays}

    def _forget(self, command: Forget) -> None:
        self.store.vault.forget(command.trajectories, self.config.run.archive, command.reason)

    def _set_timer(self, command: SetTimer) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, command.at - self.now), self._fire, command.timer)

    def _fire(self, timer: str) -> None:
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

    def _start(self, command: Start) -> None:
        process = self.local.processes.get((command.part, command.id))
        if process is not None and process.alive and not process.joined:
            return  # it is on its way
        self._outbox.append(self._start_part(command.part, command.id))

    async def _start_everybody(self) -> None:
        """A resumed run: whoever was there is gone with the controller that had started it."""
        await self._start_part("trainer", TRAINER)
        for id in range(self.config.local.relays):
            await self._start_part("relay", id)
        for id in range(self.config.local.replicas):
            await self._start_part("replica", id)

    async def _start_part(self, role: str, id: int) -> None:
        spec = Spec(
            role=role,
            id=id,
            incarnation=self._next_incarnation(role, id),
            endpoint=self.hub.endpoint,
            token=self.token,
            folder=str(self.store.folder.resolve()),
            config=self.config,
            step=self.plane.state.training.version,
        )
        await self.local.start(spec)
        asyncio.get_running_loop().call_later(self.config.local.start_s, self._overdue, spec)

    def _next_incarnation(self, role: str, id: int) -> int:
        state = self.plane.state
        records: dict[str, Any] = {"replica": state.fleet.replicas, "relay": state.relays.relays}
        known = state.training if role == "trainer" else records[role].get(id)
        started = self.local.processes.get((role, id))
        return 1 + max(known.incarnation if known else 0, started.spec.incarnation if started else 0)

    def _overdue(self, spec: Spec) -> None:
        process = self.local.processes.get((spec.role, spec.id))
        if process is not None and process.spec is spec and not process.joined and not self.stopped:
            self._fail(
                f"{_title(spec)} is not up after {self.config.local.start_s:g} s (local.start_s); see {process.log}"
            )


def _restored(store: RunStore, config: Config) -> tuple[ControlPlane, bool]:
    """The control plane where the journal left it; a fresh one if there is no journal yet."""
    if store.last_seq == 0:
        return ControlPlane(config), False
    snapshot = store.newest_snapshot()
    plane = ControlPlane.restore(config, snapshot.state) if snapshot else ControlPlane(config)
    for entry in store.entries(snapshot.seq if snapshot else 0):
        plane.handle(entry.now, entry.event)
    return plane, True


def _title(spec: Spec) -> str:
    return "the trainer" if spec.role == "trainer" else f"{spec.role} {spec.id}"


__all__ = ["INTERRUPTED", "Controller", "RunError", "Source"]
