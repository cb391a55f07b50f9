"""Passes a part of a version on, from a trainer rank to the relay that assembles the version.

The relay on a rank's host does this, because only relays talk to other hosts. Nothing is kept here: every chunk is
verified and sent on at once, and answers go back, so that the rank resumes where the assembling relay is. If either
side fails, both connections end, and the rank tries again.
"""

from __future__ import annotations

from msgspec.structs import replace

from tailrace.types import label
from tailrace.weights.channel import Channel, ChannelError
from tailrace.weights.checksum import piece_checksums
from tailrace.weights.messages import AcceptVersion, AnyMessage, ChunkHeader, EndOfVersion, KeepAlive, OfferVersion
from tailrace.weights.transfer import LARGEST_CHUNK, check_chunk


def pass_on(sender: Channel, receiver: Channel, request: OfferVersion, size: int) -> None:
    """All of a transfer, from the offer of a part of `size` bytes to its confirmation."""
    receiver.send(replace(request, destination="", nixl=""))
    answer = receiver.receive(f"an answer to the offer of {label('version', request.version)}")
    sender.send(answer)
    if isinstance(answer, AcceptVersion):
        _Passage(sender, receiver, request, size).run()


class _Passage:
    """What follows an accepted offer."""

    def __init__(self, sender: Channel, receiver: Channel, request: OfferVersion, size: int) -> None:
        self._sender, self._receiver, self._size = sender, receiver, size
        self._name = f"{label('version', request.version)}, a part of it"
        self._memory = memoryview(bytearray(min(LARGEST_CHUNK, size)))

    def run(self) -> None:
        while not isinstance(message := self._sender.receive(self._name), EndOfVersion):
            self._chunk(message)
        self._receiver.send(message)
        while isinstance(answer := self._receiver.receive(f"the confirmation of {self._name}"), KeepAlive):
            self._sender.send(answer)
        self._sender.send(answer)

    def _chunk(self, message: AnyMessage) -> None:
        if isinstance(message, ChunkHeader) and not (message.lent or message.encoded):
            data = self._verified(message)
            self._receiver.send(message)
            self._receiver.send_bytes(data, self._name)
        elif isinstance(message, KeepAlive):
            self._receiver.send(message)
        else:
            raise ChannelError(f"{self._sender.peer} sent {type(message).__name__} instead of {self._name}")

    def _verified(self, chunk: ChunkHeader) -> memoryview:
        sent = f"{self._sender.peer} sent bytes {chunk.position:,} to {chunk.position + chunk.size:,}"
        check_chunk(chunk, self._size, sent, self._name)
        data = self._memory[: chunk.size]
        self._sender.receive_weights([data], self._name)
        if piece_checksums(data) != chunk.checksums:
            raise ChannelError(f"{sent} damaged, of {self._name}")
        return data
