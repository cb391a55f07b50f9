"""Where the sample stores of a run are: told to everybody who exchanges tokens with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tailrace.control.storage import FIRST
from tailrace.runtime.local import Process
from tailrace.runtime.run_control import RunControl
from tailrace.wire.keys import Keyring, sample_key
from tailrace.wire.messages import StoreAddress, StoreAddresses

READERS = ("replica", "store", "trainer")
Processes = Mapping[tuple[str, int], Process]
Send = Callable[[str, int, StoreAddresses], None]


class StoreDirectory:
    """`send`: to a component, by its role and number."""

    def __init__(self, keys: Keyring, control: RunControl, processes: Processes, send: Send) -> None:
        self._keys = keys
        self._control = control
        self._processes = processes
        self._send = send
        self._told_departed: tuple[int, ...] = ()  # those that will not come back

    def tell(self) -> None:
        """Everybody."""
        self._told_departed = self._departed()
        for process in self._processes.values():
            if process.joined and process.spec.role in READERS:
                self.tell_one(process.spec.role, process.spec.id)

    def tell_departed(self) -> None:
        """Nobody is to wait for a store that does not come back."""
        if self._departed() != self._told_departed:
            self.tell()

    def tell_one(self, role: str, id: int) -> None:
        process = self._processes.get((role, id))
        if process is not None:
            theirs = [store for store in self._there() if not process.spec.worker or store.spec.id == FIRST]
            addresses = [self._address(store, process) for store in theirs]
            self._send(role, id, StoreAddresses(tuple(addresses), self._departed()))

    def _departed(self) -> tuple[int, ...]:
        return tuple([store.id for store in self._control.state.stores.stores.values() if store.departed])

    def _there(self) -> list[Process]:
        """Those that have joined."""
        known = [self._processes.get(("store", id)) for id in self._control.state.stores.stores]
        return [process for process in known if process is not None and process.joined]

    def _address(self, store: Process, reader: Process) -> StoreAddress:
        endpoint, _, fingerprint = store.address.partition("#")
        key = sample_key(self._keys.of(store.spec.name), reader.spec.name)
        return StoreAddress(store.spec.id, f"tcp://{endpoint}", fingerprint, key.hex())
