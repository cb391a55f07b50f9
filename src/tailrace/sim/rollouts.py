"""Replicas in virtual time: they generate, release, cancel and load weights as told, and report what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tailrace.config.tree import Config
from tailrace.protocol import (
    SCORING_S,
    Cancel,
    Evaluate,
    Finished,
    Forget,
    Generate,
    GenerationResumed,
    JudgedTurn,
    LoadWeights,
    Parked,
    Release,
    Request,
    SampleFailed,
    ScoringStarted,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.sim.clock import VirtualClock
from tailrace.sim.engine import SimSequence
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet, SimReplica
from tailrace.sim.result import Meter
from tailrace.sim.samples import SimSamples
from tailrace.types import TrajectoryId, Version


@dataclass
class Rollouts:
    config: Config
    clock: VirtualClock
    fleet: SimFleet
    network: Network
    meter: Meter
    trained_steps: Callable[[], int]  # how far training has come, which lengths may follow

    def __post_init__(self) -> None:
        self.stored: dict[TrajectoryId, SimSequence] = {}  # every sample that is not forgotten, as it was streamed
        self._samples = SimSamples(self.config)
        self._colocated = self.config.colocated
        self._reward_s = self.config.workload.reward_s

    def _reached(self, id: int, incarnation: int) -> SimReplica | None:
        """The replica that an order is for, if it gets there; then its next heartbeat brings its load."""
        replica = self.fleet.replicas[id]
        if not replica.alive or self.network.is_cut(replica) or replica.incarnation != incarnation:
            return None
        replica.reported = None
        return replica

    def generate(self, command: Generate | Evaluate) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        step = self.trained_steps()
        sequences = [self._sequence(request, replica, step) for request in command.requests]
        replica.engine.submit(self.clock.now, [one for one in sequences if one.tokens < one.stop])
        for sequence in sequences:
            if sequence.tokens >= sequence.stop:
                replica.engine.take_ended(sequence)
                self._judge(replica, sequence)
        self.mark(replica)
        self.wake(replica)

    def _sequence(self, request: Request, replica: SimReplica, step: int) -> SimSequence:
        sequence = self.stored.get(request.trajectory) if request.resume else None
        # An older assignment may still run elsewhere: its work is not shared.
        if sequence is None or sequence.tokens == 0 or sequence.status != "outside":
            sequence = self._samples.sequence(request, step)
            sequence.oldest = replica.version
        self.stored[request.trajectory] = sequence
        sequence.attempt = request.attempt
        sequence.newest = replica.version
        return sequence

    def forget(self, command: Forget) -> None:
        forgotten = [self.stored.pop(id) for id in command.trajectories if id in self.stored]
        if command.reason not in ("trained", "evaluated"):
            self.meter.discarded += sum([one.tokens for one in forgotten])

    # ------------------------------------------------------------------------------------------------------ colocated

    def pause(self, seconds: float) -> None:
        """What is in flight waits while the trainer has the GPUs."""
        for replica in self.fleet.replicas:
            self.meter.mark(replica, "training", self.clock.now)
            if replica.engine.held:
                replica.engine.lend(self.clock.now, seconds)
                self.wake(replica)

    def resume(self) -> None:
        for replica in self.fleet.replicas:
            self.mark(replica)

    # ---------------------------------------------------------------------------------------------------------- turns

    def mark(self, replica: SimReplica) -> None:
        """Note what a replica is doing, for the timeline."""
        if self.meter.timeline is not None:
            self.meter.mark(replica, self._doing(replica), self.clock.now)

    def _doing(self, replica: SimReplica) -> str:
        if replica.pulling or not replica.alive:
            return "pulling" if replica.alive else "lost"
        if self._colocated and self.fleet.trainer.training is not None:
            return "training"
        if replica.engine.batch or replica.engine.waiting:
            return "generating"
        return "scoring" if replica.engine.held or replica.scoring else "idle"

    def wake(self, replica: SimReplica) -> None:
        """Something about an engine has changed: wake it when its next change is due."""
        replica.wake += 1
        at = replica.engine.next_change()
        if at != inf:
            self.clock.at(at, self._woken, replica, replica.wake)

    def _woken(self, replica: SimReplica, wake: int) -> None:
        if wake != replica.wake:
            return
        for sequence in replica.engine.ended_turns(self.clock.now):
            self._judge(replica, sequence)
        self.mark(replica)
        self.wake(replica)

    def _judge(self, replica: SimReplica, sequence: SimSequence) -> None:
        """A turn is over: a tool is called, or the whole is scored."""
        final = sequence.status != "calling"
        seconds = self._reward_s if final else sequence.turns[sequence.turn].latency_s
        if final and not seconds:
            self._report(replica, sequence)
            return
        turn = JudgedTurn(sequence.trajectory, sequence.attempt, sequence.turn, final)
        if final:
            replica.scoring[sequence.trajectory] = sequence
        if seconds > SCORING_S:
            self.clock.after(SCORING_S, self._judged_for_long, replica, sequence, turn)
        self.clock.after(seconds, self._judged, replica, sequence, turn, seconds > SCORING_S)

    def _is_judged(self, replica: SimReplica, sequence: SimSequence, turn: JudgedTurn) -> bool:
        """It is still where it was when the turn ended."""
        held = replica.scoring if turn.final else replica.engine.held
        here = held.get(sequence.trajectory) is sequence
        same = here and sequence.attempt == turn.attempt and sequence.turn == turn.turn
        return same and (turn.final or sequence.status == "calling")

    def _judged_for_long(self, replica: SimReplica, sequence: SimSequence, turn: JudgedTurn) -> None:
        if self._is_judged(replica, sequence, turn):
            self.network.send(replica, ScoringStarted(replica.id, replica.incarnation, (turn,)))

    def _judged(self, replica: SimReplica, sequence: SimSequence, turn: JudgedTurn, was_long: bool) -> None:
        if not self._is_judged(replica, sequence, turn):
            return
        if turn.final:
            del replica.scoring[sequence.trajectory]
            self._report(replica, sequence)
        else:
            self._continue(replica, sequence, was_long)
        self.mark(replica)

    def _continue(self, replica: SimReplica, sequence: SimSequence, was_long: bool) -> None:
        replica.engine.finish_call(self.clock.now, sequence)
        self.wake(replica)
        if was_long:
            turn = JudgedTurn(sequence.trajectory, sequence.attempt, sequence.turn)
            self.network.send(replica, GenerationResumed(replica.id, replica.incarnation, (turn,)))

    def _report(self, replica: SimReplica, sequence: SimSequence) -> None:
        if self._samples.failure_share and self._samples.fails(sequence):
            failed = SampleFailed(replica.id, sequence.trajectory, sequence.attempt, "the environment failed")
            self.network.send(replica, failed)
        else:
            self.network.send(replica, Finished(replica.id, self._meta(sequence, "stop")))

    def _meta(self, sequence: SimSequence, finish: str = "") -> TrajectoryMeta:
        return TrajectoryMeta(
            sequence.trajectory,
            sequence.attempt,
            sequence.tokens,
            sequence.oldest,
            sequence.newest,
            finish,
            sequence.reward if finish else None,
        )

    def release(self, command: Release) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.clock.now
        sequences = replica.engine.withdraw(now, {one.trajectory for one in command.samples})
        self.meter.mark(replica, "repacked", now)
        self.wake(replica)
        self.network.send(replica, Parked(replica.id, replica.incarnation, tuple([self._meta(s) for s in sequences])))

    def cancel(self, command: Cancel) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        for one in command.samples:
            held = replica.scoring if one.trajectory in replica.scoring else replica.engine.held
            sequence = held.get(one.trajectory)
            if sequence is not None and sequence.attempt == one.attempt:
                self._drop(replica, one.trajectory)
        self.mark(replica)
        self.wake(replica)

    def _drop(self, replica: SimReplica, trajectory: TrajectoryId) -> None:
        if replica.scoring.pop(trajectory, None) is None:
            replica.engine.cancel(self.clock.now, trajectory)

    # ------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, command: LoadWeights) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.clock.now
        replica.pull += 1
        replica.pulling = True
        alone = replica.engine.costs.pull(remote=command.relay != replica.host)
        seconds = alone * replica.engine.slowdown
        replica.pulled_s += seconds
        replica.pulls += 1
        self.mark(replica)
        if replica.engine.held:
            replica.engine.stall(now, alone)
            self.wake(replica)
        self.clock.after(seconds, self._loaded, replica, replica.pull, command.version)

    def _loaded(self, replica: SimReplica, pull: int, version: Version) -> None:
        if pull != replica.pull:
            return
        now = self.clock.now
        replica.version = version
        replica.pulling = False
        if replica.engine.held:
            replica.engine.switch_weights(now, version, self.config.schedule.in_flight_kv == "recompute")
            self.wake(replica)
        self.mark(replica)
        self.network.send(replica, WeightsLoaded(replica.id, replica.incarnation, version))
