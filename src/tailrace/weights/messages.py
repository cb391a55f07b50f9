"""Messages between trainer, relays and replicas about one weight version. `transfer.py` has their order.

Every number is bounded here, or checked against the version it belongs to before memory is allocated for it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tailrace.types import Struct

Bytes = Annotated[int, Meta(ge=0, lt=1 << 60)]
VersionSize = Annotated[int, Meta(gt=0, lt=1 << 60)]
VersionNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
ContentId = Annotated[str, Meta(max_length=64)]
LONGEST_RANGES = 16 << 16  # bytes: a part of 65,536 ranges


class TransferMessage(Struct, tag_field="kind", tag=True):
    pass


class BaseVersion(Struct):
    """A version that both ends may hold, byte for byte."""

    version: VersionNumber
    checksum: Annotated[str, Meta(max_length=64)]


class OfferVersion(TransferMessage):
    """The sender can send this version, or a part of it.

    `size` is that of the version. `ranges` are the part's (`Part.pack`); empty: all of it. `content_id` is a random id
    of these very bytes, and the same for all parts: what is partly here is only completed with the same id.
    `destination`: the relay that assembles the version, if the receiver is only to pass the part on to it.
    `from_trainer`: the sender is the trainer, which may bring back a version that was dropped; `generation` counts its
    starts. `in_place`: the sender is on the same host and wants to write into the receiver's shared memory itself.
    `bases`: versions from which the sender can send the differences instead."""

    version: VersionNumber
    size: VersionSize
    content_id: ContentId = ""
    generation: Annotated[int, Meta(ge=0)] = 0
    from_trainer: bool = False
    in_place: bool = False
    ranges: Annotated[bytes, Meta(max_length=LONGEST_RANGES)] = b""
    destination: Annotated[str, Meta(max_length=400)] = ""
    nixl: Annotated[str, Meta(max_length=64)] = ""  # the sender's agent, if it can lend the bytes by NIXL
    bases: Annotated[tuple[BaseVersion, ...], Meta(max_length=16)] = ()


class AcceptVersion(TransferMessage):
    """Send it from byte `start` of the part; the receiver has what is before. `base`: one of the offered ones, from
    which the differences are enough."""

    start: Bytes = 0
    nixl: bool = False  # by NIXL, if that is still possible
    base: VersionNumber | None = None


class RegisteredMemory(TransferMessage):
    """Where the sender will have one chunk after the other; `metadata` is what NIXL needs to read them there."""

    metadata: Annotated[bytes, Meta(max_length=64 << 10)]
    address: Annotated[int, Meta(ge=0, lt=1 << 62)]


class ChunkHeader(TransferMessage):
    """`size` raw bytes follow, which begin at `position` of the part; `checksums` are those of their pieces. `lent`:
    they do not follow, but are to be read from the sender's registered memory. `encoded`: so many bytes follow instead,
    with the differences from the base (`delta_transport.py`)."""

    position: Bytes
    size: Bytes
    checksums: Annotated[bytes, Meta(max_length=1024)]
    lent: bool = False
    encoded: Bytes = 0


class ChunkTaken(TransferMessage):
    """The receiver has read the chunk that was lent."""


class KeepAlive(TransferMessage):
    """The peer is alive and itself waits: for more bytes, or for the other parts."""


class EndOfVersion(TransferMessage):
    """All bytes were sent. `checksum` is that of the whole version; empty: the sender has only a part of it."""

    checksum: Annotated[str, Meta(max_length=64)]


class VersionSealed(TransferMessage):
    """The receiver has the whole version, verified."""


class AlreadyHeld(TransferMessage):
    """The receiver has the version, or has dropped it: nothing to send."""


class ReceivingElsewhere(TransferMessage):
    """The receiver is getting it from another sender. Ask again later: that one may fail."""


class VersionRefused(TransferMessage):
    reason: str


class WriteTarget(TransferMessage):
    """The shared-memory file to write into, from start to end. A sender on the same host finds this inode there."""

    path: str
    inode: int


class WrittenUpTo(TransferMessage):
    """Everything before `position` is written in place."""

    position: Bytes


class PullVersion(TransferMessage):
    """Send this version, from `start` on if `content_id` is still its id."""

    version: VersionNumber
    content_id: ContentId = ""
    start: Bytes = 0


class PullAccepted(TransferMessage):
    size: VersionSize
    content_id: ContentId = ""
    start: Bytes = 0


AnyMessage = (
    OfferVersion
    | AcceptVersion
    | RegisteredMemory
    | ChunkHeader
    | ChunkTaken
    | KeepAlive
    | EndOfVersion
    | VersionSealed
    | AlreadyHeld
    | ReceivingElsewhere
    | VersionRefused
    | WriteTarget
    | WrittenUpTo
    | PullVersion
    | PullAccepted
)
DECODER = msgspec.msgpack.Decoder(AnyMessage)
