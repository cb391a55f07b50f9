"""The keys of strangers: files in the folder `workers` of a run, one for each, readable by its owner alone.

    NAME.key        what this stranger needs to join; made by `tailrace workers RUN --invite NAME`
    NAME.revoked    it may not join, nor stay: its content is the reason; made by `--revoke NAME`

The controller reads them whenever somebody knocks, and looks for revoked ones with every heartbeat.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tailrace.errors import UsageError
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.wire.keys import JOIN_KEY, WORKER, JoinKey
from tailrace.wire.messages import WireError

FOLDER = "workers"


class WorkerKeys:
    """Of the run in this folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = run / FOLDER

    def token(self, worker: str) -> str:
        """Empty: there is none."""
        if not WORKER.fullmatch(worker):
            return ""
        with suppress(OSError, UnicodeDecodeError, WireError):
            key = JoinKey.read(self._path(worker).read_text())
            return key.token if key.worker == worker else ""
        return ""

    def names(self) -> list[str]:
        """Who has one."""
        return sorted([path.stem for path in self._folder.glob("*.key")])

    def revoked(self) -> Iterator[tuple[str, str]]:
        """Whose was withdrawn, and why."""
        for path in sorted(self._folder.glob("*.revoked")):
            yield path.stem, path.read_text(errors="replace").strip()

    def invite(self, worker: str) -> Path:
        """Make a key; a name is used once."""
        if not WORKER.fullmatch(worker):
            raise UsageError(f"'{worker[:40]}' is no name for a worker; write small letters, digits and _, at most 24")
        if self._path(worker).exists() or self._path(worker, "revoked").exists():
            raise UsageError(f"there is or was a key for '{worker}'; write another name")
        self._write(JoinKey(self._fingerprint(), secrets.token_hex(32), worker))
        return self._path(worker)

    def revoke(self, worker: str, reason: str) -> None:
        if not WORKER.fullmatch(worker) or not self._path(worker).exists():
            known = ", ".join(self.names()) or "nobody"
            raise UsageError(f"'{worker[:40]}' has no key in {self._folder}; {known} has")
        written = self._path(worker, "new")
        written.touch(PRIVATE)
        written.write_text(f"{reason}\n")
        os.replace(written, self._path(worker, "revoked"))
        self._path(worker).unlink()

    def renew(self, fingerprint: str) -> None:
        """The controller has another certificate than when the keys were made."""
        for worker in self.names():
            if token := self.token(worker):
                self._write(JoinKey(fingerprint, token, worker))

    def _write(self, key: JoinKey) -> None:
        self._folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
        written = self._path(key.worker, "new")
        written.touch(PRIVATE)
        written.write_text(f"{key}\n")
        os.replace(written, self._path(key.worker))

    def _fingerprint(self) -> str:
        try:
            return JoinKey.read((self._run / JOIN_KEY).read_text()).fingerprint
        except OSError:
            raise UsageError(f"{self._run} is no run that others may join now; start it with local.listen") from None

    def _path(self, worker: str, kind: str = "key") -> Path:
        return self._folder / f"{worker}.{kind}"
