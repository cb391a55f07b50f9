"""Small files of a checkpoint that are read as numbers: JSON that ends with the checksum of everything in it."""

from __future__ import annotations

import msgspec

from tailrace.weights.checksum import checksum


class Sealed(msgspec.Struct, kw_only=True):
    """Base of what such a file holds."""

    sum: str = ""  # of the rest; empty in files of earlier releases


def sealed(state: Sealed) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(state, sum=_sum(state)))


def is_as_written(state: Sealed) -> bool:
    """What is in it is what was written; of a file without a checksum nobody knows."""
    return not state.sum or state.sum == _sum(state)


def _sum(state: Sealed) -> str:
    return checksum(msgspec.json.encode(msgspec.structs.replace(state, sum="")))
