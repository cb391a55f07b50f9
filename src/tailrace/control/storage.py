"""The sample stores as control sees them: which there are, and which has been lost for good.

    store:  lost <-> live              one that dies is started again on its file: nothing is lost
            any  -> departed           with its host, or after too many starts: what it had is gone

Store 0 is on the controller's machine; the store of another machine has that machine's number. Owned by the plane.
"""

from __future__ import annotations

import msgspec

from tailrace.protocol import TrainGroup
from tailrace.types import HostId, StoreId, TrajectoryId

FIRST: StoreId = 0


class Store(msgspec.Struct):
    id: StoreId
    incarnation: int = 0
    live: bool = False
    departed: bool = False
    last_seen: float = 0.0
    restarts: int = 0
    restart_at: float = 0.0
    reason: str = ""


class Stores(msgspec.Struct):
    stores: dict[StoreId, Store] = {}
    missing: dict[TrajectoryId, None] = {}  # that were picked for training, and are not in their store any more

    def near(self, host: HostId) -> StoreId:
        """Where a replica on this host keeps what it begins: in the store of its host, if that is there."""
        store = self.stores.get(host) if host > 0 else None
        return store.id if store is not None and store.live else FIRST

    def works(self, id: StoreId) -> None:
        """Something was stored there: earlier starts count no more."""
        store = self.stores.get(id)
        if store is not None:
            store.restarts = 0

    def has(self, id: StoreId) -> bool:
        """Whether what was acknowledged by this store can still be had, now or once it is back."""
        store = self.stores.get(id)
        return store is None or not store.departed

    def found_missing(self, ids: list[TrajectoryId]) -> None:
        """It has been seen to: nobody will ask for these again."""
        for id in ids:
            self.missing.pop(id, None)

    def has_sample(self, id: TrajectoryId, store: StoreId) -> bool:
        return id not in self.missing and self.has(store)

    def has_group(self, group: TrainGroup) -> bool:
        return all(self.has_sample(id, store) for id, store in group.located())
