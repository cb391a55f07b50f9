"""Shared-memory files of weight versions: a `Region` is mapped for writing, a `MappedVersion` for reading.

Memory is allocated before it is written to, so that a full /dev/shm is a `SharedMemoryError` and never a SIGBUS. A
mapping holds a lock on its file, shared for readers: a region is only written again when nobody reads it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import TailraceError
from tailrace.types import Version, label
from tailrace.weights.layout import WeightLayout

if TYPE_CHECKING:
    import numpy as np
    import torch

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class SharedMemoryError(TailraceError):
    """A version cannot be stored or read here; the sentence says why."""


class NotOnThisHostError(TailraceError):
    """The file that the relay names is not on this host, or not writable for us."""


class MappedVersion:
    """A sealed version in this process's address space, read-only. It stays mapped while anything refers to it."""

    def __init__(self, version: Version, checksum: str, buffer: memoryview, path: Path) -> None:
        self.version = version
        self.checksum = checksum
        self.buffer = buffer
        self.path = path  # of the safetensors file, for another process of this host

    @property
    def size(self) -> int:
        return len(self.buffer)

    def tensors(self) -> dict[str, torch.Tensor]:
        return WeightLayout.read(self.buffer).views(self.buffer)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return WeightLayout.read(self.buffer).arrays(self.buffer)


class Region:
    """A new file of one version, mapped for writing. While it is locked no reader can map it."""

    def __init__(self, path: Path, size: int) -> None:
        assert size > 0
        self.path, self.size = path, size
        self.file = _new_file(path)
        fcntl.flock(self.file, fcntl.LOCK_EX)
        os.ftruncate(self.file, size)
        self.buffer = memoryview(mmap.mmap(self.file, size))

    @property
    def inode(self) -> int:
        return os.fstat(self.file).st_ino

    def rename(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path

    def lock(self) -> bool:
        """Make it writable again; False if somebody reads it."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.fchmod(self.file, 0o600)
        return True

    def unlock(self) -> None:
        """From here on it is read-only."""
        os.fchmod(self.file, 0o400)
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Idempotent. The mapping stays while anything refers to it."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def allocate(file: int, start: int, count: int, folder: Path, version: Version) -> None:
    """Back a range of a version's file with memory."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, start, count)
        else:
            os.pwrite(file, bytes(count), start)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise no_room(folder, version, os.fstat(file).st_size) from None


def no_room(folder: Path, version: Version, size: int) -> SharedMemoryError:
    room = os.statvfs(folder)
    return SharedMemoryError(
        f"no room for {label('version', version)} of {megabytes(size)} in {folder.parent}: "
        f"{megabytes(room.f_bavail * room.f_frsize)} are free; make it larger (docker: --shm-size) or lower "
        "relay.keep_versions"
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _new_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SharedMemoryError(f"{path} is being written already: only one sender may write a version") from None
