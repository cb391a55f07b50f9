"""A learner without a model: it reads and packs its samples, takes the time that `[costs]` says, and trains nothing.

It stands where a real learner would, for fleets larger than this machine, for the data path alone, and for tests that
kill things. Its ranks plan, read and pack as those of a real learner do; what they read is checked. Its weights
are one small array that names its version, so that relays carry something and a reader can tell what it got, and
perhaps a large one (`costs.weight_mbytes`) of which every step moves one element in a hundred; its checkpoint is a file
`state.json`, beside which the one before it is kept.
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
from tailrace.trainer.batch import MiniBatch, figures, plan_mini_batch, rank_share, read_packs, worth_a_pass
from tailrace.trainer.manifest import CheckpointError
from tailrace.trainer.packing import Pack
from tailrace.trainer.ranks import Alone, Ranks
from tailrace.trainer.reader import SampleInfo, TrajectoryReader
from tailrace.trainer.sealed import Sealed, is_as_written, sealed
from tailrace.types import MALFORMED

FILE, EARLIER = "state.json", "state.earlier.json"
MOVED_EVERY = 100  # elements


class EmulatedState(Sealed):
    """All that it knows."""

    step: int = 0  # steps in its weights, the one that it is at counted as done: nobody looks in between
    tokens: int = 0  # that it was given so far


class EmulatedLearner:
    def __init__(
        self,
        config: Config,
        ranks: Ranks | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = EmulatedState()
        self._config, self._costs = config, config.costs
        self._ranks = ranks or Alone()
        self._sleep, self._clock = sleep, clock
        self._start = np.random.default_rng(0).normal(0.0, 0.02, int(config.costs.weight_mbytes * 1e6 / 4))

    def train_mini_batch(
        self, step: int, mini_batch: int, samples: Sequence[SampleInfo], reader: TrajectoryReader
    ) -> dict[str, float]:
        """Take as long as this mini-batch of a step would; returns what a learner with a model can say of it as
        well."""
        began = self._clock()
        batch = plan_mini_batch(samples, reader, self._config.trainer, self._config.groups)
        self._pack(batch)
        tokens = sum(info.length for info in samples)
        seconds = self._costs.train_mini_batch + self._costs.train_token * tokens
        self._sleep(max(0.0, seconds - (self._clock() - began)))
        self.state = EmulatedState(step + 1, self.state.tokens + tokens)
        return figures(batch) | {"seconds": seconds}

    def _pack(self, batch: MiniBatch) -> None:
        """Read, check and pack this rank's share, and wait for the others."""
        settings = self._config.trainer
        share = rank_share(batch, worth_a_pass(batch, settings), self._ranks.rank, self._ranks.size)
        packs = 0
        for pack in read_packs(batch, share, settings.tokens_per_batch):
            _check(pack, batch)
            packs += 1
        self._ranks.most(packs)

    def snapshot(self) -> dict[str, np.ndarray]:
        """The weights as they are now, for a publication; takes the time of the trainer's stall."""
        self._sleep(self._costs.publish)
        return dict(self.weights())

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "emulated.weight", np.full(16, self.state.step, np.float32)
        if self._start.size:
            yield "emulated.more", self._moved()

    def _moved(self) -> np.ndarray:
        """By one unit in bfloat16's last place for each step that was an element's turn."""
        bits = self._start.astype(np.float32).view(np.uint32)
        for place in range(min(self.state.step, MOVED_EVERY)):
            turns = (self.state.step - 1 - place) // MOVED_EVERY + 1
            bits[place::MOVED_EVERY] += np.uint32(turns << 16)
        return bits.view(np.float32)

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
        self.state = found or EmulatedState()
        return self.state.step


def _check(pack: Pack, batch: MiniBatch) -> None:
    """A model would show log-probs that are none by a loss that is not finite."""
    if not np.isfinite(pack.behavior_logprobs).all():
        wrong = pack.sequence[~np.isfinite(pack.behavior_logprobs)][0]
        raise ValueError(f"trajectory t{batch.samples[wrong].id} has log-probs that are not finite")


def _read(path: Path) -> EmulatedState | None:
    """What the file says; None if it is not there, or damaged."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=EmulatedState)
    except (FileNotFoundError, *MALFORMED):
        return None
    return state if is_as_written(state) else None
