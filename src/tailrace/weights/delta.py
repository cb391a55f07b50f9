"""The difference between two versions of the same bytes, as few bytes that give back the newer one exactly.

Weights are read as unsigned integers of their width. An update of reinforcement learning moves most of them by nothing
or by a few units in the last place, up or down: so the differences, modulo 2^n and folded so that small ones of either
sign are small numbers, are mostly zeros in bfloat16 and short in float32. Where few have changed, a bit mask says
which; then come the differences, byte plane by byte plane. Every stream is deflated by run lengths and Huffman codes
alone, unless that is no use. `benchmarks/deltas.py` compares other encodings.

Nothing here is rounded, so that any number of differences, one after the other, is as good as none.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from typing import Any

import numpy as np

from tailrace.errors import TailraceError
from tailrace.weights.layout import BY_CODE, LayoutError, WeightLayout

Bits = np.ndarray[Any, Any]

FEW = 0.5  # share of the elements; up to that a mask says which have changed
UNKNOWN_WIDTH = 2  # of elements, where no layout says it
DENSE, STORED = 0x80, 1 << 31  # marks of a difference without a mask, and of a stream as it is
SAMPLE = 4 << 10  # bytes of a stream that are tried
PAYS = 0.9  # of what it was
WIDTHS = (1, 2, 4, 8)


class DeltaError(TailraceError):
    """These bytes are no difference from that base."""


class ElementWidths:
    """Bytes of an element at each place of a version, which has its widest elements first."""

    def __init__(self, version: memoryview) -> None:
        self._ends: list[int] = []
        self._widths: list[int] = []
        try:
            layout = WeightLayout.read(version)
        except LayoutError:
            return
        for entry in layout.entries.values():
            self._ends.append(len(layout.header) + entry.data_offsets[1])
            self._widths.append(BY_CODE[entry.dtype].width)

    def at(self, position: int) -> int:
        number = bisect_right(self._ends, position)
        return self._widths[number] if number < len(self._widths) else UNKNOWN_WIDTH


class EncodedPieces:
    """The differences of a version, by the checksum of their base and where their piece begins; for whoever needs them
    next."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int], bytes] = {}

    def get(self, base: str, start: int) -> bytes | None:
        return self._pieces.get((base, start))

    def put(self, base: str, start: int, encoded: bytes) -> None:
        self._pieces[base, start] = encoded

    def clear(self) -> None:
        self._pieces = {}


def encode(base: memoryview, new: memoryview, width: int) -> bytes:
    """What makes `new` of a base of the same length; nothing if it would not be much shorter than `new`."""
    if len(base) != len(new) or len(new) % width or not len(new):
        return b""
    streams, mark = _streams(_fold(_elements(new, width) - _elements(base, width)))
    packed = [_pack(stream) for stream in streams]
    head = struct.pack(f"<B{len(packed)}I", width | mark, *[length for length, _ in packed])
    encoded = b"".join([head, *[data for _, data in packed]])
    return encoded if len(encoded) < PAYS * len(new) else b""


def decode(base: memoryview, encoded: memoryview, into: memoryview) -> None:
    """Write the newer version there; DeltaError if `encoded` is not of such a base."""
    width, dense = encoded[0] & ~DENSE, bool(encoded[0] & DENSE)
    if width not in WIDTHS or len(base) != len(into) or len(into) % width:
        raise DeltaError("its elements are of another size")
    streams = _Streams(encoded, width + (not dense))
    old, new = _elements(base, width), _elements(into, width)
    if dense:
        np.add(old, _unfold(streams.planes(len(old), width)), out=new)
        return
    changed = np.unpackbits(streams.take(-(-len(old) // 8)), count=len(old)).view(bool)
    np.copyto(new, old)
    new[changed] += _unfold(streams.planes(int(np.count_nonzero(changed)), width))


# ----------------------------------------------------------------------------------------------------------- integers


def _elements(data: memoryview, width: int) -> Bits:
    return np.frombuffer(data, dtype=f"<u{width}")


def _fold(difference: Bits) -> Bits:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    signed = difference.view(f"<i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _unfold(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _streams(folded: Bits) -> tuple[list[Bits], int]:
    """The streams and their mark."""
    changed = folded != 0
    if np.count_nonzero(changed) > FEW * len(folded):
        return _planes(folded), DENSE
    return [np.packbits(changed), *_planes(folded[changed])], 0


def _planes(folded: Bits) -> list[Bits]:
    """Lowest bytes first."""
    return [(folded >> _shift(folded.dtype, number)).astype(np.uint8) for number in range(folded.itemsize)]


def _shift(kind: np.dtype[Any], plane: int) -> Any:
    return kind.type(8 * plane)  # of the same kind: another one would widen the result


# ------------------------------------------------------------------------------------------------------------ streams


def _pack(stream: Bits) -> tuple[int, Any]:
    """The length with its mark, and the bytes."""
    if len(_deflate(stream[:SAMPLE])) < PAYS * len(stream[:SAMPLE]):
        packed = _deflate(stream)
        if len(packed) < len(stream):
            return len(packed), packed
    return len(stream) | STORED, stream.data


def _deflate(data: Bits) -> bytes:
    """Matches are not looked for, because there are none but runs: four times as fast, and no longer."""
    deflating = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflating.compress(data.data) + deflating.flush()


class _Streams:
    """One after the other, each of a length that is known."""

    def __init__(self, encoded: memoryview, count: int) -> None:
        head = struct.Struct(f"<B{count}I")
        if len(encoded) < head.size:
            raise DeltaError("it is cut short")
        self._lengths = iter(head.unpack_from(encoded)[1:])
        self._rest = encoded[head.size :]

    def take(self, size: int) -> Bits:
        marked = next(self._lengths)
        length = marked & ~STORED
        data, self._rest = self._rest[:length], self._rest[length:]
        found = data if marked & STORED else _inflate(data, size)
        if len(found) != size:
            raise DeltaError(f"a stream has {len(found):,} bytes instead of {size:,}")
        return np.frombuffer(found, dtype=np.uint8)

    def planes(self, count: int, width: int) -> Bits:
        folded = np.zeros(count, dtype=f"<u{width}")
        for number in range(width):
            folded |= self.take(count).astype(folded.dtype) << _shift(folded.dtype, number)
        return folded


def _inflate(data: memoryview, size: int) -> bytes:
    """Never more than `size` bytes, whatever was sent."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size) if size else b""
    except zlib.error as error:
        raise DeltaError(f"a stream is damaged: {error}") from None
