"""The versions that one host holds, as files in shared memory: written once, sealed, mapped by everybody.

    <base>/tailrace-<run>-<part>/
        lock                                        held by the process that writes here, as long as it lives
        v6.partial                                  being written
        v5.<checksum>.<bytes>.safetensors           sealed: the name itself is the seal, so one rename does it
        v4.spare                                    dropped; its memory is there for the next version

A relay owns an `Arena` and writes; replicas on the host open the same folder with an `ArenaReader`. The promise: what
`open` returns is complete and checked, and stays valid for whoever has mapped it, also after a `drop`; memory counts
once, however many processes map it. Memory is claimed before it is written to, so that a full /dev/shm is an
`ArenaError` with a sentence and never a SIGBUS.

A trainer on the host may write a version in place, from its GPU. What makes that slow is new memory: to claim it and to
make it known to the GPU takes ten times as long as to fill it. So the memory of such a version is used again once it is
dropped and no reader has it mapped any more: a mapping holds a shared lock on its file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.errors import TailraceError
from tailrace.relay.checksum import Checksum, checksum
from tailrace.relay.layout import Layout
from tailrace.types import Version, label

if TYPE_CHECKING:
    import numpy as np
    import torch

SHARED_MEMORY = Path("/dev/shm")
SEALED = re.compile(r"v(?P<version>\d+)\.(?P<checksum>[0-9a-f]{16})\.(?P<size>\d+)\.safetensors")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class ArenaError(TailraceError):
    """A version cannot be stored or read here; the sentence says why."""


class Mapped:
    """A sealed version in this process's address space, read-only. It stays mapped while anything refers to it."""

    def __init__(self, version: Version, checksum: str, buffer: memoryview) -> None:
        self.version = version
        self.checksum = checksum
        self.buffer = buffer

    @property
    def size(self) -> int:
        return len(self.buffer)

    def tensors(self) -> dict[str, torch.Tensor]:
        return Layout.read(self.buffer).views(self.buffer)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return Layout.read(self.buffer).arrays(self.buffer)


class Seal(NamedTuple):
    """A sealed file, as its name describes it."""

    version: Version
    checksum: str
    size: int
    path: Path


def arena_path(run: str, part: str, base: Path | None = None) -> Path:
    """Where the arena of a part (`h0`: relay 0) of a run lies; `run` must be unique on this host."""
    name = re.sub(r"[^\w.-]+", "-", f"tailrace-{run}-{part}")
    return (base or default_base()) / name


def default_base() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class ArenaReader:
    """The view of a process that only reads. Cheap to make: the folder is looked at when something is asked for."""

    def __init__(self, path: Path, several: bool = False) -> None:
        """`several`: checksums are verified by several threads."""
        self.path = path
        self._several = several
        self._checked: set[str] = set()  # names of files whose checksum was found right in this process

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(seal.version for seal in self._seals()))

    def held_bytes(self) -> int:
        """Of all versions here, those that are being written included."""
        total = 0
        for file in self._files("v*"):
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def open(self, version: Version) -> Mapped:
        """Map a version without copying it. Its checksum is verified the first time in each process."""
        seal = next((seal for seal in self._seals() if seal.version == version), None)
        if seal is None:
            held = ", ".join(label("version", v) for v in self.versions()) or "nothing"
            raise ArenaError(f"{label('version', version)} is not in {self.path}, which holds {held}")
        mapped = self._map(seal)
        if seal.path.name not in self._checked:
            if checksum(mapped.buffer, self._several) != seal.checksum:
                raise ArenaError(f"{seal.path} is damaged: its checksum is not the one it was sealed with")
            self._checked.add(seal.path.name)
        return mapped

    def _map(self, seal: Seal) -> Mapped:
        try:
            with seal.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != seal.size:
                    raise ArenaError(f"{seal.path} is damaged: {size:,} bytes are left of {seal.size:,}")
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the mapping has it from here on, until it goes
                seal.path.stat()  # is it still a version, now that nobody can write to it?
                memory = mmap.mmap(file.fileno(), seal.size, access=mmap.ACCESS_READ)
        except (FileNotFoundError, BlockingIOError):
            raise ArenaError(f"{label('version', seal.version)} was dropped from {self.path} just now") from None
        return Mapped(seal.version, seal.checksum, memoryview(memory))

    def _seals(self) -> Iterator[Seal]:
        for file in self._files("v*.safetensors"):
            if match := SEALED.fullmatch(file.name):
                yield Seal(int(match["version"]), match["checksum"], int(match["size"]), file)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.path.glob(pattern))


class Arena(ArenaReader):
    """The view of the one process that writes. What a dead predecessor left in the folder is cleared away.

    `quota` bounds the bytes of sealed versions (0: no bound). The one that is being written comes on top, because
    control frees the oldest version only when the next one is there.
    """

    def __init__(self, path: Path, quota: int = 0) -> None:
        super().__init__(path)
        self.quota = quota
        self._placed: dict[Path, Memory] = {}  # of sealed versions that were written in place
        self._spare: Spare | None = None
        self._lock = _own(path)
        for file in self._files("v*"):
            file.unlink(missing_ok=True)

    def create(self, version: Version, size: int, in_place: bool = False) -> Writer:
        """Begin to write a version of exactly `size` bytes. `in_place`: another process of this host writes it."""
        if version in self.versions():
            raise ArenaError(f"{label('version', version)} is in {self.path} already; drop it first")
        self._check_quota(version, size)
        path = self.path / f"{label('version', version)}.partial"
        memory = self._reused(path, size, in_place)
        if memory is None:
            self._check_room(version, size)
            memory = Memory(path, size)
        return Writer(self, version, path, memory, in_place)

    def drop(self, version: Version) -> None:
        """Forget a version. Whoever has it mapped keeps it; the memory is freed with the last of them, or is kept for
        the next version that is written in place."""
        for seal in self._seals():
            if seal.version == version:
                self._put_away(seal)
                self._checked.discard(seal.path.name)

    def remove(self) -> None:
        """Forget everything and the folder itself."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _put_away(self, seal: Seal) -> None:
        memory = self._placed.pop(seal.path, None)
        if memory is None:
            seal.path.unlink(missing_ok=True)
            return
        self._free_spare()
        path = self.path / f"{label('version', seal.version)}.spare"
        os.rename(seal.path, path)
        self._spare = Spare(path, memory)

    def _reused(self, path: Path, size: int, in_place: bool) -> Memory | None:
        """The spare memory under a new name, if it fits and nobody reads it. Otherwise it is freed."""
        spare = self._spare
        if spare is None or not in_place or spare.memory.size != size or not spare.memory.lock():
            self._free_spare()
            return None
        os.rename(spare.path, path)
        self._spare = None
        return spare.memory

    def _free_spare(self) -> None:
        if self._spare is not None:
            self._spare.path.unlink(missing_ok=True)
            self._spare.memory.close()
            self._spare = None

    def _check_quota(self, version: Version, size: int) -> None:
        held = sum(seal.size for seal in self._seals())
        if self.quota and max(held, size) > self.quota:
            raise ArenaError(
                f"{label('version', version)} of {_mb(size)} does not fit into {self.path}: {_mb(held)} of its "
                f"{_mb(self.quota)} are taken; raise relay.quota_gbytes or lower relay.keep_versions"
            )

    def _check_room(self, version: Version, size: int) -> None:
        """Refuse at once what cannot end well; others may still take the room while this version is written."""
        room = os.statvfs(self.path)
        if size > room.f_bavail * room.f_frsize:
            raise no_room(self.path, version, size)

    def _sealed(self, writer: Writer, checksum: str) -> Mapped:
        path = self.path / f"{label('version', writer.version)}.{checksum}.{writer.size}.safetensors"
        writer.memory.close_for_writing()
        os.rename(writer.path, path)
        if writer.in_place:
            self._placed[path] = writer.memory
        else:
            writer.memory.close()
        self._checked.add(path.name)  # it was summed up while it was written
        return self._map(Seal(writer.version, checksum, writer.size, path))


class Memory:
    """The file of one version, mapped for writing. While it is locked no reader can map it."""

    def __init__(self, path: Path, size: int) -> None:
        assert size > 0
        self.size = size
        self._file = _new_file(path)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.ftruncate(self._file, size)
        self.buffer = memoryview(mmap.mmap(self._file, size))

    @property
    def inode(self) -> int:
        return os.fstat(self._file).st_ino

    def back(self, start: int, count: int) -> None:
        back(self._file, start, count)

    def lock(self) -> bool:
        """Open it for writing again; False if somebody reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.fchmod(self._file, 0o600)
        return True

    def close_for_writing(self) -> None:
        os.fchmod(self._file, 0o400)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Again, perhaps. The mapping stays while anything refers to it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class Spare(NamedTuple):
    """Memory of a version that was dropped."""

    path: Path
    memory: Memory


class Writer:
    """A version that is being written from its first byte to its last, and summed up on the way.

    `claim` hands out the next stretch of memory to fill, `confirm` says that it is filled and with what sums of its
    pieces, `seal` makes it a version if the checksum is right. Everything else ends in `discard`. One that is written
    in place is claimed and filled by another process, which has no sums to compare with, as nothing came over a wire:
    `advance` says how much is filled.
    """

    def __init__(self, arena: Arena, version: Version, path: Path, memory: Memory, in_place: bool = False) -> None:
        self.arena, self.version, self.path, self.memory = arena, version, path, memory
        self.size, self.in_place = memory.size, in_place
        self.buffer = memory.buffer
        self.written = 0
        self.sums = Checksum(memory.buffer, several=in_place)

    @property
    def summed(self) -> int:
        """Bytes that can be sent on, together with their sums."""
        return self.sums.summed

    def claim(self, count: int) -> memoryview:
        """The next `count` bytes, or what is left, backed by memory that is really there."""
        end = min(self.size, self.written + count)
        try:
            self.memory.back(self.written, end - self.written)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise no_room(self.arena.path, self.version, self.size) from None
        return self.buffer[self.written : end]

    def confirm(self, count: int, sums: bytes) -> bool:
        """False if the pieces that were written are not what their sums say: then they are to be written again."""
        right = self.sums.confirm(self.written + count, sums)
        self.written += count if right else 0
        return right

    def advance(self, count: int) -> None:
        self.written += count
        self.sums.advance(self.written)

    def seal(self, checksum: str = "") -> Mapped:
        """Make it a version; `checksum` is what the first sender of these bytes says it is."""
        name = label("version", self.version)
        if self.written < self.size:
            raise ArenaError(f"{name} is incomplete: {self.written:,} of {self.size:,} bytes arrived")
        found = self.sums.digest()
        if found != checksum and not self.in_place:
            raise ArenaError(f"{name} was damaged on its way: its checksum is not the one it was sent with")
        mapped = self.arena._sealed(self, found)
        self.buffer = mapped.buffer  # from here on nobody can write; who still reads the other mapping may go on
        self.sums.let_go()
        del self.memory
        return mapped

    def discard(self) -> None:
        """Free the memory of a version that will not be completed."""
        self.path.unlink(missing_ok=True)
        self.memory.close()


def no_room(path: Path, version: Version, size: int) -> ArenaError:
    room = os.statvfs(path)
    return ArenaError(
        f"no room for {label('version', version)} of {_mb(size)} in {path.parent}: "
        f"{_mb(room.f_bavail * room.f_frsize)} are free; make it larger (docker: --shm-size) or keep fewer versions"
    )


def back(file: int, start: int, count: int) -> None:
    """See to it that there is memory behind a part of a file, rather than when it is written to."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, count)
    else:
        os.pwrite(file, bytes(count), start)


def _new_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ArenaError(f"{path} is being written already: a version is written by one sender at a time") from None


# ------------------------------------------------------------------------------------------------- who owns a folder


def clear_abandoned(base: Path | None = None) -> list[Path]:
    """Remove the arenas whose owners are dead: what runs that were killed have left in memory. Returns which."""
    cleared: list[Path] = []
    for path in (base or default_base()).glob("tailrace-*"):
        try:
            lock = _lock(path, os.O_RDWR)
        except OSError:
            continue  # alive, somebody else's, or not an arena
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        cleared.append(path)
    return cleared


def _own(path: Path) -> int:
    """Lock a folder for as long as this process lives. Somebody may clear it away while we do: then make it anew."""
    while True:
        _make_private(path)
        try:
            lock = _lock(path, os.O_RDWR | os.O_CREAT)
            if _is(path / "lock", lock):
                return lock
            os.close(lock)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            raise ArenaError(f"{path} is in use by a process that is alive: stop it, or rename the run") from None


def _make_private(path: Path) -> None:
    """The base folder may be open to everybody on the host: nobody else shall have put something in our place."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ArenaError(f"{path} belongs to somebody else: remove it, or give the run another name")


def _lock(path: Path, flags: int) -> int:
    file = os.open(path / "lock", flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
