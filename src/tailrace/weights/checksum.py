"""Checksums of a weight version: the XXH3 of every 512 KiB piece, and for the whole version the XXH3 of those in order.

A version is sent in whole pieces, each with the checksum that the first sender computed. So damage is detected at the
next hop, before the piece is forwarded, and only that piece is sent again. Every byte is hashed once per hop, where it
arrives; one core hashes 3 GB in 0.3 s.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock

import xxhash

PIECE = 512 << 10  # bytes. A relay forwards whole pieces, so each hop of a chain adds the time of one piece
CHECKSUM_BYTES = 8  # of one piece
PIECES_PER_TASK = 16  # that one thread hashes at a time
MAX_THREADS = 8


class RunningChecksum:
    """Of a buffer that fills from its start. `parallel`: hashed by a thread pool, so that `advance` does not wait."""

    def __init__(self, buffer: memoryview, parallel: bool = False) -> None:
        self.buffer, self._size = buffer, len(buffer)
        self._pool = thread_pool() if parallel else None
        self._step = PIECE * (PIECES_PER_TASK if parallel else 1)
        self._checksums = bytearray()
        self._tasks: deque[Future[bytes]] = deque()  # their results follow `_checksums`
        self._collecting = Lock()
        self._given: dict[int, bytes] = {}  # by where their piece begins: verified, but not yet reached
        self.hashed = 0  # bytes that are hashed, or handed to the pool: whole pieces, or the whole buffer

    def advance(self, position: int) -> None:
        """Hash what is complete. Everything before `position` is written and does not change any more."""
        while self.hashed < position:
            end = min(self.hashed + self._step, self._size)
            if end > position:
                return
            self._add(self.hashed, end)
            start, self.hashed = self.hashed, end
            self._given.pop(start, None)  # only now, so that readers find its checksum here or there

    def give(self, start: int, checksum: bytes) -> None:
        """Of the piece that begins there: it is verified already, so it is not hashed again."""
        self._given[start] = checksum

    def known_from(self, position: int) -> int:
        """Up to where, from `position` on, all pieces have a checksum."""
        while position in self._given:
            position = min(position + PIECE, self._size)
        return max(position, self.hashed)

    def checksums(self, start: int, end: int) -> bytes:
        """Of the pieces from `start` to `end`; waits for the pool."""
        assert start % PIECE == 0
        pieces = ((first, min(first + PIECE, end)) for first in range(start, end, PIECE))
        return b"".join([self._given.get(first) or self._hashed_checksums(first, last) for first, last in pieces])

    def _hashed_checksums(self, start: int, end: int) -> bytes:
        assert end <= self.hashed
        first, last = start // PIECE * CHECKSUM_BYTES, -(-end // PIECE) * CHECKSUM_BYTES
        with self._collecting:
            while len(self._checksums) < last:
                self._checksums += self._tasks.popleft().result()
            return bytes(self._checksums[first:last])

    def digest(self) -> str:
        """Of the whole buffer; waits for the pool."""
        assert self.hashed == self._size, "asked for the checksum of a part"
        pieces = self._hashed_checksums(0, self._size)
        return pieces.hex() if len(pieces) == CHECKSUM_BYTES else xxhash.xxh3_64_hexdigest(pieces)

    def release_buffer(self) -> None:
        """All of it is hashed; the checksums stay."""
        self.buffer = memoryview(b"")

    def _add(self, start: int, end: int) -> None:
        if self._pool is None:
            self._checksums += self._given.get(start) or piece_checksums(self.buffer[start:end])
        else:
            self._tasks.append(self._pool.submit(piece_checksums, self.buffer[start:end]))


def checksum(buffer: memoryview | bytes, parallel: bool = False) -> str:
    """Of a complete buffer."""
    running = RunningChecksum(memoryview(buffer), parallel)
    running.advance(len(buffer))
    return running.digest()


def piece_checksums(data: memoryview) -> bytes:
    return b"".join([xxhash.xxh3_64_digest(data[start : start + PIECE]) for start in range(0, len(data), PIECE)])


def scattered_checksums(segments: Sequence[memoryview]) -> bytes:
    """Of pieces that lie in several places."""
    if len(segments) == 1:
        return piece_checksums(segments[0])
    found, running, room = b"", xxhash.xxh3_64(), PIECE
    for segment in segments:
        start = 0
        while start < len(segment):
            end = min(start + room, len(segment))
            running.update(segment[start:end])
            start, room = end, room - (end - start)
            if not room:
                found, running, room = found + running.digest(), xxhash.xxh3_64(), PIECE
    return found if room == PIECE else found + running.digest()


def chunk_bytes(mbytes: float, default: int) -> int:
    """Megabytes as bytes, rounded to whole pieces; `default` if 0."""
    return max(1, round(mbytes * 1e6 / PIECE)) * PIECE if mbytes else default


@cache
def thread_pool() -> ThreadPoolExecutor:
    """One per process. XXH3 releases the GIL."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="checksum")
