"""The virtual-time driver: carries out the control plane's commands on modelled parts and reports what happens.

It plays everybody but the controller: engines that decode, relays that forward, a trainer that trains, a network that
may be late. The control plane in the middle is the real one. `Simulation(config).run()` gives a `Result`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Alive,
    Assignment,
    Cancel,
    Checkpointed,
    Command,
    Drop,
    Event,
    FetchPrompts,
    Finished,
    Forget,
    Generate,
    LoadWeights,
    Parked,
    Progressed,
    PromptsAdded,
    Publish,
    RelayJoined,
    Release,
    ReplicaJoined,
    Request,
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
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.sim.costs import SWITCH_S, Costs
from tailrace.sim.engine import Engine, Sequence
from tailrace.sim.episodes import Episodes, Turn
from tailrace.sim.faults import Faults
from tailrace.sim.kernel import Kernel
from tailrace.sim.lengths import LengthLaw
from tailrace.sim.measure import Meter, Result
from tailrace.sim.nodes import Node, SimRelay, SimReplica, SimTrainer
from tailrace.types import Prompt, TrajectoryId, Version

STANDSTILL_S = 1e5  # no published step took more than an hour
Observer = Callable[[float, Event, list[Command]], None]


class Stuck(RuntimeError):
    """The fleet came to a standstill before the run was over: a fault of ours."""


class Simulation:
    def __init__(self, config: Config, observer: Observer | None = None, timeline: bool = False) -> None:
        self.config = config
        self.costs = Costs(config)
        self.kernel = Kernel()
        self.plane = ControlPlane(config)
        self.observer = observer
        self.lengths = LengthLaw(config.workload, config.run.seed, Path())
        self.episodes = Episodes(config.workload, config.run.seed)
        hosts = -(-config.replicas // config.replicas_per_host)
        self.relays = [SimRelay(id) for id in range(hosts)]
        self.replicas = [
            SimReplica(id, id // config.replicas_per_host, Engine(self.costs, 0.0)) for id in range(config.replicas)
        ]
        self.trainer = SimTrainer()
        self.vault: dict[TrajectoryId, Sequence] = {}
        self.meter = Meter(config, self.costs, self.replicas, self.trainer, timeline)
        self.faults = Faults(self)
        self.stopped = ""
        self.handled = 0  # events
        self._inbox: deque[Event] = deque()
        self._hop = self.costs.hop(hosts, 1 if config.relay.topology == "chain" else config.relay.fan_out)
        self._actions: dict[type[Command], Callable[[Any], None]] = {
            FetchPrompts: self._fetch_prompts,
            Generate: self._generate,
            Release: self._release,
            Cancel: self._cancel,
            LoadWeights: self._load_weights,
            Train: self._train,
            Publish: self._publish,
            Route: self._route,
            Drop: self._drop,
            Forget: self._forget,
            Start: self._start,
            SetTimer: self._set_timer,
            Stop: self._stop,
        }

    # ------------------------------------------------------------------------------------------------------ running

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Simulate until all steps are trained; `progress` is told the number of finished steps."""
        self.tell(None, RunStarted(len(self.replicas), len(self.relays)))
        self.kernel.after(self.config.health.heartbeat_s, self._heartbeats)
        self.faults.begin()
        self._drain()
        steps, since = 0, 0.0
        while not self.stopped:
            if not self.kernel.step() or self.kernel.now - since > STANDSTILL_S:
                raise Stuck(f"no step was finished from {since:.0f} s to {self.kernel.now:.0f} s of virtual time")
            self._drain()
            if self.plane.state.training.version > steps:
                steps, since = self.plane.state.training.version, self.kernel.now
                if progress:
                    progress(steps)
        return self.meter.result(self.kernel.now, self.plane.state)

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
        elif self.faults.network:
            self.faults.transmit(sender, event)
        else:
            self._inbox.append(event)

    def arrive(self, event: Event) -> None:
        self._inbox.append(event)

    def arrive_first(self, event: Event) -> None:
        self._inbox.appendleft(event)

    def _heartbeats(self) -> None:
        now = self.kernel.now
        for replica in self.replicas:
            if replica.alive:
                engine = replica.engine
                engine.advance(now)
                self.tell(
                    replica,
                    Progressed(replica.id, replica.incarnation, int(engine.kv), len(engine.batch), len(engine.waiting)),
                )
        for relay in self.relays:
            if relay.alive:
                self.tell(relay, Alive("relay", relay.id, relay.incarnation))
        if self.trainer.alive:
            self.tell(self.trainer, Alive("trainer", 0, self.trainer.incarnation))
        self.kernel.after(self.config.health.heartbeat_s, self._heartbeats)

    # ------------------------------------------------------------------------------------------- controller's errands

    def _fetch_prompts(self, command: FetchPrompts) -> None:
        tokens = self.config.workload.prompt_tokens
        prompts = tuple([Prompt(id, tokens) for id in range(command.start, command.start + command.count)])
        self.tell(None, PromptsAdded(command.start, prompts))

    def _set_timer(self, command: SetTimer) -> None:
        self.kernel.at(command.at, self._fire, command.timer, self.faults.controller_life)

    def _fire(self, timer: str, life: int) -> None:
        if life == self.faults.controller_life:
            self._inbox.append(TimerFired(timer))

    def _forget(self, command: Forget) -> None:
        for id in command.trajectories:
            self.vault.pop(id, None)

    def _stop(self, command: Stop) -> None:
        self.stopped = command.reason

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
            self.meter.mark(node, "lost", self.kernel.now)
        elif isinstance(node, SimRelay):
            node.versions = {}
            node.incoming = {}
            node.targets = ()
        elif isinstance(node, SimTrainer):
            node.doing = None

    # ---------------------------------------------------------------------------------------------------- generation

    def _replica(self, id: int, incarnation: int) -> SimReplica | None:
        replica = self.replicas[id]
        reachable = replica.alive and not self.faults.is_cut(replica)
        return replica if reachable and replica.incarnation == incarnation else None

    def _generate(self, command: Generate) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.kernel.now
        replica.engine.submit(now, [self._sequence(request, replica) for request in command.requests])
        self.meter.mark(replica, "generating", now)
        self.wake(replica)

    def _sequence(self, request: Request, replica: SimReplica) -> Sequence:
        sequence = self.vault.get(request.trajectory) if request.resume else None
        if sequence is None or sequence.tokens == 0:
            sequence = self._new_sequence(request)
            sequence.oldest = replica.version
        if sequence.place != "outside":  # an older assignment still runs elsewhere: its work is not shared
            sequence = self._new_sequence(request)
            sequence.oldest = replica.version
        self.vault[request.trajectory] = sequence
        sequence.epoch = request.epoch
        sequence.newest = replica.version
        return sequence

    def _new_sequence(self, request: Request) -> Sequence:
        size = self.config.workload.group_size
        index = request.trajectory % size
        tokens = self.lengths.group(request.group, size, self.plane.state.training.version)[index]
        if self.episodes.single:
            turns = (Turn(tokens, 0.0, 0),)
        else:
            turns = self.episodes.split(request.group, index, tokens)
        return Sequence(request.trajectory, request.group, request.prompt_tokens, turns)

    def wake(self, replica: SimReplica) -> None:
        """Something about an engine has changed: wake it when its next change is due."""
        replica.wake += 1
        at = replica.engine.next_change()
        if at != inf:
            self.kernel.at(at, self._woken, replica, replica.wake)

    def _woken(self, replica: SimReplica, wake: int) -> None:
        if wake != replica.wake:
            return
        now = self.kernel.now
        for sequence in replica.engine.ended_turns(now):
            if sequence.place == "calling":
                latency = sequence.turns[sequence.turn].latency_s
                self.kernel.after(latency, self._call_finished, replica, sequence, sequence.epoch)
            elif self.config.workload.reward_s:
                replica.scoring[sequence.trajectory] = sequence
                self.kernel.after(self.config.workload.reward_s, self._scored, replica, sequence, sequence.epoch)
            else:
                self._report(replica, sequence)
        if not replica.engine.held:
            self.meter.mark(replica, "idle", now)
        self.wake(replica)

    def _call_finished(self, replica: SimReplica, sequence: Sequence, epoch: int) -> None:
        """A tool has answered, if the trajectory is still where it was when it asked."""
        here = replica.engine.held.get(sequence.trajectory) is sequence and sequence.epoch == epoch
        if here and sequence.place == "calling":
            replica.engine.finish_call(self.kernel.now, sequence)
            self.wake(replica)

    def _scored(self, replica: SimReplica, sequence: Sequence, epoch: int) -> None:
        if replica.scoring.get(sequence.trajectory) is sequence and sequence.epoch == epoch:
            del replica.scoring[sequence.trajectory]
            self._report(replica, sequence)

    def _report(self, replica: SimReplica, sequence: Sequence) -> None:
        if self.faults.sample_fails(sequence.trajectory, sequence.epoch):
            failed = SampleFailed(replica.id, sequence.trajectory, sequence.epoch, "the environment failed")
            self.tell(replica, failed)
        else:
            self.tell(replica, Finished(replica.id, self._meta(sequence, "stop")))

    def _meta(self, sequence: Sequence, finish: str = "") -> TrajectoryMeta:
        return TrajectoryMeta(
            sequence.trajectory, sequence.epoch, sequence.tokens, sequence.oldest, sequence.newest, finish
        )

    def _release(self, command: Release) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.kernel.now
        sequences = replica.engine.withdraw(now)
        self.meter.mark(replica, "repacked", now)
        self.wake(replica)
        self.tell(replica, Parked(replica.id, replica.incarnation, tuple([self._meta(s) for s in sequences])))

    def _cancel(self, command: Cancel) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        for one in command.samples:
            sequence = replica.engine.held.get(one.trajectory)
            if sequence is not None and sequence.epoch == one.epoch:
                replica.engine.cancel(self.kernel.now, one.trajectory)
        self.wake(replica)

    # ------------------------------------------------------------------------------------------------------- weights

    def _load_weights(self, command: LoadWeights) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.kernel.now
        replica.pull += 1
        seconds = self.costs.pull(remote=command.relay != replica.host) * replica.engine.slowdown
        replica.pulled_s += seconds
        replica.pulls += 1
        self.meter.mark(replica, "pulling", now)
        if replica.engine.held:
            replica.engine.stall(now, seconds)
            self.wake(replica)
        self.kernel.after(seconds, self._loaded, replica, replica.pull, command.version)

    def _loaded(self, replica: SimReplica, pull: int, version: Version) -> None:
        if pull != replica.pull:
            return
        now = self.kernel.now
        replica.version = version
        if replica.engine.held:
            replica.engine.switch_weights(now, version, self.config.schedule.in_flight_kv == "recompute")
            self.wake(replica)
        self.meter.mark(replica, "generating" if replica.engine.held else "idle", now)
        self.tell(replica, WeightsLoaded(replica.id, replica.incarnation, version))

    def _route(self, command: Route) -> None:
        relay = self.relays[command.relay]
        if relay.incarnation != command.incarnation or command.epoch <= relay.route_epoch or self.faults.is_cut(relay):
            return
        relay.route_epoch = command.epoch
        relay.targets = command.targets
        for version in relay.versions:
            self._forward(relay, version, self.costs.transfer)

    def _forward(self, relay: SimRelay, version: Version, seconds: float) -> None:
        """Send a version on to every target that has not got it and is not just getting it."""
        for id in relay.targets:
            target = self.relays[id]
            coming = target.incoming.get(version)
            if version in target.versions or (coming and self.relays[coming[0]].life == coming[1]):
                continue
            target.incoming[version] = (relay.id, relay.life)
            self.kernel.after(seconds, self._received, relay, relay.life, target, target.life, version)

    def _received(self, relay: SimRelay, sender: int, target: SimRelay, receiver: int, version: Version) -> None:
        """A transfer is complete, if both ends lived through it and could reach each other."""
        if target.incoming.get(version) == (relay.id, sender):
            del target.incoming[version]
        intact = relay.alive and relay.life == sender and target.alive and target.life == receiver
        if intact and not self.faults.is_cut(relay) and not self.faults.is_cut(target):
            self._store(target, version, self._hop)

    def _store(self, relay: SimRelay, version: Version, forward_s: float) -> None:
        relay.versions[version] = None
        self.tell(relay, VersionStored(relay.id, relay.incarnation, version))
        self._forward(relay, version, forward_s)

    def _drop(self, command: Drop) -> None:
        relay = self.relays[command.relay]
        if relay.incarnation == command.incarnation:
            relay.versions.pop(command.version, None)

    def _publish(self, command: Publish) -> None:
        """The trainer stalls while it pushes; the master forwards once it has all (it reshards first)."""
        trainer, now = self.trainer, self.kernel.now
        if not trainer.alive or trainer.incarnation != command.incarnation or self.faults.is_cut(trainer):
            return
        seconds = self.costs.push()
        trainer.stall_s += seconds
        trainer.pushes += 1
        trainer.free_at = max(trainer.free_at, now) + seconds
        relay = self.relays[command.relay]
        self.kernel.at(trainer.free_at, self._pushed, trainer.life, relay, relay.life, command.version)

    def _pushed(self, sender: int, relay: SimRelay, receiver: int, version: Version) -> None:
        trainer = self.trainer
        intact = trainer.alive and trainer.life == sender and relay.alive and relay.life == receiver
        if intact and not self.faults.is_cut(relay):
            self._store(relay, version, 0.0 if self.config.colocated else self.costs.broadcast_start(len(self.relays)))

    # ------------------------------------------------------------------------------------------------------- training

    def _train(self, command: Train) -> None:
        trainer, now = self.trainer, self.kernel.now
        if not trainer.alive or trainer.incarnation != command.incarnation or self.faults.is_cut(trainer):
            return
        if (command.step, command.part) < (trainer.step, trainer.part):  # the report has not come through
            self.tell(trainer, Trained(trainer.incarnation, command.step, command.part))
            return
        assert (command.step, command.part) == (trainer.step, trainer.part), "parts are trained in their order"
        if trainer.doing is not None:
            return  # it is at it already; one report answers both orders
        sequences = [self.vault[id] for group in command.groups for id in group.trajectories]
        seconds = self.costs.train([s.prompt + s.tokens for s in sequences])
        if self.config.colocated:
            seconds += SWITCH_S if command.part == 0 else 0.0
            self._pause_engines(seconds)
        self.meter.picked(command, sequences)
        trainer.doing = command
        trainer.busy_s += seconds
        trainer.free_at = max(trainer.free_at, now) + seconds
        self.kernel.at(trainer.free_at, self._part_done, command)

    def _pause_engines(self, seconds: float) -> None:
        """Colocated: what is in flight waits while its GPUs train."""
        for replica in self.replicas:
            if replica.engine.held:
                replica.engine.stall(self.kernel.now, seconds)
                self.wake(replica)

    def _part_done(self, command: Train) -> None:
        trainer = self.trainer
        if trainer.doing is not command:
            return
        trainer.doing = None
        trainer.part += 1
        if command.last:
            trainer.step, trainer.part = trainer.step + 1, 0
            self.meter.stepped(trainer.step, self.kernel.now)
        self.tell(trainer, Trained(trainer.incarnation, command.step, command.part))
        if command.last and trainer.step % self.config.trainer.checkpoint_every == 0:
            trainer.saved = trainer.step
            self.tell(trainer, Checkpointed(trainer.incarnation, trainer.step))
