"""The ranks of a trainer as one: rank 0 is told what to do and tells the others, then all do it together.

`worker.py` has one in every rank. With one rank nothing is broadcast. An emulated trainer has ranks too, which read and
pack their shares; what concerns weights, of which it has next to none, is left to rank 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from tailrace.samples.client import SampleClient
from tailrace.trainer.emulated import EmulatedLearner
from tailrace.trainer.pace import BYTES_PER_PARAMETER
from tailrace.trainer.reader import SampleInfo, StoreReader
from tailrace.types import Struct, Version
from tailrace.wire.messages import ComponentSpec, StoreAddresses

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.trainer.parallel import Ranks
    from tailrace.trainer.step import Learner
    from tailrace.weights.publisher import Publisher

LOOK_S = 0.2  # how often the other ranks look where the sample stores are
GiveUp = Callable[[Version, str], None]  # is told what could not be sent and why


class RankGroup(Protocol):
    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is."""
        ...

    def restore(self, checkpoints: Path, at_most: int) -> int:
        """Take up the newest checkpoint of that step or an earlier one; returns its step, 0 if there is none."""
        ...

    def train(
        self, step: int, mini_batch: int, samples: tuple[SampleInfo, ...], client: SampleClient
    ) -> dict[str, float]:
        """Train on one mini-batch, of which each rank reads its share from the sample stores."""
        ...

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        """Write a checkpoint, and delete old ones, but not the newest up to version `good`."""
        ...

    def snapshot(self, version: Version) -> float:
        """Copy the weights for publication; returns how long training stood still for it."""
        ...

    def publish(self, version: Version, address: str, give_up: GiveUp) -> None:
        """Stream the last snapshot to a relay, in the background."""
        ...

    def find_stores(self, stores: StoreAddresses) -> None:
        """Tell the other ranks where the sample stores are. May be called from any thread."""
        ...

    def follow(self) -> None:
        """In every rank but the first: do as it says until it leaves."""
        ...

    def close(self) -> None: ...


def build_rank_group(spec: ComponentSpec) -> RankGroup:
    return EmulatedRankGroup(spec) if spec.config.trainer.engine == "emulated" else NativeRankGroup(spec)


class SnapshotSender:
    """Has the last snapshot and gets it to a relay."""

    def __init__(self, spec: ComponentSpec, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from tailrace.model.load import precision_on
        from tailrace.weights.layout import WeightLayout
        from tailrace.weights.publisher import Publisher

        named = dict(tensors)
        device = next((one.device for one in named.values() if one.device.type == "cuda"), None)
        precision = precision_on("cpu" if device is None else "cuda", spec.config.rollout.precision)
        layout = WeightLayout.of_tensors(named, dtype=precision)
        relay = spec.config.relay
        self.publisher: Publisher = Publisher(
            layout, spec.token.encode(), relay.chunk_mbytes, device=device, generation=spec.incarnation
        )
        self._newest: Version = -1
        self._goal = ""  # where the last one is to go
        self._under_way: tuple[Version, str] | None = None

    def snapshot(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> float:
        self._newest = version
        return self.publisher.snapshot(version, tensors)

    def send(self, version: Version, address: str, give_up: GiveUp) -> None:
        """Send this version, or the newer one that was finished while the order was on its way."""
        from tailrace.weights.channel import Address

        assert version <= self._newest, f"asked to publish version {version}, but the last snapshot is {self._newest}"
        if self._under_way == (self._newest, address):
            return  # a new controller asks for what the one before it had asked for
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

        self.publisher.send(Address.read(address), arrived, failed)


# ------------------------------------------------------------------------------------------- what rank 0 tells others


class RankCommand(Struct, tag_field="kind", tag=True):
    pass


class TrainCommand(RankCommand):
    step: int
    mini_batch: int
    samples: tuple[SampleInfo, ...]


class GatherCommand(RankCommand):
    """Rank 0 reads whole tensors, of which every rank has a part."""


class SaveCommand(RankCommand):
    checkpoints: str


class RestoreCommand(RankCommand):
    checkpoint: str


class LeaveCommand(RankCommand):
    pass


_decode = msgspec.msgpack.Decoder(TrainCommand | GatherCommand | SaveCommand | RestoreCommand | LeaveCommand).decode


AnyLearner = TypeVar("AnyLearner", "Learner", EmulatedLearner)


class _Group(Generic[AnyLearner]):
    """What is the same with and without a model."""

    learner: AnyLearner
    sender: SnapshotSender | None  # of rank 0

    def __init__(self, spec: ComponentSpec, ranks: Ranks) -> None:
        self.name = spec.name
        self.ranks = ranks

    def train(
        self, step: int, mini_batch: int, samples: tuple[SampleInfo, ...], client: SampleClient
    ) -> dict[str, float]:
        self._tell(TrainCommand(step, mini_batch, samples))
        return self.learner.train_mini_batch(step, mini_batch, samples, StoreReader(client, samples))

    def publish(self, version: Version, address: str, give_up: GiveUp) -> None:
        assert self.sender is not None, "only the first rank publishes"
        self.sender.send(version, address, give_up)

    def find_stores(self, stores: StoreAddresses) -> None:
        self.ranks.announce(msgspec.json.encode(stores).decode())

    def follow(self) -> None:
        client, over = SampleClient(self.name), threading.Event()
        client.open()
        threading.Thread(target=self._follow_stores, args=(client, over), name="stores", daemon=True).start()
        try:
            while not isinstance(command := _decode(self.ranks.broadcast_bytes(None)), LeaveCommand):
                self._obey(command, client)
        finally:
            over.set()
            client.close()

    def _follow_stores(self, client: SampleClient, over: threading.Event) -> None:
        """Beside the commands: a store that has moved may be what this rank is waiting for."""
        known = b""
        while not over.wait(LOOK_S):
            with suppress(RuntimeError):  # rank 0 has left, and this one is about to
                announced = self.ranks.announced()
                if announced != known:
                    client.find(msgspec.json.decode(announced, type=StoreAddresses))
                    known = announced

    def _obey(self, command: RankCommand, client: SampleClient) -> None:
        assert isinstance(command, TrainCommand), command
        self.learner.train_mini_batch(
            command.step, command.mini_batch, command.samples, StoreReader(client, command.samples)
        )

    def _tell(self, command: RankCommand) -> None:
        if self.ranks.size > 1:
            self.ranks.broadcast_bytes(msgspec.msgpack.encode(command))

    def close(self) -> None:
        if self.sender is not None:
            self._tell(LeaveCommand())
            self.sender.publisher.close()
        self.ranks.leave()


class EmulatedRankGroup(_Group[EmulatedLearner]):
    checkpoint_bytes = 0

    def __init__(self, spec: ComponentSpec) -> None:
        from tailrace.trainer.parallel import ranks_of

        super().__init__(spec, ranks_of(spec, "cpu"))
        self.learner = EmulatedLearner(spec.config, self.ranks)
        self.sender = None if spec.rank else SnapshotSender(spec, self._tensors())

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        import torch

        return [(name, torch.from_numpy(array)) for name, array in self.learner.weights()]

    def restore(self, checkpoints: Path, at_most: int) -> int:
        return min(self.learner.restore(checkpoints), at_most)

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        self.learner.save(checkpoints)

    def snapshot(self, version: Version) -> float:
        assert self.sender is not None, "only the first rank publishes"
        began = time.monotonic()
        self.learner.snapshot()
        self.sender.snapshot(version, self._tensors())
        return time.monotonic() - began


class NativeRankGroup(_Group["Learner"]):
    def __init__(self, spec: ComponentSpec) -> None:
        import torch

        from tailrace.model.device import usable_device
        from tailrace.trainer import parallel
        from tailrace.trainer.memory import at_start, take_share
        from tailrace.trainer.step import Learner

        self.settings = settings = spec.config.trainer
        if settings.threads:
            torch.set_num_threads(settings.threads)
        super().__init__(spec, parallel.ranks_of(spec, usable_device("trainer", spec.config)))
        take_share(spec.memory, parallel.pick_device(settings.device, spec.rank))
        with at_start():
            self.learner = Learner(spec.config, self.ranks)
        self.learner.warm_up()
        self.sender = None if spec.rank else SnapshotSender(spec, self.learner.model.named_parameters())

    @property
    def checkpoint_bytes(self) -> int:
        return BYTES_PER_PARAMETER * sum(one.numel() for one in self.learner.model.parameters())

    def restore(self, checkpoints: Path, at_most: int) -> int:
        from tailrace.trainer import checkpoint

        found = checkpoint.newest(checkpoints, at_most)
        if found is None:
            return 0
        self._tell(RestoreCommand(str(found)))
        checkpoint.restore(self.learner, found)
        return self.learner.step

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        from tailrace.trainer import checkpoint

        self._tell(SaveCommand(str(checkpoints)))
        checkpoint.save(checkpoints, self.learner)
        checkpoint.prune(checkpoints, self.settings.keep_checkpoints, self.settings.archive_every, good)

    def snapshot(self, version: Version) -> float:
        assert self.sender is not None, "only the first rank publishes"
        self._tell(GatherCommand())
        return self.sender.snapshot(version, self.learner.weights())

    def _obey(self, command: RankCommand, client: SampleClient) -> None:
        from tailrace.trainer import checkpoint

        match command:
            case GatherCommand():
                for _ in self.learner.weights():
                    pass
            case SaveCommand(checkpoints):
                checkpoint.save(Path(checkpoints), self.learner)
            case RestoreCommand(folder):
                checkpoint.restore(self.learner, Path(folder))
            case _:
                super()._obey(command, client)
