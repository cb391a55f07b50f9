"""Runs with samples whose texts the test has written: run.db and the file of a store, without any process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sample_stores import put
from tailrace.config import Config, load
from tailrace.protocol import Finished, PromptsAdded, Request, SampleFailed, TrajectoryMeta
from tailrace.samples.file import SampleFile
from tailrace.samples.messages import Piece
from tailrace.samples.schema import RUN, sample_file
from tailrace.store.run import RunStore
from tailrace.types import Prompt, Row, id_bytes
from tailrace.wire.messages import Grant

OPTIONS = ["--model.preset", "smollm2-135m", "--rollout.engine", "emulated"]  # its tokens are the codes of letters


class Written(NamedTuple):
    """A sample of prompt `prompt`. Turns alternate between policy and environment."""

    prompt: int
    turns: Sequence[str]
    reward: float | None = 0.0
    version: int = 0
    parts: dict[str, float] | None = None
    reason: str = ""


def piece_of(text: str, version: int | None) -> Piece:
    ids = [ord(letter) for letter in text]
    logprobs = None if version is None else np.linspace(-0.1, -3.0, len(ids)).astype("<f4").tobytes()
    return Piece(version, id_bytes(ids), logprobs)


class WrittenRun:
    def __init__(self, folder: Path, config: Config, group_size: int) -> None:
        self.store = RunStore.create(folder, config)
        self.file = SampleFile.create(sample_file(folder, 0), {RUN: self.store.meta.get("run") or ""})
        self.group_size = group_size
        self.samples = 0
        self._now = 0.0

    def ask(self, *prompts: str, rows: Sequence[int] = ()) -> None:
        """New visits."""
        first = len(self.file.prompts)
        made = [
            Row(first + i, id_bytes([ord(letter) for letter in text]), text, {"answer": "42"})
            for i, text in enumerate(prompts)
        ]
        self.file.add_prompts(made)
        numbers = list(rows) or [row.id for row in made]
        told = tuple(Prompt(row.id, row.length, number) for row, number in zip(made, numbers, strict=True))
        self._record(PromptsAdded(first, told))

    def answer(self, *samples: Written) -> None:
        """They are generated, and end with a reward or a reason."""
        for one in samples:
            self._end(one, self.begin(one))

    def answer_again(self, trajectory: int, attempt: int, one: Written) -> None:
        """The attempt before it has failed."""
        self._end(one, self._begin(one, trajectory, attempt))

    def _end(self, one: Written, request: Request) -> None:
        meta = self._meta(one, request)
        if one.reason:
            self._fail(meta, one)
        else:
            self._finish(meta, one)
        self.file.commit()

    def begin(self, one: Written) -> Request:
        id, self.samples = self.samples, self.samples + 1
        return self._begin(one, id, 1)

    def _begin(self, one: Written, id: int, attempt: int) -> Request:
        request = Request(id, attempt, id // self.group_size, one.prompt, 4)
        self.store.trajectories.assign([request])
        self.file.assign([Grant(0, id, attempt, request.group, one.prompt, False)])
        start = 0
        for place, text in enumerate(one.turns):
            put(self.file, 0, id, attempt, start, piece_of(text, None if place % 2 else one.version))
            start += len(text)
        self.file.commit()
        self.store.commit()
        return request

    def _meta(self, one: Written, request: Request) -> TrajectoryMeta:
        tokens = sum(map(len, one.turns))
        return TrajectoryMeta(request.trajectory, request.attempt, tokens, one.version, one.version, "stop", one.reward)

    def _finish(self, meta: TrajectoryMeta, one: Written) -> None:
        self.store.trajectories.finish(meta)
        self.store.trajectories.explain(meta.id, one.parts or {})
        self._record(Finished(0, meta, one.parts or {}))

    def _fail(self, meta: TrajectoryMeta, one: Written) -> None:
        self.file.complete(meta.id, meta.attempt, failed=True)
        self.store.trajectories.fail(meta.id, meta.attempt, one.reason, meta)
        self._record(SampleFailed(0, meta.id, meta.attempt, one.reason, meta))

    def _record(self, event: object) -> None:
        self._now += 0.25
        self.store.record(self._now, event, [])  # type: ignore[arg-type]
        self.store.commit()

    def close(self) -> None:
        self.file.close()
        self.store.close(complete=True)


@contextmanager
def written_run(folder: Path, group_size: int = 2, options: Sequence[str] = ()) -> Iterator[WrittenRun]:
    config = load([], [*OPTIONS, "--workload.group_size", str(group_size), *options])
    run = WrittenRun(folder, config, group_size)
    try:
        yield run
    finally:
        run.close()
