"""trackio: its own local database (TRACKIO_DIR), which `trackio show` serves."""

from __future__ import annotations

from typing import Any

from tailrace.sinks.base import Logged, SampleText, TrackedRun

COLUMNS = list(SampleText.__struct_fields__)


class TrackioSink:
    def __init__(self, run: TrackedRun, position: int) -> None:
        import trackio

        self._trackio = trackio
        self._run: Any = trackio.init(
            project=run.project, name=run.name, config=dict(run.settings), resume="allow", embed=False
        )
        self._rows = position

    def log(self, row: Logged) -> None:
        values: dict[str, Any] = dict(row.values)
        if row.samples:
            data = [[getattr(one, name) for name in COLUMNS] for one in row.samples]
            values["samples"] = self._trackio.Table(columns=COLUMNS, data=data)
        self._run.log(values, step=row.step)
        self._rows += 1

    def flush(self) -> int:
        return self._rows

    def close(self, ended: bool) -> None:
        self._run.finish()
