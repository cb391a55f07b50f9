"""The trainer in virtual time: one mini-batch after the other, a checkpoint now and then."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.config.tree import Config
from tailrace.protocol import Checkpointed, Train, Trained
from tailrace.sim.clock import VirtualClock
from tailrace.sim.cost_model import CostModel
from tailrace.sim.network import Network
from tailrace.sim.processes import SimFleet
from tailrace.sim.result import Meter
from tailrace.sim.rollouts import Rollouts
from tailrace.trainer.pace import BYTES_PER_PARAMETER, CheckpointPace


@dataclass
class TrainerLoop:
    config: Config
    clock: VirtualClock
    costs: CostModel
    fleet: SimFleet
    network: Network
    rollouts: Rollouts
    meter: Meter

    def __post_init__(self) -> None:
        every, size = self.config.trainer.checkpoint_every, BYTES_PER_PARAMETER * self.config.model.parameters
        self._pace = CheckpointPace(every, self.config.schedule.publish_every, size, 0.0)
        self._tokens = 0  # of the mini-batch that is being trained

    def train(self, command: Train) -> None:
        trainer = self.fleet.trainer
        if not trainer.alive or trainer.incarnation != command.incarnation or self.network.is_cut(trainer):
            return
        if (command.step, command.mini_batch) < (trainer.step, trainer.mini_batch):  # the report has not come through
            self.network.send(trainer, Trained(trainer.incarnation, command.step, command.mini_batch))
            return
        assert (command.step, command.mini_batch) == (trainer.step, trainer.mini_batch), (
            "mini_batches are trained in their order"
        )
        if trainer.training is None:  # or else one report answers both orders
            self._begin(command)

    def _begin(self, command: Train) -> None:
        trainer = self.fleet.trainer
        sequences = [self.rollouts.stored[id] for group in command.groups for id in group.trajectories]
        lengths = [one.prompt + one.tokens for one in sequences]
        self._tokens = sum(lengths)
        trainer.decoded += sum([one.decoded for one in sequences])
        seconds = self.costs.train(lengths) * trainer.slowdown
        if self.config.colocated:
            seconds += self.costs.switch_s if command.mini_batch == 0 else 0.0
            self.rollouts.pause(seconds)
        trainer.training = command
        trainer.busy_s += seconds
        begins_at = max(trainer.free_at, self.clock.now) + self.costs.fetch(len(sequences))
        trainer.free_at = trainer.mini_batch_ends_at = begins_at + seconds
        self.clock.at(trainer.free_at, self._mini_batch_done, command)

    def stretch(self, factor: float) -> None:
        """What is left of the present mini-batch will take so many times as long."""
        trainer = self.fleet.trainer
        if trainer.training is None:
            return
        more = (trainer.mini_batch_ends_at - self.clock.now) * (factor - 1.0)
        trainer.mini_batch_ends_at += more
        trainer.free_at += more
        trainer.busy_s += more
        self.clock.at(trainer.mini_batch_ends_at, self._mini_batch_done, trainer.training)

    def _mini_batch_done(self, command: Train) -> None:
        trainer, now = self.fleet.trainer, self.clock.now
        if trainer.training is not command or now < trainer.mini_batch_ends_at:
            return  # lost with its trainer, or it takes longer than it looked at first
        trainer.training = None
        trainer.mini_batch += 1
        if self.config.colocated:
            self.rollouts.resume()
        if command.last:
            trainer.step, trainer.mini_batch = trainer.step + 1, 0
            self.meter.stepped(trainer.step, now)
        self.network.send(trainer, Trained(trainer.incarnation, command.step, command.mini_batch))
        self._pace.trained(sum(len(group.trajectories) for group in command.groups), self._tokens)
        if command.last and self._pace.is_due(trainer.step, now):
            self._save()

    def _save(self) -> None:
        trainer = self.fleet.trainer
        self._pace.saved(self.clock.now, 0.0)
        trainer.saved = trainer.step
        self.network.send(trainer, Checkpointed(trainer.incarnation, trainer.step))
