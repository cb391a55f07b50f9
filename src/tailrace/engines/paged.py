"""Who owns which block of the KV pool: plain integers, no tensors.

The scheduler takes and gives back blocks here. A block is in use while a running sequence needs it or while a cache
keeps it; needs and keeps are counted apart, because a block that is only kept may be evicted at any time and is no
load. The lowest-numbered free block is always taken first, so what is in use stays dense at the pool's low end and
attention can read that region without gathering it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """`size` blocks, each with a count of sequences that need it and of caches that keep it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.needed = 0  # blocks that some sequence needs, shared ones counted once
        self._free = list(range(size))  # a heap
        self._needs = [0] * size
        self._keeps = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The lowest free blocks, each needed once. The caller made sure that there are enough."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self.need(blocks)
        return blocks

    def need(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.needed += self._needs[block] == 0
            self._needs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """The opposite of `need`."""
        for block in blocks:
            assert self._needs[block] > 0, f"block {block} is released twice"
            self._needs[block] -= 1
            self.needed -= self._needs[block] == 0
            self._free_if_unused(block)

    def keep(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._keeps[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """The opposite of `keep`."""
        for block in blocks:
            assert self._keeps[block] > 0, f"block {block} is dropped twice"
            self._keeps[block] -= 1
            self._free_if_unused(block)

    def is_needed(self, block: int) -> bool:
        return self._needs[block] > 0

    def check(self, needs: dict[int, int], keeps: dict[int, int]) -> None:
        """The conservation law: these are all the needs and keeps there are, and every other block is free once."""
        assert self._needs == [needs.get(block, 0) for block in range(self.size)]
        assert self._keeps == [keeps.get(block, 0) for block in range(self.size)]
        assert sorted(self._free) == [b for b in range(self.size) if b not in needs and b not in keeps]
        assert self.needed == len(needs)

    def _free_if_unused(self, block: int) -> None:
        if not self._needs[block] and not self._keeps[block]:
            heapq.heappush(self._free, block)
