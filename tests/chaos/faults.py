"""The ways in which a run can be broken, and plans of them.

A fault is a function of a `Victim` and a `Random`: it strikes now and returns whom it hit, or nothing if there was
nobody to hit. What has to be undone later (a stopped process goes on, a full disk is emptied) is left with the victim.
A plan is drawn from a seed: the same seed gives the same kinds, pauses and choices.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from liar import Liar
from victim import Victim

from tailrace.runtime.local import read_records
from tailrace.store.journal import Journal, JournalError
from tailrace.wire.keys import JoinKey
from tailrace.wire.messages import WireError
from tailrace.wire.session import NAMELESS, PROOF, Opening

Strike = Callable[[Victim, random.Random], str]
SHORT_S = (0.2, 1.5)  # a stop that nobody need notice
LONG_S = (4.0, 9.0)  # one that counts as death
BROADCAST_S = 2.5  # how long a version is waited for that is under way
FULL_S = (0.5, 2.0)
SLOW_S = (0.3, 4.0)
REWARD = "troubled.py"  # a copy of it, in the folder of a run's trouble
CROWD = 1500  # to the controller's port, and a tenth of it to the relays'


# ------------------------------------------------------------------------------------------------ killed and stopped


def killed(role: str) -> Strike:
    def strike(run: Victim, draw: random.Random) -> str:
        name, ids = _one(run, role, draw)
        run.send(signal.SIGKILL, ids[:1])
        return name

    return strike


def stopped(role: str, seconds: tuple[float, float]) -> Strike:
    def strike(run: Victim, draw: random.Random) -> str:
        name, ids = _one(run, role, draw)
        pause = draw.uniform(*seconds)
        run.stop_for(ids, pause)
        return name and f"{name} for {pause:.1f} s"

    return strike


def stopped_for_good(role: str) -> Strike:
    """Until the run itself gets rid of it."""

    def strike(run: Victim, draw: random.Random) -> str:
        name, ids = _one(run, role, draw)
        run.send(signal.SIGSTOP, ids)
        return name

    return strike


def killed_together(*roles: str) -> Strike:
    """One of each, at the same moment."""

    def strike(run: Victim, draw: random.Random) -> str:
        found = [_one(run, role, draw) for role in roles]
        run.send(signal.SIGKILL, [id for _, ids in found for id in ids[:1]])
        return " and ".join(name for name, _ in found) if all(name for name, _ in found) else ""

    return strike


def master_killed(run: Victim, draw: random.Random) -> str:
    name = run.master()
    run.send(signal.SIGKILL, run.processes().get(name, ()))
    return name


def master_killed_in_broadcast(run: Victim, draw: random.Random) -> str:
    """The others stand still while the master receives a version, so it dies with the only copy."""
    name, processes = run.master(), run.processes()
    others = [id for other, ids in processes.items() if other.startswith("relay") and other != name for id in ids]
    if name not in processes or not others:
        return ""
    run.stop_for(others, BROADCAST_S)
    relay, seq = int(name[5:]), _newest_seq(run)
    query = "SELECT 1 FROM journal WHERE seq > ? AND kind = 'VersionStored' AND json_extract(event, '$.relay') = ?"
    end = time.monotonic() + BROADCAST_S - 0.5
    while not (arrived := run.query(query, seq, relay)) and time.monotonic() < end:
        time.sleep(0.01)
    run.send(signal.SIGKILL, processes[name])
    return f"{name} {'with a version that the others lack' if arrived else 'while the others stood still'}"


def everybody_killed(run: Victim, draw: random.Random) -> str:
    ids = run.everybody()
    run.send(signal.SIGKILL, ids)
    return f"{len(ids)} processes" if ids else ""


# -------------------------------------------------------------------------------------------------- rewards and files


def reward(kind: str) -> Strike:
    def strike(run: Victim, draw: random.Random) -> str:
        (run.trouble / kind).touch()
        return f"one {kind}"

    return strike


def version_damaged(run: Victim, draw: random.Random) -> str:
    """Bytes of a version change in shared memory after it was sealed."""
    return _with_a_version(run, draw, _scribble)


def version_truncated(run: Victim, draw: random.Random) -> str:
    return _with_a_version(run, draw, lambda file: os.truncate(file, file.stat().st_size // 2))


def _with_a_version(run: Victim, draw: random.Random, harm: Callable[[Path], None]) -> str:
    files = sorted(file for arena in run.arenas() for file in arena.glob("v*.safetensors"))
    if not files:
        return ""
    file = draw.choice(files)
    try:
        harm(file)
    except OSError:
        return ""  # it was dropped just now
    return "/".join(file.parts[-2:])


def checkpoint_damaged(run: Victim, draw: random.Random) -> str:
    """The newest checkpoint is cut short, and the trainer has to come back from one."""
    files = sorted((run.folder / "checkpoints").glob("step-*/*.safetensors"))
    if not files:
        return ""
    newest = [file for file in files if file.parent == files[-1].parent]
    file = draw.choice(newest)
    with suppress(OSError):
        os.truncate(file, file.stat().st_size * 2 // 3)
        run.send(signal.SIGKILL, run.processes().get("trainer0", ()))
        return "/".join(file.parts[-2:])
    return ""


def _scribble(file: Path) -> None:
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        content.write(b"\xa5" * 16)


def copied_while_in_use(run: Victim, draw: random.Random) -> str:
    """Somebody copies `run.db` without its log, as people do, and looks into the copy: it is a true beginning of the
    run, or refused."""
    with tempfile.TemporaryDirectory(dir=run.trouble) as folder:
        copy = Path(shutil.copy(run.folder / "run.db", folder))
        try:
            told = list(Journal(copy).entries())
        except JournalError:
            return "refused"
        assert told == list(islice(Journal(run.folder).entries(), len(told))), "the copy tells another story"
        return f"{len(told)} events"


def locked_by_another_program(file: str) -> Strike:
    """Somebody begins to write there, and takes a while."""

    def strike(run: Victim, draw: random.Random) -> str:
        seconds = draw.uniform(*LONG_S)
        try:
            shell = sqlite3.connect(f"file:{run.folder / file}?mode=rw", uri=True, isolation_level=None)
            shell.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return ""  # there is no run yet
        run.later(seconds, shell.close)
        return f"for {seconds:.1f} s"

    return strike


def inputs_replaced(run: Victim, draw: random.Random) -> str:
    """Everybody is killed, and the file of the reward is changed: the run refuses to go on until it is put back."""
    file = run.trouble / REWARD
    if not file.exists() or run.ended() or not run.steps_done:
        return ""
    run.kill()
    if run.over():
        return ""
    run.settle()
    before = file.read_bytes()
    file.write_bytes(before + b"\n")
    try:
        code, said, _ = run.start("--resume").wait()
        assert code == 2, said
        assert "has changed" in said, said
    finally:
        file.write_bytes(before)
    return file.name


# --------------------------------------------------------------------------------------------------------- strangers


def strangers_talk(run: Victim, draw: random.Random) -> str:
    """Nonsense to everybody who listens, and greetings in the name of a component, without its key."""
    doors = _doors(run)
    for place in doors:
        with suppress(OSError), socket.create_connection(place, timeout=1.0) as caller:
            caller.sendall(draw.randbytes(draw.choice((1, 64, 4096))))
    if doors:
        _forge(doors[0], draw)
    return f"{len(doors)} doors" if doors else ""


def strangers_keep_silent(run: Victim, draw: random.Random) -> str:
    """They are let in and say nothing."""
    callers: list[socket.socket] = []
    for place in _doors(run) * 8:
        with suppress(OSError):
            callers.append(socket.create_connection(place, timeout=1.0))
    run.later(draw.uniform(*LONG_S), lambda: _hang_up(callers))
    return f"{len(callers)} callers" if callers else ""


def crowd_of_strangers(run: Victim, draw: random.Random) -> str:
    """Very many are let in and say nothing, and somebody has to be started meanwhile."""
    callers: list[socket.socket] = []
    for number, place in enumerate(_doors(run)):
        for _ in range(CROWD if number == 0 else CROWD // 10):
            with suppress(OSError):
                callers.append(socket.create_connection(place, timeout=0.1))
    name, ids = _one(run, draw.choice(("replica", "relay")), draw)
    run.send(signal.SIGKILL, ids[:1])
    run.later(draw.uniform(*LONG_S), lambda: _hang_up(callers))
    return f"{len(callers)} callers, and {name} killed" if callers else ""


def liar_with_a_key(run: Victim, draw: random.Random) -> str:
    """A machine joins and lies. Only where a run takes machines."""
    try:
        key = JoinKey.read((run.folder / "join.key").read_text())
    except (OSError, WireError):
        return ""
    port = read_records(run.folder).port
    return Liar(f"tcp://127.0.0.1:{port}", key, draw).come_and_lie() if port else ""


def _hang_up(callers: list[socket.socket]) -> None:
    for caller in callers:
        caller.close()


def _doors(run: Victim) -> list[tuple[str, int]]:
    """The controller's, and those of the relays."""
    traces = read_records(run.folder)
    addresses = [f"127.0.0.1:{traces.port}"] * bool(traces.port) + [
        one.address for one in traces.components if one.address
    ]
    parted = [address.partition("#")[0].rpartition(":") for address in addresses]
    return [(host, int(port)) for host, _, port in parted]


def _forge(place: tuple[str, int], draw: random.Random) -> None:
    with suppress(OSError), socket.create_connection(place, timeout=1.0) as caller:
        caller.sendall(Opening(draw.choice(("trainer-0/1", "replica-0/1", "relay-1/2", "nobody"))).named)
        caller.recv(NAMELESS.size)
        caller.sendall(draw.randbytes(PROOF))
        assert caller.recv(1) == b"", "somebody without a key is answered"


# ------------------------------------------------------------------------------------------------------------ the disk


@contextmanager
def small_disk(folder: Path, mbytes: int = 256) -> Iterator[Path]:
    """A file system of its own at `folder`, which can be filled and frozen. Needs root; else the folder as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_suffix(".img")
    if not can_mount():
        yield folder
        return
    with image.open("wb") as file:
        file.truncate(mbytes << 20)
    _call("mkfs.ext4", "-q", "-b", "4096", str(image))  # pages of SQLite's shared memory are allocated whole
    _call("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, timeout=30, check=False)
        _call("umount", "-l", str(folder))
        image.unlink()


def can_mount() -> bool:
    tools = all(shutil.which(tool) for tool in ("mkfs.ext4", "mount", "umount", "fsfreeze"))
    return tools and os.geteuid() == 0 and Path("/dev/loop-control").exists()


def disk_full(run: Victim, draw: random.Random) -> str:
    """Somebody else takes all the room there is, and gives it back after a while."""
    disk = run.folder
    while not disk.is_mount():
        if disk.parent == disk:
            return ""
        disk = disk.parent
    filler, seconds = disk / "filler", draw.uniform(*FULL_S)
    if disk == Path("/") or filler.exists():
        return ""
    _fill(filler)
    run.later(seconds, lambda: filler.unlink(missing_ok=True))
    return f"for {seconds:.1f} s"


def store_cannot_write(run: Victim, draw: random.Random) -> str:
    """Writing samples fails, and everything else can be written: the store's files may not grow."""
    name, ids = _one(run, "store", draw)
    if not ids:
        return ""
    seconds = draw.uniform(*FULL_S)
    with suppress(ProcessLookupError):
        before = resource.prlimit(ids[0], resource.RLIMIT_FSIZE)
        resource.prlimit(ids[0], resource.RLIMIT_FSIZE, (0, before[1]))
        run.later(seconds, lambda: _lift_limit(ids[0], before))
        return f"{name} for {seconds:.1f} s"
    return ""


def _lift_limit(id: int, before: tuple[int, int]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        resource.prlimit(id, resource.RLIMIT_FSIZE, before)


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1 << 10):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def disk_slow(run: Victim, draw: random.Random) -> str:
    """Nothing can be written for a while; whoever tries waits in the kernel. Nobody looks at the run meanwhile."""
    disk = next((one for one in run.folder.parents if one.is_mount() and one != Path("/")), None)
    if disk is None:
        return ""
    seconds = draw.uniform(*SLOW_S)
    _call("fsfreeze", "-f", str(disk))
    try:
        time.sleep(seconds)
    finally:
        _call("fsfreeze", "-u", str(disk))
    return f"for {seconds:.1f} s"


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


# --------------------------------------------------------------------------------------------------------------- plans

KINDS: dict[str, Strike] = {
    "replica killed": killed("replica"),
    "replica stopped briefly": stopped("replica", SHORT_S),
    "replica stopped": stopped("replica", LONG_S),
    "replica stopped for good": stopped_for_good("replica"),
    "relay killed": killed("relay"),
    "relay stopped": stopped("relay", LONG_S),
    "relay stopped for good": stopped_for_good("relay"),
    "master relay killed": master_killed,
    "master relay killed in a broadcast": master_killed_in_broadcast,
    "trainer killed": killed("trainer"),
    "trainer stopped briefly": stopped("trainer", SHORT_S),
    "trainer stopped": stopped("trainer", LONG_S),
    "trainer stopped for good": stopped_for_good("trainer"),
    "store killed": killed("store"),
    "store stopped briefly": stopped("store", SHORT_S),
    "store stopped": stopped("store", LONG_S),
    "store stopped for good": stopped_for_good("store"),
    "store killed with the controller": killed_together("store", "controller"),
    "store cannot write": store_cannot_write,
    "judge killed": killed("judge"),
    "judge stopped for good": stopped_for_good("judge"),
    "reward stuck": reward("stuck"),
    "reward raises": reward("raises"),
    "reward answers nonsense": reward("nonsense"),
    "reward's process dies": reward("dies"),
    "reward is not a number": reward("nan"),
    "reward at the end of what a float holds": reward("extreme"),
    "version damaged in memory": version_damaged,
    "version truncated in memory": version_truncated,
    "checkpoint cut short": checkpoint_damaged,
    "run.db copied while in use": copied_while_in_use,
    "run.db locked by another program": locked_by_another_program("run.db"),
    "samples-0.db locked by another program": locked_by_another_program("samples-0.db"),
    "inputs replaced": inputs_replaced,
    "strangers talk": strangers_talk,
    "strangers keep silent": strangers_keep_silent,
    "a crowd of strangers": crowd_of_strangers,
    "a liar with a key": liar_with_a_key,
    "controller killed": killed("controller"),
    "controller stopped": stopped("controller", LONG_S),
    "everybody killed": everybody_killed,
    "disk full": disk_full,
    "disk slow": disk_slow,
}
RARE = {  # each costs a start of everybody
    *("everybody killed", "controller killed", "disk full", "checkpoint cut short", "inputs replaced"),
    *("store killed with the controller", "store cannot write"),
}
NEEDS_JUDGES = {"judge killed", "judge stopped for good", "inputs replaced"} | {
    kind for kind in KINDS if kind.startswith("reward")
}


class Fault(NamedTuple):
    """One entry of a plan: after a pause, this, with choices of its own."""

    pause_s: float
    kind: str
    seed: int

    def strike(self, run: Victim) -> str:
        return KINDS[self.kind](run, random.Random(self.seed))


class Struck(NamedTuple):
    kind: str
    whom: str
    at: float


def plan(seed: int, pause_s: float, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Fault]:
    """Faults without end; in every round each kind comes once, in a new order (rare ones in every third)."""
    draw = random.Random(f"chaos {seed}")
    for turn in range(1_000_000):
        order = [kind for kind in kinds if kind not in RARE or turn % 3 == 0]
        draw.shuffle(order)
        for kind in order:
            yield Fault(draw.uniform(0.5, 1.5) * pause_s, kind, draw.randrange(1 << 30))


def _one(run: Victim, role: str, draw: random.Random) -> tuple[str, list[int]]:
    """One part of a role; of a trainer's ranks, all, in an order drawn anew."""
    found = {name: ids for name, ids in sorted(run.processes().items()) if name.startswith(role)}
    if not found:
        return "", []
    name = draw.choice(list(found))
    return name, draw.sample(found[name], len(found[name]))


def _newest_seq(run: Victim) -> int:
    rows = run.query("SELECT max(seq) FROM journal")
    return rows[0][0] or 0 if rows else 0
