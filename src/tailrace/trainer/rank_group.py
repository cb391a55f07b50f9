"""The ranks of a trainer as one: rank 0 is told what to do and tells the others, then all do it together.

`worker.py` has one in every rank. With one rank nothing is broadcast. Every rank copies its own rows for a publication
and sends them itself; one that cannot complains to rank 0. An emulated trainer has ranks too, which read and pack their
shares; what concerns weights, of which it has next to none, is left to rank 0.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from tailrace.samples.client import SampleClient
from tailrace.trainer.emulated import EmulatedLearner
from tailrace.trainer.manifest import ORIGIN
from tailrace.trainer.pace import BYTES_PER_PARAMETER
from tailrace.trainer.ranks import Ranks, ranks_of
from tailrace.trainer.reader import SampleInfo, StoreReader
from tailrace.trainer.sending import ArraySender, GiveUp, ParameterSender, PublishRoute, SnapshotSender
from tailrace.trainer.spared import NONE_SPARED, SparedSteps
from tailrace.types import RelayId, Struct, Version
from tailrace.weights.snapshot import new_content_id
from tailrace.wire.messages import ComponentSpec, StoreAddresses

if TYPE_CHECKING:
    from tailrace.trainer.step import Learner

LOOK_S = 0.2  # how often the other ranks look where the sample stores are


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

    def save(self, checkpoints: Path, step: int, good: Version, spared: SparedSteps = NONE_SPARED) -> None:
        """Write a checkpoint, and delete old ones, but not the newest up to version `good`, nor those `spared`."""
        ...

    def snapshot(self, version: Version) -> float:
        """Copy the weights for publication; returns how long training stood still for it."""
        ...

    def publish(self, version: Version, route: PublishRoute, give_up: GiveUp) -> None:
        """Stream the last snapshot to the master relay, in the background."""
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


# ------------------------------------------------------------------------------------------- what rank 0 tells others


class RankCommand(Struct, tag_field="kind", tag=True):
    pass


class TrainCommand(RankCommand):
    step: int
    mini_batch: int
    samples: tuple[SampleInfo, ...]


class SnapshotCommand(RankCommand):
    """Copy your rows. `content_id` is that of the version, the same for all parts."""

    version: Version
    content_id: str


class SendCommand(RankCommand):
    """Send your part of the last snapshot."""

    version: Version
    route: PublishRoute


class SaveCommand(RankCommand):
    checkpoints: str


class RestoreCommand(RankCommand):
    checkpoint: str
    anew: bool = False  # it is another run's


class LeaveCommand(RankCommand):
    pass


_decode = msgspec.msgpack.Decoder(
    TrainCommand | SnapshotCommand | SendCommand | SaveCommand | RestoreCommand | LeaveCommand
).decode


class Complaint(Struct):
    """Of a rank, to the first one: it cannot send its part."""

    rank: int
    version: Version
    master: RelayId
    reason: str


AnyLearner = TypeVar("AnyLearner", "Learner", EmulatedLearner)


class _Group(Generic[AnyLearner]):
    """What is the same with and without a model."""

    learner: AnyLearner
    sender: SnapshotSender | None  # None: this rank publishes nothing

    def __init__(self, spec: ComponentSpec, ranks: Ranks) -> None:
        self.name = spec.name
        self.ranks = ranks
        self._over = threading.Event()

    def train(
        self, step: int, mini_batch: int, samples: tuple[SampleInfo, ...], client: SampleClient
    ) -> dict[str, float]:
        self._tell(TrainCommand(step, mini_batch, samples))
        return self.learner.train_mini_batch(step, mini_batch, samples, StoreReader(client, samples))

    def publish(self, version: Version, route: PublishRoute, give_up: GiveUp) -> None:
        assert self.sender is not None
        self.sender.send(version, route, give_up)

    def find_stores(self, stores: StoreAddresses) -> None:
        self.ranks.announce(msgspec.json.encode(stores).decode())

    def follow(self) -> None:
        client = SampleClient(self.name)
        client.open()
        threading.Thread(target=self._follow_stores, args=(client, self._over), name="stores", daemon=True).start()
        try:
            while not isinstance(command := _decode(self.ranks.broadcast_bytes(None)), LeaveCommand):
                self._obey(command, client)
        finally:
            self._over.set()
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
        self._over.set()
        if self.ranks.rank == 0:
            self._tell(LeaveCommand())
        if self.sender is not None:
            self.sender.publisher.close()
        self.ranks.leave()


class EmulatedRankGroup(_Group[EmulatedLearner]):
    checkpoint_bytes = 0

    def __init__(self, spec: ComponentSpec) -> None:
        super().__init__(spec, ranks_of(spec, "cpu"))
        self.learner = EmulatedLearner(spec.config, self.ranks)
        self.sender = None if spec.rank else ArraySender(spec, dict(self.learner.weights()))

    def restore(self, checkpoints: Path, at_most: int) -> int:
        return min(self.learner.restore(checkpoints), at_most)

    def save(self, checkpoints: Path, step: int, good: Version, spared: SparedSteps = NONE_SPARED) -> None:
        self.learner.save(checkpoints)

    def snapshot(self, version: Version) -> float:
        assert self.sender is not None, "only the first rank publishes"
        began = time.monotonic()
        self.sender.snapshot(version, self.learner.snapshot().items(), content_id="")
        return time.monotonic() - began


class NativeRankGroup(_Group["Learner"]):
    def __init__(self, spec: ComponentSpec) -> None:
        import torch

        from tailrace.model.device import usable_device
        from tailrace.trainer.memory import at_start, take_share
        from tailrace.trainer.parallel import pick_device
        from tailrace.trainer.step import Learner

        self.settings = settings = spec.config.trainer
        if settings.threads:
            torch.set_num_threads(settings.threads)
        super().__init__(spec, ranks_of(spec, usable_device("trainer", spec.config)))
        take_share(spec.memory, pick_device(settings.device, spec.rank))
        with at_start():
            self.learner = Learner(spec.config, self.ranks)
        self.learner.warm_up()
        self.sender = ParameterSender(spec, self.learner.model.named_parameters())
        self._route: PublishRoute | None = None  # of the last publication
        self._give_up: GiveUp = _unasked
        if self.ranks.size > 1 and self.ranks.rank == 0:
            threading.Thread(target=self._hear_complaints, name="complaints", daemon=True).start()

    @property
    def checkpoint_bytes(self) -> int:
        return BYTES_PER_PARAMETER * sum(one.numel() for one in self.learner.model.parameters())

    def restore(self, checkpoints: Path, at_most: int) -> int:
        from tailrace.trainer import checkpoint

        own = checkpoint.newest(checkpoints, at_most)
        found = own or checkpoint.newest(checkpoints.parent / ORIGIN)
        if found is None:
            return 0
        self._tell(RestoreCommand(str(found), anew=own is None))
        checkpoint.restore(self.learner, found, anew=own is None)
        return self.learner.step

    def save(self, checkpoints: Path, step: int, good: Version, spared: SparedSteps = NONE_SPARED) -> None:
        from tailrace.trainer import checkpoint

        self._tell(SaveCommand(str(checkpoints)))
        checkpoint.save(checkpoints, self.learner)
        checkpoint.prune(checkpoints, self.settings.keep_checkpoints, self.settings.archive_every, good, spared)

    def snapshot(self, version: Version) -> float:
        command = SnapshotCommand(version, new_content_id())
        self._tell(command)
        return self._copy(command)

    def _copy(self, command: SnapshotCommand) -> float:
        assert self.sender is not None
        return self.sender.snapshot(command.version, self.learner.model.named_parameters(), command.content_id)

    def publish(self, version: Version, route: PublishRoute, give_up: GiveUp) -> None:
        self._route, self._give_up = route, give_up
        self._tell(SendCommand(version, route))
        super().publish(version, route, give_up)

    def _send(self, command: SendCommand) -> None:
        """In every rank but the first."""

        def complain(version: Version, reason: str) -> None:
            complaint = Complaint(self.ranks.rank, version, command.route.master, reason)
            with suppress(RuntimeError):  # rank 0 is gone, and this one is about to go
                self.ranks.complain(msgspec.json.encode(complaint).decode())

        super().publish(command.version, command.route, complain)

    def _hear_complaints(self) -> None:
        while not self._over.wait(LOOK_S):
            with suppress(RuntimeError):
                for text in self.ranks.complaints():
                    self._heed(msgspec.json.decode(text, type=Complaint))

    def _heed(self, complaint: Complaint) -> None:
        if self._route is not None and complaint.master == self._route.master:
            self._give_up(complaint.version, f"rank {complaint.rank}: {complaint.reason}")

    def _obey(self, command: RankCommand, client: SampleClient) -> None:
        from tailrace.trainer import checkpoint

        match command:
            case SnapshotCommand():
                self._copy(command)
            case SendCommand():
                self._send(command)
            case SaveCommand(checkpoints):
                checkpoint.save(Path(checkpoints), self.learner)
            case RestoreCommand(folder, anew):
                checkpoint.restore(self.learner, Path(folder), anew)
            case _:
                super()._obey(command, client)


def _unasked(version: Version, reason: str) -> None:
    raise AssertionError(f"nobody was asked to publish version {version}: {reason}")
