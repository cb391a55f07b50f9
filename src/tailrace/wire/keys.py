"""Who may say what in whose name: a key for every component, and one by which other machines join.

The controller's secret never leaves it and its supervisor. Each component is told one key, made from that secret and
the component's own name, so nobody can speak for another component: not a stranger, not a machine that joined, not
another part of the run. Machines join with the run's token, by which they can prove names that begin with `HOST`, and
no others. A stranger has a token of its own, for names that end with its own name.
"""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

from msgspec.structs import replace

from tailrace.wire.messages import Receipt, WireError, encode

RANK = re.compile(r"\.\d+/")  # in the name of a trainer's rank, but for the first
JOIN_KEY = "join.key"  # the file in a run's folder by which other machines join
HOST = "host-"  # what the names of other machines begin with
WORKER = re.compile(r"[a-z][a-z0-9_]{0,23}")  # the name of a stranger's key


def worker_of(name: str) -> str:
    """The stranger whose machine or component this is; empty: it is one that is trusted."""
    return name.partition("@")[2]


def stranger_token(token: str, worker: str) -> str:
    """By which our relays and a stranger's know each other. It opens no other door."""
    return hmac.digest(token.encode(), b"stranger " + worker.encode(), "sha256").hex()


class Keyring(NamedTuple):
    """What the controller knows: the keys of all."""

    secret: bytes
    token: str

    def of(self, name: str) -> bytes:
        if name.startswith(HOST):
            return host_key(self.token, name)
        return hmac.digest(self.secret, b"component " + name.encode(), "sha256")

    def folder_mark(self, name: str) -> str:
        """By which another machine knows the folder of this run, and, after the point, this trainer as the one that
        writes there."""
        folder = hmac.digest(self.secret, b"folder", "sha256").hex()
        return f"{folder}.{hmac.digest(self.secret, b'folder ' + name.encode(), 'sha256').hex()}"

    @property
    def identity(self) -> bytes:
        """From which the controller's certificate is made."""
        return hmac.digest(self.secret, b"certificate", "sha256")


def host_key(token: str, name: str) -> bytes:
    """That of a machine which has the run's token."""
    return hmac.digest(token.encode(), b"host " + name.encode(), "sha256")


def sample_key(store: bytes, name: str) -> bytes:
    """That of a component for a sample store, made from the store's own key. Both the store and the controller can make
    it, and nobody else. The ranks of a trainer share one."""
    return hmac.digest(store, b"samples " + RANK.sub("/", name).encode(), "sha256")


def signed_receipt(
    name: str, store: bytes, trajectory: int, attempt: int, tokens: int, oldest: int, newest: int
) -> Receipt:
    """Of the store with this name and key."""
    receipt = Receipt(name, trajectory, attempt, tokens, oldest, newest)
    return replace(receipt, signature=_signature(store, receipt))


def is_genuine(store: bytes, receipt: Receipt) -> bool:
    return hmac.compare_digest(receipt.signature, _signature(store, receipt))


def _signature(store: bytes, receipt: Receipt) -> bytes:
    return hmac.digest(store, b"receipt " + encode(replace(receipt, signature=b"")), "sha256")


class JoinKey(NamedTuple):
    """What a machine needs to join a run: the fingerprint of the controller's certificate, and the token. The token is
    secret. `worker`: it is that of the stranger of this name."""

    fingerprint: str
    token: str
    worker: str = ""

    @classmethod
    def read(cls, text: str) -> JoinKey:
        """The inverse of `str`."""
        fingerprint, _, rest = text.strip().partition(".")
        token, dot, worker = rest.partition(".")
        if not (_is_hex(fingerprint) and _is_hex(token)) or (dot and not WORKER.fullmatch(worker)):
            raise WireError("this is no join key; it is in the run's folder, in join.key, as one line")
        return cls(fingerprint, token, worker)

    def __str__(self) -> str:
        return ".".join(filter(None, self))


def _is_hex(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
