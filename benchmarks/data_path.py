"""The path of tokens from replicas to a sample store and from there to a trainer, over the real wire.

    python benchmarks/data_path.py [--replicas 64] [--running 64] [--seconds 60] [--chunk 64] [--rate 0] [--read 4096]

A store process as a run starts it, mock replicas (many per process) that append random token ids in chunks as an engine
does, and this process in the place of the controller: it assigns samples and hears when they are durable. Each answer
has 16,384 tokens. `--rate` bounds what is generated, in tokens/s; 0: as much as the store takes. `--warm-up` seconds
are left out: every answer begins with a fetch of its prompt. Then an emulated trainer rank reads so many whole answers.
CPU is of each process apart. Beside it stands what the disk takes: plain writes, synced as often. Adds a row to
benchmarks/results/data_path.json, with the load of the machine: other work on it makes the figures worse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tailrace.config import with_values
from tailrace.config.tree import Config
from tailrace.protocol import FetchPrompts, PromptsAdded, StoreJoined
from tailrace.samples.client import SampleClient
from tailrace.samples.file import sample_file
from tailrace.samples.messages import Fetched, Piece
from tailrace.store.run import RunStore
from tailrace.wire import descriptors
from tailrace.wire.keys import Keyring, sample_key
from tailrace.wire.messages import Assigned, ComponentSpec, Ended, Grant, Hello, Ordered, Reported, StoreAddress
from tailrace.wire.server import ControlServer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "data_path.json"
KEYS = Keyring(bytes(32), "ab" * 32)
ANSWER, VOCABULARY, PROMPTS = 16_384, 150_000, 256
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
EVERY_S = 1.0


# ---------------------------------------------------------------------------------------------------- mock replicas


class MockReplica:
    """Generates some answers at a time, a chunk of each in turn, and begins another when one is durable."""

    def __init__(self, id: int, address: StoreAddress, chunk: int, finished: list[tuple[int, int]]) -> None:
        name = f"replica-{id}/1"
        self.id = id
        self.client = SampleClient(name)
        self.client.connect([msgspec.structs.replace(address, key=sample_key(bytes.fromhex(address.key), name).hex())])
        self.client.open()
        self.appended = 0
        self._finished = finished
        self._chunk = chunk
        random = np.random.default_rng(id)
        self._tokens = random.integers(0, VOCABULARY, 1 << 16, dtype="<i4").tobytes()
        self._logprobs = (-random.random(1 << 16, dtype="<f4")).tobytes()
        self._running: dict[int, int] = {}  # and the length of each
        self._ends: dict[int, int] = {}

    def begin(self, trajectory: int, end: int) -> None:
        self._ends[trajectory] = end
        self.client.fetch(trajectory, 1)

    def step(self) -> int:
        """One chunk of every answer; returns how many tokens that were."""
        for answer in self.client.poll():
            assert isinstance(answer, Fetched), answer
            self._running[answer.trajectory] = 0
        if self.client.waiting_for:
            return 0
        before = self.appended
        for trajectory in list(self._running):
            self._grow(trajectory)
        return self.appended - before

    def _grow(self, trajectory: int) -> None:
        start = self._running[trajectory]
        count = min(self._chunk, self._ends[trajectory] - start)
        at = 4 * ((start * 7 + trajectory) % ((1 << 16) - count))
        piece = Piece(0, self._tokens[at : at + 4 * count], self._logprobs[at : at + 4 * count])
        self.client.append(trajectory, 1, start, [piece])
        self.appended += count
        self._running[trajectory] = start + count
        if start + count == self._ends[trajectory]:
            del self._running[trajectory], self._ends[trajectory]
            self.client.then(trajectory, 1, lambda: self._finished.append((self.id, trajectory)))


def produce(pipe: Pipe, ids: list[int], address: StoreAddress, chunk: int, rate: float) -> None:
    """A process with many mock replicas. `rate`: tokens/s that they generate at most; 0: no bound."""
    finished: list[tuple[int, int]] = []
    replicas = {id: MockReplica(id, address, chunk, finished) for id in ids}
    began, report_at, total = time.monotonic(), 0.0, 0
    while True:
        while pipe.poll():
            for replica, trajectory, end in (order := pipe.recv()) or ():
                replicas[replica].begin(trajectory, end)
            if order is None:
                return
        grown = sum([replica.step() for replica in replicas.values()]) if _may(rate, began, total) else 0
        total += grown
        if finished or time.monotonic() >= report_at:
            report_at = time.monotonic() + EVERY_S / 4
            done, finished[:] = list(finished), []
            waiting = sum(replica.client.unacknowledged_bytes for replica in replicas.values())
            pipe.send((done, total - waiting // 8, sum(bool(one.client.waiting_for) for one in replicas.values())))
        if not grown:
            time.sleep(0.002)


def _may(rate: float, began: float, total: int) -> bool:
    return not rate or total < rate * (time.monotonic() - began)


# ----------------------------------------------------------------------------------------- in place of the controller


class Producer:
    """A process of mock replicas, seen from here."""

    def __init__(self, ids: list[int], address: StoreAddress, chunk: int, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.ids = ids
        self.stored = self.waiting = 0
        self.process = context.Process(target=produce, args=(other, ids, address, chunk, rate), daemon=True)
        self.process.start()


class Conductor:
    """Assigns samples, as control would, and hears of those that are durable."""

    def __init__(self, server: ControlServer, store: str, running: int) -> None:
        self._server = server
        self._store = store
        self._running = running
        self._next = 0
        self._lengths = np.random.default_rng(0)
        self.finished: list[int] = []

    async def begin(self, producer: Producer) -> None:
        """The first answers have any length, so that not all end at once."""
        wanted = [id for id in producer.ids for _ in range(self._running)]
        await self._assign(producer, [(id, int(self._lengths.integers(64, ANSWER))) for id in wanted])

    async def hear_all(self, producers: list[Producer], seconds: float, look: Callable[[], None]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for producer in producers:
                await self._hear(producer)
            await asyncio.sleep(0.01)
            look()

    async def _hear(self, producer: Producer) -> None:
        while producer.pipe.poll():
            done, producer.stored, producer.waiting = producer.pipe.recv()
            self.finished += [trajectory for _, trajectory in done]
            await self._assign(producer, [(replica, ANSWER) for replica, _ in done])

    async def _assign(self, producer: Producer, wanted: list[tuple[int, int]]) -> None:
        if not wanted:
            return
        ids = range(self._next, self._next + len(wanted))
        self._next += len(wanted)
        grants = [Grant(one[0], id, 1, id // 16, id % PROMPTS) for id, one in zip(ids, wanted, strict=True)]
        await self._server.send(self._store, Assigned(tuple(grants)))
        producer.pipe.send([(one[0], id, one[1]) for id, one in zip(ids, wanted, strict=True)])


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = with_values(Config(), {"rollout.engine": "emulated", "model.preset": "qwen2.5-7b"})
    server = ControlServer(KEYS)
    spec = ComponentSpec("store", 0, 1, server.endpoint, KEYS.token, str(folder), config)
    lifeline, held = os.pipe()
    spec = msgspec.structs.replace(spec, key=KEYS.of(spec.name).hex(), lifeline=lifeline)
    with RunStore.create(folder, config):
        store = start(spec)
        try:
            address = await joined(server, spec)
            return await drive(server, spec, store, address, options)
        finally:
            await server.send(spec.name, Ended(complete=True))
            await server.close()
            store.wait(60)
            os.close(held)


def start(spec: ComponentSpec) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tailrace.runtime.component"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(spec.lifeline,))
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.close()
    return process


async def joined(server: ControlServer, spec: ComponentSpec) -> StoreAddress:
    """Until the store is there and has prompts."""
    address = ""
    while True:
        for letter in await server.receive():
            match letter.message:
                case Hello(place):
                    address = place
                case Reported(StoreJoined()):
                    await server.send(spec.name, Ordered(FetchPrompts(0, PROMPTS)))
                case Reported(PromptsAdded()):
                    return StoreAddress(0, f"tcp://{address}", "", spec.key)
                case _:
                    pass


async def drive(
    server: ControlServer,
    spec: ComponentSpec,
    store: subprocess.Popen[bytes],
    address: StoreAddress,
    options: argparse.Namespace,
) -> dict[str, Any]:
    conductor = Conductor(server, spec.name, options.running)
    shares = [list(range(options.replicas))[at :: options.processes] for at in range(options.processes)]
    producers = [Producer(ids, address, options.chunk, options.rate / len(shares)) for ids in shares]
    for producer in producers:
        await conductor.begin(producer)
    listening = asyncio.create_task(listen(server))
    await conductor.hear_all(producers, options.warm_up, lambda: None)
    watch = Watch(store.pid, producers)
    await conductor.hear_all(producers, options.seconds, watch.look)
    row = watch.row(options)
    for producer in producers:
        producer.pipe.send(None)
        producer.process.join()
    listening.cancel()
    if options.read:
        row["read"] = await asyncio.to_thread(read_back, store.pid, address, conductor.finished[-options.read :])
    return row


async def listen(server: ControlServer) -> None:
    while True:
        await server.receive()


def read_back(pid: int, address: StoreAddress, ids: list[int]) -> dict[str, float]:
    """What a trainer rank does before it packs a step."""
    name = "trainer-0/1"
    client = SampleClient(name)
    client.connect([msgspec.structs.replace(address, key=sample_key(bytes.fromhex(address.key), name).hex())])
    client.open()
    began, store_cpu, own_cpu = time.monotonic(), cpu_s(pid), time.process_time()
    assert len(client.lengths(ids)) == len(ids)
    lengths_s = time.monotonic() - began
    tokens = most = 0
    for sample in client.read(ids):
        tokens += sum(len(piece) for piece in sample.pieces)
        most = max(most, rss_mb(os.getpid()))
    wall_s, millions = time.monotonic() - began, tokens / 1e6
    client.close(0.0)
    return {
        "samples": len(ids),
        "tokens": tokens,
        "lengths_s": lengths_s,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "store_cpu_s_per_million": (cpu_s(pid) - store_cpu) / millions,
        "rank_cpu_s_per_million": (time.process_time() - own_cpu) / millions,
        "rank_rss_mb": most,
        "store_rss_mb": rss_mb(pid),
    }


# ------------------------------------------------------------------------------------------------------- the figures


class Watch:
    """Looks at the processes once a second."""

    def __init__(self, store: int, producers: list[Producer]) -> None:
        self._store = store
        self._producers = producers
        self._began = self._at = time.monotonic()
        self._cpu = self._cpus()
        self._before, self._written = self._total, written_mb(store)
        self._looks: list[dict[str, float]] = []

    def _cpus(self) -> dict[str, float]:
        producers = sum(cpu_s(producer.process.pid or 0) for producer in self._producers)
        return {"store": cpu_s(self._store), "controller": time.process_time(), "producers": producers}

    @property
    def _total(self) -> int:
        return sum(producer.stored for producer in self._producers)

    @property
    def _stored(self) -> int:
        return self._total - self._before

    def look(self) -> None:
        if time.monotonic() < self._at + EVERY_S:
            return
        self._at = time.monotonic()
        look: dict[str, float] = {
            "at_s": self._at - self._began,
            "tokens": self._stored,
            "store_rss_mb": rss_mb(self._store),
        }
        look |= {"controller_rss_mb": rss_mb(os.getpid()), "written_mb": written_mb(self._store)}
        self._looks.append(look | {"held_up": sum(producer.waiting for producer in self._producers)})

    def row(self, options: argparse.Namespace) -> dict[str, Any]:
        wall_s, millions = time.monotonic() - self._began, self._stored / 1e6
        cpus = {name: (used - self._cpu[name]) / millions for name, used in self._cpus().items()}
        return {
            "replicas": options.replicas,
            "running": options.running,
            "chunk": options.chunk,
            "rate": options.rate,
            "seconds": wall_s,
            "tokens_per_s": self._stored / wall_s,
            "payload_mb_per_s": 8 * millions / wall_s,
            "disk_mb_per_s": (written_mb(self._store) - self._written) / wall_s,
            "cpu_s_per_million": cpus,
            "load": os.getloadavg()[0],
            "looks": thinned(self._looks),
        }


def thinned(looks: list[dict[str, float]], most: int = 30) -> list[dict[str, float]]:
    return looks[:: max(1, len(looks) // most)]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


def written_mb(pid: int) -> float:
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"]) / 1e6


def disk_takes(folder: Path, mbytes: int = 1024, piece: int = 4 << 20) -> dict[str, float]:
    """Plain sequential writes, synced as often as a busy store commits."""
    content, began = os.urandom(piece), time.monotonic()
    with (folder / "plain").open("wb", buffering=0) as file:
        for _ in range((mbytes << 20) // piece):
            file.write(content)
            os.fdatasync(file.fileno())
    wall_s = time.monotonic() - began
    (folder / "plain").unlink()
    return {"mb_per_s": mbytes * 1.048576 / wall_s, "tokens_per_s": mbytes * 1.048576e6 / 8 / wall_s}


def figures(row: dict[str, Any]) -> Iterator[str]:
    cpu, rss, read = row["cpu_s_per_million"], [look["store_rss_mb"] for look in row["looks"]], row.get("read")
    load = f"{row['replicas']} replicas x {row['running']}, chunks of {row['chunk']}"
    yield f"{load}: {row['tokens_per_s'] / 1e6:.2f}M tokens/s"
    plain = f"{row['disk']['mb_per_s']:.0f} by plain writes"
    yield f"  payload {row['payload_mb_per_s']:.0f} MB/s, written {row['disk_mb_per_s']:.0f} MB/s ({plain})"
    yield "  CPU s per million tokens: " + ", ".join(f"{name} {used:.3f}" for name, used in cpu.items())
    yield f"  store RSS {rss[0]:.0f} to {max(rss):.0f} MB, file {row['file_mb']:.0f} MB"
    if read:
        speed = f"{read['tokens_per_s'] / 1e6:.1f}M tokens/s, rank's RSS {read['rank_rss_mb']:.0f} MB"
        yield f"  read {read['tokens'] / 1e6:.1f}M tokens in {read['wall_s']:.1f} s: {speed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("replicas", 64),
        ("running", 64),
        ("seconds", 60),
        ("chunk", 64),
        ("processes", 2),
        ("warm-up", 10),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--read", type=int, default=4096)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    descriptors.raise_limit()
    folder = Path(tempfile.mkdtemp(prefix="tailrace-data-path-", dir=options.folder))
    try:
        disk = disk_takes(folder)
        row = asyncio.run(measure(folder / "run", options)) | {"disk": disk}
        row["file_mb"] = sample_file(folder / "run", 0).stat().st_size / 1e6
    finally:
        shutil.rmtree(folder)
    print("\n".join(figures(row)))
    if not options.dry:
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(json.dumps([*rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
