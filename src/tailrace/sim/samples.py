"""The samples of a simulated run: how long each is, in which turns, whether it is right, and if its environment fails.

All of it depends on the seed, the group's index and the sample's index alone, so every schedule meets the same samples.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from tailrace.config.tree import Config
from tailrace.lengths import LengthLaw
from tailrace.protocol import Request
from tailrace.sim.difficulty import SuccessLaw
from tailrace.sim.engine import SimSequence
from tailrace.sim.episodes import Episodes, SimTurn


class SimSamples:
    def __init__(self, config: Config) -> None:
        self._seed = config.run.seed
        self.failure_share = config.faults.sample_failure
        self._group_size = config.workload.group_size
        self._lengths = LengthLaw(config.workload, config.run.seed, Path())
        self._episodes = Episodes(config.workload, config.run.seed)
        self._successes = SuccessLaw(config)

    def sequence(self, request: Request, step: int) -> SimSequence:
        """A sample from its start, as long as samples are at that step of training."""
        size, failures = self._group_size, request.failures
        index = request.trajectory % size
        tokens = self._lengths.sample(request.group, index, failures, step)
        if self._episodes.single:
            turns = (SimTurn(tokens, 0.0, 0),)
        else:
            turns = self._episodes.split(request.group, failures * size + index, tokens)
        sequence = SimSequence(request.trajectory, request.group, request.prompt_tokens, turns, failures)
        sequence.reward = self._successes.reward(request, step)
        return sequence

    def fails(self, sequence: SimSequence) -> bool:
        """Each attempt is a draw of its own, whichever replica has it."""
        draw = Random(f"{self._seed} {sequence.trajectory} {sequence.failures + 1}")
        return draw.random() < self.failure_share
