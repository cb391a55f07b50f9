"""When training has diverged: which updates were not finite, which weights were the last good ones, and the way back.

`worker.py` shows every update to a `Divergence`. An update whose loss or gradient is not finite changes no weights. One
of them may be an accident; after three in a row nothing more will come of these weights, and the run ends. Weights that
are not finite themselves end it at once. An update on samples without advantage says nothing either way.

Finite weights can be ruined too: the step that went wrong leaves numbers behind, but such that nothing can be computed
with them. So a version is good only once an update has started from it and was finite. The newest good one is never
pruned, and what is newer is put aside when the run ends, so that it is neither exported nor resumed from.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.trainer.manifest import found_in, step_of
from tailrace.types import Version

IN_A_ROW = 3
ASIDE = "diverged-"  # what the name of a checkpoint that was put aside begins with


class DivergedError(TailraceError):
    """The loss, its gradient or the weights are not finite, and will not be again."""


class Divergence:
    def __init__(self) -> None:
        self.good: Version = -1  # the newest that an update from was finite
        self.in_a_row = 0

    def see(self, step: int, measured: Mapping[str, float]) -> str:
        """What is wrong with this update of a step, counted from 0; nothing, mostly."""
        if measured.get("skipped"):
            self.in_a_row += 1
            times = "" if self.in_a_row == 1 else f", the {_ordinal(self.in_a_row)} time in a row"
            return f"the loss or gradient of an update of step {step + 1} is not finite{times}, so it is skipped"
        if not measured.get("without_advantage", True):
            self.in_a_row = 0
            self.good = step
        if measured.get("nonfinite_weights"):
            self.in_a_row = IN_A_ROW
            return f"an update of step {step + 1} has left weights that are not finite"
        return ""

    @property
    def is_final(self) -> bool:
        return self.in_a_row >= IN_A_ROW


def way_back(checkpoints: Path, good: Version, from_start: bool, rate: float) -> str:
    """What to do now. `from_start`: no checkpoint was written before those that this trainer has written.

    A run can be resumed from the checkpoint before the newest, not from an earlier one: the data of what came after
    that is no longer kept. So no more than one is put aside.
    """
    found = found_in(checkpoints)
    doubtful = [path for path in found if step_of(path) > good]
    if len(doubtful) == 1 and (len(found) > 1 or from_start):
        put_aside_after(checkpoints, good)
        doubtful, found = [], found[:-1]
    if not doubtful:
        last = f"version {step_of(found[-1])}, in {found[-1]}" if found else "those that the run started from"
        return (
            f"the last good weights are {last}; go on from there with a lower rate: the same command with --resume and "
            f"--trainer.learning_rate {rate / 10:g}"
        )
    kept = [path for path in found if step_of(path) <= good]
    last = f"in {kept[-1]}" if kept else "those that the run started from"
    return f"the last good weights are {last}; begin a new run with model.path there and a lower trainer.learning_rate"


def put_aside_after(checkpoints: Path, good: Version) -> None:
    for path in found_in(checkpoints):
        if step_of(path) > good:
            _put_aside(path)


def _put_aside(path: Path) -> None:
    aside = path.with_name(f"{ASIDE}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
