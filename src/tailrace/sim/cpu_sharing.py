"""Processes that share the cores of one machine: when they want more than there are, all get the same share less.

With `local.cores` the measured costs are processor seconds, and how long they last depends on who else is busy. The
driver calls `settle` after everything that happens, where cores are `shared`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.config.tree import Config
from tailrace.sim.clock import VirtualClock
from tailrace.sim.processes import SimFleet, SimReplica


@dataclass
class CpuSharing:
    config: Config
    clock: VirtualClock
    fleet: SimFleet
    wake: Callable[[SimReplica], None]  # told of every engine whose speed has changed
    stretch: Callable[[float], None]  # told by what factor the trainer takes longer

    def __post_init__(self) -> None:
        config = self.config
        self._cores = shared_cores(config)
        self._engine_threads, self._trainer_threads = threads_of(config)
        self.shared = self._cores > 0
        self._crowding = 1.0  # cores wanted for each that is there, and never below 1
        self._slow_down()

    def settle(self) -> None:
        """If more or fewer processes are busy than before, they go on slower or faster from now on."""
        crowding = max(1.0, self._wanted() / self._cores)
        if crowding != self._crowding:
            self.stretch(crowding / self._crowding)
            self._crowding = crowding
            self._slow_down()

    def _wanted(self) -> int:
        engines = sum(self._engine_threads for replica in self.fleet.replicas if replica.engine.batch)
        return engines + (self._trainer_threads if self.fleet.trainer.training is not None else 0)

    def _slow_down(self) -> None:
        self.fleet.trainer.slowdown = self._crowding / self._trainer_threads
        for replica in self.fleet.replicas:
            replica.engine.share_cores(self.clock.now, self._crowding / self._engine_threads)
            if replica.engine.batch:
                self.wake(replica)


def shared_cores(config: Config) -> int:
    """0: nobody shares any, and costs are seconds on the clock."""
    return config.local.cores if config.costs.measured else 0


def threads_of(config: Config) -> tuple[int, int]:
    """How many cores an engine and the trainer can keep busy; 1 where nobody shares any."""
    cores, trainer = shared_cores(config), config.trainer
    return _threads(config.rollout.threads, cores), _threads(trainer.threads * trainer.ranks, cores)


def _threads(given: int, cores: int) -> int:
    """How many cores a process can keep busy; 0 threads are as many as there are."""
    return min(given or cores, cores) or 1
