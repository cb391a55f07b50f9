"""The wall-clock driver: carries out the control plane's commands on real processes and reports what happens.

One asyncio loop. Whatever arrives is handled in batches: events go through the control plane, everything is committed
to `run.db` in one transaction, and only then are the commands sent. So a crash at any moment leaves a journal from
which the run goes on, and nobody has ever been told what the journal does not know. While another program has `run.db`
locked, what arrives waits, so much and no more: then the server stops reading. Heartbeats have a channel and a thread
of their own (`wire.liveness`), so nobody looks dead because this loop is late. No token passes through here: replicas
and trainers exchange them with the sample stores, which are told who may write what.

Components outlive a controller that is killed. The next one, started by the same supervisor, adopts them and asks each
to join again; what they report is counted exactly once (see `wire`), so they go on with the work that they have in
hand.

Who the components are, and what becomes of them, is known to `components`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol, TextIO

from tailrace.config.resuming import differences
from tailrace.config.tree import Config
from tailrace.control.state import State
from tailrace.errors import TailraceError
from tailrace.logs import open_log, to_stream
from tailrace.obs.live import WAITING_FOR
from tailrace.obs.summary import AFTER, BEFORE
from tailrace.protocol import (
    TRAINER,
    Activate,
    Command,
    ControllerRestarted,
    CutOff,
    Dismiss,
    EvalSetsOpened,
    Event,
    Explain,
    Generate,
    GiveUp,
    HostLeft,
    RecordEvaluation,
    RelayJoined,
    ReplicaJoined,
    RunStarted,
    SetTimer,
    SettingsChanged,
    SkipPrompts,
    Start,
    Stop,
    StoreJoined,
    TimerFired,
    Trained,
    TrainerJoined,
    WorkerRevoked,
)
from tailrace.runtime.allowance import Allowance, messages_in
from tailrace.runtime.backpressure import Backpressure
from tailrace.runtime.components import FIRST_STORE, Components, RunHandle
from tailrace.runtime.grants import reconciliation
from tailrace.runtime.lag import LoopLag
from tailrace.runtime.local import Process
from tailrace.runtime.orders import Orders
from tailrace.runtime.outcomes import Outcomes
from tailrace.runtime.prices import price_changes
from tailrace.runtime.provisioning_watch import ProvisioningWatch
from tailrace.runtime.restored import restored
from tailrace.runtime.validation import LONGEST_REASON, Sender, Validation, shortened
from tailrace.runtime.worker_keys import WorkerKeys
from tailrace.scoring import EvalSet
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.store.journal import RUN
from tailrace.store.prices import PriceFile
from tailrace.store.run import RunStore
from tailrace.store.waiting import PAUSE_S, Locked, to_terminal
from tailrace.trainer.pace import BYTES_PER_PARAMETER
from tailrace.watchdog import Watchdog
from tailrace.wire.keys import HOST, worker_of
from tailrace.wire.messages import (
    Accused,
    Acknowledged,
    BeatHere,
    Collapsed,
    FromComponent,
    Garbled,
    Hello,
    Measured,
    Offer,
    Ordered,
    Receipt,
    Reported,
)
from tailrace.wire.server import ControlServer
from tailrace.wire.tls import Identity

SNAPSHOT_EVERY = 5000  # events; what a resumed run has to go through again at most
ENDING_S = 60.0  # for everybody to leave; and for the trainer's last checkpoint
FAILED_S = 2.0  # the same after a failure: somebody may wait for what will not come
SLOW_DISK = 100e6  # bytes per second
TURN_S = 0.01  # between the beginnings of two transactions, and for the events of one
ACKNOWLEDGE_S = 0.5  # how often components are told what is committed
LATE_BEATS = 1.5  # heartbeats without a datagram until frames are asked for
LOOP_LAG, LAG_EVERY = "controller/loop_lag_p99_s", 100  # samples between two figures: ten seconds
EVAL = "eval"  # who measured: the replicas together
INTERRUPTED = "interrupted"
TOO_MUCH = "more messages than a stranger may"
STUCK_S = 10.0  # at one thing; then the controller writes to its log where it is


class RunError(TailraceError):
    """Why a run cannot go on, for the person who started it."""


class Observer(Protocol):
    """Whoever watches: the terminal, the summary."""

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None: ...

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None: ...


class PendingEvent(NamedTuple):
    """An event for control. If a component reported it: which, and what was known of it then."""

    event: Event
    process: Process | None = None
    sender: Sender | None = None
    receipts: tuple[Receipt, ...] = ()  # of sample stores, for what it says of tokens


class Controller:
    def __init__(
        self,
        store: RunStore,
        config: Config,
        handle: RunHandle,
        observer: Observer,
        eval_sets: tuple[EvalSet, ...] | None = None,
    ) -> None:
        """`eval_sets`: what is evaluated while training; None: what is known of that stays as it is."""
        self.store = store
        self.config = config
        self.handle = handle
        self.observer = observer
        self._eval_sets = eval_sets
        if handle.left is None:
            store.hear_anew()
        self._worker_keys = WorkerKeys(store.folder)
        self._allowance = Allowance()
        self.server = self._server(store.heard)
        self.components = Components(config, handle, store.run_folder, self.server, self)
        self.plane, self.resumed = restored(store)
        self.stopped = ""
        self.error: RunError | None = None
        self._began = time.monotonic() - store.last_now
        self.backpressure = Backpressure()
        self._provisioning = ProvisioningWatch(config)
        self.lag = LoopLag(self._sampled)
        self._arrived: deque[Callable[[], None]] = deque()  # what is to be taken in with the next transaction
        self._taken_in = asyncio.Event()  # there is nothing in it
        self._events: deque[PendingEvent] = deque()
        self._validation = Validation(config, lambda: self.state, handle.keys.of)
        self.held_up = False  # by another program that has run.db locked
        self._outbox: list[Coroutine[Any, Any, None]] = []
        self._wake = asyncio.Event()
        self._since_snapshot = 0
        self._unacknowledged: dict[str, int] = {}  # the last committed report of each component
        self._acknowledge_at = 0.0
        self._crash: BaseException | None = None
        self._log: TextIO = sys.stderr
        self._told_of_datagrams = False  # that they do not get through
        self._outcomes = Outcomes(config, store.trajectories, self.components, self.fail)
        self._prices = PriceFile(store.folder)
        self._orders = Orders(self.components, store.trajectories, config.run.archive)
        self._own_actions: dict[type[Command], Callable[[Any], None]] = {
            Explain: lambda _: None,  # it is in the journal, which is all it is for
            SkipPrompts: lambda _: None,  # likewise
            RecordEvaluation: self._record_evaluation,
            Activate: lambda _: None,  # likewise
            GiveUp: self.components.give_up,
            CutOff: self.components.cut_off,
            Dismiss: self._dismiss,
            Start: self.components.start,
            SetTimer: self._set_timer,
            Stop: self._stop,
        }

    def _server(self, heard: Mapping[str, int]) -> ControlServer:
        port = (self.handle.left and self.handle.left.port) or self.config.local.port
        if not self.config.local.listen:
            return ControlServer(self.handle.keys, port, heard)
        identity = Identity(self.handle.keys.identity)
        return ControlServer(self.handle.keys, port, heard, identity, self.config.local.listen, self._worker_token)

    def _worker_token(self, worker: str) -> str:
        """Of a stranger that may come in."""
        known = self.state.strangers.workers.get(worker)
        return "" if known is not None and known.excluded else self._worker_keys.token(worker)

    def _dismiss(self, command: Dismiss) -> None:
        self.components.admission.dismiss_worker(command)
        self.components.send("store", FIRST_STORE, Ordered(command))

    def _find_revoked(self) -> None:
        for worker, reason in self._worker_keys.revoked():
            known = self.state.strangers.workers.get(worker)
            if known is not None and not known.excluded:
                self.tell(WorkerRevoked(worker, reason[:LONGEST_REASON]))

    @property
    def complete(self) -> bool:
        """Control has ended the run: there is nothing to resume."""
        return bool(self.plane.state.stopped) and not self.plane.state.failed and not self.error

    @property
    def now(self) -> float:
        """Seconds that this run has been running, resumptions included, pauses left out."""
        return time.monotonic() - self._began

    # ---------------------------------------------------------------------------------------------------------- running

    async def run(self) -> str:
        """Until control stops the run, or somebody calls `interrupt`. Returns the reason."""
        self._events += [PendingEvent(event) for event in self._beginning]
        listening = asyncio.create_task(self._listen())
        listening.add_done_callback(self._deaf)
        patience_s = FAILED_S
        try:
            if self.resumed and self.handle.left is None:
                self.components.start_all()
            await self._until_stopped()
            if self.store.begin():  # else whoever resumes goes through more of the journal
                self.store.snapshot(self.store.last_seq, self.plane.snapshot())
                self.store.commit()
            patience_s = FAILED_S if self.error else self._ending_s
        finally:
            listening.cancel()
            self.lag.close()
            await self.components.end(self.complete, patience_s)
            await self.server.close()
        if self.error:
            raise self.error
        return self.stopped

    @property
    def _ending_s(self) -> float:
        return ENDING_S + BYTES_PER_PARAMETER * self.config.model.parameters / SLOW_DISK

    @property
    def _beginning(self) -> list[Event]:
        sets = self.state.evaluation.sets if self._eval_sets is None else self._eval_sets
        evaluation = [EvalSetsOpened(sets)] if sets != self.state.evaluation.sets else []
        if self.resumed:
            changed = differences(self.plane.config, self.config)
            restarted = [ControllerRestarted(), *self.components.missing(self.handle.left), *evaluation]
            return [SettingsChanged(changed), *restarted] if changed else restarted
        return [RunStarted(self.config.local.replicas, self.config.local.relays, stores=1), *evaluation]

    def interrupt(self) -> None:
        """Stop as soon as what is under way is written down; the run can be resumed. The second time: at once."""
        if self.stopped:
            self.components.kill()
        self.stopped = self.stopped or INTERRUPTED
        self._wake.set()

    def _deaf(self, task: asyncio.Task[None]) -> None:
        """Nothing would ever be heard again: better to end with the error than to wait."""
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._wake.set()

    async def _until_stopped(self) -> None:
        path = self.store.folder / "logs" / "controller.log"
        path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        path.touch(PRIVATE)
        with open_log(path) as self._log, Watchdog("the controller", _say, self._log) as dog:
            await self._turn_over(dog)

    async def _turn_over(self, watchdog: Watchdog) -> None:
        while await self._begin(watchdog):
            until = self.now + TURN_S
            self._wake.clear()  # first of all: what happens from here on, also during an await, is seen below
            watchdog.expect("handling events and writing them to run.db", STUCK_S, "look at the disk of the run")
            self.store.run_folder.refuse_moved()
            self._take_turn(until)
            outbox, self._outbox = self._outbox, []  # what is added from here on waits for the next commit
            self._unacknowledged |= await asyncio.to_thread(self.store.commit)  # the disk may be slow, the loop not
            watchdog.expect("sending orders and starting components", STUCK_S)
            for sending in outbox:
                await sending
            await self._acknowledge()
            if not self._events and not self._arrived:
                await self._rest(watchdog)
            await asyncio.sleep(max(0.0, until - self.now))  # what else comes soon is of the same transaction

    def _take_turn(self, until: float) -> None:
        """What has arrived, but only so much that the loop is not kept from everything else. What is heard is handled
        in the same transaction: its sender will not say it again."""
        self._handle_events()
        while self._arrived and self.now < until:
            self._arrived.popleft()()
            self._handle_events()
        if not self._arrived:
            self._taken_in.set()

    async def _begin(self, watchdog: Watchdog) -> bool:
        """A transaction, once nobody else has one; False if the run stops before that. Until then nothing is handled,
        so nobody is told or found to be silent."""
        locked: Locked | None = None
        while not self.stopped and not self.error:
            if self._crash:
                raise self._crash
            if self.store.begin():
                if locked is not None:
                    locked.over()
                self.held_up = False
                return True
            self.held_up = True
            locked = locked or Locked(self.store.file, self.report)
            locked.still()
            watchdog.expect("waiting for run.db, which another program has locked", STUCK_S)
            await self.components.admission.reassure_hosts()
            await asyncio.sleep(PAUSE_S)
        return False

    def report(self, sentence: str) -> None:
        """To the terminal and to the log."""
        to_terminal(sentence)
        self.note(sentence)

    async def _rest(self, watchdog: Watchdog) -> None:
        """Until there is something to do, however long that takes: what is watched is that the loop turns."""
        while not self._wake.is_set():
            watchdog.expect("waiting for reports", STUCK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(STUCK_S / 4):
                    await self._wake.wait()

    async def _listen(self) -> None:
        """One batch at a time: what cannot be taken in waits in the server, which has room for so much."""
        while True:
            for sender, number, message in await self.server.receive():
                self._arrived.append(partial(self._receive, sender, number, message))
            self._taken_in.clear()
            self._wake.set()
            await self._taken_in.wait()

    def _receive(self, sender: str, number: int, message: FromComponent | Garbled) -> None:
        self.store.hear(sender, number)
        self._hear(sender, message)

    async def _acknowledge(self) -> None:
        """Components keep their reports until they are known to be safe."""
        if self.now < self._acknowledge_at:
            return
        self._acknowledge_at = self.now + ACKNOWLEDGE_S
        committed, self._unacknowledged = self._unacknowledged, {}
        for name, number in committed.items():
            await self.server.send(name, Acknowledged(number))

    def _handle_events(self) -> None:
        while self._events and not self.stopped:
            happened, now = self._events.popleft(), self.now
            if self._is_refused(happened):
                continue
            event = happened.event
            self._outcomes.note(self.state, event)
            commands = self.plane.handle(now, event)
            seq = self.store.record(now, event, commands)
            self._introduce_stores(event)
            self.observer.see(now, event, commands)
            if advice := self._provisioning.see(now, event, commands):
                self.note(advice)
            for command in commands:
                self._own_actions.get(type(command), self._order)(command)
            if type(event) is Trained:
                self._measure_control(event)
            self._since_snapshot += 1
            if self._since_snapshot >= SNAPSHOT_EVERY:
                self._since_snapshot = 0
                self.store.snapshot(seq, self.plane.snapshot())

    def _is_refused(self, happened: PendingEvent) -> bool:
        """Control may have learned something since it was heard."""
        event, process, sender, receipts = happened
        if process is None or sender is None:
            return False
        if not process.refused:
            complaint = self._validation.complaint_about_event(sender, event, receipts)
            if complaint:
                process.incarnation = sender.incarnation  # whatever it has called itself since
                self.components.refuse(process, complaint)
        return process.refused

    def _introduce_stores(self, event: Event) -> None:
        """A store that joins hears what is under way, and everybody hears where it is; so does whoever joins later."""
        match event:
            case StoreJoined(store):
                self.components.stores.tell()
                self.components.send("store", store, reconciliation(self.state, self.store.trajectories, store))
                for worker in [one for one in self.state.strangers.workers.values() if one.excluded]:
                    self.components.send("store", store, Ordered(Dismiss(worker.name, worker.excluded)))
            case HostLeft() | TimerFired():
                self.components.stores.tell_departed()
            case ReplicaJoined(replica):
                self.components.stores.tell_one("replica", replica)
            case TrainerJoined():
                self.components.stores.tell_one("trainer", TRAINER)
            case _:
                pass

    # ---------------------------------------------------------------------------------------------------------- hearing

    def _hear(self, name: str, message: FromComponent | Garbled) -> None:
        if name.startswith(HOST):
            self._hear_host(name, message)
            return
        process = self.components.named(name)
        if process is None:
            self._hear_unknown(name, message)
            return
        complaint = "" if process.refused else self._complaint_about(process, message)
        if complaint:
            self.components.refuse(process, complaint)
        if not process.refused:
            self._take_in(process, message)

    def _hear_unknown(self, name: str, message: FromComponent | Garbled) -> None:
        """It has been replaced, or was started by a controller that died before it could say so."""
        if worker_of(name) and not self._may_say(name, message):
            self._silence(name)
        elif isinstance(message, Hello):
            self.components.turn_away(name)

    def _silence(self, name: str) -> None:
        """A stranger that says too much."""
        self.components.admission.refuse_host(name, TOO_MUCH)
        self.server.hang_up(name)

    def _complaint_about(self, process: Process, message: FromComponent | Garbled) -> str:
        if process.spec.worker and not self._may_say(process.spec.name, message):
            return TOO_MUCH
        return self._validation.complaint_about(_sender(process), message)

    def _may_say(self, name: str, message: FromComponent | Garbled) -> bool:
        """Whether a stranger has not yet said more than it may."""
        return self._allowance.spend(name, self.now, messages_in(message))

    def _hear_host(self, name: str, message: FromComponent | Garbled) -> None:
        if worker_of(name) and not self._may_say(name, message):
            self._silence(name)
            return
        complaint = self._validation.complaint_about(Sender("host", 0, 0, 0, joined=True), message)
        if complaint:
            self.components.admission.refuse_host(name, complaint)
        elif isinstance(message, Offer):
            self.components.admission.offered(name, message)

    def _take_in(self, process: Process, message: FromComponent | Garbled) -> None:
        match message:
            case Hello(address, arena):
                self.components.introduced(process, address, arena)
            case Reported(event, receipts):
                self._events.append(PendingEvent(shortened(event), process, _sender(process), receipts))
                if isinstance(event, ReplicaJoined | RelayJoined | StoreJoined | TrainerJoined):
                    process.joined, process.incarnation = True, max(process.incarnation, event.incarnation)
            case Accused(component, reason):
                self._accuse(process, component, reason)
            case Measured(step, values):
                self._measure(step, process.label, values)
            case Collapsed(reason, expected):
                self.components.collapsed(process, reason[:LONGEST_REASON], expected)

    def _accuse(self, store: Process, component: str, reason: str) -> None:
        """A store elsewhere may lie as well as anybody there: of what runs on this machine it is not believed."""
        accused = self.components.named(component)
        if accused is None:
            return
        believed = self._is_ours(store) or not self._is_ours(accused)
        if believed:
            self.components.refuse(accused, reason)
        else:
            self.components.refuse(store, f"what cannot be true of {accused.title}: that it sent {reason}")

    def _is_ours(self, process: Process) -> bool:
        return self.components.is_ours(process.spec.role, process.spec.id)

    def _measure_control(self, trained: Trained) -> None:
        """Once a step."""
        if trained.step + 1 == self.plane.state.training.version and not self.plane.state.training.taken:
            self._measure(trained.step, "controller", self.plane.learned())

    def _measure(self, step: int, source: str, values: Mapping[str, float]) -> None:
        self.store.metrics.measure(self.now, step, source, values)
        self.observer.measure(self.now, step, source, values)

    # ----------------------------------------------------------------------------------------- what the components need

    @property
    def state(self) -> State:
        return self.plane.state

    @property
    def run_id(self) -> str:
        return self.store.meta.get(RUN) or ""

    def tell(self, event: Event) -> None:
        """Something that control has to hear."""
        self._events.append(PendingEvent(event))
        self._wake.set()

    def then(self, doing: Coroutine[Any, Any, None]) -> None:
        """Once the books are closed."""
        self._outbox.append(doing)
        self._wake.set()

    def later(self, wait_s: float, action: Callable[[], None]) -> None:
        """Deadlines of others are extended by the time in which they could not be heard."""
        asyncio.get_running_loop().call_later(wait_s, self._due, self.now + wait_s, action)

    def _due(self, at: float, action: Callable[[], None]) -> None:
        """A controller that stood still, stopped or waiting for its disk, first hears what was said meanwhile. So does
        one that is held up."""
        pause = self.config.health.heartbeat_s
        if self.held_up or self.now - at > pause:
            asyncio.get_running_loop().call_later(pause, self._due, inf, action)
        elif not self.stopped and not self.error:
            action()

    def note(self, sentence: str) -> None:
        to_stream(self._log).info("%.1f s: %s", self.now, sentence)

    def fail(self, reason: str) -> None:
        self.error = self.error or RunError(reason)
        self._wake.set()

    # --------------------------------------------------------------------------------------------------------- commands

    def _order(self, command: Command) -> None:
        if isinstance(command, Generate):
            self._expect_answers(command)
        self._orders.send(self.state, command)

    def _expect_answers(self, command: Generate) -> None:
        process = self.components.get("replica", command.replica)
        if process is not None and process.spec.worker:
            self._allowance.give(process.spec.name, self.now, len(command.requests))

    def _set_timer(self, command: SetTimer) -> None:
        self.later(max(0.0, command.at - self.now), partial(self._fire, command.timer))

    def _fire(self, timer: str) -> None:
        if timer == "health":
            self.components.admission.find_silent_hosts()
            self.components.look_for_missing()
            self._find_revoked()
            self._ask_for_frames()
            self._note_waiting()
            self._look_at_prices()
            self.tell(self.plane.heartbeats(self.components.age_s))
        self.tell(TimerFired(timer))

    def _look_at_prices(self) -> None:
        try:
            for event in price_changes(self._prices.changed(), self.state.fleet):
                self.tell(event)
        except (TailraceError, ValueError) as error:
            self.report(str(error))

    # ---------------------------------------------------------------------------------------------------- signs of life

    def _ask_for_frames(self) -> None:
        """Of those whose heartbeats do not get through as datagrams, though they are connected."""
        liveness = self.server.liveness
        for name, on in liveness.to_ask(LATE_BEATS * self.config.health.heartbeat_s).items():
            self.then(self.server.send(name, BeatHere(on)))
        without = liveness.without_datagrams
        if without and not self._told_of_datagrams:
            self._told_of_datagrams = True
            self.note(
                f"no heartbeats come from {without[0]} as datagrams to UDP port {self.server.port}, which a "
                "firewall may have closed; they come over its TCP connection instead"
            )

    def _note_waiting(self) -> None:
        """Who is held up, and by which store, is named when that begins and when it ends."""
        found = [(self.components.named(name), what) for name, what in dict(self.server.liveness.waiting).items()]
        own = [(process, what) for process, what in found if process is not None and not process.spec.worker]
        labels = {process.label: what for process, what in own}  # a stranger would make up figures
        for change in self.backpressure.look(self.now, labels):
            self.note(str(change))
            values = {f"{WAITING_FOR}{change.subject}": float(change.began)}
            self._arrived.extend([partial(self._measure, -1, name, values) for name in change.components])

    def _sampled(self) -> None:
        """Several times a second, whatever else there is to do."""
        self.server.liveness.loop_turns(self.server.reads)
        if self.lag.samples % LAG_EVERY == 0:
            self._arrived.append(partial(self._measure, -1, "controller", {LOOP_LAG: self.lag.p99_s}))

    def _record_evaluation(self, command: RecordEvaluation) -> None:
        """As metrics of that version; and the first set's, as what the run says of itself before and after."""
        for result in command.results:
            self._measure(command.version, EVAL, result.metrics)
        if self.state.stopped or not command.version:
            when = AFTER if self.state.stopped else BEFORE
            self.store.meta.set(f"accuracy_{when}", str(command.results[0].accuracy))
            self.store.meta.set(f"reward_{when}", str(command.results[0].mean_reward))

    def _stop(self, command: Stop) -> None:
        if command.failed:
            self.fail(command.reason)
        else:
            self.stopped = command.reason
            self._wake.set()  # nobody else may have anything more to say


def _sender(process: Process) -> Sender:
    spec = process.spec
    known = (process.incarnation, process.joined, process.address)
    return Sender(spec.role, spec.id, spec.host, *known, spec.worker)


def _say(sentence: str) -> None:
    """To the terminal: the disk of the log may be what it waits for. Replacing it is for its supervisor."""
    to_terminal(f"the controller is {sentence}")


__all__ = ["INTERRUPTED", "Controller", "RunError"]
