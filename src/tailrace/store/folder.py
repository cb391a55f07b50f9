"""The directory of a run: who may write there, whether it is still the same one, and who may read what is in it.

The process that writes a run holds its directory open and locked (`RunFolder`), so there is one writer at a time; the
lock ends with the process, however that ends. A directory is known by its inode, not by its name: if it is renamed or
replaced while the run goes on, nothing more is written under the old name. What a run leaves is for its owner alone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from tailrace.store.errors import JournalError

PRIVATE, PRIVATE_FOLDER = 0o600, 0o700  # prompts, answers and weights are nobody else's business
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.02

Identity = tuple[int, int]  # device and inode


class RunFolder:
    """Held open and locked by the process that writes the run."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(path)
        except JournalError:
            os.close(self._handle)
            raise

    @classmethod
    def make(cls, path: Path) -> RunFolder:
        try:
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            return cls(path)
        except OSError as error:
            raise JournalError(f"{path} cannot be written ({error.strerror}); name another directory") from error

    @property
    def identity(self) -> Identity:
        found = os.fstat(self._handle)
        return found.st_dev, found.st_ino

    @property
    def now(self) -> Path:
        """Where it is now, whatever it was called at first."""
        return Path(os.readlink(f"/proc/self/fd/{self._handle}"))

    def refuse_moved(self) -> None:
        try:
            refuse_moved(self.path, self.identity)
        except JournalError as error:
            where = f"it is at {self.now}" if identity_of(self.now) == self.identity else "it is gone"
            raise JournalError(f"{error}; {where}, and --resume goes on where a run lies") from None

    def _lock(self, path: Path) -> None:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S)  # it may be only somebody who asks whether the run is being written
            else:
                return
        raise JournalError(f"{path} is a run that another process is writing; wait for its end, or stop it")

    def close(self) -> None:
        os.close(self._handle)


def is_being_written(folder: Path) -> bool:
    """Whether some process has the run open to write it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def identity_of(path: Path) -> Identity | None:
    """None if there is nothing of this name. A disk that cannot answer is another matter."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def refuse_moved(path: Path, identity: Identity) -> None:
    """JournalError unless this is still the directory that it was; for components of a run that write there by its
    name."""
    if identity_of(path) != identity:
        raise JournalError(_moved(path))


def _moved(path: Path) -> str:
    return f"{path} is no longer the directory of this run: it was renamed, moved or replaced while the run went on"
