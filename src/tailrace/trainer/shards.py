"""Which rows of a tensor this rank has. FSDP2 cuts tensors by rows; with hybrid sharding several ranks have the same.

Publication and checkpoints ask: every row belongs to exactly one rank, which publishes and saves it.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from tailrace.weights.shard import RowRange


def rows_in(shape: tuple[int, ...]) -> int:
    """Of a tensor of this shape; a number counts as one row."""
    return shape[0] if shape else 1


def held_rows(tensor: Tensor) -> RowRange:
    """Those that are here."""
    rows, first = rows_in(tuple(tensor.shape)), 0
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                each = -(-rows // tensor.device_mesh.size(dimension))
                first = min(each * tensor.device_mesh.get_local_rank(dimension), rows)
        rows = len(tensor.to_local())
    return RowRange(first, first + rows)


def owned_rows(tensor: Tensor, rank: int) -> RowRange:
    """Those that this rank publishes and saves; what all ranks have belongs to the first one."""
    if not isinstance(tensor, DTensor):
        return held_rows(tensor) if rank == 0 else RowRange(0, 0)
    replicated = [dimension for dimension, placement in enumerate(tensor.placements) if placement.is_replicate()]
    is_copy = any(tensor.device_mesh.get_local_rank(dimension) for dimension in replicated)
    return RowRange(0, 0) if is_copy else held_rows(tensor)
