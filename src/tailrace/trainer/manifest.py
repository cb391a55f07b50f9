"""Which checkpoints there are, and whether one is as it was written. Needs no torch, so that `export` can ask too."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import msgspec

from tailrace.errors import TailraceError
from tailrace.trainer.sealed import Sealed, is_as_written
from tailrace.types import MALFORMED
from tailrace.weights.checksum import checksum

PREFIX = "step-"
ORIGIN = "origin"  # beside the checkpoints of a run that was made from another: the one that it began with
LAYOUT = 2
LONGEST_STATE = 1 << 20  # bytes of state.json: a few hundred, and a hundred more for every file
NAME = re.compile(rf"{PREFIX}[0-9]{{8,12}}")


class CheckpointError(TailraceError):
    """A checkpoint could not be written or read; earlier ones are intact."""


class File(msgspec.Struct, frozen=True):
    size: int
    checksum: str


class TrainerState(Sealed, forbid_unknown_fields=True):
    """What is not a tensor."""

    step: int
    updates: int
    layout: int = LAYOUT  # of the folder; the first had no checksum of this file
    files: dict[str, File] = msgspec.field(default_factory=dict[str, File])


def found_in(folder: Path) -> list[Path]:
    """By step. What else somebody has put there is not ours to read, nor to delete."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if NAME.fullmatch(path.name) and path.is_dir())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def check(path: Path) -> None:
    """CheckpointError unless every file is as it was written."""
    state = read_state(path)
    if state.step != step_of(path):
        raise CheckpointError(f"{path} is the checkpoint of step {state.step} under another name")
    for name, expected in state.files.items():
        try:
            _check(path, name, expected)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {name[:80]!r} {error}") from None


def _check(path: Path, name: str, expected: File) -> None:
    file = path / name
    if Path(name).name != name or file.is_symlink() or not file.is_file():
        raise ValueError("is missing")
    if (size := file.stat().st_size) != expected.size:
        raise ValueError(f"has {size:,} of {expected.size:,} bytes")
    if described(file) != expected:
        raise ValueError("is not as it was written")


def read_state(folder: Path) -> TrainerState:
    try:
        with (folder / "state.json").open("rb") as file:
            state = msgspec.json.decode(file.read(LONGEST_STATE), type=TrainerState)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{folder} is not a checkpoint that training can go on from ({error})") from None
    if state.layout > LAYOUT:
        raise CheckpointError(
            f"{folder} was written by a later release (layout {state.layout}; this one reads {LAYOUT})"
        )
    if not is_as_written(state) or (state.layout == LAYOUT and not state.sum):
        raise CheckpointError(f"{folder} is damaged: 'state.json' is not as it was written")
    return state


def described(file: Path) -> File:
    size = file.stat().st_size
    if not size:
        return File(0, "")
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return File(size, checksum(memoryview(content), parallel=True))
