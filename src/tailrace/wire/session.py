"""What makes a connection one of the run's: both ends prove who they are; then every frame is signed and counted.

    component         MAGIC, a nonce, its name
    controller   MAGIC, a nonce
    component         proof that it has the key of that name
    controller   proof that it has it too
    both         frames: length, number, signature, content

The key itself never travels. What is signed includes both nonces, the certificate if there is one, the direction and a
count, so that nothing that was recorded, left out, repeated or turned around is taken for a frame. There are no sockets
here: `server` and `connection` carry the bytes.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from os import urandom
from typing import Literal

from tailrace.wire.messages import WireError

MAGIC = b"tailrace wire 1\n"
NONCE = PROOF = 32
LONGEST_NAME = 64
NAMED = struct.Struct(f">{len(MAGIC)}s{NONCE}sB")  # the last: the length of the name that follows
NAMELESS = struct.Struct(f">{len(MAGIC)}s{NONCE}s")
HEAD = struct.Struct(f">QQ{PROOF}s")

Side = Literal["component", "controller"]


class StrangerError(WireError):
    """The other end does not speak as one of ours does, or has another key."""


class Opening:
    """What one end says first."""

    def __init__(self, name: str = "") -> None:
        self.nonce = urandom(NONCE)
        self._name = name.encode()

    @property
    def named(self) -> bytes:
        return NAMED.pack(MAGIC, self.nonce, len(self._name)) + self._name

    @property
    def nameless(self) -> bytes:
        return NAMELESS.pack(MAGIC, self.nonce)


def read_named(head: bytes) -> tuple[bytes, int]:
    """The nonce, and the length of the name that follows."""
    magic, nonce, length = NAMED.unpack(head)
    if magic != MAGIC or not 0 < length <= LONGEST_NAME:
        raise StrangerError("it is not a part of a run of this version of Tailrace")
    return nonce, length


def read_nameless(head: bytes) -> bytes:
    magic, nonce = NAMELESS.unpack(head)
    if magic != MAGIC:
        raise StrangerError("it is not the controller of a run of this version of Tailrace")
    return nonce


class Session:
    """One end of a connection, after both openings. `certificate`: the fingerprint of the one that encrypts it."""

    def __init__(self, side: Side, key: bytes, nonces: tuple[bytes, bytes], certificate: str = "") -> None:
        """The component's nonce is the first."""
        self._key = hmac.digest(key, b"".join(nonces) + certificate.encode(), "sha256")
        self._own, self._other = (b"p", b"c") if side == "component" else (b"c", b"p")
        self._sent = self._received = 0

    @property
    def proof(self) -> bytes:
        return hmac.digest(self._key, b"proof" + self._own, "sha256")

    @property
    def beat_key(self) -> bytes:
        """Of the datagrams that go with this connection (`liveness`)."""
        return hmac.digest(self._key, b"beat", "sha256")

    def check_proof(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, hmac.digest(self._key, b"proof" + self._other, "sha256")):
            raise StrangerError("it has another key")

    def head(self, number: int, content: bytes) -> bytes:
        """What goes before the next content."""
        self._sent += 1
        return HEAD.pack(len(content), number, self._sign(self._own, self._sent, number, content))

    def check(self, number: int, signature: bytes, content: bytes | bytearray) -> None:
        self._received += 1
        if not hmac.compare_digest(signature, self._sign(self._other, self._received, number, content)):
            raise StrangerError("it has sent a frame that is not signed as it should be")

    def _sign(self, side: bytes, count: int, number: int, content: bytes | bytearray) -> bytes:
        """BLAKE2 takes a key, and is the fastest that Python brings."""
        digest = blake2b(side + struct.pack(">QQ", count, number), key=self._key, digest_size=PROOF)
        digest.update(content)
        return digest.digest()
