"""The ranks of a trainer as one: rank 0 is told what to do and tells the others, then all do it together.

`worker.py` has one in every rank. With one rank nothing is broadcast; an emulated trainer has no ranks at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.trainer.emulated import EmulatedLearner
from tailrace.trainer.pace import BYTES_PER_PARAMETER
from tailrace.types import Struct, Trajectory, Version
from tailrace.wire.messages import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace.weights.publisher import Publisher

Groups = tuple[tuple[Trajectory, ...], ...]
GiveUp = Callable[[Version, str], None]  # is told what could not be sent and why


class Crew(Protocol):
    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is."""
        ...

    def restore(self, checkpoints: Path, at_most: int) -> int:
        """Take up the newest checkpoint of that step or an earlier one; returns its step, 0 if there is none."""
        ...

    def train(self, step: int, part: int, groups: Groups) -> dict[str, float]: ...

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        """Write a checkpoint, and delete old ones, but not the newest up to version `good`."""
        ...

    def snapshot(self, version: Version) -> float:
        """Copy the weights for publication; returns how long training stood still for it."""
        ...

    def publish(self, version: Version, address: str, give_up: GiveUp) -> None:
        """Stream the last snapshot to a relay, in the background."""
        ...

    def follow(self) -> None:
        """In every rank but the first: do as it says until it leaves."""
        ...

    def close(self) -> None: ...


def build_crew(spec: Spec) -> Crew:
    return EmulatedCrew(spec) if spec.config.trainer.engine == "emulated" else NativeCrew(spec)


class Courier:
    """Has the last snapshot and gets it to a relay."""

    def __init__(self, spec: Spec, tensors: Iterable[tuple[str, Tensor]]) -> None:
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


class EmulatedCrew:
    def __init__(self, spec: Spec) -> None:
        self.learner = EmulatedLearner(spec.config)
        self.courier = Courier(spec, self._tensors())

    @property
    def checkpoint_bytes(self) -> int:
        return 0

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        import torch

        return [(name, torch.from_numpy(array)) for name, array in self.learner.weights()]

    def restore(self, checkpoints: Path, at_most: int) -> int:
        return min(self.learner.restore(checkpoints), at_most)

    def train(self, step: int, part: int, groups: Groups) -> dict[str, float]:
        return self.learner.train_part(step, part, groups)

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        self.learner.save(checkpoints)

    def snapshot(self, version: Version) -> float:
        began = time.monotonic()
        self.learner.snapshot()
        self.courier.snapshot(version, self._tensors())
        return time.monotonic() - began

    def publish(self, version: Version, address: str, give_up: GiveUp) -> None:
        self.courier.send(version, address, give_up)

    def follow(self) -> None:
        raise AssertionError("an emulated trainer has one rank")

    def close(self) -> None:
        self.courier.publisher.close()


# ------------------------------------------------------------------------------------------- what rank 0 tells others


class Order(Struct, tag_field="kind", tag=True):
    pass


class TrainTogether(Order):
    step: int
    part: int
    groups: Groups


class Gather(Order):
    """Rank 0 reads whole tensors, of which every rank has a part."""


class SaveTogether(Order):
    checkpoints: str


class RestoreTogether(Order):
    checkpoint: str


class Leave(Order):
    pass


_decode = msgspec.msgpack.Decoder(TrainTogether | Gather | SaveTogether | RestoreTogether | Leave).decode


class NativeCrew:
    def __init__(self, spec: Spec) -> None:
        import torch

        from tailrace.model.device import usable_device
        from tailrace.trainer import parallel
        from tailrace.trainer.memory import at_start, take_share
        from tailrace.trainer.step import Learner

        settings = spec.config.trainer
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = usable_device("trainer", spec.config)
        several = settings.ranks > 1
        self.together = parallel.join(spec.rank, settings.ranks, spec.meeting, device) if several else None
        self.ranks = self.together or parallel.Alone()
        take_share(spec.config, parallel.pick_device(settings.device, spec.rank))
        with at_start():
            self.learner = Learner(spec.config, self.ranks)
        self.learner.warm_up()
        self.settings = settings
        self.courier = None if spec.rank else Courier(spec, self.learner.model.named_parameters())

    @property
    def checkpoint_bytes(self) -> int:
        return BYTES_PER_PARAMETER * sum(one.numel() for one in self.learner.model.parameters())

    def restore(self, checkpoints: Path, at_most: int) -> int:
        from tailrace.trainer import checkpoint

        found = checkpoint.newest(checkpoints, at_most)
        if found is None:
            return 0
        self._tell(RestoreTogether(str(found)))
        checkpoint.restore(self.learner, found)
        return self.learner.step

    def train(self, step: int, part: int, groups: Groups) -> dict[str, float]:
        self._tell(TrainTogether(step, part, groups))
        return self.learner.train_part(step, part, groups)

    def save(self, checkpoints: Path, step: int, good: Version) -> None:
        from tailrace.trainer import checkpoint

        self._tell(SaveTogether(str(checkpoints)))
        checkpoint.save(checkpoints, self.learner)
        checkpoint.prune(checkpoints, self.settings.keep_checkpoints, self.settings.archive_every, good)

    def snapshot(self, version: Version) -> float:
        assert self.courier is not None, "only the first rank publishes"
        self._tell(Gather())
        return self.courier.snapshot(version, self.learner.weights())

    def publish(self, version: Version, address: str, give_up: GiveUp) -> None:
        assert self.courier is not None, "only the first rank publishes"
        self.courier.send(version, address, give_up)

    def follow(self) -> None:
        from tailrace.trainer import checkpoint

        while True:
            match _decode(self.ranks.broadcast_bytes(None)):
                case TrainTogether(step, part, groups):
                    self.learner.train_part(step, part, groups)
                case Gather():
                    for _ in self.learner.weights():
                        pass
                case SaveTogether(checkpoints):
                    checkpoint.save(Path(checkpoints), self.learner)
                case RestoreTogether(folder):
                    checkpoint.restore(self.learner, Path(folder))
                case Leave():
                    return

    def _tell(self, order: Order) -> None:
        if self.together is not None:
            self.together.broadcast_bytes(msgspec.msgpack.encode(order))

    def close(self) -> None:
        if self.courier is not None:
            self._tell(Leave())
            self.courier.publisher.close()
        if self.together is not None:
            self.together.leave()
