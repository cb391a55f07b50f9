"""The processes of a run on this machine: how they are asked to leave."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from tailrace.config.tree import Config
from tailrace.runtime.local import LocalChild, LocalProcesses, Process
from tailrace.store.folder import RunFolder
from tailrace.wire.messages import ComponentSpec

LEAVES_SOON = "import time; print(flush=True); time.sleep(0.3)"


def test_who_is_stopped_while_it_is_asked_to_leave_is_let_go_on_and_leaves_by_itself(tmp_path: Path) -> None:
    async def ended() -> str:
        started = subprocess.Popen([sys.executable, "-c", LEAVES_SOON], stdout=subprocess.PIPE)
        assert started.stdout is not None
        started.stdout.readline()
        process = Process(ComponentSpec("relay", 0, 1, "", "", "", Config()), tmp_path / "log")
        process.children = [child := LocalChild(started.pid, started)]
        asyncio.get_running_loop().call_later(0.1, child.send, signal.SIGSTOP)
        await LocalProcesses(RunFolder(tmp_path), 0, lambda *_: None).end([process], 60.0)
        return child.how

    assert asyncio.run(ended()) == "ended with status 0"
