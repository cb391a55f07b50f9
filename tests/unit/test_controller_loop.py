"""The controller's loop: nothing that happens is overlooked, and what cannot be done now is done later."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from played import Child, Played
from tailrace.config import Config, load
from tailrace.protocol import ReplicaLost, Stop, TimerFired
from tailrace.runtime.controller import INTERRUPTED, RunError
from tailrace.runtime.local import Process
from tailrace.wire.messages import Ended

DEADLINE_S = 20.0
QUIET = (  # nothing happens by itself
    *("--model.preset", "smollm2-135m", "--rollout.engine", "emulated", "--trainer.engine", "emulated"),
    *("--costs.decode_step", "0.001", "--rollout.kv_tokens", "4000", "--health.heartbeat_s", "3600"),
)


class Recorder:
    """In place of a watchdog: what the loop says it is at."""

    def __init__(self) -> None:
        self.expected: list[tuple[str, float]] = []
        self.on_waiting: Callable[[], None] = lambda: None

    def expect(self, what: str, within_s: float, advice: str = "") -> None:
        self.expected.append((what, within_s))
        if what.startswith("waiting"):
            self.on_waiting()


def play(folder: Path, scene: Callable[[Played], Any]) -> None:
    async def whole() -> None:
        played = Played(folder, quiet())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await played.start()
                await scene(played)
        finally:
            await played.close()

    asyncio.run(whole())


def quiet(*words: str) -> Config:
    return load([], [*QUIET, *words])


def crash(controller: Any) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    task = asyncio.create_task(broken())
    task.add_done_callback(controller._deaf)


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (lambda controller: controller.interrupt(), None),
        (lambda controller: controller.fail("it cannot go on"), None),
        (crash, ZeroDivisionError),
    ],
)
def test_what_happens_while_orders_are_sent_is_not_overlooked(tmp_path, happens, error):
    """Nothing else would wake the loop: heartbeats are an hour apart."""

    async def scene(played: Played) -> None:
        async def sending() -> None:
            happens(played.controller)
            await asyncio.sleep(0.01)

        played.controller.then(sending())
        if error:
            with pytest.raises(error):
                await played.controller._turn_over(Recorder())  # type: ignore[arg-type]
        else:
            await played.controller._turn_over(Recorder())  # type: ignore[arg-type]
            assert played.controller.stopped == INTERRUPTED or isinstance(played.controller.error, RunError)

    play(tmp_path / "run", scene)


def test_an_event_that_comes_while_orders_are_sent_is_handled_at_once(tmp_path):
    async def scene(played: Played) -> None:
        async def sending() -> None:
            played.controller.tell(TimerFired("lunch"))
            await asyncio.sleep(0.01)

        recorder, seq = Recorder(), played.store.last_seq
        recorder.on_waiting = played.controller.interrupt
        played.controller.then(sending())
        await played.controller._turn_over(recorder)  # type: ignore[arg-type]
        assert played.store.last_seq == seq + 1

    play(tmp_path / "run", scene)


def test_a_controller_that_waits_for_long_is_not_stuck(tmp_path, monkeypatch):
    """It says again and again that it waits, so that only a loop that does not turn is reported."""
    monkeypatch.setattr("tailrace.runtime.controller.STUCK_S", 0.05)

    async def scene(played: Played) -> None:
        recorder = Recorder()

        def enough() -> None:
            if len([what for what, _ in recorder.expected if what.startswith("waiting")]) == 5:
                played.controller.interrupt()

        recorder.on_waiting = enough
        await played.controller._turn_over(recorder)  # type: ignore[arg-type]

    play(tmp_path / "run", scene)


# --------------------------------------------------------------------------------------------------------- shortage


def short_of(played: Played, times: int, number: int = errno.EMFILE) -> list[Process]:
    """The next starts fail."""
    tried: list[Process] = []

    def begin(process: Process) -> None:
        tried.append(process)
        if len(tried) <= times:
            raise OSError(number, os.strerror(number))
        process.children.append(Child())

    local: Any = played.controller.components._local
    local._begin = begin
    return tried


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_component_that_cannot_be_started_now_is_started_later(tmp_path, monkeypatch, number):
    monkeypatch.setattr("tailrace.runtime.components.SHORTAGE_S", 0.01)

    async def scene(played: Played) -> None:
        tried = short_of(played, 3, number)
        played.controller.components._start("replica", 1)
        while len(tried) < 4:
            await played.turn()
            await asyncio.sleep(0.01)
        assert played.goes_on
        assert played.process("replica", 1).alive
        assert played.notes.count("replica 1 cannot be started") == 1

    play(tmp_path / "run", scene)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT])
def test_a_component_that_can_never_be_started_again_is_lost_with_the_reason(tmp_path, monkeypatch, number):
    monkeypatch.setattr("tailrace.runtime.components.SHORTAGE_S", 0.01)

    async def scene(played: Played) -> None:
        short_of(played, 10**9, number)
        played.controller.components.config = quiet("--local.start_s", "0.05")  # the others are up by now
        played.controller.tell(ReplicaLost(1, 1, "it died"))
        played.controller.components._start("replica", 1)
        while "could not be started" not in played.controller.state.fleet.replicas[1].reason:
            await played.turn()
            await asyncio.sleep(0.01)
        assert played.goes_on

    play(tmp_path / "run", scene)


def test_stores_leave_last_when_those_who_write_to_them_are_gone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tailrace.runtime.local.TERM_S", 0.01)
    told: list[tuple[str, set[str]]] = []

    async def scene(played: Played) -> None:
        async def send(name: str, message: Any) -> None:
            if isinstance(message, Ended):
                there = played.processes("store", "relay", "trainer", "replica")
                told.append((name, {one.spec.name for one in there if not one.children[0].ended.is_set()}))

        server: Any = played.controller.server
        server.send = send
        await played.controller.components.end(complete=False, patience_s=0.01)

    play(tmp_path / "run", scene)
    *others, (store, left) = told
    assert (store, left) == ("store-0/1", {"store-0/1"})
    assert {name.partition("-")[0] for name, _ in others} == {"relay", "trainer", "replica"}


def test_components_json_is_written_when_there_is_a_descriptor_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tailrace.runtime.local.SHORTAGE_S", 0.01)
    real, left = os.open, [3]

    def short(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("components.json.new") and left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *more, **named)

    async def scene(played: Played) -> None:
        file = played.store.folder / "components.json"
        file.unlink()
        monkeypatch.setattr(os, "open", short)
        played.controller.components.introduced(played.process("relay", 0), "127.0.0.1:1", "/dev/shm/x")
        while not file.exists():
            await asyncio.sleep(0.01)
        assert played.goes_on

    play(tmp_path / "run", scene)


def test_a_run_that_control_stops_ends_though_nobody_says_anything_more(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        controller, watchdog = played.controller, Recorder()
        controller.store.commit()
        watchdog.on_waiting = lambda: None if controller.stopped else controller._stop(Stop("all steps are done"))
        await controller._turn_over(watchdog)  # type: ignore[arg-type]
        assert controller.stopped == "all steps are done"

    play(tmp_path / "run", scene)
