"""What the launcher and its placer process say to each other: a line of JSON each, on the placer's stdin and stdout.

launcher -> placer   Order, then Go; the end of the stream means: stop everything
placer -> launcher   Found or Failed, then Said, again and again
"""

from __future__ import annotations

import msgspec

from tailrace.launch.placers.fleet import NodeShare
from tailrace.types import Struct


class Order(Struct, tag=True):
    """Find the cluster at `address`; use at most so many of its nodes (0: all). `cards`: those of this node are ours
    already."""

    address: str
    nodes: int
    each: NodeShare
    cards: str | None = None


class Go(Struct, tag=True):
    """Place agents that join there. `key` is secret. `folder` and `threads` are those of whoever asked."""

    join: str
    key: str
    folder: str
    threads: str | None = None


class Found(Struct, tag=True):
    """The cluster: the address of this node, what its processes may see of its cards, and how many others there are."""

    address: str
    cards: str
    nodes: int


class Failed(Struct, tag=True):
    """There is no such cluster, or it is not as asked for."""

    reason: str


class Said(Struct, tag=True):
    """Something for the person who watches."""

    text: str
    warning: bool = False


FromPlacer = Found | Failed | Said
FromLauncher = Order | Go
_from_placer = msgspec.json.Decoder(FromPlacer)
_from_launcher = msgspec.json.Decoder(FromLauncher)


def line(message: FromPlacer | FromLauncher) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_from_placer(text: bytes) -> FromPlacer:
    return _from_placer.decode(text)


def read_from_launcher(text: bytes) -> FromLauncher:
    return _from_launcher.decode(text)
