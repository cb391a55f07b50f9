"""Fetches versions from a relay on another host, for a replica whose host has no live relay."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tailrace.types import Version
from tailrace.weights.channel import (
    STALL_S,
    Address,
    Channel,
    ChannelError,
    NobodyListensError,
    TokenError,
    VersionRefusedError,
    dial,
)
from tailrace.weights.region import MappedVersion
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader
from tailrace.weights.transfer import pull, receive
from tailrace.weights.version_buffer import VersionBuffer

RETRY_S = 0.2  # between two attempts
DEADLINE_S = 120.0
GONE_S = 5.0  # a relay whose host refuses connections for so long is gone; control knows another one
GivenUp = Callable[[], bool]


def never() -> bool:
    return False


def fetch(
    address: Address,
    token: bytes,
    version: Version,
    memory: SharedMemory,
    deadline_s: float = DEADLINE_S,
    stall_s: float = STALL_S,
    given_up: GivenUp = never,
    gone_s: float = GONE_S,
) -> MappedVersion:
    """Copy a version into `memory` and map it. A broken connection is made again and resumes, unless nobody wants the
    version any more or nobody listens there for `gone_s`. A refusal, and what takes longer than `deadline_s`, is a
    `ChannelError` or a `SharedMemoryError`; then nothing is left behind."""
    fetching = VersionFetch(version, memory)
    until = time.monotonic() + deadline_s
    listened = time.monotonic()  # when somebody did
    try:
        while True:
            try:
                with dial(address, token, stall_s, until) as channel:
                    return fetching.resume(channel)
            except (VersionRefusedError, TokenError):
                raise
            except ChannelError as error:
                now = time.monotonic()
                listened = listened if isinstance(error, NobodyListensError) else now
                if given_up() or now + RETRY_S > min(until, listened + gone_s):
                    raise
                time.sleep(RETRY_S)
    except BaseException:
        fetching.discard()
        raise


class VersionFetch:
    """One version, over as many connections as it takes."""

    def __init__(self, version: Version, memory: SharedMemory) -> None:
        self._version, self._memory = version, memory
        self._buffer: VersionBuffer | None = None

    def resume(self, channel: Channel) -> MappedVersion:
        buffer = self._buffer
        known = (buffer.content_id, buffer.written) if buffer else ("", 0)
        answer = pull(channel, self._version, *known)
        if buffer is None or not answer.start or answer.size != buffer.size:
            self.discard()
            buffer = self._memory.create(self._version, answer.size, content_id=answer.content_id)
            self._buffer = buffer
        if answer.start != buffer.written:
            raise ChannelError(f"{channel.peer} resumes at byte {answer.start:,}, not at {buffer.written:,}")
        return buffer.seal(receive(channel, buffer.whole()))

    def discard(self) -> None:
        if self._buffer is not None:
            self._buffer.discard()
            self._buffer = None


class RemoteVersionCache(SharedMemory):
    """Opens versions of a relay on another host: each one is copied here first, and replaces the one before. `address`
    is the relay's, and may change."""

    def __init__(self, path: Path, address: Address, token: bytes, given_up: GivenUp = never) -> None:
        super().__init__(path)
        self.address = address
        self._token, self._given_up = token, given_up

    def open(self, version: Version) -> MappedVersion:
        if version not in self.versions():
            for other in self.versions():
                self.drop(other)
            fetch(self.address, self._token, version, self, given_up=self._given_up)
        return super().open(version)


class RelayReaders:
    """Where a replica opens versions: in the shared memory of relays on its host, or in copies of those elsewhere.
    `name` is the replica's. Once it has `given_up`, a relay that is gone is not waited for."""

    def __init__(self, token: bytes, name: str, given_up: GivenUp, parallel: bool = False) -> None:
        self._token, self._name, self._given_up, self._parallel = token, name, given_up, parallel
        self._local: dict[str, SharedMemoryReader] = {}  # kept, because they remember which versions are verified
        self._remote: dict[str, RemoteVersionCache] = {}

    def reader(self, path: str, address: str) -> SharedMemoryReader:
        """Of the relay that listens at `address` and has its shared memory at `path` on its own host."""
        if Path(path).is_dir() or not address:
            return self._local.setdefault(path, SharedMemoryReader(Path(path), self._parallel))
        if path not in self._remote:
            own = Path(path).with_name(f"{Path(path).name}-{self._name}")
            self._remote[path] = RemoteVersionCache(own, Address.read(address), self._token, self._given_up)
        self._remote[path].address = Address.read(address)
        return self._remote[path]

    def close(self) -> None:
        for cache in self._remote.values():
            cache.remove()
