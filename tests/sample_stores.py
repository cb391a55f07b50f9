"""A sample store on real sockets and a real file, and clients of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from tailrace.samples.client import SampleClient
from tailrace.samples.file import SampleFile
from tailrace.samples.messages import Append, CompletionLimits, Piece, PieceColumns, StoredSample, column
from tailrace.samples.schema import sample_file
from tailrace.samples.server import SampleServer
from tailrace.types import Row, id_bytes
from tailrace.wire.keys import sample_key, signed_receipt
from tailrace.wire.messages import Grant, StoreAddress
from tailrace.wire.tls import Identity

KEY = bytes(range(32))
DEADLINE_S = 60.0
PROMPT = Row(3, id_bytes((5, 6, 7)), "one and one?", {"answer": "2"})
LIMITS = CompletionLimits(vocabulary=50_000, completion_tokens=20_000)


def tokens_of(trajectory: int, start: int, end: int) -> np.ndarray:
    """What this sample has there, whoever generates it."""
    return ((np.arange(start, end) * 31 + trajectory * 7) % 49_999).astype("<i4")


def piece(trajectory: int, start: int, end: int, version: int | None = 1) -> Piece:
    tokens = tokens_of(trajectory, start, end)
    return Piece(version, tokens.tobytes(), None if version is None else (-tokens / 1e6).astype("<f4").tobytes())


def put(file: SampleFile, replica: int, trajectory: int, attempt: int, start: int, one: Piece) -> int:
    """Append to it as its store would; returns the verdict."""
    verdicts: dict[tuple[int, int], int] = {}
    columns = column([trajectory]), column([attempt]), column([start]), column([0])
    file.append(replica, Append(*columns, *PieceColumns.of([one])), verdicts)
    return verdicts[trajectory, attempt]


def grant(trajectory: int, attempt: int = 1, replica: int = 0, resume: bool = False) -> Grant:
    return Grant(replica, trajectory, attempt, trajectory // 4, PROMPT.id, resume)


def ids_in(sample: StoredSample) -> list[int]:
    """All tokens after the prompt."""
    return [token for part in sample.pieces[1:] for token in np.frombuffer(part.tokens, "<i4").tolist()]


def until(true: Callable[[], object]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)


class RunningStore:
    """A server, and what it has said of its clients."""

    def __init__(self, folder: Path, port: int = 0, identity: Identity | None = None) -> None:
        self.identity = identity
        self.accused: dict[str, str] = {}
        self.errors: list[BaseException] = []
        self.port = port
        self._begin(folder)

    def _begin(self, folder: Path) -> None:
        self.folder, self.file = folder, SampleFile.at(sample_file(folder, 0))
        keys, answers = partial(sample_key, KEY), (self.accused.__setitem__, self.errors.append)
        sign = partial(signed_receipt, "store-0/1", KEY)
        self.server = SampleServer(self.file, keys, sign, *answers, LIMITS, self.identity, port=self.port)
        self.server.start()
        self.port = int(self.server.address.partition("#")[0].rpartition(":")[2])
        committed = threading.Event()
        self.server.add_prompts([PROMPT], committed.set)
        assert committed.wait(DEADLINE_S)

    def restart(self, folder: Path | None = None) -> None:
        """On its file, or on another one."""
        self.server.close()
        self._begin(folder or self.folder)

    def assign(self, *grants: Grant) -> None:
        self.server.assign(grants)
        until(lambda: all(self.attempt_of(one.trajectory) >= one.attempt for one in grants))

    def attempt_of(self, trajectory: int) -> int:
        head = self.file.heads.get(trajectory)
        return head.attempt if head is not None else 0


@contextmanager
def store(folder: Path, identity: Identity | None = None) -> Iterator[RunningStore]:
    running = RunningStore(folder, identity=identity)
    try:
        yield running
    finally:
        running.server.close()
        assert not running.errors


def address(port: int, name: str, fingerprint: str = "") -> StoreAddress:
    return StoreAddress(0, f"tcp://127.0.0.1:{port}", fingerprint, sample_key(KEY, name).hex())


@contextmanager
def client(port: int, name: str = "replica-0/1", credit_bytes: int = 8 << 20) -> Iterator[SampleClient]:
    one = SampleClient(name, credit_bytes)
    one.connect([address(port, name)])
    one.open()
    try:
        yield one
    finally:
        one.close(0.0)


def stream(one: SampleClient, trajectory: int, cuts: Sequence[int], attempt: int = 1) -> None:
    """Append the sample in pieces that end at these places."""
    for start, end in zip([0, *cuts], cuts, strict=False):
        one.append(trajectory, attempt, start, [piece(trajectory, start, end)])


def once_durable(one: SampleClient, trajectory: int, attempt: int, action: Callable[[], None]) -> None:
    """Call it once all that was appended is durable; never if it is refused or withdrawn before."""
    one.then_all([(trajectory, attempt)], lambda durable: action() if durable else None)


def stored(one: SampleClient, trajectory: int, attempt: int = 1) -> None:
    """Wait until all that was appended is durable."""
    done: list[bool] = []
    once_durable(one, trajectory, attempt, lambda: done.append(True))
    until(lambda: done)
