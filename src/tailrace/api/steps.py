"""One row for each complete step of a run, read from `run.db` beside its writer: all of them, or those since."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from tailrace.store.database import FILE, has_table, reading
from tailrace.store.journal import Journal

Row = dict[str, Any]
TRAINED = """
SELECT seq, now, json_extract(event, '$.step'), json_extract(event, '$.mini_batch') FROM journal
WHERE seq > ? AND kind = 'Trained' ORDER BY seq
"""
MEASURED = "SELECT rowid, step, name, value FROM metrics WHERE rowid > ? AND source IN ('trainer', 'controller')"
OF_SAMPLES = """
SELECT step, count(*), avg(reward), avg(tokens), avg(finish = 'length'), max(step - oldest) FROM trajectories
WHERE state = 'trained' AND step >= ? GROUP BY step
"""
OF_GROUPS = """
SELECT step, avg(high - low <= :tolerance * max(1, high, -low)) FROM (
    SELECT step, min(reward) AS low, max(reward) AS high FROM trajectories
    WHERE state = 'trained' AND step >= :first GROUP BY step, group_id
) GROUP BY step
"""
COLUMNS = ("samples", "reward", "completion_tokens", "truncated", "staleness_max", "zero_variance")


class StepRows:
    """`new()` has the steps that were completed since it was last asked."""

    def __init__(self, run: Path) -> None:
        self._file = run / FILE
        config = Journal(run).config
        self._mini_batches = config.trainer.mini_batches
        self._tolerance = config.groups.reward_tolerance
        self._seq = self._row = 0
        self._step = 0  # the first that was not told yet
        self._values: dict[int, dict[str, list[float]]] = {}

    def new(self) -> list[Row]:
        with reading(self._file) as database:
            ended = self._ended(database)  # before the measurements: a step's are there when it is
            if not ended or not has_table(database, "metrics"):
                return []
            self._measure(database)
            of_samples = {step: values for step, *values in database.execute(OF_SAMPLES, (self._step,))}
            groups = database.execute(OF_GROUPS, {"tolerance": self._tolerance, "first": self._step})
            for step, share in groups:
                of_samples[step].append(share)
        self._step = max(ended) + 1
        return [self._as_row(step, ended[step], of_samples.get(step, ())) for step in sorted(ended)]

    def _ended(self, database: sqlite3.Connection) -> dict[int, float]:
        """When each new step was done. One that is trained again after a crash was told before."""
        found: dict[int, float] = {}
        for seq, now, step, mini_batch in database.execute(TRAINED, (self._seq,)):
            self._seq = seq
            if mini_batch == self._mini_batches - 1 and step >= self._step:
                found[step] = now
        return found

    def _measure(self, database: sqlite3.Connection) -> None:
        for row, step, name, value in database.execute(MEASURED, (self._row,)):
            self._row = row
            if value is not None:
                self._values.setdefault(step, {}).setdefault(name, []).append(value)

    def _as_row(self, step: int, now: float, of_samples: Any) -> Row:
        measured = {name: values[-self._mini_batches :] for name, values in self._values.pop(step, {}).items()}
        means = {name: sum(values) / len(values) for name, values in measured.items()}
        return {"step": step, "time": now} | means | dict(zip(COLUMNS, of_samples, strict=False))
