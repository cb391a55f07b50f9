"""The processes of a run on this machine: started, watched, ended, and taken over. No orphans, a log file each.

`LocalProcesses.start` begins a process for a component (several for a trainer with ranks); `on_exit` is told when one
ends by itself. A component that is asked for again is ended first: there is never more than one of it. Who is there is
written to `components.json` in the run's folder, so that the next controller can `adopt` the components that outlive
this one. A component, or a rank of one, may be on another machine: then it has a stand-in here (see `hosts`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from tailrace.config.dealing import Deal, visible
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER, RunFolder
from tailrace.types import HostId, ReplicaId, Struct, label
from tailrace.wire.messages import ComponentSpec, WireError

FILE = "components.json"
SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of what others may give back soon
SHORTAGE_S = 1.0  # before the next try
TERM_S = 5.0  # between asking a process to go and killing it
CONTINUE_S = 1.0  # between two SIGCONT to those who are asked to go


class ComponentRecord(Struct):
    """What is written down of a component: enough to find its processes again and to talk to it."""

    role: str
    id: int
    incarnation: int  # that it was started as
    # process id and time of its start, zeros if it is elsewhere; none yet: about to be started
    processes: tuple[tuple[int, int], ...] = ()
    address: str = ""
    arena: str = ""
    rank_hosts: tuple[HostId, ...] = ()  # of a trainer, by rank


class HostRecord(Struct):
    """Another machine that has joined: what it calls itself, the numbers of its relay and its replicas, whether it has
    a sample store, how many ranks of the trainer it has room for, and by which interfaces those may talk."""

    name: str
    id: HostId
    replicas: tuple[ReplicaId, ...]
    store: bool = False
    ranks: int = 0
    interfaces: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class ComponentRecords(Struct):
    port: int = 0  # where the controller listened
    components: tuple[ComponentRecord, ...] = ()
    hosts: tuple[HostRecord, ...] = ()


class Child(Protocol):
    """A process of a component, here or elsewhere. `ended` says when, `how` then says why."""

    pid: int
    started: int
    ended: asyncio.Event
    how: str

    def send(self, number: int) -> None: ...


class LocalChild:
    """One process, watched and signalled by a descriptor: that is safe for a process which is not our child, too."""

    def __init__(self, pid: int, ours: subprocess.Popen[bytes] | None = None) -> None:
        self._handle = os.pidfd_open(pid)
        self._ours = ours
        self.pid = pid
        self.started = _start_time(pid)
        self.ended = asyncio.Event()
        self.how = ""
        asyncio.get_running_loop().add_reader(self._handle, self._see_end)

    def _see_end(self) -> None:
        self.how = how_it_ended(self._ours.wait() if self._ours else None)
        self.ended.set()
        self.let_go()

    def let_go(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)

    def send(self, number: int) -> None:
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)


class Process:
    """One component's processes (a trainer has one per rank), which live and end together."""

    def __init__(self, spec: ComponentSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.members: tuple[ComponentSpec | Child, ...] = ()  # of what it is to be made, by rank
        self.children: list[Child] = []
        self.incarnation = spec.incarnation  # of its last joining
        self.joined = False
        self.dismissed = False  # its end is expected
        self.refused = False  # it has sent what it must not, and is not heard any more
        self.address = self.arena = ""  # of a relay; a sample store has an address too

    @property
    def title(self) -> str:
        """For people."""
        return "the trainer" if self.spec.role == "trainer" else f"{self.spec.role} {self.spec.id}"

    @property
    def label(self) -> str:
        """For metrics."""
        return "trainer" if self.spec.role == "trainer" else label(self.spec.role, self.spec.id)

    @property
    def distant(self) -> list[Child]:
        """Those on other machines."""
        return [one for one in self.members if not isinstance(one, ComponentSpec)]

    @property
    def is_elsewhere(self) -> bool:
        """Or a part of it."""
        return bool(self.distant)

    @property
    def alive(self) -> bool:
        return not all(child.ended.is_set() for child in self.children)

    @property
    def trace(self) -> ComponentRecord:
        spec, processes = self.spec, tuple([(child.pid, child.started) for child in self.children])
        known = (spec.incarnation, processes, self.address, self.arena, spec.rank_hosts)
        return ComponentRecord(spec.role, spec.id, *known)

    def how(self, child: Child) -> str:
        """How one of its processes ended, with the rank where there are several."""
        if len(self.children) < 2:
            return child.how
        rank = self.children.index(child)
        return f"lost its rank {rank}, on host {self.spec.rank_hosts[rank]}, which {child.how}"

    def kill(self) -> None:
        self.dismissed = True
        for child in self.children:
            child.send(signal.SIGKILL)


class LocalProcesses:
    def __init__(
        self, folder: RunFolder, port: int, on_exit: Callable[[Process, str], None], deal: Deal = Deal()
    ) -> None:
        self.processes: dict[tuple[str, int], Process] = {}  # by `slot` of their specs
        self.hosts: tuple[HostRecord, ...] = ()
        self._folder = folder
        self._port = port
        self._on_exit = on_exit
        self.deal = deal  # of this machine's cards
        self._unwritten = False  # something is not in the file
        self._watchers: set[asyncio.Task[None]] = set()

    def start(self, spec: ComponentSpec, members: Sequence[ComponentSpec | Child] = ()) -> Process:
        """Start the component's processes; an earlier incarnation of it is killed first. `members`: its ranks, each to
        be started here or begun elsewhere; nothing: it is one process, here. `OSError`: the system cannot start any
        now."""
        earlier = self.processes.get(spec.slot)
        if earlier is not None:
            earlier.kill()
        process = self._enter(spec)
        self._unwritten = True
        process.members = tuple(members) or (spec,)
        if any(isinstance(one, ComponentSpec) for one in process.members):
            self._write()  # before there is anything: the next controller must not use the name again
            self._begin(process)
            self.write()
        else:
            process.children = list(process.distant)
        self._watch(process)
        return process

    def note_those_elsewhere(self) -> None:
        """Before anybody is told of them, for the same reason; they may be many."""
        if self._unwritten:
            self._write()

    def _begin(self, process: Process) -> None:
        process.log.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        process.log.touch(PRIVATE)
        try:
            for one in process.members:
                here = isinstance(one, ComponentSpec)
                process.children.append(_spawn(placed(one, self.deal), process.log) if here else one)
        except OSError:
            process.children += process.distant
            process.kill()  # those that were begun
            raise

    def adopt(self, spec: ComponentSpec, trace: ComponentRecord, elsewhere: Mapping[int, Child | None]) -> Process:
        """Take over a component that an earlier controller started, or what is left of it. `elsewhere`: its ranks on
        other machines, as far as those are there."""
        process = self._enter(spec)
        process.address, process.arena = trace.address, trace.arena
        ranks = range(max(1, len(trace.processes), len(trace.rank_hosts)))
        found = [elsewhere[rank] if rank in elsewhere else _found(trace, rank) for rank in ranks]
        process.members = tuple([child for child in elsewhere.values() if child])
        process.children = [child for child in found if child]
        if len(process.children) < len(found):
            process.kill()
        self._watch(process)
        return process

    def _enter(self, spec: ComponentSpec) -> Process:
        rank = f".{spec.rank}" if spec.rank else ""
        process = Process(spec, self._folder.path / "logs" / f"{spec.role}{spec.id}{rank}.log")
        self.processes[spec.slot] = process
        return process

    def write(self) -> None:
        """Now, or as soon as there is a descriptor for it."""
        try:
            self._write()
        except OSError:
            asyncio.get_running_loop().call_later(SHORTAGE_S, self.write)

    def _write(self) -> None:
        """Whole or not at all, and for nobody else's eyes."""
        self._folder.refuse_moved()
        traces = ComponentRecords(self._port, tuple([process.trace for process in self.processes.values()]), self.hosts)
        written = self._folder.path / f"{FILE}.new"
        try:
            written.touch(PRIVATE)
            written.write_bytes(msgspec.json.encode(traces))
            os.replace(written, self._folder.path / FILE)
            self._unwritten = False
        except OSError as error:
            if error.errno in SHORTAGE:
                raise
            raise WireError(f"{written} cannot be written ({error.strerror}); make room, then --resume") from None

    def _watch(self, process: Process) -> None:
        for child in process.children:
            task = asyncio.create_task(self._until_exit(process, child))
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    async def _until_exit(self, process: Process, child: Child) -> None:
        await child.ended.wait()
        if not process.dismissed:
            process.kill()  # the other ranks cannot go on without this one
            self._on_exit(process, process.how(child))

    async def end(self, processes: Iterable[Process], patience_s: float) -> None:
        """Wait for these to leave, then make them."""
        children: list[Child] = []
        for process in processes:
            process.dismissed = True
            children += process.children
        for wait_s, force in ((patience_s, signal.SIGTERM), (TERM_S, signal.SIGKILL), (TERM_S, signal.SIGKILL)):
            await _until_ended(children, wait_s)
            for child in children:
                child.send(force)  # nothing, to one that has ended

    def forget(self) -> None:
        """Nobody is left."""
        (self._folder.now / FILE).unlink(missing_ok=True)


async def _until_ended(children: list[Child], wait_s: float) -> None:
    """Whoever is stopped, even now, is let go on: it shall hear that it is over."""
    waiting = [asyncio.create_task(child.ended.wait()) for child in children]
    until = time.monotonic() + wait_s
    while waiting and time.monotonic() < until:
        for child in children:
            child.send(signal.SIGCONT)
        _, left = await asyncio.wait(waiting, timeout=min(CONTINUE_S, wait_s))
        waiting = list(left)
    for task in waiting:
        task.cancel()


def read_records(folder: Path) -> ComponentRecords:
    """Who was there when the last controller wrote it down; nobody, if there is no such file."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=ComponentRecords)
    except FileNotFoundError:
        return ComponentRecords()


def placed(spec: ComponentSpec, deal: Deal) -> ComponentSpec:
    """The same with what it was dealt. It will see no other cards, so the first that it sees is its own."""
    is_trainer = spec.role == "trainer"
    has = deal.of(spec.role, spec.rank if is_trainer else spec.id)
    if not has.cards:
        return spec
    name = "trainer" if is_trainer else "rollout"
    section = replace(getattr(spec.config, name), device="cuda")
    config = replace(spec.config, **{name: section})
    return replace(spec, config=config, cards=has.cards, memory=has.memory, cpus=has.cpus)


def _environment(spec: ComponentSpec) -> dict[str, str]:
    threads = spec.config.trainer.threads if spec.role == "trainer" else spec.config.rollout.threads
    return os.environ | visible(spec.cards, os.environ) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _spawn(spec: ComponentSpec, log: Path) -> LocalChild:
    with log.open("ab") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "tailrace.runtime.component"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the terminal is for the controller alone
            env=_environment(spec),
            pass_fds=(spec.lifeline,),
        )
    assert started.stdin is not None
    try:
        with suppress(BrokenPipeError), started.stdin as pipe:  # it may have ended already: that will be seen
            pipe.write(msgspec.json.encode(spec) + b"\n")
        return LocalChild(started.pid, started)
    except OSError:
        started.kill()  # nobody would see its end
        started.wait()
        raise


def _found(trace: ComponentRecord, rank: int) -> LocalChild | None:
    """Its process, if that was begun and is still the one that was started then."""
    return _find(*trace.processes[rank]) if rank < len(trace.processes) else None


def _find(pid: int, started: int) -> LocalChild | None:
    try:
        child = LocalChild(pid)
    except ProcessLookupError:
        return None
    if child.started != started:
        child.let_go()
        return None
    return child


def _start_time(pid: int) -> int:
    """In ticks since the machine was started; it tells a process from a later one of the same number."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.rpartition(")")[2].split()[19])


def how_it_ended(status: int | None) -> str:
    if status is None:
        return "ended"  # how, is known only of a process that this one started
    if status < 0:
        return f"was killed by signal {-status}"
    return f"ended with status {status}"


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log, for an error message."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
