"""A reward for measuring speed: right or wrong by a checksum of the answer, so that every group has both."""

import zlib


def coin(completion: str) -> float:
    return float(zlib.crc32(completion.encode()) & 1)
