"""What one rank has of the last snapshot, and its way to the master relay.

`rank_group.py` has one in every rank that publishes: of the parameters of a model, or of the arrays of an emulated
learner, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tailrace.model.load import precision_on
from tailrace.types import RelayId, Struct, Version
from tailrace.weights.channel import Address
from tailrace.weights.layout import WeightLayout
from tailrace.weights.publisher import Publisher
from tailrace.weights.shard import ShardLayout
from tailrace.weights.snapshot import ArraySnapshot

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tailrace.wire.messages import ComponentSpec

GiveUp = Callable[[Version, str], None]  # is told what could not be sent and why


class PublishRoute(Struct):
    """The relay that assembles a version, and where it and those on the hosts of the ranks listen."""

    master: RelayId
    addresses: dict[RelayId, str]


class SnapshotSender:
    """Has this rank's part of the last snapshot and gets it to the master relay. `options`: of the publisher."""

    def __init__(self, spec: ComponentSpec, mine: ShardLayout, **options: Any) -> None:
        self._mine = mine
        self._host = spec.rank_hosts[spec.rank] if spec.rank_hosts else None
        relay = spec.config.relay
        self.publisher = Publisher(
            mine,
            spec.token.encode(),
            relay.chunk_mbytes,
            generation=spec.incarnation,
            streams=relay.streams,
            **options,
        )
        self._newest: Version = -1
        self._goal = ""  # where the last one is to go
        self._under_way: tuple[Version, str] | None = None

    def snapshot(self, version: Version, tensors: Iterable[tuple[str, Any]], content_id: str) -> float:
        self._newest = version
        return self.publisher.snapshot(version, tensors, content_id)

    def send(self, version: Version, route: PublishRoute, give_up: GiveUp) -> None:
        """Send this version, or the newer one that was finished while the order was on its way."""
        assert version <= self._newest, f"asked to publish version {version}, but the last snapshot is {self._newest}"
        address = route.addresses[route.master]
        if self._under_way == (self._newest, address) or not self._mine.part.size:
            return  # a new controller asks for what the one before it had asked for, or all is with other ranks
        self._goal = address
        self._under_way = (self._newest, address)

        def arrived(*_: object) -> None:
            self._under_way = None

        def failed(version: Version, reason: str) -> None:
            """A relay that is gone is lost to control too, which names another one. Of one that is there but takes
            nothing, control has to hear."""
            self._under_way = None
            if self._goal == address:
                give_up(version, reason)

        own_relay = route.addresses.get(self._host, address) if self._host is not None else address
        self.publisher.send(Address.read(address), arrived, failed, Address.read(own_relay))


class ParameterSender(SnapshotSender):
    """Of the rows of a model's parameters that this rank has."""

    def __init__(self, spec: ComponentSpec, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from tailrace.trainer.shards import owned_rows

        named = dict(tensors)
        device = next((one.device for one in named.values() if one.device.type == "cuda"), None)
        precision = precision_on("cpu" if device is None else "cuda", spec.config.rollout.precision)
        layout = WeightLayout.of_tensors(named, dtype=precision)
        rows = {name: owned_rows(tensor, spec.rank) for name, tensor in named.items()}
        super().__init__(spec, ShardLayout.of(layout, rows, with_header=spec.rank == 0), device=device)

    def snapshot(self, version: Version, tensors: Iterable[tuple[str, Tensor]], content_id: str) -> float:
        from tailrace.trainer.policies import local

        mine = ((name, local(tensor.detach())) for name, tensor in tensors if name in self._mine.entries)
        return super().snapshot(version, mine, content_id)


class ArraySender(SnapshotSender):
    """Of all that there is."""

    def __init__(self, spec: ComponentSpec, arrays: Mapping[str, np.ndarray]) -> None:
        layout = WeightLayout.of_tensors(arrays, dtype=precision_on("cpu", spec.config.rollout.precision))
        super().__init__(spec, ShardLayout.whole(layout), new_snapshot=ArraySnapshot)
