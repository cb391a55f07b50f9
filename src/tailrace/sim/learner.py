"""The trainer in virtual time: one part after the other, a checkpoint now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.protocol import Checkpointed, Train, Trained
from tailrace.sim.costs import SWITCH_S
from tailrace.trainer.pace import BYTES_PER_PARAMETER, CheckpointPace

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation


class Learner:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        config = simulation.config
        size = BYTES_PER_PARAMETER * config.model.parameters
        self.pace = CheckpointPace(config.trainer.checkpoint_every, config.schedule.publish_every, size, 0.0)

    def train(self, command: Train) -> None:
        trainer, now = self.sim.trainer, self.sim.kernel.now
        if not trainer.alive or trainer.incarnation != command.incarnation or self.sim.faults.is_cut(trainer):
            return
        if (command.step, command.part) < (trainer.step, trainer.part):  # the report has not come through
            self.sim.tell(trainer, Trained(trainer.incarnation, command.step, command.part))
            return
        assert (command.step, command.part) == (trainer.step, trainer.part), "parts are trained in their order"
        if trainer.doing is not None:
            return  # it is at it already; one report answers both orders
        sequences = [self.sim.vault[id] for group in command.groups for id in group.trajectories]
        seconds = self.sim.costs.train([s.prompt + s.tokens for s in sequences])
        seconds *= self.sim.processors.trainer_slowdown
        if self.sim.config.colocated:
            seconds += SWITCH_S if command.part == 0 else 0.0
            self._pause_engines(seconds)
        self.sim.meter.picked(command, sequences)
        trainer.doing = command
        trainer.busy_s += seconds
        trainer.free_at = trainer.part_ends_at = max(trainer.free_at, now) + seconds
        self.sim.kernel.at(trainer.free_at, self._part_done, command)

    def stretch(self, factor: float) -> None:
        """What is left of the present part will take so many times as long."""
        trainer = self.sim.trainer
        if trainer.doing is None:
            return
        more = (trainer.part_ends_at - self.sim.kernel.now) * (factor - 1.0)
        trainer.part_ends_at += more
        trainer.free_at += more
        trainer.busy_s += more
        self.sim.kernel.at(trainer.part_ends_at, self._part_done, trainer.doing)

    def _pause_engines(self, seconds: float) -> None:
        """Colocated: what is in flight waits while its GPUs train."""
        for replica in self.sim.replicas:
            self.sim.meter.mark(replica, "training", self.sim.kernel.now)
            if replica.engine.held:
                replica.engine.lend(self.sim.kernel.now, seconds)
                self.sim.rollouts.wake(replica)

    def _resume_engines(self) -> None:
        for replica in self.sim.replicas:
            self.sim.rollouts.mark(replica)

    def _part_done(self, command: Train) -> None:
        trainer = self.sim.trainer
        if trainer.doing is not command or self.sim.kernel.now < trainer.part_ends_at:
            return  # lost with its trainer, or it takes longer than it looked at first
        trainer.doing = None
        trainer.part += 1
        if self.sim.config.colocated:
            self._resume_engines()
        if command.last:
            trainer.step, trainer.part = trainer.step + 1, 0
            self.sim.meter.stepped(trainer.step, self.sim.kernel.now)
        self.sim.tell(trainer, Trained(trainer.incarnation, command.step, command.part))
        self.pace.trained(sum(len(group.trajectories) for group in command.groups), self.sim.meter.tokens_of(command))
        if command.last and self.pace.is_due(trainer.step, self.sim.kernel.now):
            self.pace.saved(self.sim.kernel.now, 0.0)
            trainer.saved = trainer.step
            self.sim.tell(trainer, Checkpointed(trainer.incarnation, trainer.step))
