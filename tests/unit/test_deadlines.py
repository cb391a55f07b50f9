"""Waits that had none: each ends, and says what it waited for."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.config.tree import Config, Health
from tailrace.envs import sandbox
from tailrace.launch import evaluation, train
from tailrace.obs import progress
from tailrace.protocol import Publish, PublishFailed
from tailrace.runtime.controller import INTERRUPTED
from tailrace.trainer.worker import TrainerWorker
from tailrace.wire.messages import Ordered


def test_an_evaluation_that_falls_silent_is_ended_with_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    child = tmp_path / "python"
    child.write_text('#!/bin/sh\necho \'{"done": 3, "total": 8}\'\nexec sleep 600\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(evaluation, "SETTING_UP_S", 0.5)
    with pytest.raises(evaluation.EvaluationError, match=r"said nothing for 1 s, with 3 of 8 prompts"):
        evaluation.measure(Config(health=Health(stuck_s=0.5)), None, lambda *_: None)


def test_a_terminal_that_takes_nothing_does_not_keep_the_work_from_going_on(monkeypatch: Any) -> None:
    freed = threading.Event()

    class Stuck(io.StringIO):
        def write(self, _: str) -> int:
            freed.wait(60.0)
            return 0

    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.2)
    with progress.Progress("working", Stuck(), quiet_s=0.0) as shown:
        pass
    assert shown._thread.is_alive(), "it was left behind"
    freed.set()


def test_a_program_that_the_kernel_holds_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox, "REAP_S", 0.1)
    monkeypatch.setattr(sandbox.os, "killpg", lambda *_: None)  # as if it did not help
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(RuntimeError, match=f"process {process.pid} of the sandbox was killed and is still there"):
            sandbox._end(process)
        process.kill()


def test_an_error_of_the_view_ends_the_run_at_once(monkeypatch: Any) -> None:
    class Waits:
        now = 0.0

        def __init__(self, *_: object) -> None:
            self._ended = asyncio.Event()

        def interrupt(self) -> None:
            self._ended.set()

        async def run(self) -> str:
            await self._ended.wait()
            return INTERRUPTED

    class Broken:
        def __init__(self, *_: object) -> None:
            pass

        async def show(self, *_: object) -> None:
            raise OSError("the terminal is gone")

    monkeypatch.setattr(train, "Controller", Waits)
    monkeypatch.setattr(train, "LiveView", Broken)
    monkeypatch.setattr(train, "invite", lambda *_: "")
    supervisor: Any = SimpleNamespace(beat=lambda: None, rest=lambda: None)
    nothing: Any = SimpleNamespace(run_folder=None)

    async def driven() -> None:
        async with asyncio.timeout(10.0):
            await train._drive(nothing, nothing, nothing, supervisor, None)

    with pytest.raises(OSError, match="the terminal is gone"):
        asyncio.run(driven())


def test_a_trainer_that_cannot_get_a_version_to_the_master_says_so_and_goes_on() -> None:
    worker: Any = TrainerWorker.__new__(TrainerWorker)
    reported: list[object] = []
    worker.controller = SimpleNamespace(incarnation=3, report=reported.append)
    worker.rank_group = SimpleNamespace(
        publish=lambda version, route, give_up: give_up(version, f"{route.addresses[route.master]} took nothing")
    )
    assert worker._obey(Ordered(Publish(3, 7, 1), addresses={1: "10.0.0.2:4242"}))
    assert reported == [PublishFailed(3, 7, 1, "10.0.0.2:4242 took nothing")]
