"""Runs on a cluster, for tests: `tailrace launch` as somebody would type it, in a folder that all its processes share
as their working directory, wherever they are started. So whoever is left over is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from runs import EMULATED, Run, read_output

DEADLINE_S = 60.0
LOCAL = ("--local.replicas", "1")


class Launched(Run):
    """`tailrace launch ray` on a file of settings. What it says is in `said`."""

    def __init__(self, folder: Path, address: str, settings: str = EMULATED, *options: str) -> None:
        super().__init__(folder, settings, *LOCAL, *options)
        self.here = folder
        self._address = address
        self._said = folder / "said"

    def start(self, *more: str) -> Launched:
        words = ["launch", "ray", str(self.file), "--address", self._address, *self.options, *more]
        with self._said.open("ab") as said:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tailrace", *words],
                cwd=self.here,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            )
        self.reading = read_output(self.child)
        return self

    @property
    def said(self) -> str:
        return self._said.read_text()

    def stop(self, number: int = signal.SIGINT) -> int:
        assert self.child is not None
        self.child.send_signal(number)
        self.wait()
        return self.child.returncode

    def end(self) -> None:
        """Whatever happened, nothing is left running."""
        assert self.child is not None
        if self.child.poll() is None:
            self.child.kill()
            self.wait()
        for id in self.processes():
            with suppress(ProcessLookupError):
                os.kill(id, signal.SIGKILL)

    def processes(self, *words: str) -> list[int]:
        """Of this run, on whatever node: those that have all these words in their command line."""
        found = list[int]()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if os.readlink(f"/proc/{name}/cwd") == str(self.here.resolve()) and set(words) <= set(line):
                    found.append(int(name))
        return found

    def agents(self) -> list[int]:
        return self.processes("worker", "--join", "-m")

    def gone(self) -> None:
        """All its processes are, on all nodes, within a deadline."""
        limit = time.monotonic() + DEADLINE_S
        while left := self.processes():
            assert time.monotonic() < limit, f"left over: {[describe(id) for id in left]}"
            time.sleep(0.05)


RECIPE = Path(__file__).parents[2] / "examples" / "running_total" / "running_total.toml"


def learned(run: Run) -> tuple[float, float]:
    """Held-out accuracy before and after."""
    accuracy = json.loads((run.folder / "summary.json").read_text())["accuracy"]
    return accuracy["before"], accuracy["after"]


def describe(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return f"{process}, which is gone now"
