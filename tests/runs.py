"""Real runs for tests: started as a user would, watched through their journal, ended one way or another."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import xxhash

from audit import Audit
from tailrace.control.plane import ControlPlane
from tailrace.protocol import Train
from tailrace.store.journal import Journal
from tailrace.weights.shared_memory import default_base

DEADLINE_S = 120.0
EMULATED = """
[model]
preset = "smollm2-135m"
[workload]
prompts_per_step = 4
group_size = 2
prompt_tokens = 16
max_completion_tokens = 256
[workload.lengths]
median = 30
sigma = 1.0
[rollout]
engine = "emulated"
kv_tokens = 2000
stream_tokens = 8
[trainer]
engine = "emulated"
mini_batches = 2
checkpoint_every = 1
[costs]
decode_step = 0.001
decode_sequence = 0.0001
train_mini_batch = 0.01
train_token = 0.00002
[repack]
every_s = 0.3
[health]
heartbeat_s = 0.3
strikes = 10
backoff_s = 0.2
[run]
steps = 12
"""
START = Path(__file__).parents[1] / "examples" / "running_total" / "start"
NATIVE = f"""
[model]
path = "{START}"
[task]
name = "running_total"
[workload]
prompts_per_step = 4
group_size = 4
prompt_tokens = 100
max_completion_tokens = 320
[rollout]
kv_tokens = 4096
stream_tokens = 8
[trainer]
mini_batches = 1
learning_rate = 3e-4
tokens_per_batch = 4096
threads = 1
[health]
heartbeat_s = 0.5
strikes = 60
[run]
steps = 3
evaluate = false
[local]
replicas = 1
"""


class Run:
    """`tailrace train` on a file of settings, in a folder of the test's own."""

    def __init__(self, folder: Path, settings: str = EMULATED, *options: str) -> None:
        self.file = folder / "run.toml"
        self.file.write_text(settings)
        self.folder = folder / "runs" / "run"
        self.options = ["--run.folder", str(folder / "runs"), *options]
        self.inside: list[str] = []  # what to put before the command
        self.output = subprocess.PIPE  # or a descriptor, for both of its streams
        self.child: subprocess.Popen[str] | None = None
        self.reading: Future[tuple[str, str]] = Future()

    def start(self, *more: str) -> Run:
        command = [*self.inside, sys.executable, "-m", "tailrace", "train", str(self.file), *self.options, *more]
        self.child = subprocess.Popen(command, stdout=self.output, stderr=self.output, text=True)
        self.reading = read_output(self.child)
        return self

    def wait(self) -> tuple[int, str, str]:
        assert self.child is not None
        out, err = self.reading.result(DEADLINE_S)
        return self.child.returncode, out, err

    def finish(self, *more: str) -> str:
        """Run to the end, which must be a good one; returns what it printed."""
        status, out, err = self.start(*more).wait()
        assert status == 0, f"{out}\n{err}\n{self.logs()}"
        return out

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()
        self.wait()

    def interrupt(self) -> tuple[int, str, str]:
        assert self.child is not None
        self.child.send_signal(signal.SIGINT)
        return self.wait()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """A run that goes on has to do so until then."""
        limit = time.monotonic() + DEADLINE_S
        going = self.child if self.child and self.child.poll() is None else None
        while not condition():
            assert going is None or going.poll() is None, f"it ended while waiting for {what}: {self.wait()}"
            assert time.monotonic() < limit, f"waited {DEADLINE_S} s for {what}"
            time.sleep(0.02)

    def events(self, kind: str = "%") -> int:
        """How many events of a kind are committed."""
        try:
            with closing(sqlite3.connect(f"file:{self.folder / 'run.db'}?mode=ro", uri=True)) as database:
                return database.execute("SELECT count(*) FROM journal WHERE kind LIKE ?", (kind,)).fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # not there yet

    def controller(self) -> int:
        """Its process id; 0 while there is none. The process that was started is its supervisor."""
        assert self.child is not None
        supervisor = self.child.pid
        try:
            return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    def components(self) -> dict[str, int]:
        """Process ids of the living components, by the name of their log."""
        found: dict[str, int] = {}
        for id in _processes():
            try:
                log = os.readlink(f"/proc/{id}/fd/1")
            except OSError:
                continue
            if log.startswith(str(self.folder.resolve())):
                found[Path(log).stem] = id
        return found

    def trained_prompts(self) -> list[list[int]]:
        """The prompts of every step in the surviving history, step by step."""
        prompt_of: dict[int, int] = {}
        steps: dict[tuple[int, int], list[int]] = {}
        for entry in Journal(self.folder).entries():
            for command in entry.commands:
                for request in getattr(command, "requests", ()):
                    prompt_of[request.group] = request.prompt
                if isinstance(command, Train):
                    prompts = [prompt_of[group.group] for group in command.groups]
                    assert steps.setdefault((command.step, command.mini_batch), prompts) == prompts
        return [prompts for _, prompts in sorted(steps.items())]

    def logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("logs/*.log"))


def read_output(child: subprocess.Popen[str]) -> Future[tuple[str, str]]:
    """All that it says until its end, read as it comes: with a full pipe it would wait for whoever reads it."""
    said: Future[tuple[str, str]] = Future()
    threading.Thread(target=lambda: said.set_result(child.communicate()), daemon=True).start()
    return said


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def replayed(run: Run) -> ControlPlane:
    """The journal through a fresh control plane, audited on the way: nothing lost, doubled or too stale."""
    journal = Journal(run.folder)
    plane = ControlPlane(journal.begun)
    audit = Audit(journal.config)
    for entry in journal.entries():
        commands = plane.handle(entry.now, entry.event)
        assert commands == list(entry.commands)
        audit.listen(entry.now, entry.event, commands)
    plane.check()
    audit.finish(plane)
    return plane


def nothing_is_left(run: Run) -> bool:
    """Neither processes nor shared memory of this very run."""
    mark = xxhash.xxh3_64_hexdigest(str(run.folder.resolve()).encode())[:8]
    return not run.components() and not list(default_base().glob(f"tailrace-*{mark}*"))
