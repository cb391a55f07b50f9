"""Machines that join a run, for tests: `tailrace worker` as somebody would start it, and what becomes of it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from hosts import Network, clear_abandoned, hosts
from proof import Proof, prove

from runs import EMULATED, Run, nothing_is_left
from tailrace.protocol import Generate, HandedIn, HostJoined, HostLeft, Train
from tailrace.runtime.local import read_records
from tailrace.store.journal import Journal

DEADLINE_S = 60.0
PORT = 4777  # of a controller in a network of its own
HONEST = (sys.executable, "-m", "tailrace")
LIES = Path(__file__).parent / "lying.py"  # run with the name of a lie instead
LISTEN = ("--local.listen", "127.0.0.1", "--local.replicas", "1")


class Guest:
    """`tailrace worker`, as somebody on another machine would start it; its logs are in `folder`."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        inside: tuple[str, ...] = (),
        key: str | None = None,
        program: tuple[str, ...] = HONEST,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder.resolve()
        command = [*inside, *program, "worker", *options]
        env = {name: value for name, value in os.environ.items() if name != "TAILRACE_JOIN_KEY"}
        env |= {"TMPDIR": str(folder)} | ({"TAILRACE_JOIN_KEY": key} if key is not None else {})
        self.child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def components(self) -> dict[str, int]:
        """Process ids of the living components, by the name of their log."""
        found: dict[str, int] = {}
        for id in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            try:
                log = os.readlink(f"/proc/{id}/fd/1")
            except OSError:
                continue
            if log.startswith(str(self.folder)):
                found[Path(log).stem] = id
        return found

    def wait(self) -> tuple[int, str]:
        _, err = self.child.communicate(timeout=DEADLINE_S)
        return self.child.returncode, err

    def interrupt(self) -> tuple[int, str]:
        self.child.send_signal(signal.SIGINT)
        return self.wait()


@contextmanager
def a_run(folder: Path, *options: str) -> Iterator[tuple[Run, Callable[..., Guest]]]:
    """A run that machines may join, and how one does. Everybody is gone at the end."""
    with waiting_run(folder, *options) as (run, join):
        run.until(lambda: run.events("Trained"), "a step")
        yield run, join


@contextmanager
def waiting_run(folder: Path, *options: str) -> Iterator[tuple[Run, Callable[..., Guest]]]:
    """The same before it has trained anything: it may have to wait for those who join."""
    run, guests = Run(folder, EMULATED, *LISTEN, *options).start(), list[Guest]()
    try:
        run.until((run.folder / "join.key").exists, "its key")
        run.until(lambda: read_records(run.folder).port, "its address")

        def join(*more: str) -> Guest:
            where = ("--join", address(run), "--key", str(run.folder / "join.key"))
            guests.append(Guest(folder / f"guest{len(guests)}", *where, *more))
            return guests[-1]

        yield run, join
    finally:
        _end(run, guests)


def _end(run: Run, guests: list[Guest]) -> None:
    for child in (run.child, *[guest.child for guest in guests]):
        if child is not None and child.poll() is None:
            child.kill()
            child.communicate(timeout=DEADLINE_S)


@contextmanager
def on_two_hosts(folder: Path, *options: str) -> Iterator[tuple[Network, Run, Callable[..., Guest]]]:
    """A run on the first one, and how the second one joins it."""
    with on_hosts(2, folder, EMULATED, "--local.replicas", "1", *options) as (network, run, join):
        run.until(lambda: run.events("Trained"), "a step")
        yield network, run, lambda *more: join(1, *more)


@contextmanager
def on_hosts(
    count: int, folder: Path, settings: str, *options: str
) -> Iterator[tuple[Network, Run, Callable[..., Guest]]]:
    """A run on the first of so many, and how another one joins it, by its number."""
    clear_abandoned()
    with hosts(count) as network:
        where, guests = network[0].address, list[Guest]()
        run = Run(folder, settings, "--local.listen", where, "--local.port", str(PORT), *options)
        run.inside = network[0].inside

        def join(number: int, *more: str, key: str = "join.key", program: tuple[str, ...] = HONEST) -> Guest:
            join_words = ("--join", f"{where}:{PORT}", "--key", str(run.folder / key), *more)
            inside = tuple(network[number].inside)
            guests.append(Guest(folder / f"guest{len(guests)}", *join_words, inside=inside, program=program))
            return guests[-1]

        run.start()
        try:
            run.until((run.folder / "join.key").exists, "its key")
            yield network, run, join
        finally:
            _end(run, guests)


def address(run: Run) -> str:
    """Where its controller listens."""
    return f"127.0.0.1:{read_records(run.folder).port}"


def joined(run: Run) -> list[HostJoined]:
    return [entry.event for entry in Journal(run.folder).entries() if isinstance(entry.event, HostJoined)]


def left(run: Run) -> list[HostLeft]:
    return [entry.event for entry in Journal(run.folder).entries() if isinstance(entry.event, HostLeft)]


def trained_of_strangers(run: Run) -> set[int]:
    """The samples that were trained on as a stranger has handed them in."""
    made, trained = set[int](), set[int]()
    for entry in Journal(run.folder).entries():
        if isinstance(entry.event, HandedIn):
            made |= {meta.id for meta in entry.event.samples}
        for command in entry.commands:
            if isinstance(command, Generate):
                made -= {request.trajectory for request in command.requests if not request.resume}
            if isinstance(command, Train):
                trained |= made & {id for group in command.groups for id in group.trajectories}
    return trained


def finished(run: Run, replica: int) -> int:
    """Samples that they have brought to an end."""
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        query = "SELECT count(*) FROM journal WHERE kind = 'Finished' AND json_extract(event, '$.replica') = ?"
        return database.execute(query, (replica,)).fetchone()[0]


def at_work(run: Run, *replicas: int) -> None:
    before = [finished(run, id) for id in replicas]
    run.until(lambda: all(finished(run, id) > n + 3 for id, n in zip(replicas, before, strict=True)), "their work")


def ends_well(run: Run, elsewhere: Mapping[int, Path] | None = None) -> Proof:
    """It is stopped when it has seen enough, and every promise was kept. `elsewhere`: folders of other stores."""
    status, out, err = run.interrupt()
    assert status == 130, f"{out}\n{err}\n{run.logs()}"
    proof = prove(run.folder, elsewhere=elsewhere)
    assert proof.trained
    limit = time.monotonic() + DEADLINE_S
    while not nothing_is_left(run):
        assert time.monotonic() < limit, "something is left of the run"
        time.sleep(0.05)
    return proof


def gone(run: Run, guest: Guest) -> None:
    run.until(lambda: not guest.components(), "its components to be gone")
