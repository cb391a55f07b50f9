"""The path of tokens: from replicas to a sample store, and from there to a trainer, with a real controller in charge.

    python benchmarks/data_path.py [--replicas 64] [--seconds 60] [--overload]
    python benchmarks/data_path.py --step [--ranks 1,2]

Controller, sample store, relay and trainer are real processes, started and directed as in a run; the trainer and the
weights are emulated, so all that it does is to fetch, check and pack. Replicas are mocks, many in a process, which
speak the real protocols: they introduce themselves, load versions, get `Generate` orders, fetch prompts, append random
token ids in chunks as an engine does, and report with the store's receipts. Answers have 16,384 tokens; the first ones
of a replica have any length, so that not all end at once.

`--overload` finds the limit, then offers 0.7 times, twice and again 0.7 times of it. `--step` fills the store with one
step of 67M tokens (256 prompts x 16 x 16,384), then lets trainers of so many ranks fetch, check and pack it.

CPU is of each process apart; the mocks share the machine. Beside it stands what the disk takes: plain synced writes.
Adds rows to benchmarks/results/data_path.json, with the load of the machine: other work on it makes the figures worse.
`data_path_before.py` is the same for the release before there were stores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
from data_path_rig import (
    ANSWER,
    LOOK_S,
    PIECES,
    VOCABULARY,
    Board,
    ControllerProcess,
    Rig,
    Seen,
    fleet_settings,
    keep,
    measured,
    options,
    rss_mb,
)
from msgspec.structs import replace

from tailrace.config import Config, load
from tailrace.protocol import (
    Cancel,
    Event,
    Finished,
    Generate,
    LoadWeights,
    Parked,
    Progressed,
    Release,
    ReplicaJoined,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.runtime.components import RunHandle
from tailrace.runtime.controller import Controller
from tailrace.samples.client import Receipts, SampleClient
from tailrace.samples.messages import AssignmentLost, Piece
from tailrace.samples.uploads import Growth
from tailrace.store.run import RunStore
from tailrace.wire import descriptors
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring
from tailrace.wire.messages import (
    Beat,
    BeatHere,
    Hello,
    Introduce,
    Ordered,
    Receipt,
    Reported,
    StoreAddresses,
    decode_from_controller,
    encode,
)

KEYS = Keyring(bytes(32), "ab" * 32)
STEP_PROMPTS, STEP_REPLICAS, STEP_RUNNING = 256, 16, 256
STEP = {  # nothing is trained before all is there
    "schedule.kind": "sync",
    "schedule.max_staleness": "0",
    "schedule.max_inflight": str(STEP_REPLICAS * STEP_RUNNING),
    "workload.prompts_per_step": str(STEP_PROMPTS),
    "run.steps": "1",
}

Key = tuple[int, int]  # trajectory and attempt


def settings(chosen: argparse.Namespace, ranks: int = 1) -> Config:
    """Of more replicas, too, than one machine may have."""
    more = {"trainer.ranks": str(ranks), "run.archive": "false" if chosen.delete else "true"}
    words = fleet_settings(chosen.replicas, chosen.running) | more | (STEP if chosen.step else {})
    config = load([], [word for name, value in words.items() for word in (f"--{name}", value)])
    return replace(config, local=replace(config.local, replicas=STEP_REPLICAS if chosen.step else chosen.replicas))


# -------------------------------------------------------------------------------------------------------- the mocks


class MockReplica:
    """See `data_path_rig.Mock`."""

    def __init__(self, running: int, chunk: int, whole: bool, id: int, incarnation: int, port: int) -> None:
        name = f"replica-{id}/{incarnation}"
        self.id, self._incarnation = id, incarnation
        self.held_up = self.lost = False
        self._wire = Connection(f"tcp://127.0.0.1:{port}", name, KEYS.of(name))
        self._beats = self._wire.beat_sender()
        self._beats_here = False
        self._samples = SampleClient(name)
        self._number = 0
        self._chunk, self._uneven = chunk, 0 if whole else running
        self._random = np.random.default_rng(id)
        self._version = self._last = -1  # that it has loaded, and that its newest tokens are of
        self._pieces = [self._piece() for _ in range(PIECES)]
        self._appended = 0
        self._running: dict[Key, int] = {}  # and the length of each
        self._ends: dict[Key, int] = {}
        self._first: dict[Key, int] = {}  # the version that it began with
        gc.set_threshold(100_000)

    def _piece(self) -> Piece:
        tokens = self._random.integers(0, VOCABULARY, self._chunk, dtype="<i4")
        return Piece(0, tokens.tobytes(), (-self._random.random(self._chunk, dtype="<f4")).tobytes())

    @property
    def stored(self) -> int:
        return self._appended - self._samples.unacknowledged_bytes // 8

    def join(self) -> None:
        self._beats.send(self._incarnation)
        self._wire.send(0, encode(Hello()))
        self._report(ReplicaJoined(self.id, self._incarnation, 0, -1, 1 << 30, 1024))
        self.send()

    def beat(self) -> None:
        self._beats.send(self._incarnation, self._samples.waiting_for)
        if self._beats_here:
            self._wire.send(0, encode(Beat(self._samples.waiting_for)))
        load = Progressed(self.id, self._incarnation, sum(self._running.values()), len(self._running), 0)
        self._wire.send(0, encode(Reported(load)))

    def _report(self, event: Event, *receipts: Receipt) -> None:
        self._number += 1
        self._wire.send(self._number, encode(Reported(event, receipts)))  # type: ignore[arg-type]

    def send(self) -> None:
        self._samples.turn()
        self._wire.flush()

    def close(self) -> None:
        self._beats.close()
        self._wire.close()
        self._samples.disconnect()

    # ------------------------------------------------------------------------------------------------------- orders

    def take_in(self) -> None:
        for content in self._wire.receive():
            match decode_from_controller(content):
                case Ordered(command):
                    self._obey(command)
                case StoreAddresses() as stores:
                    self._samples.find(stores)
                case BeatHere(on):
                    self._beats_here = on
                case Introduce():
                    self.lost = True
                case _:
                    pass
        for found in self._samples.poll():
            assert not isinstance(found, AssignmentLost), found
            key = found.trajectory, found.attempt
            self._running[key] = 0

    def _obey(self, command: Any) -> None:
        match command:
            case Generate(_, _, requests):
                for one in requests:
                    self._ends[one.trajectory, one.attempt] = self._end()
                    self._samples.fetch(one.trajectory, one.attempt, one.store)
            case LoadWeights(_, _, version):
                self._version = version
                self._pieces = [Piece(version, one.tokens, one.logprobs) for one in self._pieces]
                self._report(WeightsLoaded(self.id, self._incarnation, version))
            case Release():
                self._release()
            case Cancel(_, _, samples):
                for one in samples:
                    self._drop((one.trajectory, one.attempt))
                    self._samples.withdraw(one.trajectory, one.attempt)
            case _:
                raise AssertionError(command)

    def _end(self) -> int:
        self._uneven -= 1
        return int(self._random.integers(1, ANSWER // self._chunk)) * self._chunk if self._uneven >= 0 else ANSWER

    def _release(self) -> None:
        metas = {key: self._meta(key, length) for key, length in self._running.items()}

        def park(receipts: Receipts) -> None:
            self._report(
                Parked(self.id, self._incarnation, tuple([metas[key] for key in receipts])), *receipts.values()
            )

        self._samples.complete_all([(key, meta.tokens, 0) for key, meta in metas.items()], park)
        for key in metas:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        for known in (self._running, self._ends, self._first):
            known.pop(key, None)

    # ---------------------------------------------------------------------------------------------------- generating

    def generate(self) -> int:
        self.held_up = bool(self._samples.waiting_for)
        if self.held_up:
            return 0
        chunk, pieces, grown, ended, growths = self._chunk, self._pieces, 0, list[Key](), list[Growth]()
        for key, start in self._running.items():
            growths.append(Growth(key, start, (pieces[(start // chunk + key[0]) % PIECES],)))
            if not start:
                self._first[key] = self._version
            self._running[key] = start + chunk
            grown += chunk
            if start + chunk >= self._ends[key]:
                ended.append(key)
        self._samples.append_all(growths)
        self._appended += grown
        self._last = self._version
        for key in ended:
            self._finish(key)
        return grown

    def _finish(self, key: Key) -> None:
        meta = self._meta(key, self._running[key], float(self._random.random()))

        def finish(receipt: Receipt | None) -> None:
            if receipt is not None:
                self._report(Finished(self.id, meta), receipt)

        self._drop(key)
        self._samples.complete(*key, meta.tokens, finish)

    def _meta(self, key: Key, tokens: int, reward: float | None = None) -> TrajectoryMeta:
        oldest = self._first.get(key, self._version)
        return TrajectoryMeta(*key, tokens, oldest, self._last if tokens else oldest, "length", reward)


# ------------------------------------------------------------------------------------------ the controller's process


def control(pipe: Pipe, board: Board, folder: Path, config: Config) -> None:
    def make(lifeline: int, seen: Seen) -> Controller:
        descriptors.raise_limit()
        return Controller(RunStore.create(folder, config), config, RunHandle(KEYS, lifeline), seen)

    asyncio.run(ControllerProcess(pipe, board).run(make))


# ----------------------------------------------------------------------------------------------------------- all of it


def build(chosen: argparse.Namespace, folder: Path) -> Rig:
    make = partial(MockReplica, chosen.running, chosen.chunk, False)
    return Rig(chosen.replicas, control, make, folder, settings(chosen))


def step(chosen: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """One step of 67M tokens."""
    folder = Path(tempfile.mkdtemp(prefix="tailrace-data-path-", dir=chosen.folder))
    try:
        began, make = time.monotonic(), partial(MockReplica, STEP_RUNNING, chosen.chunk, True)
        rig = Rig(STEP_REPLICAS, control, make, folder / "run", settings(chosen, ranks))
        most: dict[str, float] = {}
        for _ in rig.controller.asking("step", LOOK_S / 20):
            most |= {name: max(most.get(name, 0.0), rss_mb(pid)) for name, pid in rig.pids.items()}
        found = rig.controller.answer
        rig.end()
        row = {"what": "step", "ranks": ranks, "rss_mb": most, "whole_s": time.monotonic() - began} | found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    millions, load = row["trained_tokens"] / 1e6, os.getloadavg()[0]
    print(f"a step of {millions:.1f}M tokens, {ranks} ranks: fetched, checked and packed in {row['seconds']:.1f} s")
    print("  RSS, most: " + ", ".join([f"{name} {size:.0f} MB" for name, size in most.items()]))
    silence = f"longest silence {row['longest_silence_s']:.2f} s, missed heartbeats: {row['missed_heartbeats']}"
    print(f"  trainer: {silence}; declared dead: {row['deaths']}")
    lag = f"event-loop lag p99 {1e3 * row['lag_p99_s']:.1f} ms"
    print(f"  controller: {row['controller_cpu_s']:.2f} s of CPU, {lag}; load average {load:.1f}", flush=True)
    return row | {"load": load}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--delete", action="store_true", help="run.archive off: tokens are deleted once trained")
    parser.add_argument("--step", action="store_true", help="one step of 67M tokens instead")
    parser.add_argument("--ranks", default="1,2", help="with --step: trainers of so many ranks")
    chosen = parser.parse_args()
    descriptors.raise_limit()
    if not chosen.step:
        measured("after", chosen, partial(build, chosen))
        return
    rows = [step(chosen, int(ranks)) for ranks in chosen.ranks.split(",")]
    if not chosen.dry:
        keep(rows)


if __name__ == "__main__":
    main()
