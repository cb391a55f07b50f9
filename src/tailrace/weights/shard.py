"""What one trainer rank has of a weight version: rows of its tensors, one after the other in one buffer.

`trainer/rank_group.py` says which rows are whose: together the ranks have every row once. A trainer of one rank has all
of them, and its buffer is the version. The header belongs to the first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from tailrace.types import Struct
from tailrace.weights.layout import BY_CODE, WeightLayout
from tailrace.weights.part import Part

if TYPE_CHECKING:
    import numpy as np
    import torch


class RowRange(NamedTuple):
    """Of a tensor, from the first up to the last; a number counts as one row."""

    first: int
    last: int


class ShardEntry(Struct):
    """One tensor's rows in the buffer, which begin at byte `start` of it."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return BY_CODE[self.dtype].width * prod(self.shape)


class ShardLayout(NamedTuple):
    """The buffer of one rank. `header` is how it begins, empty in all ranks but the first."""

    part: Part
    header: bytes
    entries: dict[str, ShardEntry]

    @classmethod
    def whole(cls, layout: WeightLayout) -> ShardLayout:
        return cls.of(
            layout, {name: RowRange(0, (entry.shape or (1,))[0]) for name, entry in layout.entries.items()}, True
        )

    @classmethod
    def of(cls, layout: WeightLayout, rows: Mapping[str, RowRange], with_header: bool) -> ShardLayout:
        """`rows`: by tensor, those that this rank has."""
        header = layout.header if with_header else b""
        base, start = len(layout.header), len(header)
        ranges, entries = [(0, start)], dict[str, ShardEntry]()
        for name, entry in layout.entries.items():
            first, last = rows.get(name, RowRange(0, 0))
            if first < last:
                row_bytes = BY_CODE[entry.dtype].width * prod(entry.shape[1:])
                entries[name] = ShardEntry(entry.dtype, (last - first, *entry.shape[1:])[: len(entry.shape)], start)
                begin = base + entry.data_offsets[0]
                ranges.append((begin + first * row_bytes, begin + last * row_bytes))
                start += (last - first) * row_bytes
        return cls(Part.of(layout.size, ranges), header, entries)

    def views_of(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a buffer of bytes, on any device."""
        import torch

        return {
            name: memory[entry.start : entry.start + entry.size]
            .view(getattr(torch, BY_CODE[entry.dtype].torch))
            .view(entry.shape)
            for name, entry in self.entries.items()
        }

    def arrays_of(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """The same of a buffer in host memory; bfloat16 and 8-bit floats appear as their bits."""
        return {
            name: memory[entry.start : entry.start + entry.size].view(BY_CODE[entry.dtype].numpy).reshape(entry.shape)
            for name, entry in self.entries.items()
        }
