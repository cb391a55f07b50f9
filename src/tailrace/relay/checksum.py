"""The checksum of a version: the XXH3 of each piece of 8 MiB, and of several pieces the XXH3 of their sums in order.

Pieces can be summed up as they arrive, and by several cores at once: 3 GB take one core 0.3 s. Whoever sends, stores or
maps a version uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import xxhash

PIECE = 8 << 20
MOST_THREADS = 8


class Checksum:
    """Of a buffer that fills from its start. `several`: by several threads, so that `advance` does not wait."""

    def __init__(self, buffer: memoryview, several: bool = False) -> None:
        self._buffer = buffer
        self._pool = pool() if several else None
        self._summed = 0  # bytes that are summed up, or on their way to it
        self._sums: list[Callable[[], bytes]] = []

    def advance(self, position: int) -> None:
        """Everything before `position` is there, and will not change any more."""
        while self._summed < position:
            end = min(self._summed + PIECE, len(self._buffer))
            if end > position:
                return
            self._sums.append(self._sum(self._buffer[self._summed : end]))
            self._summed = end

    def digest(self) -> str:
        """Of everything; waits for the threads."""
        assert self._summed == len(self._buffer), "asked for the checksum of a part"
        sums = [found() for found in self._sums]
        return sums[0].hex() if len(sums) == 1 else xxhash.xxh3_64_hexdigest(b"".join(sums))

    def _sum(self, piece: memoryview) -> Callable[[], bytes]:
        if self._pool is not None:
            return self._pool.submit(xxhash.xxh3_64_digest, piece).result
        done = xxhash.xxh3_64_digest(piece)
        return lambda: done


def checksum(buffer: memoryview | bytes, several: bool = False) -> str:
    """Of a buffer that is complete."""
    whole = Checksum(memoryview(buffer), several)
    whole.advance(len(buffer))
    return whole.digest()


@cache
def pool() -> ThreadPoolExecutor:
    """One for the process: XXH3 lets other threads run."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="checksum")
