"""`prices.json` in the directory of a run: what replicas cost an hour, as somebody sets it while the run goes on.

Written by `tailrace price`, looked at by the controller, which tells control what has changed: the journal has it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tailrace.protocol import Price
from tailrace.store.errors import JournalError
from tailrace.store.folder import PRIVATE

FILE = "prices.json"
Prices = dict[str, Price]  # by the label of a replica (r3) or of a host, for all replicas there (h2)


def set_price(run: Path, label: str, price: float) -> None:
    """In one piece: a controller reads the old file or the new one."""
    path = run / FILE
    prices = (read(path) if path.exists() else {}) | {label: price}
    new = path.with_suffix(".new")
    new.touch(PRIVATE)
    new.write_bytes(msgspec.json.encode(prices, order="sorted") + b"\n")
    os.replace(new, path)


def read(path: Path) -> Prices:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Prices)
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} cannot be read ({error}); delete it, and set the prices again") from None


class PriceFile:
    """As a controller follows it."""

    def __init__(self, run: Path) -> None:
        self._path = run / FILE
        self._seen = 0

    def changed(self) -> Prices:
        """All that it says, if it has been written since; else nothing."""
        try:
            written = self._path.stat().st_mtime_ns
        except OSError:
            return {}
        if written == self._seen:
            return {}
        self._seen = written
        return read(self._path)
