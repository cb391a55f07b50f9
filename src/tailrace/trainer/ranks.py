"""What the ranks of a trainer ask of each other, and the trainer that has only one.

Several find each other by torch.distributed, in `parallel.py`. One does without it, and an emulated one without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tailrace.wire.messages import ComponentSpec


class Ranks(Protocol):
    rank: int
    size: int

    def shard(self, module: nn.Module, bfloat16: bool = False) -> None:
        """Spread the parameters over the ranks, layer by layer, in float32. `bfloat16`: of the arithmetic."""
        ...

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor."""
        ...

    def add_up(self, tensor: Tensor) -> Tensor: ...

    def largest(self, tensor: Tensor) -> Tensor: ...

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """What rank 0 gives, on every rank."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gives, on every rank."""
        ...

    def announce(self, text: str) -> None:
        """By rank 0, at any moment: the others find it when they look. Not a collective."""
        ...

    def announced(self) -> bytes:
        """What rank 0 has announced last; nothing if it has not."""
        ...

    def complain(self, text: str) -> None:
        """To rank 0, at any moment. Not a collective."""
        ...

    def complaints(self) -> list[bytes]:
        """By rank 0: those that it has not seen yet."""
        ...

    def leave(self) -> None: ...


class Alone:
    """One process has everything."""

    rank = 0
    size = 1

    def shard(self, module: nn.Module, bfloat16: bool = False) -> None:
        return

    def full(self, tensor: Tensor) -> Tensor:
        return tensor

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor

    def most(self, count: int) -> int:
        return count

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def announce(self, text: str) -> None:
        return

    def announced(self) -> bytes:
        return b""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def complain(self, text: str) -> None:
        raise AssertionError("who is alone is rank 0")

    def complaints(self) -> list[bytes]:
        return []

    def leave(self) -> None:
        return


def ranks_of(spec: ComponentSpec, device: str) -> Ranks:
    """What the rank with this spec is one of."""
    size = len(spec.rank_hosts) or spec.config.trainer.ranks
    if size == 1:
        return Alone()
    from tailrace.trainer.parallel import joined

    return joined(spec, size, device)
