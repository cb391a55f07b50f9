"""Replicas in virtual time: they generate, release, cancel and load weights as told, and report what comes of it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tailrace.protocol import (
    SCORING_S,
    Cancel,
    Finished,
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
from tailrace.sim.engine import Sequence
from tailrace.sim.episodes import Turn
from tailrace.sim.nodes import SimReplica
from tailrace.types import TrajectoryId, Version

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation


class Rollouts:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation

    def _reached(self, id: int, incarnation: int) -> SimReplica | None:
        """The replica that an order is for, if it gets there; then its next heartbeat brings its load."""
        replica = self.sim.replicas[id]
        if not replica.alive or self.sim.faults.is_cut(replica) or replica.incarnation != incarnation:
            return None
        replica.reported = None
        return replica

    def generate(self, command: Generate) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        sequences = [self._sequence(request, replica) for request in command.requests]
        replica.engine.submit(self.sim.kernel.now, [one for one in sequences if one.tokens < one.stop])
        for sequence in sequences:
            if sequence.tokens >= sequence.stop:
                replica.engine.take_ended(sequence)
                self._judge(replica, sequence)
        self.mark(replica)
        self.wake(replica)

    def _sequence(self, request: Request, replica: SimReplica) -> Sequence:
        sequence = self.sim.vault.get(request.trajectory) if request.resume else None
        if sequence is None or sequence.tokens == 0:
            sequence = self._new_sequence(request)
            sequence.oldest = replica.version
        if sequence.place != "outside":  # an older assignment still runs elsewhere: its work is not shared
            sequence = self._new_sequence(request)
            sequence.oldest = replica.version
        self.sim.vault[request.trajectory] = sequence
        sequence.epoch = request.epoch
        sequence.newest = replica.version
        return sequence

    def _new_sequence(self, request: Request) -> Sequence:
        size, failures = self.sim.config.workload.group_size, request.failures
        index = request.trajectory % size
        tokens = self.sim.lengths.sample(request.group, index, failures, self.sim.plane.state.training.version)
        if self.sim.episodes.single:
            turns = (Turn(tokens, 0.0, 0),)
        else:
            turns = self.sim.episodes.split(request.group, failures * size + index, tokens)
        return Sequence(request.trajectory, request.group, request.prompt_tokens, turns, failures)

    def mark(self, replica: SimReplica) -> None:
        """Note what a replica is doing, for the timeline."""
        self.sim.meter.mark(replica, self._doing(replica), self.sim.kernel.now)

    def _doing(self, replica: SimReplica) -> str:
        if replica.pulling or not replica.alive:
            return "pulling" if replica.alive else "lost"
        if self.sim.config.colocated and self.sim.trainer.doing is not None:
            return "training"
        if replica.engine.batch or replica.engine.waiting:
            return "generating"
        return "scoring" if replica.engine.held or replica.scoring else "idle"

    def wake(self, replica: SimReplica) -> None:
        """Something about an engine has changed: wake it when its next change is due."""
        replica.wake += 1
        at = replica.engine.next_change()
        if at != inf:
            self.sim.kernel.at(at, self._woken, replica, replica.wake)

    def _woken(self, replica: SimReplica, wake: int) -> None:
        if wake != replica.wake:
            return
        for sequence in replica.engine.ended_turns(self.sim.kernel.now):
            self._judge(replica, sequence)
        self.mark(replica)
        self.wake(replica)

    def _judge(self, replica: SimReplica, sequence: Sequence) -> None:
        """A turn is over: a tool is called, or the whole is scored."""
        turn = JudgedTurn(sequence.trajectory, sequence.epoch, sequence.turn, final=sequence.place != "calling")
        seconds = self.sim.config.workload.reward_s if turn.final else sequence.turns[sequence.turn].latency_s
        if turn.final and not seconds:
            self._report(replica, sequence)
            return
        if turn.final:
            replica.scoring[sequence.trajectory] = sequence
        if seconds > SCORING_S:
            self.sim.kernel.after(SCORING_S, self._judged_for_long, replica, sequence, turn)
        self.sim.kernel.after(seconds, self._judged, replica, sequence, turn, seconds > SCORING_S)

    def _is_judged(self, replica: SimReplica, sequence: Sequence, turn: JudgedTurn) -> bool:
        """It is still where it was when the turn ended."""
        held = replica.scoring if turn.final else replica.engine.held
        here = held.get(sequence.trajectory) is sequence and (sequence.epoch, sequence.turn) == (turn.epoch, turn.turn)
        return here and (turn.final or sequence.place == "calling")

    def _judged_for_long(self, replica: SimReplica, sequence: Sequence, turn: JudgedTurn) -> None:
        if self._is_judged(replica, sequence, turn):
            self.sim.tell(replica, ScoringStarted(replica.id, replica.incarnation, (turn,)))

    def _judged(self, replica: SimReplica, sequence: Sequence, turn: JudgedTurn, was_long: bool) -> None:
        if not self._is_judged(replica, sequence, turn):
            return
        if turn.final:
            del replica.scoring[sequence.trajectory]
            self._report(replica, sequence)
        else:
            self._go_on(replica, sequence, was_long)
        self.mark(replica)

    def _go_on(self, replica: SimReplica, sequence: Sequence, was_long: bool) -> None:
        replica.engine.finish_call(self.sim.kernel.now, sequence)
        self.wake(replica)
        if was_long:
            turn = JudgedTurn(sequence.trajectory, sequence.epoch, sequence.turn)
            self.sim.tell(replica, GenerationResumed(replica.id, replica.incarnation, (turn,)))

    def _report(self, replica: SimReplica, sequence: Sequence) -> None:
        if self.sim.faults.sample_fails(sequence.trajectory, sequence.failures):
            failed = SampleFailed(replica.id, sequence.trajectory, sequence.epoch, "the environment failed")
            self.sim.tell(replica, failed)
        else:
            self.sim.tell(replica, Finished(replica.id, self._meta(sequence, "stop")))

    def _meta(self, sequence: Sequence, finish: str = "") -> TrajectoryMeta:
        return TrajectoryMeta(
            sequence.trajectory, sequence.epoch, sequence.tokens, sequence.oldest, sequence.newest, finish
        )

    def release(self, command: Release) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.sim.kernel.now
        sequences = replica.engine.withdraw(now)
        self.sim.meter.mark(replica, "repacked", now)
        self.wake(replica)
        self.sim.tell(replica, Parked(replica.id, replica.incarnation, tuple([self._meta(s) for s in sequences])))

    def cancel(self, command: Cancel) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        for one in command.samples:
            held = replica.scoring if one.trajectory in replica.scoring else replica.engine.held
            sequence = held.get(one.trajectory)
            if sequence is not None and sequence.epoch == one.epoch:
                self._drop(replica, one.trajectory)
        self.mark(replica)
        self.wake(replica)

    def _drop(self, replica: SimReplica, trajectory: TrajectoryId) -> None:
        if replica.scoring.pop(trajectory, None) is None:
            replica.engine.cancel(self.sim.kernel.now, trajectory)

    # ------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, command: LoadWeights) -> None:
        replica = self._reached(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.sim.kernel.now
        replica.pull += 1
        replica.pulling = True
        seconds = self.sim.costs.pull(remote=command.relay != replica.host) * replica.engine.slowdown
        replica.pulled_s += seconds
        replica.pulls += 1
        self.mark(replica)
        if replica.engine.held:
            replica.engine.stall(now, seconds)
            self.wake(replica)
        self.sim.kernel.after(seconds, self._loaded, replica, replica.pull, command.version)

    def _loaded(self, replica: SimReplica, pull: int, version: Version) -> None:
        if pull != replica.pull:
            return
        now = self.sim.kernel.now
        replica.version = version
        replica.pulling = False
        if replica.engine.held:
            replica.engine.switch_weights(now, version, self.sim.config.schedule.in_flight_kv == "recompute")
            self.wake(replica)
        self.mark(replica)
        self.sim.tell(replica, WeightsLoaded(replica.id, replica.incarnation, version))
