"""Processes that share the cores of one machine: when they want more than there are, all get the same part less.

With `local.cores` the measured costs are processor seconds, and how long they last depends on who else is busy. The
driver calls `settle` after everything that happens; without `local.cores` nothing here has any effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.sim.cluster import Simulation


class Processors:
    def __init__(self, simulation: Simulation) -> None:
        config = simulation.config
        self.sim = simulation
        self.cores = config.local.cores if config.costs.measured else 0
        self._engine = _threads(config.rollout.threads, self.cores)
        self._trainer = _threads(config.trainer.threads * config.trainer.ranks, self.cores)
        self._crowding = 1.0  # cores wanted for each that is there, and never below 1
        self._slow_engines()

    @property
    def trainer_slowdown(self) -> float:
        """Seconds on the clock for each processor second of training."""
        return self._crowding / self._trainer

    def settle(self) -> None:
        """If more or fewer processes are busy than before, they go on slower or faster from now on."""
        if not self.cores:
            return
        crowding = max(1.0, self._wanted() / self.cores)
        if crowding != self._crowding:
            self.sim.learner.stretch(crowding / self._crowding)
            self._crowding = crowding
            self._slow_engines()

    def _wanted(self) -> int:
        engines = sum(self._engine for replica in self.sim.replicas if replica.engine.batch)
        return engines + (self._trainer if self.sim.trainer.doing is not None else 0)

    def _slow_engines(self) -> None:
        for replica in self.sim.replicas:
            replica.engine.share_cores(self.sim.kernel.now, self._crowding / self._engine)
            if replica.engine.batch:
                self.sim.rollouts.wake(replica)


def _threads(given: int, cores: int) -> int:
    """How many cores a process can keep busy; 0 threads are as many as there are."""
    return min(given or cores, cores) or 1
