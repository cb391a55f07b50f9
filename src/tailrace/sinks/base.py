"""What a tracker is told, and the contract that each of them keeps.

A sink is opened at a position, given rows in order, and closed. It may raise whatever it likes: the process that feeds
it ends then, and the run does not notice. The position is what it needs to go on from where it was closed, or killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

SinkName = Literal["jsonl", "tensorboard", "wandb", "trackio"]


class TrackedRun(NamedTuple):
    """The run that a tracker is told of."""

    id: str  # the same whenever it is resumed
    name: str
    project: str
    folder: Path  # where a sink may write: RUN/log
    settings: Mapping[str, Any]  # flat: "schedule.kind"


class SampleText(msgspec.Struct, frozen=True):
    """A sample as people read it."""

    step: int  # that trained it, or the version that was evaluated
    trajectory: int
    group: int
    prompt: str
    completion: str
    reward: float | None
    tokens: int
    finish: str


class Logged(NamedTuple):
    """All that is said of one step: the number of steps that are trained, when, the figures, and some samples."""

    step: int
    seconds: float  # running time of the run
    values: Mapping[str, float]
    samples: Sequence[SampleText] = ()


class Sink(Protocol):
    def log(self, row: Logged) -> None: ...

    def flush(self) -> int:
        """What was logged is safe from here on. Returns what `opened` is to be given to go on after it."""
        ...

    def close(self, ended: bool) -> None:
        """`ended`: the run is over, rather than this process."""
        ...
