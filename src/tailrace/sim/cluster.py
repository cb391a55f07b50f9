"""The virtual-time driver: carries out the control plane's commands on modelled parts and reports what happens.

It plays everybody but the controller: engines that decode, relays that forward, a trainer that trains, a network that
may be late. The control plane in the middle is the real one. `Simulation(config).run()` gives a `Result`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.errors import TailraceError
from tailrace.lengths import LengthLaw
from tailrace.protocol import (
    Assignment,
    Cancel,
    Command,
    Drop,
    Event,
    FetchPrompts,
    Forget,
    Generate,
    GiveUp,
    LoadWeights,
    Progressed,
    PromptsAdded,
    Publish,
    RelayJoined,
    Release,
    ReplicaJoined,
    Route,
    RunStarted,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    Train,
    TrainerJoined,
)
from tailrace.sim.engine import Engine, Sequence
from tailrace.sim.episodes import Episodes
from tailrace.sim.faults import Faults
from tailrace.sim.kernel import Kernel
from tailrace.sim.learner import Learner
from tailrace.sim.measure import Meter, Result
from tailrace.sim.measured import costs_of
from tailrace.sim.nodes import Node, SimRelay, SimReplica, SimTrainer
from tailrace.sim.processors import Processors
from tailrace.sim.relay_tier import RelayTier
from tailrace.sim.rollouts import Rollouts
from tailrace.types import Prompt, TrajectoryId

STANDSTILL_S = 1e5  # no published step took more than an hour
Observer = Callable[[float, Event, list[Command]], None]


class StandstillError(RuntimeError):
    """The fleet came to a standstill before the run was over: a fault of ours."""


class FleetLostError(TailraceError):
    """Control has given the run up, as it would a real one: no replica, no relay or no trainer is left."""


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Millions of objects and hardly a cycle: looking for some would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Simulation:
    def __init__(self, config: Config, observer: Observer | None = None, timeline: bool = False) -> None:
        self.config = config
        self.costs = costs_of(config)
        self.kernel = Kernel()
        self.plane = ControlPlane(config)
        self.observer = observer
        self.lengths = LengthLaw(config.workload, config.run.seed, Path())
        self.episodes = Episodes(config.workload, config.run.seed)
        self.relays = [SimRelay(id) for id in range(config.hosts)]
        self.replicas = [SimReplica(id, config.host_of(id), Engine(self.costs, 0.0)) for id in range(config.replicas)]
        self.trainer = SimTrainer()
        self.vault: dict[TrajectoryId, Sequence] = {}
        self.meter = Meter(config, self.costs, self.replicas, self.trainer, timeline)
        self.faults = Faults(self)
        self.rollouts = Rollouts(self)
        self.relay_tier = RelayTier(self)
        self.learner = Learner(self)
        self.processors = Processors(self)
        self.stopped = ""
        self.failed = False
        self.handled = 0  # events
        self._inbox: deque[Event] = deque()
        self._actions: dict[type[Command], Callable[[Any], None]] = {
            FetchPrompts: self._fetch_prompts,
            Generate: self.rollouts.generate,
            Release: self.rollouts.release,
            Cancel: self.rollouts.cancel,
            LoadWeights: self.rollouts.load_weights,
            Train: self.learner.train,
            Publish: self.relay_tier.publish,
            Route: self.relay_tier.route,
            Drop: self.relay_tier.drop,
            Forget: self._forget,
            GiveUp: lambda _: None,  # it is dead, or cut off and does not hear
            Start: self._start,
            SetTimer: self._set_timer,
            Stop: self._stop,
        }

    # ------------------------------------------------------------------------------------------------------ running

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Simulate until all steps are trained, or FleetLostError; `progress` is told the number of finished steps."""
        self.tell(None, RunStarted(len(self.replicas), len(self.relays)))
        self.kernel.after(self.config.health.heartbeat_s, self._heartbeats)
        self.faults.begin()
        self._drain()
        with _garbage_left_alone():
            self._until_stopped(progress)
        if self.failed:
            steps = self.plane.state.training.version
            raise FleetLostError(f"the fleet was lost after {steps} of {self.config.run.steps} steps: {self.stopped}")
        return self.meter.result(self.kernel.now, self.plane.state)

    def _until_stopped(self, progress: Callable[[int], None] | None) -> None:
        steps, since = 0, 0.0
        while not self.stopped:
            if not self.kernel.step() or self.kernel.now - since > STANDSTILL_S:
                raise StandstillError(
                    f"no step was finished from {since:.0f} s to {self.kernel.now:.0f} s of virtual time"
                )
            self._drain()
            self.processors.settle()
            if self.plane.state.training.version > steps:
                steps, since = self.plane.state.training.version, self.kernel.now
                if progress:
                    progress(steps)

    def _drain(self) -> None:
        """Let the control plane handle what has happened, and do what it asks."""
        inbox, now = self._inbox, self.kernel.now
        while inbox and not self.faults.controller_down:
            event = inbox.popleft()
            self.handled += 1
            commands = self.plane.handle(now, event)
            if self.observer:
                self.observer(now, event, commands)
            if self.faults.after_event(event):
                continue  # the controller died before it could send them
            for command in commands:
                self._actions[type(command)](command)

    def tell(self, sender: Node | None, event: Event) -> None:
        """Send an event to the controller, over a network that may hold it back, delay it or deliver it twice."""
        if sender is not None and self.faults.holds_back(sender):
            sender.outbox.append(event)
        else:
            self._transmit(sender, event)

    def _transmit(self, sender: Node | None, event: Event | None) -> None:
        if self.faults.network:
            self.faults.transmit(sender, event)
        else:
            self.arrive(sender, event)

    def arrive(self, sender: Node | None, event: Event | None) -> None:
        """Whatever comes is a sign of life; None: it is nothing else."""
        if sender is not None:
            sender.heard_at = self.kernel.now
        if event is not None:
            self._inbox.append(event)

    def arrive_first(self, event: Event) -> None:
        self._inbox.appendleft(event)

    def _heartbeats(self) -> None:
        for node in (*self.replicas, *self.relays, self.trainer):
            if node.alive and not self.faults.holds_back(node):
                self._transmit(node, self._new_load(node) if isinstance(node, SimReplica) else None)
        self.kernel.after(self.config.health.heartbeat_s, self._heartbeats)

    def _new_load(self, replica: SimReplica) -> Progressed | None:
        """What a replica has to report with its heartbeat, if anything has changed or was ordered since."""
        engine = replica.engine
        engine.advance(self.kernel.now)
        load = Progressed(replica.id, replica.incarnation, int(engine.kv), len(engine.batch), len(engine.waiting))
        if load == replica.reported:
            return None
        replica.reported = load
        return load

    # ------------------------------------------------------------------------------------------- controller's errands

    def _fetch_prompts(self, command: FetchPrompts) -> None:
        tokens = self.config.workload.prompt_tokens
        prompts = tuple([Prompt(id, tokens) for id in range(command.start, command.start + command.count)])
        self.tell(None, PromptsAdded(command.start, prompts))

    def _set_timer(self, command: SetTimer) -> None:
        self.kernel.at(command.at, self._fire, command.timer, self.faults.controller_life)

    def _fire(self, timer: str, life: int) -> None:
        if life != self.faults.controller_life:
            return
        if timer == "health":
            self._inbox.append(self.plane.heartbeats(self._silence))
        self._inbox.append(TimerFired(timer))

    def _silence(self, part: str, id: int) -> float:
        """How long the controller has not heard anything of somebody."""
        return self.kernel.now - max(self._node(part, id).heard_at, self.faults.listening_since)

    def _forget(self, command: Forget) -> None:
        for id in command.trajectories:
            self.vault.pop(id, None)

    def _stop(self, command: Stop) -> None:
        self.stopped, self.failed = command.reason, command.failed

    def _start(self, command: Start) -> None:
        node = self._node(command.part, command.id)
        if node.restarting:
            return
        if node.alive:
            self.kill(node)
        if command.attempt == 1 and node.incarnation == 0:
            self._come_up(node)  # the beginning of the run: everybody is there
        else:
            node.restarting = True
            self.kernel.after(self.config.faults.restart_s, self._come_up, node)

    def _node(self, part: str, id: int) -> Node:
        return self.trainer if part == "trainer" else self.relays[id] if part == "relay" else self.replicas[id]

    # ---------------------------------------------------------------------------------------------- life and death

    def _come_up(self, node: Node) -> None:
        node.restarting = False
        node.alive = True
        node.outbox.clear()
        if isinstance(node, SimTrainer):
            node.step, node.part = node.saved, 0
            node.free_at = self.kernel.now
        self.join(node)

    def join(self, node: Node) -> None:
        """Introduce a part that has started, or that has found the controller again."""
        node.incarnation += 1
        if isinstance(node, SimReplica):
            node.pull += 1  # a pull that was under way is given up
            node.pulling = False
            work = [*node.engine.held.values(), *node.scoring.values()]
            held = tuple([Assignment(s.trajectory, s.epoch) for s in work])
            event: Event = ReplicaJoined(
                node.id, node.incarnation, node.host, node.version, self.costs.kv_capacity, self.costs.roofline, held
            )
        elif isinstance(node, SimRelay):
            event = RelayJoined(node.id, node.incarnation, tuple(node.versions))
        else:
            event = TrainerJoined(node.incarnation, self.trainer.step, self.trainer.part)
        self.tell(node, event)

    def kill(self, node: Node) -> None:
        """What it had in memory is gone; what it had streamed to the vault stays."""
        node.alive = False
        node.life += 1
        node.outbox.clear()
        if isinstance(node, SimReplica):
            node.engine.withdraw(self.kernel.now)
            node.scoring.clear()
            node.version = -1
            node.wake += 1
            node.pull += 1
            node.pulling = False
            self.meter.mark(node, "lost", self.kernel.now)
        elif isinstance(node, SimRelay):
            node.versions = {}
            node.incoming = {}
            node.targets = ()
        elif isinstance(node, SimTrainer):
            node.doing = None
