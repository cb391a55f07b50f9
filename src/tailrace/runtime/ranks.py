"""The ranks of the trainer, wherever they are: what each is told, and who stands in for those on other machines.

One component to control, one `Process` with several children here. `placement` says which machine runs which rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec.structs import replace

from tailrace.config.tree import Config
from tailrace.runtime import placement
from tailrace.runtime.hosts import Host, Hosts
from tailrace.runtime.local import Child, ComponentRecord
from tailrace.runtime.placement import Machine, RankPlacement
from tailrace.store.folder import PRIVATE, RunFolder
from tailrace.types import HostId
from tailrace.wire.keys import Keyring
from tailrace.wire.messages import RANKS_MARK, ComponentSpec


class TrainerRanks:
    def __init__(self, config: Config, hosts: Hosts, keys: Keyring, folder: RunFolder) -> None:
        self._config = config
        self._hosts = hosts
        self._keys = keys
        self._folder = folder
        self._own = placement.own_machine(config)

    @property
    def missing(self) -> int:
        """Ranks for which other machines have to make room."""
        return placement.missing(self._config.trainer.ranks, self._machines, self._config.trainer.interface)

    def specs(self, spec: ComponentSpec) -> list[ComponentSpec]:
        """What each rank is told, from what is the same for all; nothing while there is no room for them."""
        found = placement.place(self._config.trainer.ranks, self._machines, self._config.trainer.interface)
        if found is None:
            return []
        alone, first_here = len(found.hosts) == 1, self._host(found.hosts[0]) is None
        meeting = "" if alone else placement.meeting(found, first_here)
        mark = self._keys.folder_mark(spec.name) if self._config.local.listen else ""
        same = replace(spec, rank_hosts=found.hosts, meeting=meeting, folder_mark=mark)
        if any(map(self._host, found.hosts)):
            same = replace(same, rank_key=self._keys.of(f"ranks of {spec.name}").hex())
        return [self._of_rank(same, rank, found) for rank in range(len(found.hosts))]

    def members(self, specs: Sequence[ComponentSpec]) -> list[ComponentSpec | Child]:
        """As they are to be started: here, or by their hosts."""
        self._mark_folder(specs[0].folder_mark)
        hosts = [self._host(spec.host) for spec in specs]
        return [host.assign(spec) if host else spec for host, spec in zip(hosts, specs, strict=True)]

    def adopted(self, spec: ComponentSpec, trace: ComponentRecord) -> dict[int, Child | None]:
        """The ranks that are elsewhere, as far as their machines are still there."""
        away = {rank: id for rank, id in enumerate(trace.rank_hosts) if not self._is_here(id)}
        hosts = {rank: self._host(id) for rank, id in away.items()}
        return {rank: host and host.assign(self._named(spec, rank), adopted=True) for rank, host in hosts.items()}

    def forget(self) -> None:
        (self._folder.now / RANKS_MARK).unlink(missing_ok=True)

    @property
    def _machines(self) -> list[Machine]:
        return [self._own, *self._hosts.machines] if self._own.slots else self._hosts.machines

    def _is_here(self, id: HostId) -> bool:
        return id < self._config.local.relays

    def _host(self, id: HostId) -> Host | None:
        """Another machine."""
        return None if self._is_here(id) else self._hosts.find("relay", id)

    def _named(self, spec: ComponentSpec, rank: int) -> ComponentSpec:
        one = replace(spec, rank=rank)
        return replace(one, key=self._keys.of(one.name).hex())

    def _of_rank(self, same: ComponentSpec, rank: int, found: RankPlacement) -> ComponentSpec:
        return replace(self._named(same, rank), host=found.hosts[rank], interface=found.endpoints[rank].interface)

    def _mark_folder(self, text: str) -> None:
        """So that another machine can tell whether it has the same directory, not one of the same name; and so that an
        earlier trainer, which may live on where nobody can reach it, writes no more checkpoints."""
        mark = self._folder.path / RANKS_MARK
        written = mark.with_suffix(".new")
        if text:
            written.touch(PRIVATE)
            written.write_text(text)
            os.replace(written, mark)
