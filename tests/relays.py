"""Relays for the tests: as nodes in this process, as processes of their own, and a trainer that can be held up."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from tailrace.relay.arena import Arena, ArenaReader
from tailrace.relay.checksum import checksum as sum_up
from tailrace.relay.link import Address, LinkError, dial, offer
from tailrace.relay.node import Failure, RelayNode

TOKEN = b"t" * 32
DEADLINE_S = 20.0


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.005)


class Weights:
    """A version to send, a `Source`. `hold` keeps back everything after its first half until `go`."""

    def __init__(self, version: int, data: bytes, hold: bool = False, checksum: str = "") -> None:
        self.version, self.size, self._data = version, len(data), data
        self._checksum = checksum or sum_up(data)
        self.go = Event()
        if not hold:
            self.go.set()

    def ready(self, position: int) -> memoryview:
        if position >= self.size // 2:
            if not self.go.wait(DEADLINE_S):
                raise LinkError("nobody let the version go on")
            return memoryview(self._data)[position:]
        return memoryview(self._data)[position : self.size // 2]

    def checksum(self) -> str:
        return self._checksum


def publish(address: Address, weights: Weights) -> Thread:
    """Send from a thread; what goes wrong there shows at the relays."""

    def run() -> None:
        with suppress(LinkError), dial(address, TOKEN) as channel:
            offer(channel, weights, chunk=1 << 16, fresh=True)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


class Node(RelayNode):
    """A node that remembers what it reported."""

    def __init__(self, id: int, folder: Path, token: bytes = TOKEN, quota: int = 0, stall_s: float = 10.0) -> None:
        self.stored: list[int] = []
        self.failures: list[Failure] = []
        arena = Arena(folder / f"h{id}", quota)
        super().__init__(
            id,
            arena,
            token,
            on_stored=self.stored.append,
            on_failed=self.failures.append,
            chunk_mbytes=0.05,
            stall_s=stall_s,
        )

    def holds(self, version: int, data: bytes) -> bool:
        return version in self.versions() and bytes(ArenaReader(self.arena.path).open(version).buffer) == data


@contextmanager
def nodes(count: int, folder: Path) -> Iterator[list[Node]]:
    made = [Node(id, folder) for id in range(count)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


class RelayProcess:
    """A relay that can be killed. It obeys lines of JSON and reports in lines of JSON."""

    def __init__(self, id: int, folder: Path) -> None:
        self.id, self.folder = id, folder / f"h{id}"
        words = [sys.executable, __file__, str(id), str(self.folder)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reports: queue.Queue[dict[str, int]] = queue.Queue()
        self.address = Address(*json.loads(self._line()))
        Thread(target=self._listen, daemon=True).start()

    def route(self, epoch: int, targets: list[RelayProcess]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([epoch, {other.id: other.address for other in targets}]) + "\n")
        self._process.stdin.flush()

    def wait_for(self, what: str, version: int) -> None:
        while self._reports.get(timeout=DEADLINE_S) != {what: version}:
            pass

    def read(self, version: int) -> bytes:
        return bytes(ArenaReader(self.folder).open(version).buffer)

    def kill(self) -> None:
        assert self._process.stdin
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self._reports.put(json.loads(line))


@contextmanager
def relay_processes(count: int, folder: Path) -> Iterator[list[RelayProcess]]:
    made: list[RelayProcess] = []
    try:
        made.extend(RelayProcess(id, folder) for id in range(count))
        yield made
    finally:
        for relay in made:
            relay.kill()


def _report(**what: int) -> None:
    print(json.dumps(what), flush=True)


def _serve(id: int, folder: Path) -> None:
    """The child: ends when its parent closes the pipe, whatever the parent died of."""
    node = RelayNode(
        id,
        Arena(folder),
        TOKEN,
        on_stored=lambda version: _report(stored=version),
        on_failed=lambda failure: _report(failed=failure.version),
        chunk_mbytes=0.05,
        stall_s=DEADLINE_S,
    )
    print(json.dumps(node.address), flush=True)
    for line in sys.stdin:
        epoch, targets = json.loads(line)
        node.route(epoch, {int(other): Address(*address) for other, address in targets.items()})
    node.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
