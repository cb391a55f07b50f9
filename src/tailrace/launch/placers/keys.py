"""Keys of a run that are known before it begins: whoever places it makes them and hands each part its own."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from tailrace.launch.secret import RunSecret
from tailrace.wire.keys import JoinKey, Keyring
from tailrace.wire.tls import Identity


class RunKeys(NamedTuple):
    """`secret` is the controller's alone; `join` is what agents have."""

    secret: str
    join: str


def make_keys() -> RunKeys:
    seed = secrets.token_bytes(32)
    keys = RunSecret.of(seed)
    fingerprint = Identity(Keyring(keys.controller, keys.token).identity).fingerprint
    return RunKeys(seed.hex(), str(JoinKey(fingerprint, keys.token)))
