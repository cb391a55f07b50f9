"""The process that brings the text index of a run up to date, while the page shows it.

One for each run, of lowest priority, started when the page is and ended with it: its standard input is a pipe whose
other end only this process has.
"""

from __future__ import annotations

import subprocess
import sys
import threading

from tailrace.page.runs import RunLibrary
from tailrace.store.database import file_of

LOOK_S = 2.0
MOST = 4  # at once


class Indexers:
    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="indexers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10.0)
        for child in self._children.values():
            child.kill()
            child.wait()

    def _keep(self) -> None:
        while not self._stopping.wait(0 if not self._children else LOOK_S):
            for number in self._library.looked_at()[-MOST:]:
                if number not in self._children:
                    self._children[number] = _start(str(file_of(self._library.path(number)).parent))


def _start(folder: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tailrace.browse.indexing", folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
