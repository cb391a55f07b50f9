"""Pulling a version from a relay on another host, for a replica on a host that has no relay, or whose relay is gone."""

from __future__ import annotations

import time
from pathlib import Path

from tailrace.relay.arena import Arena, ArenaReader, Mapped, Writer
from tailrace.relay.link import STALL_S, Address, Channel, LinkError, RefusedError, TokenError, dial
from tailrace.relay.transfer import pull, receive
from tailrace.types import Version

PAUSE_S = 0.2  # between two attempts
DEADLINE_S = 120.0


def fetch(
    address: Address,
    token: bytes,
    version: Version,
    arena: Arena,
    deadline_s: float = DEADLINE_S,
    stall_s: float = STALL_S,
) -> Mapped:
    """Copy a version into `arena` and map it. A connection that breaks is made again, and what has come is kept; what
    is final, and what is over after `deadline_s`, is a `LinkError` or an `ArenaError`, and nothing is left behind."""
    errand = Errand(version, arena)
    until = time.monotonic() + deadline_s
    try:
        while True:
            try:
                with dial(address, token, stall_s, until) as channel:
                    return errand.run(channel)
            except (RefusedError, TokenError):
                raise
            except LinkError:
                if time.monotonic() + PAUSE_S > until:
                    raise
                time.sleep(PAUSE_S)
    except BaseException:
        errand.discard()
        raise


class RemoteArena(Arena):
    """An arena that opens versions of a relay on another host: each is copied here first, and replaces the one before.
    `address` is the relay's, and may change."""

    def __init__(self, path: Path, address: Address, token: bytes, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(path)
        self.address = address
        self._token, self._deadline_s = token, deadline_s

    def open(self, version: Version) -> Mapped:
        if version not in self.versions():
            for other in self.versions():
                self.drop(other)
            fetch(self.address, self._token, version, self, self._deadline_s)
        return super().open(version)


class Sources:
    """Where a replica opens versions: in arenas of relays on its own host as they are, and copies of those elsewhere.
    `name` is the replica's."""

    def __init__(self, token: bytes, name: str, several: bool = False) -> None:
        self._token, self._name, self._several = token, name, several
        self._here: dict[str, ArenaReader] = {}  # kept, because they remember which versions are intact
        self._copies: dict[str, RemoteArena] = {}

    def at(self, path: str, address: str) -> ArenaReader:
        """The arena of the relay that listens at `address`, which lies at `path` on the relay's host."""
        if Path(path).is_dir() or not address:
            return self._here.setdefault(path, ArenaReader(Path(path), self._several))
        if path not in self._copies:
            own = Path(path).with_name(f"{Path(path).name}-{self._name}")
            self._copies[path] = RemoteArena(own, Address.read(address), self._token)
        self._copies[path].address = Address.read(address)
        return self._copies[path]

    def close(self) -> None:
        for copy in self._copies.values():
            copy.remove()


class Errand:
    """One version on its way, over as many connections as it takes."""

    def __init__(self, version: Version, arena: Arena) -> None:
        self._version, self._arena = version, arena
        self._edition = ""
        self._writer: Writer | None = None

    def run(self, channel: Channel) -> Mapped:
        answer = pull(channel, self._version, self._edition, self._writer.written if self._writer else 0)
        if self._writer is None or not answer.start or answer.size != self._writer.size:
            self.discard()
            self._writer, self._edition = self._arena.create(self._version, answer.size), answer.edition
        if answer.start != self._writer.written:
            raise LinkError(f"{channel.peer} goes on at byte {answer.start:,}, not at {self._writer.written:,}")
        return self._writer.seal(receive(channel, self._writer))

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
