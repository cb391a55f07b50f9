"""Replicas in virtual time: they generate, release, cancel and load weights as told, and report what comes of it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tailrace.protocol import (
    Cancel,
    Finished,
    Generate,
    LoadWeights,
    Parked,
    Release,
    Request,
    SampleFailed,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.sim.engine import Sequence
from tailrace.sim.episodes import Turn
from tailrace.sim.nodes import SimReplica
from tailrace.types import Version

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation


class Rollouts:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation

    def _replica(self, id: int, incarnation: int) -> SimReplica | None:
        replica = self.sim.replicas[id]
        reachable = replica.alive and not self.sim.faults.is_cut(replica)
        return replica if reachable and replica.incarnation == incarnation else None

    def generate(self, command: Generate) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.sim.kernel.now
        replica.engine.submit(now, [self._sequence(request, replica) for request in command.requests])
        self.sim.meter.mark(replica, "generating", now)
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

    def wake(self, replica: SimReplica) -> None:
        """Something about an engine has changed: wake it when its next change is due."""
        replica.wake += 1
        at = replica.engine.next_change()
        if at != inf:
            self.sim.kernel.at(at, self._woken, replica, replica.wake)

    def _woken(self, replica: SimReplica, wake: int) -> None:
        if wake != replica.wake:
            return
        now = self.sim.kernel.now
        for sequence in replica.engine.ended_turns(now):
            if sequence.place == "calling":
                latency = sequence.turns[sequence.turn].latency_s
                self.sim.kernel.after(latency, self._call_finished, replica, sequence, sequence.epoch)
            elif self.sim.config.workload.reward_s:
                replica.scoring[sequence.trajectory] = sequence
                self.sim.kernel.after(
                    self.sim.config.workload.reward_s, self._scored, replica, sequence, sequence.epoch
                )
            else:
                self._report(replica, sequence)
        if not replica.engine.held:
            self.sim.meter.mark(replica, "idle", now)
        self.wake(replica)

    def _call_finished(self, replica: SimReplica, sequence: Sequence, epoch: int) -> None:
        """A tool has answered, if the trajectory is still where it was when it asked."""
        here = replica.engine.held.get(sequence.trajectory) is sequence and sequence.epoch == epoch
        if here and sequence.place == "calling":
            replica.engine.finish_call(self.sim.kernel.now, sequence)
            self.wake(replica)

    def _scored(self, replica: SimReplica, sequence: Sequence, epoch: int) -> None:
        if replica.scoring.get(sequence.trajectory) is sequence and sequence.epoch == epoch:
            del replica.scoring[sequence.trajectory]
            self._report(replica, sequence)

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
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.sim.kernel.now
        sequences = replica.engine.withdraw(now)
        self.sim.meter.mark(replica, "repacked", now)
        self.wake(replica)
        self.sim.tell(replica, Parked(replica.id, replica.incarnation, tuple([self._meta(s) for s in sequences])))

    def cancel(self, command: Cancel) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        for one in command.samples:
            sequence = replica.engine.held.get(one.trajectory)
            if sequence is not None and sequence.epoch == one.epoch:
                replica.engine.cancel(self.sim.kernel.now, one.trajectory)
        self.wake(replica)

    # ------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, command: LoadWeights) -> None:
        replica = self._replica(command.replica, command.incarnation)
        if replica is None:
            return
        now = self.sim.kernel.now
        replica.pull += 1
        seconds = self.sim.costs.pull(remote=command.relay != replica.host) * replica.engine.slowdown
        replica.pulled_s += seconds
        replica.pulls += 1
        self.sim.meter.mark(replica, "pulling", now)
        if replica.engine.held:
            replica.engine.stall(now, seconds)
            self.wake(replica)
        self.sim.kernel.after(seconds, self._loaded, replica, replica.pull, command.version)

    def _loaded(self, replica: SimReplica, pull: int, version: Version) -> None:
        if pull != replica.pull:
            return
        now = self.sim.kernel.now
        replica.version = version
        if replica.engine.held:
            replica.engine.switch_weights(now, version, self.sim.config.schedule.in_flight_kv == "recompute")
            self.wake(replica)
        self.sim.meter.mark(replica, "generating" if replica.engine.held else "idle", now)
        self.sim.tell(replica, WeightsLoaded(replica.id, replica.incarnation, version))
