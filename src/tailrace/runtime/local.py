"""The processes of a run on this machine: started, watched, ended. No orphans, a log file each.

`Local.start` begins a process for a part (several for a trainer with ranks); `on_exit` is told when one ends by
itself. A part that is asked for again is ended first: there is never more than one of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tailrace.wire import LOOPBACK, Spec

TERM_S = 5.0  # between asking a process to go and killing it


class Process:
    """One part's processes (a trainer has one per rank), which live and end together."""

    def __init__(self, spec: Spec, children: list[asyncio.subprocess.Process], log: Path) -> None:
        self.spec = spec
        self.children = children
        self.log = log
        self.joined = False
        self.dismissed = False  # its end is expected

    @property
    def alive(self) -> bool:
        return any(child.returncode is None for child in self.children)

    def kill(self) -> None:
        self.dismissed = True
        for child in self.children:
            if child.returncode is None:
                child.kill()


class Local:
    def __init__(self, folder: Path, on_exit: Callable[[Process, str], None]) -> None:
        self.logs = folder / "logs"
        self.processes: dict[tuple[str, int], Process] = {}
        self._on_exit = on_exit
        self._watchers: set[asyncio.Task[None]] = set()

    async def start(self, spec: Spec) -> None:
        """Start the part's processes; an earlier incarnation of it is killed first."""
        earlier = self.processes.get((spec.role, spec.id))
        if earlier is not None:
            earlier.kill()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{spec.role}{spec.id}.log"
        ranks = spec.config.trainer.ranks if spec.role == "trainer" else 1
        meeting = f"tcp://{LOOPBACK}:{_free_port()}" if ranks > 1 else ""
        specs = [msgspec.structs.replace(spec, rank=rank, meeting=meeting) for rank in range(ranks)]
        process = Process(spec, [await _spawn(each, log) for each in specs], log)
        self.processes[spec.role, spec.id] = process
        self._watch(process)

    def _watch(self, process: Process) -> None:
        for child in process.children:
            task = asyncio.create_task(self._until_exit(process, child))
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    async def _until_exit(self, process: Process, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        if not process.dismissed:
            process.kill()  # the other ranks cannot go on without this one
            self._on_exit(process, how_it_ended(status))

    async def end(self, patience_s: float) -> None:
        """Wait for everybody to leave, then make them."""
        for process in self.processes.values():
            process.dismissed = True
        children = [child for process in self.processes.values() for child in process.children]
        for wait_s, force in ((patience_s, False), (TERM_S, True), (TERM_S, True)):
            left = [child for child in children if child.returncode is None]
            if not left:
                break
            await asyncio.wait([asyncio.create_task(child.wait()) for child in left], timeout=wait_s)
            for child in left:
                if child.returncode is None:
                    child.kill() if force else child.terminate()
        for child in children:
            if child.stdin is not None:
                child.stdin.close()


async def _spawn(spec: Spec, log: Path) -> asyncio.subprocess.Process:
    threads = spec.config.trainer.threads if spec.role == "trainer" else spec.config.rollout.threads
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tailrace.runtime.part",
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the terminal is for the controller alone
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(spec) + b"\n")
    await child.stdin.drain()
    return child


def how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status}"
    return f"ended with status {status}"


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log, for an error message."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
