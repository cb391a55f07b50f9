"""Versions from relay to relay as differences from an earlier one that both hold.

The offer names the versions that the sender holds, with their checksums. If the receiver holds one of them, byte for
byte, it chooses that base, and the chunks come as differences from it, piece by piece (`delta.py`). A piece whose
difference would be no shorter comes as it is. A chunk is verified like any other, by the checksums of the pieces that
it stands for: so what a relay has after any number of differences is what the trainer has sent.

Differences are made by the first relay that needs them, beside the next training step, and kept for the other targets.
A relay that has got them hands the same bytes on. Who makes them measures: where the network is faster than that, the
version goes whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from msgspec.structs import replace

from tailrace.types import Version
from tailrace.weights.channel import Channel, ChannelError
from tailrace.weights.checksum import PIECE
from tailrace.weights.delta import DeltaError, ElementWidths, EncodedPieces, decode, encode
from tailrace.weights.messages import BaseVersion, ChunkHeader
from tailrace.weights.part import ByteRange, Part
from tailrace.weights.region import MappedVersion
from tailrace.weights.transfer import ChunkSender, DamagedChunkError, OverSocket

LENGTH = 4  # bytes before each difference, that say how many it has; none: the piece as it is
WORTH = 8 << 20  # bytes of a version from which the rate is measured


class DeltaRates:
    """Of one target: bytes of versions per second, whole and as differences. 0: not measured."""

    def __init__(self) -> None:
        self.whole = self.deltas = 0.0

    @property
    def pay(self) -> bool:
        """Unless they were slower."""
        return not 0 < self.deltas < self.whole

    def measured(self, size: int, seconds: float, deltas: bool) -> None:
        if size < WORTH or not seconds:
            return
        if deltas:
            self.deltas = size / seconds
        else:
            self.whole = size / seconds


class DeltaBases:
    """What a version of this size can be told as differences from: sealed versions, which stay mapped meanwhile."""

    def __init__(self, bases: list[MappedVersion], size: int, encoded: EncodedPieces, rates: DeltaRates) -> None:
        self._bases = {base.version: base for base in bases if base.size == size}
        self._encoded, self._rates = encoded, rates

    @property
    def names(self) -> tuple[BaseVersion, ...]:
        """None, where whole versions are faster."""
        bases = self._bases.values() if self._rates.pay else ()
        return tuple(BaseVersion(base.version, base.checksum) for base in bases)

    @contextmanager
    def sending(self, channel: Channel, part: Part, base: Version | None, chunk: int) -> Iterator[ChunkSender]:
        if base is not None and base not in self._bases:
            raise ChannelError(f"{channel.peer} wants differences from a version that was not offered")
        whole = OverSocket(channel, chunk)
        way = whole if base is None else DeltaSender(channel, part, self._bases[base], self._encoded, chunk)
        timed = TimedSender(way)
        yield timed
        self._rates.measured(timed.size, timed.seconds, base is not None)


class TimedSender:
    """Adds up how long sending takes, without the time in which there is nothing to send."""

    def __init__(self, way: ChunkSender) -> None:
        self._way, self.chunk = way, way.chunk
        self.size, self.seconds = 0, 0.0

    def send(self, header: ChunkHeader, data: memoryview, rest: str) -> None:
        began = time.monotonic()
        self._way.send(header, data, rest)
        self.seconds += time.monotonic() - began
        self.size += len(data)


class DeltaSender(OverSocket):
    """The sender's end of a connection."""

    def __init__(self, channel: Channel, part: Part, base: MappedVersion, encoded: EncodedPieces, chunk: int) -> None:
        super().__init__(channel, chunk)
        self._part, self._base, self._encoded = part, base, encoded
        self._widths = ElementWidths(base.buffer)

    def send(self, header: ChunkHeader, data: memoryview, rest: str) -> None:
        payload = b"".join(self._payload(header.position, data))
        self._channel.send(replace(header, encoded=len(payload)))
        self._channel.send_bytes(memoryview(payload), rest)

    def _payload(self, position: int, data: memoryview) -> Iterator[bytes | memoryview]:
        for place, piece in places(self._part, position, data):
            encoded = self._difference(place, piece)
            yield len(encoded).to_bytes(LENGTH, "little")
            yield encoded or piece

    def _difference(self, place: ByteRange, piece: memoryview) -> bytes:
        known = self._encoded.get(self._base.checksum, place.start)
        if known is None:
            known = encode(self._base.buffer[slice(*place)], piece, self._widths.at(place.start))
            self._encoded.put(self._base.checksum, place.start, known)
        return known


class DeltaReceiver(OverSocket):
    """The receiver's end of a connection."""

    def __init__(self, channel: Channel, part: Part, base: MappedVersion, encoded: EncodedPieces) -> None:
        super().__init__(channel)
        self._part, self._base, self._encoded = part, base, encoded

    def take(self, chunk: ChunkHeader, targets: list[memoryview], rest: str) -> None:
        if not chunk.encoded:
            super().take(chunk, targets, rest)
            return
        if chunk.encoded > chunk.size + LENGTH * (len(targets) + chunk.size // PIECE):
            raise ChannelError(f"{self._channel.peer} sent differences that are longer than {rest}")
        payload = memoryview(bytearray(chunk.encoded))
        self._channel.receive_weights([payload], rest)
        try:
            self._apply(payload, chunk.position, targets)
        except (DeltaError, IndexError) as error:
            raise DamagedChunkError(f"{self._channel.peer} sent damaged differences of {rest}: {error}") from None

    def _apply(self, payload: memoryview, position: int, targets: list[memoryview]) -> None:
        for target in targets:
            for place, piece in places(self._part, position, target):
                length = int.from_bytes(payload[:LENGTH], "little")
                encoded, payload = _split(payload[LENGTH:], length or len(piece))
                if length:
                    decode(self._base.buffer[slice(*place)], encoded, piece)
                else:
                    piece[:] = encoded
                self._encoded.put(self._base.checksum, place.start, bytes(encoded) if length else b"")
            position += len(target)


def _split(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    if length > len(data):
        raise DeltaError("it is cut short")
    return data[:length], data[length:]


def places(part: Part, position: int, data: memoryview) -> Iterator[tuple[ByteRange, memoryview]]:
    """Bytes of a part from `position` on, in pieces, and where in the version each belongs."""
    for segment in part.segments(position, position + len(data)):
        cuts = [*range(segment.start, segment.end, PIECE), segment.end]
        for start, end in pairwise(cuts):
            piece, data = data[: end - start], data[end - start :]
            yield ByteRange(start, end), piece
