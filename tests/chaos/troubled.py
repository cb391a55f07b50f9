"""The default recipe's task with rewards that can be made to hang, to raise and to answer nonsense.

Whoever wants trouble puts a file into the folder `TAILRACE_TROUBLE` names; the first judge that sees it takes it away
and is in trouble, once.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.envs.base import Row, Scored, Turn
from tailrace.envs.running_total import RunningTotal

TROUBLE = "TAILRACE_TROUBLE"
KINDS = ("stuck", "raises", "nonsense", "dies", "nan", "extreme")
EXTREMES = (-0.0, 1e308, -1e308, 5e-324, True, np.float32(0.1), np.array(2.0), np.bool_(True))


class Troubled(RunningTotal):
    trusted = False  # so that it is judged in processes of its own

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        super().__init__(options, seed)
        self._folder = Path(os.environ.get(TROUBLE, "/nowhere"))

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        for kind in KINDS:
            if _taken(self._folder / kind):
                return _trouble(kind)
        return super().respond(row, transcript)


def _taken(flag: Path) -> bool:
    try:
        flag.unlink()
    except OSError:
        return False
    return True


def _trouble(kind: str) -> Scored:
    if kind == "stuck":
        time.sleep(3600)
    if kind == "raises":
        raise RuntimeError("this reward was told to raise")
    if kind == "dies":
        os.abort()
    if kind == "nan":
        return Scored(float("nan"))
    if kind == "extreme":
        return Scored(random.choice(EXTREMES))  # type: ignore[arg-type]
    return "nonsense"  # type: ignore[return-value]
