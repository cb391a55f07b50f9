"""A run that is handed to a Ray cluster as a job: `ray job submit`, and `ray job stop`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from guests import at_work
from launched import Launched
from proof import prove
from ray_nodes import Nodes, missing, ray_nodes

from runs import EMULATED

needed = missing() or ("" if find_spec("aiohttp") else "jobs need pip install 'ray[default]'")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(needed), reason=needed or "-")]
MARK = "TAILRACE_TEST_FOLDER"


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """A job has an environment of its own made for it, and processes of Ray's besides."""
    monkeypatch.setattr("runs.DEADLINE_S", 400.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(1, dashboard=True) as made:
        yield made


class Submitted(Launched):
    """Nothing is uploaded: two raylets on one machine would unpack it into the same folder. Processes are known by a
    mark in their environment."""

    def __init__(self, folder: Path, nodes: Nodes, *options: str) -> None:
        super().__init__(folder, nodes.dashboard, EMULATED, *options)
        self.name = folder.name
        mark = json.dumps({"env_vars": {MARK: str(folder)}})
        words = [sys.executable, "-m", "tailrace", "launch", "ray", str(self.file), *self.options]
        given = ["--submission-id", self.name, "--runtime-env-json", mark]
        self.job("submit", "--no-wait", *given, "--", *words)

    def job(self, what: str, *words: str) -> str:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", what, "--address", self._address, *words]
        done = subprocess.run(command, cwd=self.here, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def over(self) -> bool:
        status = self.job("status", self.name)
        return any(f"' {words}" in status for words in ("succeeded", "failed", "was stopped"))

    def processes(self, *words: str) -> list[int]:
        found = list[int]()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                given = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
                ours = f"{MARK}={self.here}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if ours and any(word.startswith("tailrace") for word in given) and set(words) <= set(given):
                    found.append(int(name))
        return found


def test_a_job_that_is_submitted_succeeds(tmp_path, nodes):
    run = Submitted(tmp_path, nodes, "--run.steps", "60")
    run.until(lambda: run.events("Trained") or run.over(), "a step")
    run.until(run.over, "the end of the job")
    assert "' succeeded" in run.job("status", run.name), run.job("logs", run.name)
    assert prove(run.folder).steps == 60
    run.gone()


def test_a_job_that_is_stopped_leaves_nothing_and_can_be_resumed(tmp_path, nodes):
    run = Submitted(tmp_path, nodes, "--run.steps", "100000")
    run.until(lambda: run.events("HostJoined") or run.over(), "a node to join")
    assert not run.over(), run.job("logs", run.name)
    at_work(run, 0, 1, 2)
    assert len(run.agents()) == 1
    run.job("stop", run.name)
    run.gone()
    assert "' was stopped" in run.job("status", run.name)
    assert prove(run.folder).trained
