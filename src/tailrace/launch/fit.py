"""`tailrace fit`: costs measured in a real run, as settings for the simulator."""

from __future__ import annotations

from pathlib import Path

from tailrace.logs import output
from tailrace.sim.fit import fragment


def print_fit(run: Path) -> int:
    output(fragment(run))
    return 0
