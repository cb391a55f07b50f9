"""The control plane of a run that goes on: its newest snapshot, and every event after it once more."""

from __future__ import annotations

from contextlib import suppress

from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.store.run import RunStore
from tailrace.types import MALFORMED


def restored(store: RunStore) -> tuple[ControlPlane, bool]:
    """The control plane where the journal left it; a fresh one if there is no journal yet."""
    if store.last_seq == 0:
        return ControlPlane(store.begun), False
    plane, seq = _from_snapshot(store, store.begun)
    for entry in store.entries(seq):
        plane.handle(entry.now, entry.event)
    return plane, True


def _from_snapshot(store: RunStore, config: Config) -> tuple[ControlPlane, int]:
    """With the event after which it was taken. One of another release may not fit: the journal has everything."""
    snapshot = store.newest_snapshot()
    with suppress(*MALFORMED):
        if snapshot is not None:
            return ControlPlane.restore(config, snapshot.state), snapshot.seq
    return ControlPlane(config), 0
