"""`tailrace` as a process of its own, for the scripts beside this file: started with a log, ended within a deadline."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLL_S = 0.5
ENDING_S = 60.0  # for a run that is asked to stop


def tailrace(
    words: Sequence[str], log: Path, deadline: float, enough: Callable[[], bool] = lambda: False
) -> int | None:
    """Run it until it ends (its exit code), until it has done enough, or until the deadline (None). What it prints goes
    to a file: a pipe would be held open by its components when it is killed."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", *words], stdout=stream, stderr=subprocess.STDOUT, env=_environment()
        )
        limit = time.monotonic() + deadline
        try:
            while process.poll() is None and time.monotonic() < limit and not enough():
                time.sleep(POLL_S)
            return process.returncode
        finally:
            _stop(process)


def trained_mini_batches(run: Path) -> int:
    """Mini-batches in the journal of a run that may be under way."""
    try:
        with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True, timeout=5)) as database:
            return database.execute("SELECT count(*) FROM journal WHERE kind = 'Trained'").fetchone()[0]
    except sqlite3.OperationalError:
        return 0  # not there yet


def tails(run: Path, log: Path) -> str:
    files = [log, *sorted(run.glob("logs/*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files if file.is_file())


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
