"""What rank 0 announces to the others has the keys of sample stores: it is encrypted, with a key that the ranks have.

Ranks on one machine need none: what they say to each other does not leave it.
"""

from __future__ import annotations

import os

NONCE = 12  # bytes


class Announcements:
    """`key`: 64 hexadecimal digits, or nothing."""

    def __init__(self, key: str = "") -> None:
        self._key = bytes.fromhex(key)

    def write(self, text: str) -> str:
        if not self._key:
            return text
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        nonce = os.urandom(NONCE)
        return (nonce + ChaCha20Poly1305(self._key).encrypt(nonce, text.encode(), None)).hex()

    def read(self, written: bytes) -> bytes:
        """The inverse. `ValueError`: somebody without the key wrote it."""
        if not self._key:
            return written
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        content = bytes.fromhex(written.decode())
        try:
            return ChaCha20Poly1305(self._key).decrypt(content[:NONCE], content[NONCE:], None)
        except InvalidTag:
            raise ValueError("an announcement that no rank of this trainer has written") from None
