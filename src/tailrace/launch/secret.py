"""The secret that all keys of a run are made from. Usually every start draws its own; who starts a run on many machines
hands it in, so that the key by which machines join is known before the run is up, and the same after a restart.

It is a line of 64 hexadecimal digits in a file or an environment variable, never on a command line, and only the
controller may have it. Workers get the join key, from which nobody finds the secret.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import TailraceError

VARIABLE = "TAILRACE_RUN_SECRET"
DIGITS = 64


class SecretError(TailraceError):
    """What was handed in is no secret."""


class RunSecret(NamedTuple):
    """`controller`: what its components' keys are made from; `token`: what other machines prove."""

    controller: bytes
    token: str

    @classmethod
    def of(cls, seed: bytes) -> RunSecret:
        return cls(hmac.digest(seed, b"controller", "sha256"), hmac.digest(seed, b"token", "sha256").hex())


def read_secret(file: Path | None) -> RunSecret:
    """Of the file, or of the environment, which no process that we start shall have; else a new one."""
    text = os.environ.pop(VARIABLE, None) if file is None else _content(file)
    return RunSecret.of(os.urandom(DIGITS // 2) if text is None else _seed(text, str(file or VARIABLE)))


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SecretError(f"--secret {file} cannot be read ({why}); write a file with {DIGITS} hex digits") from None


def _seed(text: str, source: str) -> bytes:
    try:
        seed = bytes.fromhex(text.strip())
    except ValueError:
        seed = b""
    if len(seed) != DIGITS // 2:
        raise SecretError(f"{source} has no secret of a run; it is {DIGITS} hex digits, as openssl rand -hex 32 prints")
    return seed
