"""A real run that is about to be broken: started as a user would, its processes found from outside, by what they hold.

It makes no assumption about who is whose parent: a component is the process that writes to a log of the run, the
controller the one that has `run.db` open, a judge the one whose complaints go to a replica's log.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from runs import EMULATED, Run
from tailrace.watchdog import ask_for_stacks, look_at
from tailrace.weights.shared_memory import default_base

DEADLINE_S = 180.0  # for a single fact; generous, because two cores may be shared by many
JUMPING = """
import random, time
_draw = random.Random()
time.time = lambda: _draw.uniform(0, 4e9)
time.time_ns = lambda: int(time.time() * 1e9)
"""
QUIET_S = 90.0  # without any step: then the run is said to hang


class HangError(AssertionError):
    """Nothing went on any more. The message says what everybody was doing."""


class Victim(Run):
    """`tailrace train` with its output in a file, resumed by `recover` whenever it has ended too soon."""

    def __init__(self, folder: Path, settings: str = EMULATED, *options: str, trouble: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, settings, *options)
        self.trouble = trouble or folder / "trouble"  # where rewards find out what to do
        self.trouble.mkdir(exist_ok=True)
        self.output = self.trouble / "output.txt"  # not on the disk of the run, which may be full
        self.environment: dict[str, str] = {}
        self.resumed = 0
        self.endings: list[str] = []  # how the run ended, each time that it did
        self._later: list[tuple[float, Callable[[], None]]] = []

    def start(self, *more: str) -> Self:
        command = [sys.executable, "-m", "tailrace", "train", str(self.file), *self.options, *more]
        environment = os.environ | {"TAILRACE_TROUBLE": str(self.trouble)} | self.environment
        with self.output.open("ab") as output:
            self.child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, text=True)
        return self

    def wait(self) -> tuple[int, str, str]:
        assert self.child is not None
        try:
            self.child.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise HangError(f"the run does not end\n{self.diagnosis()}") from None
        return self.child.returncode, self.said(), ""

    def said(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    def let_the_clock_jump(self) -> None:
        """Whoever asks for the time of day gets nonsense, from the next start on."""
        (self.trouble / "sitecustomize.py").write_text(JUMPING)
        self.environment["PYTHONPATH"] = str(self.trouble)

    # ---------------------------------------------------------------------------------------------------- its processes

    def processes(self) -> dict[str, list[int]]:
        """By role and number: `controller`, `supervisor`, `replica0`, `judge` ...; ranks of a trainer share a name. A
        controller that has closed the run is `ending`."""
        found: dict[str, list[int]] = {}
        for id in _ours():
            name = self._name_of(id)
            if name:
                found.setdefault(name, []).append(id)
        child = self.child.pid if self.child is not None and self.child.poll() is None else 0
        if child and child not in found.get("controller", ()):
            found["supervisor"] = [child]
            ending = [id for id in _children(child) if id not in found.get("controller", ())]
            found |= {"ending": ending} if ending else {}
        return found

    def _name_of(self, id: int) -> str:
        held, folder = _held(id), self.folder.resolve()
        log = Path(held.get(2, ""))
        if log.parent == folder / "logs":
            return "judge" if "tailrace.envs.judge" in _words(id) else log.stem
        return "controller" if str(folder / "run.db") in held.values() else ""

    def everybody(self) -> list[int]:
        return [id for ids in self.processes().values() for id in ids]

    def ended(self) -> bool:
        return self.child is not None and self.child.poll() is not None

    def over(self) -> bool:
        """It came to its end; whoever was killed after that has lost nothing."""
        return self.ended() and bool(self.query("SELECT 1 FROM meta WHERE key = 'complete'"))

    def left_behind(self) -> list[str]:
        """Processes and shared memory of this run."""
        processes = [f"{name} {ids}" for name, ids in self.processes().items()]
        return processes + [
            str(path) for path in default_base().glob(f"tailrace-{self.folder.name}-*") if self._owns(path)
        ]

    def _owns(self, arena: Path) -> bool:
        """All runs of the tests have one name; the hash of their folder keeps them apart."""
        import xxhash

        return xxhash.xxh3_64_hexdigest(str(self.folder.resolve()).encode())[:8] in arena.name

    def arenas(self) -> list[Path]:
        return [path for path in default_base().glob("tailrace-*") if self._owns(path)]

    # ------------------------------------------------------------------------------------------------------ its journal

    def query(self, sql: str, *values: object) -> list[tuple]:
        try:
            with closing(sqlite3.connect(f"file:{self.folder / 'run.db'}?mode=ro", uri=True)) as database:
                return database.execute(sql, values).fetchall()
        except sqlite3.OperationalError:
            return []  # not there yet

    @property
    def steps_done(self) -> int:
        """Of the surviving history: what has been trained completely."""
        [(step,)] = self.query("SELECT max(json_extract(event, '$.step')) FROM journal WHERE kind = 'Trained'") or [
            (0,)
        ]
        return step or 0

    def master(self) -> str:
        """The relay to which the trainer was last told to publish."""
        rows = self.query("SELECT commands FROM journal WHERE commands LIKE '%\"Publish\"%' ORDER BY seq DESC LIMIT 1")
        if not rows:
            return "relay0"
        import json

        return next(f"relay{one['relay']}" for one in json.loads(rows[0][0]) if one["kind"] == "Publish")

    # --------------------------------------------------------------------------------------------------------- breaking

    def kill(self) -> None:  # type: ignore[override]
        """Everything at once."""
        self.send(signal.SIGKILL, self.everybody())
        self.wait()

    def send(self, number: signal.Signals, ids: Iterable[int]) -> None:
        for id in ids:
            with suppress(ProcessLookupError):
                os.kill(id, number)

    def stop_for(self, ids: list[int], seconds: float) -> None:
        """SIGSTOP now, SIGCONT later, if they are still there then."""
        self.send(signal.SIGSTOP, ids)
        self.later(seconds, lambda: self.send(signal.SIGCONT, [id for id in ids if id in _ours()]))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def turn(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        due = [action for at, action in self._later if at <= now]
        self._later = [one for one in self._later if one[0] > now]
        for action in due:
            action()

    def settle(self) -> None:
        """Do everything that is still to be done later, now."""
        for _, action in self._later:
            action()
        self._later.clear()

    def recover(self) -> None:
        """If the run has ended before its end, somebody types `--resume`."""
        if self.ended() and not self.over():
            assert self.child is not None
            self.endings.append(f"{self.child.returncode}: {self.said().strip().splitlines()[-1:]}")
            self.settle()
            self.resumed += 1
            self.start(*(["--resume"] if (self.folder / "run.db").exists() else []))

    # ---------------------------------------------------------------------------------------------------------- waiting

    def wait_until(self, fact: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Until a fact holds, doing what is due on the way; what does not come true is diagnosed."""
        limit = time.monotonic() + deadline_s
        while not fact():
            if time.monotonic() > limit:
                raise HangError(f"waited {deadline_s:g} s for {what}\n{self.diagnosis()}")
            self.turn()
            time.sleep(0.02)

    def wait_until_gone(self) -> None:
        """No process and no shared memory of the run is left."""
        self.wait_until(lambda: not self.left_behind(), "its processes and its shared memory to be gone")

    def diagnosis(self) -> str:
        """What everybody is doing, the last events, the ends of the logs."""
        processes = self.processes()
        for ids in processes.values():
            for id in ids:
                ask_for_stacks(id)
        time.sleep(0.5)
        lines = [f"{name}: {look_at(id)}" for name, ids in processes.items() for id in ids]
        lines += [f"shared memory: {path}" for path in self.arenas()]
        events = self.query(
            "SELECT seq, now, kind, event FROM journal WHERE kind NOT IN ('Progressed', 'Heartbeats', 'TimerFired')"
            " ORDER BY seq DESC LIMIT 12"
        )
        lines += [
            "last events:",
            *(f"  {seq} {now:.1f} {kind} {event[:160]}" for seq, now, kind, event in reversed(events)),
        ]
        return "\n".join([*lines, self.said()[-1500:], self.logs()])


@contextmanager
def victim(*arguments: object, **named: object) -> Iterator[Victim]:
    """A run of which nothing is left, however the test ended."""
    run = Victim(*arguments, **named)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.settle()
        for _ in range(20):
            left = run.everybody()
            run.send(signal.SIGKILL, left)
            if not left:
                break
            time.sleep(0.05)
        if run.child is not None:
            run.child.wait(DEADLINE_S)


def _ours() -> list[int]:
    """Processes that run Python; everything of a run does."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and "tailrace" in _words(int(name))]


def _children(id: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{id}/task/{id}/children").read_text().split()]
    except OSError:
        return []


def _words(id: int) -> str:
    try:
        return Path(f"/proc/{id}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _held(id: int) -> dict[int, str]:
    """Open files by descriptor."""
    held: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{id}/fd"):
            with suppress(OSError):
                held[int(name)] = os.readlink(f"/proc/{id}/fd/{name}")
    return held
