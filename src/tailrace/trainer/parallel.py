"""Several ranks: who shares what, and how.

`Together` shards weights, gradients and moments over the ranks (FSDP2) and adds up what the ranks computed. Its methods
are collectives: all ranks call them, in the same order. A rank that dies breaks the connections of the others, who then
fail at once; one that hangs is found out after `deadline_s` (`trainer.collective_s`). The others may wait longer for a
command of rank 0, `idle_s`. What rank 0 announces is no collective: it is read whenever somebody looks.

Nothing here is authenticated or encrypted but what is announced. So ranks on one machine meet on its loopback, and
those on several in the network that the user trusts (`trainer.interface`), at one address of it and no other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import DistError

from tailrace.config.dealing import ranks_share_cards
from tailrace.config.errors import ConfigError
from tailrace.trainer.announcements import Announcements
from tailrace.types import HostId

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from tailrace.wire.messages import ComponentSpec


ANNOUNCED = "announced"  # key of what rank 0 has announced
IDLE_S = 86400.0  # that ranks wait for the next command
MEETING_SHARE = 0.8  # of `local.start_s`, so that a rank that waits in vain can still say for what
BACKLOG = 1024


class MeetingError(RuntimeError):
    """Why ranks have not found each other. The next start may be luckier."""


COMPLAINT = "complaint"  # key of how many there are, and with a number of each


def pick_device(wanted: str, rank: int = 0) -> str:
    """`trainer.device` as torch writes it; nothing wanted: a GPU if there is one."""
    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind


class Together:
    """One of several processes, after `join`."""

    def __init__(
        self, rank: int, size: int, device: str, commands: ProcessGroup, board: Store, announcements: Announcements
    ) -> None:
        self.rank, self.size = rank, size
        self._device, self._commands, self._board = device, commands, board
        self._announcements = announcements
        self._heard = 0  # complaints
        self.ranks_by_host: list[list[int]] = []  # hybrid sharding: within each host

    def shard(self, module: nn.Module, bfloat16: bool = False) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
        mesh, precision = self._mesh(), _mixed_precision(bfloat16)
        for piece in (*layers, module):
            piece.float()  # here and not before: of a model in other types, one layer at a time is whole in memory
            fully_shard(piece, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
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
        self._board.set(ANNOUNCED, self._announcements.write(text))

    def announced(self) -> bytes:
        return self._announcements.read(self._board.get(ANNOUNCED)) if self._board.check([ANNOUNCED]) else b""

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


def _mixed_precision(bfloat16: bool) -> MixedPrecisionPolicy:
    """Weights are gathered in the precision of the arithmetic, and gradients added up in float32. Autocast would gather
    them in float32 and keep its own narrow copy of all of them until the pass ends. What goes from layer to layer stays
    as it is: rotary angles are float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    narrow = torch.bfloat16 if bfloat16 else None
    return MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)


def joined(spec: ComponentSpec, size: int, device: str) -> Together:
    """The rank with this spec, one of `size`, when it has met the others."""
    settings = spec.config.trainer
    use_interface(spec.interface)
    patience_s = MEETING_SHARE * spec.config.local.start_s
    deadlines = (settings.collective_s, IDLE_S, patience_s)
    own_card = not ranks_share_cards(spec.config)
    together = join(spec.rank, size, spec.meeting, device, *deadlines, spec.rank_key, own_card)
    if settings.sharding == "hybrid":
        together.ranks_by_host = by_host(spec.rank_hosts)
    return together


def use_interface(name: str) -> None:
    """For gloo and NCCL, which choose one by themselves otherwise; before either is begun."""
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # this one, not all whose names begin so


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
    rank: int,
    size: int,
    meeting: str,
    device: str = "",
    deadline_s: float = 600.0,
    idle_s: float = IDLE_S,
    patience_s: float = 0.0,
    key: str = "",
    own_card: bool = True,
) -> Together:
    """Meet the other ranks at `meeting` (`tcp://127.0.0.1:PORT` or `file:///PATH`) within `patience_s`. `key`: that all
    ranks have. `own_card`: on GPUs each has one of its own, which NCCL needs; gloo does without, by way of host
    memory."""
    device_name = pick_device(device, rank)
    backend = "cpu:gloo,cuda:nccl" if device_name.startswith("cuda") and own_card else "gloo"
    if device_name.startswith("cuda"):
        torch.cuda.set_device(device_name)
    limit = timedelta(seconds=deadline_s)
    board = meet(rank, size, meeting, timedelta(seconds=patience_s or deadline_s))
    torch.distributed.init_process_group(
        backend, store=PrefixStore("group", board), rank=rank, world_size=size, timeout=limit
    )
    waiting = timedelta(seconds=idle_s) if rank else limit  # a command is sent once all others take it
    commands = torch.distributed.new_group(backend="gloo", timeout=waiting)
    assert isinstance(commands, torch.distributed.ProcessGroup)
    return Together(rank, size, device_name, commands, board, Announcements(key))


def meet(rank: int, size: int, meeting: str, patience: timedelta) -> Store:
    """The store of all ranks, which rank 0 keeps. torch would have it listen at all addresses of the machine: here it
    gets a socket that listens at one."""
    if meeting.startswith("file://"):
        return FileStore(meeting.removeprefix("file://"), size)
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    listening = _listen(host, int(port)) if rank == 0 else None
    try:
        return TCPStore(host, int(port), size, rank == 0, timeout=patience, master_listen_fd=listening)
    except DistError as error:
        why, wait_s = str(error).partition("\n")[0], patience.total_seconds()
        raise MeetingError(
            f"rank {rank} has not met the others at {host}:{port} within {wait_s:g} s ({why}); "
            "trainer.interface has to be a network in which all machines with ranks reach each other"
        ) from error


def _listen(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((host, port))
            listening.listen(BACKLOG)
        except OSError as error:
            raise MeetingError(f"rank 0 cannot listen at {host}:{port} ({error.strerror})") from error
        return listening.detach()
