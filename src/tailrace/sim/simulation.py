"""The virtual-time driver: carries out the control plane's commands on modelled processes and reports what happens.

It plays everybody but the controller: engines that decode, relays that forward, a trainer that trains, a network that
may be late. The control plane in the middle is the real one. `Simulation(config).run()` gives a `Result`.

This module puts the models together and hands each command to the one that carries it out. None of them knows it: each
takes the clock, the fleet, the network to the controller and whatever else it uses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec

from tailrace.config.tree import HELD_OUT, Config, Faults
from tailrace.control.plane import ControlPlane
from tailrace.errors import TailraceError
from tailrace.protocol import (
    Activate,
    Cancel,
    Command,
    CutOff,
    Dismiss,
    Drop,
    EvalSetsOpened,
    Evaluate,
    Explain,
    FetchPrompts,
    Forget,
    Generate,
    GiveUp,
    KeepCheckpoints,
    LoadWeights,
    Progressed,
    PromptsAdded,
    Publish,
    RecordEvaluation,
    Release,
    Route,
    RunStarted,
    SetTimer,
    SkipPrompts,
    Start,
    Stop,
    Train,
)
from tailrace.scoring import EvalSet
from tailrace.sim.clock import VirtualClock
from tailrace.sim.controller import Observer, SimController
from tailrace.sim.cpu_sharing import CpuSharing
from tailrace.sim.difficulty import SuccessLaw
from tailrace.sim.faults import FaultInjector
from tailrace.sim.lifecycle import Lifecycle
from tailrace.sim.measured_costs import cost_model_of
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet, SimReplica
from tailrace.sim.relay_tier import RelayTier
from tailrace.sim.result import Meter, Result, first_measured
from tailrace.sim.rollouts import Rollouts
from tailrace.sim.trainer import TrainerLoop
from tailrace.types import Prompt

STANDSTILL_S = 1e5  # no published step took more than an hour
LONGEST = 3  # times the steps that are measured: what is not steady by then is measured as it is


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


def _longer(config: Config) -> Config:
    """The same run with as many steps as it may take until it is steady."""
    steps = LONGEST * config.run.steps + first_measured(config)
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))


class Simulation:
    def __init__(
        self, config: Config, observer: Observer | None = None, timeline: bool = False, until_steady: bool = False
    ) -> None:
        """`until_steady`: go on until `run.steps` steps have been in the steady state, within limits."""
        self.config = config
        settles = config.faults == Faults() and not config.workload.lengths.drift_per_step
        self._until_steady = until_steady and settles
        self.stopped = ""
        self.failed = False
        self._successes = SuccessLaw(config)
        costs, random = cost_model_of(config), Random(f"faults {config.run.seed}")
        self.clock = clock = VirtualClock()
        self.fleet = fleet = SimFleet(config, costs)
        self.meter = meter = Meter(config, costs, fleet.replicas, fleet.trainer, timeline)
        self._network = network = Network(config.faults, clock, random)
        lifecycle = Lifecycle(config.faults, clock, fleet, network, meter)
        observers = [meter.fold.see, *([observer] if observer else [])]
        self._controller = SimController(
            _longer(config) if self._until_steady else config,
            clock,
            network,
            random,
            observers,
            lifecycle.reconnect_all,
            fleet.heard_at,
        )
        rollouts = Rollouts(config, clock, fleet, network, meter, self._trained_steps)
        trainer = TrainerLoop(config, clock, costs, fleet, network, rollouts, meter)
        relay_tier = RelayTier(config, clock, costs, fleet, network)
        self.faults = FaultInjector(
            config.faults, clock, random, fleet, network, lifecycle, self._controller, rollouts.wake
        )
        self._cpu = CpuSharing(config, clock, fleet, rollouts.wake, trainer.stretch)
        self._actions: dict[type[Command], Callable[[Any], None]] = {
            FetchPrompts: self._fetch_prompts,
            Generate: rollouts.generate,
            Evaluate: rollouts.generate,
            Release: rollouts.release,
            Cancel: rollouts.cancel,
            LoadWeights: rollouts.load_weights,
            Explain: lambda _: None,  # for the journal alone
            SkipPrompts: lambda _: None,  # likewise
            RecordEvaluation: lambda _: None,
            KeepCheckpoints: lambda _: None,  # nothing is on disk
            Activate: lambda _: None,  # likewise
            Train: trainer.train,
            Publish: relay_tier.publish,
            Route: relay_tier.route,
            Drop: relay_tier.drop,
            Forget: rollouts.forget,
            GiveUp: lambda _: None,  # it is dead, or cut off and does not hear
            CutOff: lambda _: None,  # likewise
            Dismiss: lambda _: None,  # no strangers are simulated
            Start: lifecycle.start,
            SetTimer: self._controller.set_timer,
            Stop: self._stop,
        }

    @property
    def plane(self) -> ControlPlane:
        """That of the present controller: one that dies is replaced."""
        return self._controller.plane

    @property
    def handled(self) -> int:
        """Events that control has handled."""
        return self._controller.handled

    def _trained_steps(self) -> int:
        return self._controller.plane.state.training.version

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Simulate until all steps are trained, or FleetLostError; `progress` is told the number of finished steps."""
        self._network.send(None, RunStarted(len(self.fleet.replicas), len(self.fleet.relays)))
        if self.config.eval.every and self.config.task.eval_rows:
            self._network.send(None, EvalSetsOpened((EvalSet(HELD_OUT, self.config.task.eval_rows),)))
        self.clock.after(self.config.health.heartbeat_s, self._heartbeats)
        self.faults.begin()
        self._drain()
        with _garbage_left_alone():
            self._until_stopped(progress)
        if self.failed:
            steps = f"{self._trained_steps()} of {self.config.run.steps} steps"
            raise FleetLostError(f"the run failed after {steps}: {self.stopped}")
        return self.meter.result(self.clock.now)

    def _until_stopped(self, progress: Callable[[int], None] | None) -> None:
        clock, inbox, steps, since = self.clock, self._network.inbox, 0, 0.0
        while not self.stopped:
            if not clock.step() or clock.now - since > STANDSTILL_S:
                raise StandstillError(f"no step was finished from {since:.0f} s to {clock.now:.0f} s of virtual time")
            heard = bool(inbox)
            if heard:
                self._drain()
            if self._cpu.shared:
                self._cpu.settle()
            if heard and self._trained_steps() > steps:
                steps, since = self._trained_steps(), clock.now
                self.meter.heard(steps)
                if progress:
                    progress(min(steps, self.config.run.steps))
                if self._until_steady and self.meter.settled(steps):
                    return

    def _drain(self) -> None:
        """Let the control plane handle what has happened, and do what it asks."""
        inbox, handle, actions = self._network.inbox, self._controller.handle, self._actions
        while inbox and not self._network.controller_down:
            for command in handle(inbox.popleft()):
                actions[type(command)](command)

    def _heartbeats(self) -> None:
        now, beat = self.clock.now, self._network.beat
        for replica in self.fleet.replicas:
            if replica.alive and not self._network.holds_back(replica):
                beat(replica, _new_load(replica, now))
        for process in (*self.fleet.relays, self.fleet.trainer):
            if process.alive:
                beat(process, None)
        self.clock.after(self.config.health.heartbeat_s, self._heartbeats)

    def _fetch_prompts(self, command: FetchPrompts) -> None:
        tokens = self.config.workload.prompt_tokens
        row = self._successes.row
        prompts = tuple([Prompt(id, tokens, row(id)) for id in range(command.start, command.start + command.count)])
        self._network.send(None, PromptsAdded(command.start, prompts))

    def _stop(self, command: Stop) -> None:
        self.stopped, self.failed = command.reason, command.failed


def _new_load(replica: SimReplica, now: float) -> Progressed | None:
    """What a replica has to report with its heartbeat, if anything has changed or was ordered since."""
    engine = replica.engine
    engine.advance(now)
    load = (int(engine.kv), len(engine.batch), len(engine.waiting))
    stats = Progressed(replica.id, replica.incarnation, *load, engine.work())
    if stats == replica.reported:
        return None
    replica.reported = stats
    return stats
