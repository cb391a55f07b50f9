"""The bytes of chunks from relay to relay through NIXL, which has RDMA where the network has it, instead of a socket.

The connection stays: offers, chunk headers with their checksums and confirmations are signed messages on it. Only the
bytes take another way: the sender copies a chunk into memory that it has registered with NIXL, and the receiver reads
it into registered memory of its own and copies it to its place. Nobody else writes there, so a transfer that is given
up cannot change a version afterwards, and chunks are verified as on every hop.

NIXL neither authenticates nor encrypts, so a person has to name the network (`relay.interface`). It is used if both
ends have it and it was faster: the first version from a sender comes over the socket, the second by NIXL, and further
ones by the better of the two. After a failure everything from that sender comes over the socket.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from msgspec.structs import replace

from tailrace.errors import TailraceError
from tailrace.weights.channel import Channel, ChannelError
from tailrace.weights.checksum import PIECE
from tailrace.weights.messages import ChunkHeader, ChunkTaken, RegisteredMemory
from tailrace.weights.transfer import OverSocket
from tailrace.wire.interfaces import find, interfaces, lacking

log = logging.getLogger(__name__)

FLAVOURS = ("nixl_cu13", "nixl_cu12")  # for host memory either will do; the package `nixl` would import torch to choose
SLOT = 16 * PIECE  # bytes of one registered memory: the largest chunk
WORTH = 4 * SLOT  # bytes of a version for which it is worth the trouble
POLL_S = 50e-6
DEVICES = "UCX_NET_DEVICES"


class NixlUnavailableError(TailraceError):
    """Why weights go over TCP here."""


class NixlReadError(ChannelError):
    """A chunk could not be read."""


class Slot:
    """Registered memory of `SLOT` bytes."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, SLOT)
        self.data = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


class NixlAgent:
    """NIXL in this process. Threads may share it. Nothing in it runs by itself: who waits calls `progress`."""

    def __init__(self, interface: str) -> None:
        """`interface`: a name, or a network that this host has an address in."""
        endpoint = find(interface, interfaces())
        if endpoint is None:
            raise NixlUnavailableError(lacking(interface, interfaces(), "relay.interface"))
        os.environ[DEVICES] = ",".join(devices_of(endpoint.interface))
        self.name = os.urandom(8).hex()
        self._agent = _agent(self.name)
        self._free: deque[Slot] = deque()
        self._lock = Lock()  # guards the registration

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """To be used again by others, unless the block is left by an error: then a transfer may still be under way."""
        with self._lock:
            taken = self._free.popleft() if self._free else self._register()
        yield taken
        self._free.append(taken)

    def _register(self) -> Slot:
        slot = Slot()
        self._agent.register_memory([(slot.address, SLOT, 0, "")], "DRAM")
        return slot

    def describe(self, slot: Slot) -> RegisteredMemory:
        with self._lock:
            return RegisteredMemory(self._agent.get_agent_metadata(), slot.address)

    def progress(self) -> None:
        """Where the network cannot read memory by itself, this process has to answer."""
        self._agent.get_new_notifs()

    def connect(self, metadata: bytes) -> str:
        """The name of the agent that it is of."""
        return self._agent.add_remote_agent(metadata).decode()

    def read(self, owner: str, address: int, slot: Slot, size: int, check: Callable[[], None]) -> None:
        """Copy another agent's memory into a slot; `check` raises when it is to be given up."""
        agent = self._agent
        here, there = (agent.get_xfer_descs([(start, size, 0)], "DRAM") for start in (slot.address, address))
        request = agent.initialize_xfer("READ", here, there, owner)
        try:
            state = agent.transfer(request)
            while state == "PROC":
                time.sleep(POLL_S)
                check()
                state = agent.check_xfer_state(request)
        finally:
            with suppress(Exception):  # NIXL keeps what it cannot cancel
                agent.release_xfer_handle(request)
        if state != "DONE":
            raise NixlReadError(f"NIXL says {state}")


def devices_of(interface: str, system: Path = Path("/sys/class/net")) -> list[str]:
    """As UCX calls them: the RDMA device of a network interface if it has one, and the interface itself."""
    here = system / interface
    found = sorted((here / "device" / "infiniband").glob("*"))
    port = int((here / "dev_port").read_text()) + 1 if found else 0
    return [*[f"{device.name}:{port}" for device in found], interface]


def _agent(name: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for flavour in FLAVOURS:
        with suppress(ImportError):
            nixl: Any = import_module(f"{flavour}._api")
            break
    else:
        raise NixlUnavailableError("NIXL is not installed in this Python; pip install 'tailrace[nixl]'")
    sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        return nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync))
    except Exception as error:  # the border of somebody else's code
        raise NixlUnavailableError(f"NIXL does not start on {os.environ[DEVICES]}: {error}") from None


# --------------------------------------------------------------------------------------------------- which way is taken


class Rates(NamedTuple):
    """Bytes per second of a hop; 0: not measured."""

    socket: float = 0.0
    nixl: float = 0.0


class FasterWay:
    """By NIXL or over the socket, for each sender."""

    def __init__(self) -> None:
        self._rates: dict[str, Rates] = {}
        self._failed: set[str] = set()

    def __call__(self, sender: str, size: int) -> bool:
        """Whether a version, or a part of one, is to come by NIXL."""
        rates = self._rates.get(sender, Rates())
        return sender not in self._failed and size >= WORTH and rates.socket > 0 and not 0 < rates.nixl < rates.socket

    def measured(self, sender: str, by_nixl: bool, rate: float) -> None:
        before = self._rates.get(sender, Rates())
        self._rates[sender] = after = before._replace(**{"nixl" if by_nixl else "socket": rate})
        if by_nixl and not before.nixl:
            both = f"{after.nixl / 1e6:,.0f} MB/s by NIXL, {after.socket / 1e6:,.0f} MB/s over TCP"
            log.info("weights from %s come %s: %s", sender, "by NIXL" if self(sender, WORTH) else "over TCP", both)

    def failed(self, sender: str, reason: Exception) -> None:
        if sender not in self._failed:
            log.warning("weights from %s come over TCP from now on, because NIXL failed: %s", sender, reason)
        self._failed.add(sender)


# ------------------------------------------------------------------------------------------------------ both ends of it


class Lent(NamedTuple):
    """Another agent's memory, and where it is read to."""

    owner: str
    address: int
    slot: Slot


class NixlTransport:
    """Of one relay. `way` chooses what comes by NIXL."""

    def __init__(self, agent: NixlAgent, way: FasterWay | None = None) -> None:
        self.agent, self.way = agent, way or FasterWay()
        self._broken = False  # nothing is lent any more

    @property
    def name(self) -> str:
        """For offers."""
        return "" if self._broken else self.agent.name

    def wants(self, channel: Channel, sender: str, size: int) -> bool:
        """Whether a part of that size is to come by NIXL from the agent at the other end."""
        return self.way(_hop(channel, sender), size)

    @contextmanager
    def sending(self, channel: Channel) -> Iterator[LentChunks]:
        try:
            with self.agent.slot() as slot:
                yield LentChunks(self.agent, channel, slot)
        except TailraceError:
            raise
        except Exception as error:  # the border of somebody else's code
            self._broken = True
            log.warning("weights from here go over TCP from now on, because NIXL failed: %s", error)
            raise ChannelError(f"could not lend weights to {channel.peer} by NIXL: {error}") from None

    @contextmanager
    def receiving(self, channel: Channel, sender: str) -> Iterator[ChunkReader]:
        with ExitStack() as held:
            reader = ChunkReader(self, channel, _hop(channel, sender), held)
            yield reader
            reader.note_rate()


class LentChunks:
    """The sender's end of a connection: a `ChunkSender`."""

    chunk = SLOT

    def __init__(self, agent: NixlAgent, channel: Channel, slot: Slot) -> None:
        self._agent, self._channel, self._slot = agent, channel, slot
        channel.send(agent.describe(slot))

    def send(self, header: ChunkHeader, data: memoryview, rest: str) -> None:
        """Returns when it is read. The receiver says so before it verifies it, so that the next one is copied
        meanwhile."""
        self._slot.data[: len(data)] = data
        self._channel.send(replace(header, lent=True))
        self._channel.wait(self._agent.progress, POLL_S, rest)
        answer = self._channel.receive(f"{rest}, to be read")
        if not isinstance(answer, ChunkTaken):
            raise ChannelError(f"{self._channel.peer} sent {type(answer).__name__} instead of reading {rest}")


class ChunkReader(OverSocket):
    """The receiver's end of a connection: a `ChunkReceiver`, whichever way the chunks come. `held` is for its slot."""

    def __init__(self, transport: NixlTransport, channel: Channel, sender: str, held: ExitStack) -> None:
        super().__init__(channel)
        self._agent, self._way, self._sender, self._held = transport.agent, transport.way, sender, held
        self._lent: Lent | None = None
        self._times: list[tuple[float, int, bool]] = []  # seconds, bytes, by NIXL

    def connect(self, memory: RegisteredMemory) -> None:
        with self._failing():
            owner = self._agent.connect(memory.metadata)
            self._lent = Lent(owner, memory.address, self._held.enter_context(self._agent.slot()))

    def take(self, chunk: ChunkHeader, targets: list[memoryview], rest: str) -> None:
        began = time.monotonic()
        if chunk.lent:
            self._read(chunk, targets)
        else:
            super().take(chunk, targets, rest)
        self._times.append((time.monotonic() - began, chunk.size, chunk.lent))

    def _read(self, chunk: ChunkHeader, targets: list[memoryview]) -> None:
        lent = self._lent
        if lent is None or chunk.size > SLOT:
            raise ChannelError(f"{self._channel.peer} lends a chunk in memory that it has not named")
        until = time.monotonic() + self._channel.stall_s

        def check() -> None:
            if self._channel.aborted or time.monotonic() > until:
                raise NixlReadError(f"{self._channel.peer} does not answer")

        with self._failing():
            self._agent.read(lent.owner, lent.address, lent.slot, chunk.size, check)
        self._channel.send(ChunkTaken())
        self._channel.weights_received_at = time.monotonic()
        _scatter(lent.slot.data, targets)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the border of somebody else's code
            if not self._channel.aborted:  # which is no fault of NIXL
                self._way.failed(self._sender, error)
            raise ChannelError(f"could not read from {self._channel.peer} by NIXL: {error}") from None

    def note_rate(self) -> None:
        """The first chunk does not count: that is when connections are made. Nor does the time between chunks, in which
        a version that is just arriving is waited for."""
        counted = self._times[1:]
        seconds, size, by_nixl = sum(each[0] for each in counted), sum(each[1] for each in counted), counted[-1:]
        if size >= WORTH // 2 and seconds:
            self._way.measured(self._sender, by_nixl[0][2], size / seconds)


def _hop(channel: Channel, sender: str) -> str:
    """The agent is another one after a restart; the host is for people."""
    return f"{channel.peer.rpartition(':')[0]} ({sender})"


def _scatter(data: memoryview, targets: list[memoryview]) -> None:
    start = 0
    for target in targets:
        target[:] = data[start : start + len(target)]
        start += len(target)
