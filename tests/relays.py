"""Relays for the tests: as nodes in this process, as processes of their own, and a trainer that can be held up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.weights.channel import Address, ChannelError, dial
from tailrace.weights.checksum import PIECE, RunningChecksum
from tailrace.weights.messages import ReceivingElsewhere
from tailrace.weights.nixl_transport import FLAVOURS, FasterWay, NixlAgent, NixlTransport
from tailrace.weights.part import Part
from tailrace.weights.relay_node import RelayNode, TransferFailure
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader
from tailrace.weights.transfer import offer
from tailrace.wire.tls import LOOPBACK

if TYPE_CHECKING:
    import pytest

TOKEN = b"t" * 32
DEADLINE_S = 20.0
NIXL = "TAILRACE_TEST_NIXL"  # in the environment: relays of tests, and those who send to them, use it always


class Always(FasterWay):
    """Until it fails."""

    def __call__(self, sender: str, size: int) -> bool:
        return sender not in self._failed


@cache
def nixl_agent(number: int) -> NixlAgent:
    """The relay of that number has the same one in all tests; -1: who sends to relays."""
    return NixlAgent("lo")


def nixl(number: int) -> NixlTransport | None:
    return NixlTransport(nixl_agent(number), Always()) if NIXL in os.environ else None


def both_ways() -> list[Any]:
    """For a fixture: with NIXL too, where it is installed."""
    import pytest  # relays as processes need not

    missing = pytest.mark.skipif(not any(map(find_spec, FLAVOURS)), reason="NIXL is not installed")
    return ["tcp", pytest.param("nixl", marks=missing)]


def take_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "nixl":
        monkeypatch.setenv(NIXL, "1")


def until(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.005)


class Weights:
    """A version to send, a `Source`. `hold` keeps back everything after its first half until `go`. `asked` is where it
    was read from."""

    def __init__(
        self,
        version: int,
        data: bytes,
        hold: bool = False,
        checksum: str = "",
        content_id: str = "first",
        generation: int = 0,
    ) -> None:
        self.version, self.size, self.content_id, self.generation = version, len(data), content_id, generation
        self.part = Part.whole(self.size)
        self._data = memoryview(data)
        self._sums = RunningChecksum(self._data)
        self._sums.advance(self.size)
        self._checksum = checksum or self._sums.digest()
        self.half = self.size // 2 // PIECE * PIECE
        self.asked: list[int] = []
        self.go = Event()
        if not hold:
            self.go.set()

    def ready(self, position: int, timeout_s: float) -> memoryview:
        self.asked.append(position)
        if position < self.half:
            return self._data[position : self.half]
        return self._data[position:] if self.go.wait(min(timeout_s, 0.1)) else self._data[:0]

    def checksums(self, start: int, end: int) -> bytes:
        return self._sums.checksums(start, end)

    def checksum(self, timeout_s: float) -> str:
        return self._checksum


def publish(address: Address, weights: Weights) -> Thread:
    """Send from a thread; what goes wrong there shows at the relays."""

    def run() -> None:
        with suppress(ChannelError), dial(address, TOKEN) as channel:
            offer(channel, weights, from_trainer=True, lender=nixl(-1))

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


class Node(RelayNode):
    """A node that remembers what it reported."""

    def __init__(
        self,
        id: int,
        folder: Path,
        token: bytes = TOKEN,
        quota: int = 0,
        stall_s: float = 10.0,
        full_every: int = 1,
    ) -> None:
        self.stored: list[int] = []
        self.failures: list[TransferFailure] = []
        memory = SharedMemory(folder / f"h{id}", quota)
        super().__init__(
            id,
            memory,
            token,
            on_stored=self.stored.append,
            on_failed=self.failures.append,
            stall_s=stall_s,
            nixl=nixl(id),
            full_every=full_every,
        )

    def holds(self, version: int, data: bytes) -> bool:
        return version in self.versions() and bytes(SharedMemoryReader(self.memory.path).open(version).buffer) == data


@contextmanager
def nodes(count: int, folder: Path, full_every: int = 1) -> Iterator[list[Node]]:
    made = [Node(id, folder, full_every=full_every) for id in range(count)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


class ChildOptions(NamedTuple):
    """`updates`: as the trainer, publish `updated` and not `made_up`. The others are those of a `RelayNode`."""

    listen: str
    stall_s: float
    streams: int
    full_every: int
    updates: bool
    congestion: str


class RelayProcess:
    """A relay that can be killed and stopped, on a host of its own perhaps (`inside`). It obeys lines of JSON and
    reports in lines of JSON. It can also play the trainer."""

    def __init__(
        self,
        id: int,
        folder: Path,
        inside: Sequence[str] = (),
        listen: str = LOOPBACK,
        stall_s: float = DEADLINE_S,
        streams: int = 0,
        full_every: int = 1,
        updates: bool = False,
        congestion: str = "",
    ) -> None:
        self.id, self.folder = id, folder / f"h{id}"
        options = json.dumps(ChildOptions(listen, stall_s, streams, full_every, updates, congestion))
        words = [*inside, sys.executable, __file__, str(id), str(self.folder), options]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.reports: list[dict[str, Any]] = []
        self._told = Condition()
        self.address = Address(*json.loads(self._line()))
        Thread(target=self._listen, daemon=True).start()

    def route(self, revision: int, targets: Sequence[RelayProcess]) -> None:
        self._order(route=[revision, {other.id: other.address for other in targets}])

    def publish(self, version: int, size: int, target: RelayProcess) -> None:
        """As the trainer: send `made_up(version, size)` until it is there."""
        self._order(publish=[version, size, target.address])

    def wait_for(self, what: str, version: int, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The first such report, which counts once."""

        def found() -> dict[str, Any] | None:
            return next((report for report in self.reports if report.get(what) == version), None)

        with self._told:
            assert self._told.wait_for(found, deadline_s), f"{what} {version} of relay {self.id} in {self.reports}"
            report = found()
            assert report is not None
            self.reports.remove(report)
            return report

    def read(self, version: int) -> bytes:
        return bytes(SharedMemoryReader(self.folder).open(version).buffer)

    def versions(self) -> tuple[int, ...]:
        return SharedMemoryReader(self.folder).versions()

    def arriving_bytes(self, version: int) -> int:
        """Of a version that is in the making: what its file really occupies."""
        with suppress(FileNotFoundError):
            return (self.folder / f"v{version}.partial").stat().st_blocks * 512
        return 0

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process.stdin
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _order(self, **what: object) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                with self._told:
                    self.reports.append(json.loads(line))
                    self._told.notify_all()


@contextmanager
def relay_processes(count: int, folder: Path) -> Iterator[list[RelayProcess]]:
    with ending() as made:
        made.extend(RelayProcess(id, folder) for id in range(count))
        yield made


@contextmanager
def ending() -> Iterator[list[RelayProcess]]:
    """A list of relays that are gone at the end."""
    made: list[RelayProcess] = []
    try:
        yield made
    finally:
        for relay in made:
            relay.kill()


def made_up(version: int, size: int) -> bytes:
    """The bytes that every trainer of these tests has in this version."""
    return random.Random(version).randbytes(size)


def updated(version: int, size: int) -> bytes:
    """The same for trainers whose versions differ as those of bfloat16 weights do: one element in a hundred moves."""
    import numpy as np

    bits = np.frombuffer(made_up(0, size), dtype=np.uint16).copy()
    for number in range(1, version + 1):
        bits[number % 100 :: 100] += np.uint16(1)
    return bits.tobytes()


# --------------------------------------------------------------------------------------------------------- the child


def _report(**what: object) -> None:
    os.write(sys.stdout.fileno(), f"{json.dumps(what)}\n".encode())  # in one go: threads report too


def _serve(id: int, folder: Path, options: ChildOptions) -> None:
    """Ends when its parent closes the pipe, whatever the parent died of."""
    node = RelayNode(
        id,
        SharedMemory(folder),
        TOKEN,
        options.listen,
        on_stored=lambda version: _report(stored=version, at=time.time()),
        on_failed=lambda failure: _report(failed=failure.version, target=failure.target, reason=failure.reason),
        stall_s=options.stall_s,
        streams=options.streams,
        nixl=nixl(id),
        full_every=options.full_every,
        congestion=options.congestion,
    )
    print(json.dumps(node.address), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"route": [revision, targets]}:
                node.route(revision, {int(other): Address(*address) for other, address in targets.items()})
            case {"publish": [version, size, address]}:
                weights = Weights(version, (updated if options.updates else made_up)(version, size))
                Thread(target=_persist, args=(weights, Address(*address), options), daemon=True).start()
    node.close()


def _persist(weights: Weights, address: Address, options: ChildOptions) -> None:
    """As the trainer's publisher does."""
    _report(began=weights.version, at=time.time())
    while True:
        try:
            with dial(address, TOKEN, options.stall_s) as channel:
                channel.set_congestion(options.congestion)
                answer = offer(channel, weights, from_trainer=True, lender=nixl(-1))
                if not isinstance(answer, ReceivingElsewhere):
                    _report(published=weights.version, first=min(weights.asked, default=-1))
                    return
        except ChannelError as error:
            _report(unpublished=weights.version, reason=str(error))
        time.sleep(0.1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]), ChildOptions(*json.loads(sys.argv[3])))
