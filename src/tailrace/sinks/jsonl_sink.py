"""RUN/log/metrics.jsonl and samples.jsonl: a line for every step, evaluation and logged sample."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from tailrace.sinks.base import Logged, TrackedRun
from tailrace.store.folder import PRIVATE

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
ROW = 1 << 40  # a position is the size of both files


class JsonlSink:
    def __init__(self, run: TrackedRun, position: int) -> None:
        """What was written after that position, by a process that was killed, is written again."""
        metrics, samples = position % ROW, position // ROW
        self._metrics = _opened(run.folder / METRICS, metrics)
        self._samples = _opened(run.folder / SAMPLES, samples)

    def log(self, row: Logged) -> None:
        values = {"step": row.step, "seconds": row.seconds, **row.values}
        self._metrics.write(msgspec.json.encode(values) + b"\n")
        for sample in row.samples:
            self._samples.write(msgspec.json.encode(sample) + b"\n")

    def flush(self) -> int:
        for file in (self._metrics, self._samples):
            file.flush()
            os.fsync(file.fileno())
        return self._metrics.tell() + self._samples.tell() * ROW

    def close(self, ended: bool) -> None:
        self._metrics.close()
        self._samples.close()


def _opened(path: Path, size: int) -> BinaryIO:
    path.touch(PRIVATE)
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file
