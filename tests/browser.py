"""A real browser for tests: Chromium without a window, driven through two pipes, whose complaints are kept."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0
LOUD = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")  # what a console shows


class Browser:
    def __init__(self, to: int, since: int) -> None:
        self._to, self._from = to, since
        self._rest = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Its answer; what else it says meanwhile is looked through for complaints."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + DEADLINE_S
        while True:
            heard = self._hear(limit, method)
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return heard["result"]
            if heard.get("method") in LOUD:
                self.complaints.append(json.dumps(heard["params"]))

    def _hear(self, limit: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"the browser has not answered {what} within {DEADLINE_S} s"
            piece = os.read(self._from, 1 << 16)
            assert piece, f"the browser ended before it answered {what}"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, address: str) -> None:
        self.tell("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        return self.tell("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        limit = time.monotonic() + DEADLINE_S
        while not self.ask(expression):
            assert time.monotonic() < limit, (
                f"waited {DEADLINE_S} s for {expression}; {self.ask('document.body.innerText')}"
            )
            time.sleep(0.05)

    def text(self, id: str) -> str:
        return self.ask(f"document.getElementById('{id}').textContent")

    def resize(self, width: int, height: int) -> None:
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> bytes:
        return base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no browser here: apt-get install chromium")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--ignore-certificate-errors"]
    command = [program, *options, f"--user-data-dir={folder / 'browser'}", "--remote-debugging-pipe"]
    shell = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', *command]  # it wants them to be 3 and 4
    ends = (theirs_in, theirs_out)
    child = subprocess.Popen(shell, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in ends:
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        for end in (ours_out, ours_in):
            os.close(end)  # it ends when nobody drives it
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def page_of(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address that it says it listens on."""
    command = [sys.executable, "-m", "tailrace", "page", str(run), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        found = re.search(r"https?://\S+/", line)
        assert found, (line, child.communicate(timeout=DEADLINE_S))
        yield child, found[0]
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)
