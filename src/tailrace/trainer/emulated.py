"""A learner without a model: it takes the time that `[costs]` says and trains nothing.

It stands where a real learner would, for fleets larger than this machine and for tests that kill things. Its weights
are one small array that names its version, so that relays carry something and a reader can tell what it got; its
checkpoint is a file `state.json`, beside which the one before it is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tailrace.config.tree import Config
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.trainer.batch import figures
from tailrace.trainer.manifest import CheckpointError
from tailrace.trainer.sealed import Sealed, is_as_written, sealed
from tailrace.types import MALFORMED, Trajectory

FILE, EARLIER = "state.json", "state.earlier.json"


class State(Sealed):
    """All that it knows."""

    step: int = 0  # steps in its weights, the one that it is at counted as done: nobody looks in between
    tokens: int = 0  # that it was given so far


class EmulatedLearner:
    def __init__(self, config: Config, sleep: Callable[[float], None] = time.sleep) -> None:
        self.state = State()
        self._costs = config.costs
        self._sleep = sleep

    def train_part(self, step: int, part: int, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Take as long as this part of a step would; returns what a learner with a model can say of it as well."""
        trajectories = [trajectory for group in groups for trajectory in group]
        tokens = sum(len(segment) for trajectory in trajectories for segment in trajectory.segments)
        seconds = self._costs.train_part + self._costs.train_token * tokens
        self._sleep(seconds)
        self.state = State(step + 1, self.state.tokens + tokens)
        trained = [(one.reward or 0.0, one.sampled_tokens) for one in trajectories if one.sampled_tokens]
        rewards, counts = np.array(trained, dtype=float).reshape(-1, 2).T
        return figures(rewards, counts.astype(int)) | {"seconds": seconds}

    def snapshot(self) -> dict[str, np.ndarray]:
        """The weights as they are now, for a publication; takes the time of the trainer's stall."""
        self._sleep(self._costs.publish)
        return dict(self.weights())

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "emulated.weight", np.full(16, self.state.step, np.float32)

    def save(self, folder: Path) -> None:
        """Whole or not at all, and beside the one before it."""
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
        written, newest = folder / f"{FILE}.new", _read(folder / FILE)
        written.touch(PRIVATE)
        written.write_bytes(sealed(self.state))
        if newest is not None and newest.step < self.state.step:
            os.replace(folder / FILE, folder / EARLIER)
        os.replace(written, folder / FILE)

    def restore(self, folder: Path) -> int:
        """Take up the newest checkpoint that is whole; returns the number of steps in it, 0 where there is none."""
        files = [path for path in (folder / FILE, folder / EARLIER) if path.exists()]
        found = next((state for path in files if (state := _read(path)) is not None), None)
        if files and found is None:
            raise CheckpointError(f"{files[0]} is damaged, and there is no earlier one")
        self.state = found or State()
        return self.state.step


def _read(path: Path) -> State | None:
    """What the file says; None if it is not there, or damaged."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except (FileNotFoundError, *MALFORMED):
        return None
    return state if is_as_written(state) else None
