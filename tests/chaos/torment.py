"""Drives a run from its start to its end through a plan of faults, and says what happened on the way.

Between two faults it watches: whatever ends too soon is resumed, whatever stands still for too long is a `HangError`
with a diagnosis. When nothing has been trained for a while the faults pause, so that a run must recover by itself and
not because of the next fault.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from faults import Fault, Struck
from victim import QUIET_S, HangError, Victim

TROUBLED_S = 25.0  # without a step; then the faults pause
NOTHING = Fault(float("inf"), "", 0)  # after the end of a plan


def torment(run: Victim, faults: Iterator[Fault], most: int = 1_000_000) -> list[Struck]:
    """Start the run and strike until it is complete, or until there were so many faults. Returns those that hit."""
    struck: list[Struck] = []
    run.start()
    run.wait_until(lambda: run.ended() or run.steps_done >= 1, "its first step")
    progress, done = time.monotonic(), run.steps_done
    fault = next(faults)
    due = time.monotonic() + fault.pause_s
    while not run.over():
        run.turn()
        run.recover()
        now, steps = time.monotonic(), run.steps_done
        if steps > done:
            progress, done = now, steps
        if now - progress > QUIET_S:
            raise HangError(f"no step for {QUIET_S:g} s after {_last(struck)}\n{run.diagnosis()}")
        if now >= due and len(struck) < most and now - progress < TROUBLED_S:
            whom = fault.strike(run)
            if whom:
                struck.append(Struck(fault.kind, whom, now))
            fault = next(faults, NOTHING)
            due = time.monotonic() + fault.pause_s
        time.sleep(0.05)
    run.settle()
    run.wait_until_gone()
    return struck


def _last(struck: list[Struck]) -> str:
    return ", ".join(f"{one.kind} ({one.whom})" for one in struck[-4:])


def by_kind(struck: list[Struck]) -> Counter[str]:
    return Counter(one.kind for one in struck)
