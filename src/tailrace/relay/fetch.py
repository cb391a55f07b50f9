"""Pulling a version from a relay on another host, for a replica whose own relay is gone."""

from __future__ import annotations

import time

from tailrace.relay.arena import Arena, Mapped
from tailrace.relay.link import CHUNK, STALL_S, Address, dial, pull, receive
from tailrace.types import Version


def fetch(
    address: Address | tuple[str, int],
    token: bytes,
    version: Version,
    arena: Arena,
    deadline_s: float = 120.0,
    stall_s: float = STALL_S,
) -> Mapped:
    """Copy a version into `arena` and map it. Raises `LinkError` or `ArenaError`; then nothing is left behind."""
    with dial(Address(*address), token, stall_s, time.monotonic() + deadline_s) as channel:
        writer = arena.create(version, pull(channel, version))
        try:
            return writer.seal(receive(channel, writer, CHUNK))
        except BaseException:
            writer.discard()
            raise
