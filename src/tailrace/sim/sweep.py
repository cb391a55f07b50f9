"""Several simulations, on two cores where that pays.

Each simulation is a function of its config alone, so results are the same wherever they run. They come back in the
order of the configs. Worker processes are started afresh (spawn), take settings and give results as bytes, and end
with their parent: Ctrl-C is the parent's to handle.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import msgspec

from tailrace.config.tree import Config
from tailrace.sim.controller import Observer
from tailrace.sim.result import Result, TimelineSpan
from tailrace.sim.simulation import FleetLostError, Simulation

PROCESSES = 2
PAYS_FROM = 30_000  # trajectories in all: below that, starting processes takes longer than simulating
LOOK_EVERY_S = 0.1

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


class SimulationOutcome(msgspec.Struct, frozen=True):
    """What one simulation gave; the timeline is empty unless it was asked for.

    One that is recorded has `run.steps` steps; the others go on until so many have been in the steady state."""

    result: Result | None  # None: the fleet was lost
    timeline: list[TimelineSpan]
    lost: str = ""  # why


def simulate(
    config: Config,
    observer: Observer | None = None,
    timeline: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SimulationOutcome:
    simulation = Simulation(config, observer, timeline, until_steady=observer is None)
    try:
        result = simulation.run(progress)
    except FleetLostError as error:
        return SimulationOutcome(None, [], str(error))
    return SimulationOutcome(result, simulation.meter.timeline or [])


def sweep(
    configs: Sequence[Config], timelines: Sequence[bool], progress: Progress, pays_from: int = PAYS_FROM
) -> list[SimulationOutcome]:
    """Simulate every config; `timelines` says for which of them to keep what the replicas did."""
    work = sum(config.run.steps * config.workload.trajectories_per_step for config in configs)
    if len(configs) > 1 and work >= pays_from:
        return _in_parallel(configs, timelines, progress)
    return _one_by_one(configs, timelines, progress)


def describe(config: Config) -> str:
    return f"{config.schedule.kind} on {config.size}"


def _one_by_one(configs: Sequence[Config], timelines: Sequence[bool], progress: Progress) -> list[SimulationOutcome]:
    total = sum(config.run.steps for config in configs)
    outcomes: list[SimulationOutcome] = []
    done = 0
    for config, timeline in zip(configs, timelines, strict=True):
        before, text = done, describe(config)
        progress(before, total, text)
        outcomes.append(
            simulate(
                config, None, timeline, lambda steps, b=before, t=text: progress(b + min(steps, total - b), total, t)
            )
        )
        done += config.run.steps
    return outcomes


# -------------------------------------------------------------------------------------------------- several processes


def _in_parallel(configs: Sequence[Config], timelines: Sequence[bool], progress: Progress) -> list[SimulationOutcome]:
    context = multiprocessing.get_context("spawn")
    steps = context.Array("l", len(configs), lock=False)
    total = sum(config.run.steps for config in configs)
    largest_first = sorted(range(len(configs)), key=lambda row: -configs[row].cluster.gpus)
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(PROCESSES, context, _share, (steps,)) as pool:
        with _interrupts_ignored():  # the workers inherit this, and stay quiet when a person presses Ctrl-C
            futures = {row: pool.submit(_work, row, _encode(configs[row]), timelines[row]) for row in largest_first}
        try:
            _watch(list(futures.values()), lambda: progress(sum(steps), total, f"{len(configs)} simulations"))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise
        return [msgspec.msgpack.decode(futures[row].result(), type=SimulationOutcome) for row in range(len(configs))]


def _watch(futures: list[Future[bytes]], look: Callable[[], None]) -> None:
    """Until all are done, or one has failed."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, LOOK_EVERY_S, FIRST_EXCEPTION)
        for future in done:
            future.result()
        look()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


_encode = msgspec.msgpack.Encoder().encode
_steps: Any = None  # in a worker: the array in which it shows its progress


def _share(steps: Any) -> None:
    global _steps  # noqa: PLW0603  (the only way to hand shared memory to a worker)
    _steps = steps


def _work(row: int, config: bytes, timeline: bool) -> bytes:
    def show(steps: int) -> None:
        _steps[row] = steps

    return _encode(simulate(msgspec.msgpack.decode(config, type=Config), None, timeline, show))
