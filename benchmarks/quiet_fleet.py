"""What a fleet that does nothing costs the controller: its share of a core, its lag, and how its journal grows.

    python benchmarks/quiet_fleet.py [--replicas 256,1024,2048] [--seconds 30] [--profile]

A real controller (event loop, journal, liveness thread) in a process of its own. Its replicas, a relay, a sample store
and a trainer are mocks, hundreds in a process, each with its own TCP connection and its own datagrams, signed as those
of a real one; they join, report their load, and from then on send heartbeats and nothing else. Writes
benchmarks/results/quiet_fleet.json.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tailrace.config import Config, load
from tailrace.protocol import Event, Progressed, RelayJoined, ReplicaJoined, StoreJoined, TrainerJoined
from tailrace.runtime.components import RunHandle
from tailrace.runtime.controller import Controller
from tailrace.runtime.lag import LoopLag
from tailrace.runtime.local import Process
from tailrace.store.run import RunStore
from tailrace.wire import descriptors
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring
from tailrace.wire.messages import Beat, BeatHere, Hello, Introduce, Reported, decode_from_controller, encode

ROOT = Path(__file__).parents[1]
KEYS = Keyring(bytes(32), "ab" * 32)
FLEETS = 4  # processes that the mocks are in
OTHERS = 3  # a relay, a sample store and a trainer
JOIN_S = 120.0  # for everybody to join
TURN_MS = 10  # how often mocks whose heartbeat is due send it
SETTLE_S = 5.0  # between the last joining and the measurement
QUIET = (
    *("--model.preset", "smollm2-135m", "--rollout.engine", "emulated", "--trainer.engine", "emulated"),
    *("--costs.decode_step", "0.001", "--rollout.kv_tokens", "4000", "--local.start_s", "600"),
)


# -------------------------------------------------------------------------------------------------------- the mocks


class Mock:
    """A component that is there and does nothing."""

    def __init__(self, port: int, name: str, address: str, events: list[Event]) -> None:
        self.wire = Connection(f"tcp://127.0.0.1:{port}", name, KEYS.of(name))
        self.beats = self.wire.beat_sender()
        self._hello = Hello(address, "/dev/shm/none" if address else "")
        self._events = events
        self._beats_here = False

    def join(self) -> None:
        """From here on it is expected to send heartbeats."""
        self.beat()
        self.wire.send(0, encode(self._hello))
        for number, event in enumerate(self._events, 1):
            self.wire.send(number, encode(Reported(event)))  # type: ignore[arg-type]
        self.wire.flush()

    def beat(self) -> None:
        self.beats.send(1)
        if self._beats_here:
            self.wire.send(0, encode(Beat()))
            self.wire.flush()

    def take_in(self) -> None:
        for content in self.wire.receive():
            message = decode_from_controller(content)
            assert not isinstance(message, Introduce), "its connection was lost"
            if isinstance(message, BeatHere):
                self._beats_here = message.on


def mocks(port: int, replicas: range) -> list[Mock]:
    made: list[Mock] = []
    if replicas.start == 0:
        made.append(Mock(port, "relay-0/1", "127.0.0.1:9", [RelayJoined(0, 1)]))
        made.append(Mock(port, "store-0/1", "127.0.0.1:9", [StoreJoined(0, 1)]))
        made.append(Mock(port, "trainer-0/1", "", [TrainerJoined(1, 0)]))
    for id in replicas:
        events = [ReplicaJoined(id, 1, 0, -1, 4000, 64), Progressed(id, 1, 0, 0, 0)]
        made.append(Mock(port, f"replica-{id}/1", "", events))
    return made


def fleet(port: int, first: int, count: int, heartbeat_s: float) -> None:
    """Each mock's heartbeat has its own moment, as those of processes have."""
    descriptors.raise_limit()
    everybody = mocks(port, range(first, first + count))
    by_descriptor = {mock.wire.fileno(): mock for mock in everybody}
    poller = select.poll()
    for descriptor, mock in by_descriptor.items():
        poller.register(descriptor, select.POLLIN)
        mock.join()
    begin, sent = time.monotonic(), 0
    with suppress(ConnectionError):  # the controller has ended
        while True:
            due = int((time.monotonic() - begin) / heartbeat_s * len(everybody))
            for turn in range(sent, due):
                everybody[turn % len(everybody)].beat()
            sent = due
            for descriptor, _ in poller.poll(TURN_MS):
                by_descriptor[descriptor].take_in()


# ----------------------------------------------------------------------------------------------------- the controller


class Absent:
    """In place of a process of a component."""

    pid = started = 0
    how = "ended"

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def send(self, number: int) -> None:
        self.ended.set()


class CountingObserver:
    """Counts what happens."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()

    def see(self, now: float, event: Event, commands: Any) -> None:
        self.events.update([type(event).__name__, *[type(one).__name__ for one in commands]])

    def measure(self, *_: Any, **__: Any) -> None:
        pass


def settings(replicas: int) -> Config:
    """Of more replicas, too, than one machine may have."""
    config = load([], QUIET)
    return replace(config, local=replace(config.local, replicas=replicas))


async def control(folder: Path, replicas: int, seconds: float, profile: bool) -> None:
    """Prints its port, then, when everybody has joined, what it measured."""
    descriptors.raise_limit()
    config, seen = settings(replicas), CountingObserver()
    store = RunStore.create(folder, config)
    controller = Controller(store, config, RunHandle(KEYS, -1), seen)
    local: Any = controller.components._local
    local._begin, local._write = _begin, lambda: None  # there are no processes to find again
    running = asyncio.create_task(controller.run())
    while len(local.processes) < replicas + OTHERS and not running.done():
        await asyncio.sleep(0.05)
    print(controller.server.port, flush=True)
    async with asyncio.timeout(JOIN_S):
        while controller.state.fleet.live < replicas and not running.done():
            await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    found = await measured(controller, seen, seconds)
    profiler.disable()
    print(json.dumps({"replicas": replicas, **found}), flush=True)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    controller.interrupt()
    await running


def _begin(process: Process) -> None:
    process.children.append(Absent())


async def measured(controller: Controller, seen: CountingObserver, seconds: float) -> dict[str, float]:
    store, before, lag = controller.store, dict(seen.events), LoopLag()
    beats = newest_beats(controller)
    begin, cpu, thread, rows, size = time.monotonic(), time.process_time(), thread_s(), store.last_seq, written(store)
    await asyncio.sleep(seconds)
    wall = time.monotonic() - begin
    happened = {name: count - before.get(name, 0) for name, count in seen.events.items()}
    return {
        "heartbeats_sent_per_s": (sum(newest_beats(controller).values()) - sum(beats.values())) / wall,
        "core_share": (time.process_time() - cpu) / wall,
        "liveness_thread_share": (thread_s() - thread) / wall,
        "loop_lag_p99_s": lag.p99_s,
        "journal_rows_per_s": (store.last_seq - rows) / wall,
        "journal_bytes_per_s": (written(store) - size) / wall,
        "without_datagrams": len(controller.server.liveness.without_datagrams),
        "declared_dead": float(happened.get("GiveUp", 0)),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def newest_beats(controller: Controller) -> dict[str, int]:
    """The number of the last heartbeat that was heard of everybody."""
    return {name: record.counter for name, record in controller.server.liveness._records.items()}


def written(store: RunStore) -> int:
    """Bytes of all events and commands in the journal."""
    database: Any = store._database
    return database.execute("SELECT sum(length(event) + length(commands)) FROM journal")[0][0]


def thread_s() -> float:
    """Processor time of the thread that hears the heartbeats."""
    thread = next(one for one in threading.enumerate() if one.name == "liveness")
    user, system = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# ----------------------------------------------------------------------------------------------------------- all of it


def once(replicas: int, seconds: float, profile: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["control", f"{folder}/run", str(replicas), str(seconds), "1" if profile else ""]
        controller = start(words, stdout=subprocess.PIPE)
        assert controller.stdout is not None
        port = controller.stdout.readline().strip()
        share, heartbeat = replicas // FLEETS, settings(replicas).health.heartbeat_s
        crowds = [start(["fleet", port, str(n * share), str(share), str(heartbeat)]) for n in range(FLEETS)]
        found: dict[str, float] = json.loads(controller.stdout.readline())
        controller.wait()
        for crowd in crowds:
            crowd.wait()
    return found


def start(words: list[str], **how: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, *words], text=True, **how)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", default="256,1024,2048")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--profile", action="store_true", help="show where the controller's loop spends its time")
    arguments = parser.parse_args()
    rows = [once(int(count), arguments.seconds, arguments.profile) for count in arguments.replicas.split(",")]
    out = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "seconds": arguments.seconds, "fleets": rows}
    (ROOT / "benchmarks" / "results" / "quiet_fleet.json").write_text(json.dumps(out, indent=1) + "\n")
    columns = ("replicas", "beats/s", "of a core", "its thread", "lag p99, ms", "journal rows/s", "bytes/s", "dead")
    table = Table(*columns)
    for row in rows:
        shares = [f"{100 * row[name]:.1f} %" for name in ("core_share", "liveness_thread_share")]
        figures = [f"{1e3 * row['loop_lag_p99_s']:.1f}", f"{row['journal_rows_per_s']:.1f}"]
        rest = [f"{row['journal_bytes_per_s']:,.0f}", f"{row['declared_dead']:.0f}"]
        table.add_row(f"{row['replicas']:,.0f}", f"{row['heartbeats_sent_per_s']:,.0f}", *shares, *figures, *rest)
    Console().print(table)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["control", folder, count, seconds, profile]:
            asyncio.run(control(Path(folder), int(count), float(seconds), bool(profile)))
        case ["fleet", port, first, count, heartbeat_s]:
            fleet(int(port), int(first), int(count), float(heartbeat_s))
        case _:
            main()
