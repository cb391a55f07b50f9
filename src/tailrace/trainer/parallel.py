"""One rank or several: who shares what, and how.

`Alone` is a trainer of one process and never touches torch.distributed. `Together` shards weights, gradients and
moments over the ranks (FSDP2) and adds up what the ranks computed. Every method of `Together` is a collective: all
ranks call it, in the same order. A rank that dies breaks the connections of the others, who then fail at once; one that
hangs is found out after `deadline_s`. Waiting for the next command has a longer limit of its own, `idle_s`. What rank 0
announces is no collective: it is read whenever somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from tailrace.config.errors import ConfigError
from tailrace.types import HostId

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tailrace.wire.messages import ComponentSpec


ANNOUNCED = "announced"  # key of what rank 0 has announced
COMPLAINT = "complaint"  # key of how many there are, and with a number of each


def pick_device(wanted: str, rank: int = 0) -> str:
    """`trainer.device` as torch writes it; nothing wanted: a GPU if there is one."""
    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind


class Ranks(Protocol):
    rank: int
    size: int

    def shard(self, module: nn.Module) -> None:
        """Spread the parameters over the ranks, layer by layer."""
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

    def shard(self, module: nn.Module) -> None:
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


class Together:
    """One of several processes, after `join`."""

    def __init__(self, rank: int, size: int, device: str, commands: ProcessGroup, board: Store):
        self.rank, self.size = rank, size
        self._device, self._commands, self._board = device, commands, board
        self._heard = 0  # complaints
        self.ranks_by_host: list[list[int]] = []  # hybrid sharding: within each host

    def shard(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        mesh = self._mesh()
        for piece in (*layers, module):
            piece.float()  # here and not before: of a model in other types, one layer at a time is whole in memory
            fully_shard(piece, mesh=mesh, reshard_after_forward=True)
        for buffer in module.buffers():
            buffer.data = buffer.to(self._device)

    def _mesh(self) -> DeviceMesh:
        """All ranks share all weights; or those of each host do, and each host has a copy."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        kind = torch.device(self._device).type
        if len(self.ranks_by_host) > 1:
            return DeviceMesh(kind, torch.tensor(self.ranks_by_host), mesh_dim_names=("copies", "shards"))
        return init_device_mesh(kind, (self.size,))

    def full(self, tensor: Tensor) -> Tensor:
        whole = getattr(tensor, "full_tensor", None)
        return whole() if whole is not None else tensor

    def add_up(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor

    def most(self, count: int) -> int:
        return int(self.largest(torch.tensor(count)))

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        size = torch.tensor([len(data) if data is not None else 0])
        torch.distributed.broadcast(size, 0, group=self._commands)
        body = torch.empty(int(size), dtype=torch.uint8)
        if data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(body):
            torch.distributed.broadcast(body, 0, group=self._commands)
        return body.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(1, *(int(size) for size in sizes))
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        torch.distributed.all_gather(found, mine)
        return [body[: int(size)].numpy().tobytes() for body, size in zip(found, sizes, strict=True)]

    def announce(self, text: str) -> None:
        self._board.set(ANNOUNCED, text)

    def announced(self) -> bytes:
        return self._board.get(ANNOUNCED) if self._board.check([ANNOUNCED]) else b""

    def complain(self, text: str) -> None:
        self._board.set(f"{COMPLAINT}{self._board.add(COMPLAINT, 1)}", text)

    def complaints(self) -> list[bytes]:
        found: list[bytes] = []
        while self._board.check([key := f"{COMPLAINT}{self._heard + 1}"]):
            found.append(self._board.get(key))
            self._heard += 1
        return found

    def leave(self) -> None:
        torch.distributed.destroy_process_group()


def ranks_of(spec: ComponentSpec, device: str) -> Ranks:
    """What the rank with this spec is one of."""
    size = spec.config.trainer.ranks
    if size == 1:
        return Alone()
    together = join(spec.rank, size, spec.meeting, device)
    if spec.config.trainer.sharding == "hybrid":
        together.ranks_by_host = by_host(spec.rank_hosts)
    return together


def by_host(rank_hosts: Sequence[HostId]) -> list[list[int]]:
    """The ranks of each host, for hybrid sharding, which needs as many on each."""
    hosts: dict[HostId, list[int]] = {}
    for rank, host in enumerate(rank_hosts):
        hosts.setdefault(host, []).append(rank)
    counts = {len(ranks) for ranks in hosts.values()}
    if len(counts) > 1:
        found = ", ".join(f"{len(ranks)} on host {host}" for host, ranks in hosts.items())
        raise ConfigError(
            f'trainer.sharding = "hybrid" needs as many trainer ranks on every host, but there are {found}; write '
            '"full", or give every host the same number'
        )
    return list(hosts.values())


def join(
    rank: int, size: int, meeting: str, device: str = "", deadline_s: float = 600.0, idle_s: float = 86400.0
) -> Together:
    """Meet the other ranks at `meeting` (`tcp://127.0.0.1:PORT` or `file:///PATH`), each with a device of its own."""
    from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    device_name = pick_device(device, rank)
    backend = "cpu:gloo,cuda:nccl" if device_name.startswith("cuda") else "gloo"
    if device_name.startswith("cuda"):
        torch.cuda.set_device(device_name)
    limit = timedelta(seconds=deadline_s)
    board, _, _ = next(iter(rendezvous(meeting, rank, size, timeout=limit)))
    torch.distributed.init_process_group(
        backend, store=PrefixStore("group", board), rank=rank, world_size=size, timeout=limit
    )
    commands = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=idle_s))
    assert isinstance(commands, torch.distributed.ProcessGroup)
    return Together(rank, size, device_name, commands, board)
