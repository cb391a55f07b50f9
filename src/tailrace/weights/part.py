"""A part of a weight version: which of its bytes one stream carries, in which order.

A trainer of one rank publishes a version as one part, which is all of it. With several ranks each one publishes the
rows that it has. A relay may split what it sends over several connections: these stripes are parts too. The receiver
scatters parts into the version's memory (`version_buffer.py`); positions within a part count from its first byte.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from tailrace.weights.checksum import PIECE

STRIPE_BLOCK = 8 << 20  # bytes that one stream carries before the next one has its turn
MOST_BLOCKS = 1 << 14  # of one version, so that their list stays short


class ByteRange(NamedTuple):
    """Of a version."""

    start: int
    end: int


@dataclass(frozen=True)
class Part:
    """Ascending ranges without overlap or gap of size zero, of a version of so many bytes."""

    version_size: int
    ranges: tuple[ByteRange, ...]

    @classmethod
    def of(cls, version_size: int, ranges: Iterable[tuple[int, int]]) -> Part:
        """Of ascending ranges; what touches is joined, what is empty left out."""
        joined: list[ByteRange] = []
        for start, end in ranges:
            if joined and joined[-1].end == start:
                joined[-1] = ByteRange(joined[-1].start, end)
            elif start < end:
                joined.append(ByteRange(start, end))
        return cls(version_size, tuple(joined))

    @classmethod
    def whole(cls, version_size: int) -> Part:
        return cls(version_size, (ByteRange(0, version_size),))

    @property
    def is_whole(self) -> bool:
        return self.size == self.version_size

    @property
    def size(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """Where each range begins within the part, and at last the size."""
        return list(accumulate((end - start for start, end in self.ranges), initial=0))

    def place(self, position: int) -> int:
        """Where in the version this byte of the part belongs; for the end of the part, the end of the version."""
        return next(self.segments(position, position + 1)).start if position < self.size else self.version_size

    def segments(self, start: int, end: int) -> Iterator[ByteRange]:
        """Where in the version these bytes of the part belong."""
        number = bisect_right(self._starts, start) - 1
        while start < end:
            first = self.ranges[number].start + start - self._starts[number]
            last = min(first + end - start, self.ranges[number].end)
            yield ByteRange(first, last)
            start, number = start + last - first, number + 1

    def overlaps(self, others: Iterable[Part]) -> bool:
        return _overlap([*self.ranges, *(each for other in others for each in other.ranges)])

    def of_part(self, inner: Part) -> Part:
        """What a part of this part is in the version."""
        return Part.of(self.version_size, (place for each in inner.ranges for place in self.segments(*each)))

    def pack(self) -> bytes:
        """For a message; nothing stands for the whole version."""
        numbers = [] if self.is_whole else [number for each in self.ranges for number in each]
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    @classmethod
    def unpack(cls, version_size: int, packed: bytes) -> Part:
        """The inverse; ValueError if that is no part of such a version."""
        if not packed:
            return cls.whole(version_size)
        if len(packed) % 16:
            raise ValueError("its ranges are cut short")
        numbers = struct.unpack(f"<{len(packed) // 8}Q", packed)
        ranges = [ByteRange(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        if any(not start < end <= version_size for start, end in ranges) or _overlap(ranges, in_order=True):
            raise ValueError("its ranges overlap or lie outside")
        return cls(version_size, tuple(ranges))


def stripes(size: int, count: int) -> list[Part]:
    """So many bytes split into streams: whole pieces in turns, so that all of them together arrive from the start."""
    block = max(STRIPE_BLOCK, -(-size // MOST_BLOCKS // PIECE) * PIECE)
    starts = range(0, size, block)
    return [Part.of(size, ((s, min(s + block, size)) for s in starts[number::count])) for number in range(count)]


def _overlap(ranges: Sequence[ByteRange], in_order: bool = False) -> bool:
    return any(one.end > other.start for one, other in pairwise(ranges if in_order else sorted(ranges)))
