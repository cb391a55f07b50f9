"""What the two ends of a relay's connection say to each other. `transfer.py` has the order in which they say it.

Every figure is bounded here or checked against the version it belongs to before any memory is taken for it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tailrace.types import Struct

Bytes = Annotated[int, Meta(ge=0, lt=1 << 60)]
Number = Annotated[int, Meta(ge=0, lt=1 << 31)]  # of a version
Edition = Annotated[str, Meta(max_length=64)]


class Message(Struct, tag_field="kind", tag=True):
    pass


class Offer(Message):
    """I can send this version. `edition` is a word that the trainer made up for these very bytes: a part of one edition
    is never completed from another. `fresh`: I am the trainer, who may bring back a version that was dropped, and
    `reign` is how often it has been started. `here`: I want to write it into your memory myself."""

    version: Number
    size: Annotated[int, Meta(gt=0, lt=1 << 60)]
    edition: Edition = ""
    reign: Annotated[int, Meta(ge=0)] = 0
    fresh: bool = False
    here: bool = False


class Want(Message):
    """Send it, from `start` on: what is before that I have."""

    start: Bytes = 0


class Chunk(Message):
    """The next `size` bytes, which follow, belong at `position`; `sums` are those of their pieces."""

    position: Bytes
    size: Bytes
    sums: Annotated[bytes, Meta(max_length=1024)]


class Waiting(Message):
    """I am well, but wait for more of it myself."""


class Total(Message):
    """That was all of it; the checksum of the whole is this."""

    checksum: Annotated[str, Meta(max_length=64)]


class Stored(Message):
    """It is sealed here."""


class Have(Message):
    """I hold it, or have dropped it: nothing to do."""


class Busy(Message):
    """It is on its way to me from elsewhere; ask again, it may break off."""


class Refused(Message):
    reason: str


class Place(Message):
    """Write it to this file, which you know by its inode if you are on my host, from start to end."""

    path: str
    inode: int


class Written(Message):
    """Everything before `position` is there."""

    position: Bytes


class Pull(Message):
    """Send me this version, from `start` on if its edition is this one."""

    version: Number
    edition: Edition = ""
    start: Bytes = 0


class Sending(Message):
    size: Annotated[int, Meta(gt=0, lt=1 << 60)]
    edition: Edition = ""
    start: Bytes = 0


AnyMessage = Offer | Want | Chunk | Waiting | Total | Stored | Have | Busy | Refused | Place | Written | Pull | Sending
DECODER = msgspec.msgpack.Decoder(AnyMessage)
