"""Tailrace from Python: `tailrace.train`, `tailrace.fork`, `tailrace.simulate` and `tailrace.Run`.

Everything runs in processes of its own, started as the command line would: a script or a notebook only writes down its
settings, rows and functions (`inputs.py`, `functions.py`), starts the command (`process.py`) and reads what the run
writes (`run.py`). So nothing of a training run lives in the caller's process, and a run outlives no caller.
"""

from tailrace.api.run import RecordedRun
from tailrace.api.simulation import simulate
from tailrace.api.training import fork, train

Run = RecordedRun  # by its public name

__all__ = ["RecordedRun", "Run", "fork", "simulate", "train"]
