"""`tailrace.simulate`: rows of a simulation, from Python."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from os import fspath
from pathlib import Path
from typing import Any

import msgspec

from tailrace.api.inputs import File
from tailrace.api.process import NAME, RunFailedError
from tailrace.config import from_keywords, render

Row = dict[str, Any]


def simulate(
    *files: File, gpus: Sequence[int] | int | None = None, schedules: Sequence[str] | str | None = None, **settings: Any
) -> list[Row]:
    """Simulate, as `tailrace simulate` would: one row for each number of GPUs and schedule, with throughput, idle
    shares, staleness and the rest of its table. Settings as in `tailrace.train`.

    It runs in a process of its own, so it is safe in a script without a main guard and in a notebook.
    """
    config = from_keywords(settings, [Path(fspath(file)) for file in files])
    counts = [gpus] if isinstance(gpus, int | str) else gpus
    words = ["--gpus", ",".join(map(str, counts))] if counts else []
    kinds = [schedules] if isinstance(schedules, str) else schedules
    if not kinds and "kind" in _leaves(settings):
        kinds = [config.schedule.kind]
    words += ["--schedules", ",".join(kinds)] if kinds else []
    with tempfile.TemporaryDirectory(prefix="tailrace-") as folder:
        file = Path(folder) / "simulate.toml"
        file.write_text(render(config))
        return _rows([sys.executable, "-m", "tailrace", "simulate", str(file), "--json", *words])


def _leaves(settings: dict[str, Any]) -> set[str]:
    schedule = settings.get("schedule")
    return {key.rpartition(".")[2] for key in settings} | set(schedule if isinstance(schedule, dict) else ())


def _rows(command: list[str]) -> list[Row]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        said = [line.removeprefix(NAME) for line in done.stderr.splitlines()]
        raise RunFailedError(said[-1] if said else f"the simulation ended with status {done.returncode}")
    found: list[Row] = msgspec.json.decode(done.stdout)["results"]
    return [_flat(row) for row in found]


def _flat(row: Row) -> Row:
    """Figures of a kind become columns: `staleness_mean` and so on."""
    plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
    inner = {name: value for name, value in row.items() if isinstance(value, dict)}
    return plain | {f"{name}_{key}": each for name, value in inner.items() for key, each in value.items()}
