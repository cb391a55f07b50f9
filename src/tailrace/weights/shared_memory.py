"""The weight versions of one host, as files in shared memory: written once, sealed, mapped by every replica.

    <base>/tailrace-<run>-<component>/
        lock                                        held by the process that writes here, as long as it lives
        v6.partial                                  being written
        v5.<checksum>.<bytes>.safetensors           sealed by a rename: the name has its checksum and its size
        v4.spare                                    dropped; its memory is reused for the next version

A relay owns a `SharedMemory` and writes; replicas on the host read the same folder with a `SharedMemoryReader`. What
`open` returns is complete and verified, and stays valid for whoever has mapped it, also after a `drop`. Memory is used
once, however many processes map it.

A trainer on the host may write a version in place, from its GPU. New memory makes that slow: to allocate it and to
register it with CUDA takes ten times as long as to fill it. So the memory of such a version is reused once it is
dropped and no reader has it mapped any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tailrace.types import Version, label
from tailrace.weights.checksum import checksum
from tailrace.weights.region import MappedVersion, Region, SharedMemoryError, megabytes, no_room
from tailrace.weights.version_buffer import VersionBuffer

SHM = Path("/dev/shm")
SEALED = re.compile(r"v(?P<version>\d+)\.(?P<checksum>[0-9a-f]{16})\.(?P<size>\d+)\.safetensors")


class SealedFile(NamedTuple):
    """What the name of a sealed file says."""

    version: Version
    checksum: str
    size: int
    path: Path


def shared_memory_path(run: str, component: str, base: Path | None = None) -> Path:
    """The folder of a component (`h0`: relay 0) of a run; `run` must be unique on this host."""
    name = re.sub(r"[^\w.-]+", "-", f"tailrace-{run}-{component}")
    return (base or default_base()) / name


def default_base() -> Path:
    return SHM if os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())


class SharedMemoryReader:
    """For a process that only reads. Cheap to create: the folder is listed on every call."""

    def __init__(self, path: Path, parallel: bool = False) -> None:
        """`parallel`: checksums are verified by several threads."""
        self.path = path
        self._parallel = parallel
        self._verified: set[str] = set()  # names of files whose checksum this process has verified

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(file.version for file in self._sealed_files()))

    def held_bytes(self) -> int:
        """Of all versions, including those being written."""
        total = 0
        for file in self._files("v*"):
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def open(self, version: Version) -> MappedVersion:
        """Map a version without a copy. Its checksum is verified once per process."""
        file = next((file for file in self._sealed_files() if file.version == version), None)
        if file is None:
            held = ", ".join(label("version", v) for v in self.versions()) or "nothing"
            raise SharedMemoryError(f"{label('version', version)} is not in {self.path}, which holds {held}")
        mapped = self._map(file)
        if file.path.name not in self._verified:
            if checksum(mapped.buffer, self._parallel) != file.checksum:
                raise SharedMemoryError(f"{file.path} is damaged: its checksum is not the one it was sealed with")
            self._verified.add(file.path.name)
        return mapped

    def _map(self, sealed: SealedFile) -> MappedVersion:
        try:
            with sealed.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != sealed.size:
                    raise SharedMemoryError(f"{sealed.path} is damaged: {size:,} bytes are left of {sealed.size:,}")
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the mapping keeps it
                sealed.path.stat()  # now that nobody can write to it: is it still this version?
                memory = mmap.mmap(file.fileno(), sealed.size, access=mmap.ACCESS_READ)
        except (FileNotFoundError, BlockingIOError):
            raise SharedMemoryError(f"{label('version', sealed.version)} was just dropped from {self.path}") from None
        return MappedVersion(sealed.version, sealed.checksum, memoryview(memory), sealed.path)

    def _sealed_files(self) -> Iterator[SealedFile]:
        for file in self._files("v*.safetensors"):
            if match := SEALED.fullmatch(file.name):
                yield SealedFile(int(match["version"]), match["checksum"], int(match["size"]), file)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.path.glob(pattern))


class SharedMemory(SharedMemoryReader):
    """For the one process that writes. Files that a dead predecessor left are deleted.

    `quota` bounds the bytes of sealed versions (0: no bound). The version being written comes on top, because control
    drops the oldest version only when the next one is there.
    """

    def __init__(self, path: Path, quota: int = 0) -> None:
        super().__init__(path)
        self.quota = quota
        self._in_place: dict[Version, Region] = {}  # of sealed versions that were written in place
        self._spare: Region | None = None
        self._lock = _lock_folder(path)
        for file in self._files("v*"):
            file.unlink(missing_ok=True)

    def create(
        self, version: Version, size: int, in_place: bool = False, content_id: str = "", generation: int = 0
    ) -> VersionBuffer:
        """Begin to write a version of exactly `size` bytes. `in_place`: another process of this host writes it."""
        if version in self.versions():
            raise SharedMemoryError(f"{label('version', version)} is in {self.path} already; drop it first")
        self._check_quota(version, size)
        path = self.path / f"{label('version', version)}.partial"
        region = self._reuse_spare(path, size, in_place)
        if region is None:
            self._check_room(version, size)
            region = Region(path, size)
        return VersionBuffer(version, region, self._seal, in_place, content_id, generation)

    def drop(self, version: Version) -> None:
        """Whoever has the version mapped keeps it. Its memory is freed with the last mapping, or kept for the next
        version that is written in place."""
        for file in self._sealed_files():
            if file.version == version:
                self._free(file)
                self._verified.discard(file.path.name)

    def remove(self) -> None:
        """Delete all versions and the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _free(self, file: SealedFile) -> None:
        region = self._in_place.pop(file.version, None)
        if region is None:
            file.path.unlink(missing_ok=True)
            return
        self._free_spare()
        region.rename(self.path / f"{label('version', file.version)}.spare")
        self._spare = region

    def _reuse_spare(self, path: Path, size: int, in_place: bool) -> Region | None:
        """The spare region, if it fits and nobody reads it. Otherwise it is freed."""
        spare = self._spare
        if spare is None or not in_place or spare.size != size or not spare.lock():
            self._free_spare()
            return None
        spare.rename(path)
        self._spare = None
        return spare

    def _free_spare(self) -> None:
        if self._spare is not None:
            self._spare.delete()
            self._spare = None

    def _check_quota(self, version: Version, size: int) -> None:
        held = sum(file.size for file in self._sealed_files())
        if self.quota and max(held, size) > self.quota:
            raise SharedMemoryError(
                f"{label('version', version)} of {megabytes(size)} does not fit into {self.path}: {megabytes(held)} of "
                f"its {megabytes(self.quota)} are taken; raise relay.quota_gbytes or lower relay.keep_versions"
            )

    def _check_room(self, version: Version, size: int) -> None:
        """Refuse early what cannot fit; others may still take the memory while this version is written."""
        room = os.statvfs(self.path)
        if size > room.f_bavail * room.f_frsize:
            raise no_room(self.path, version, size)

    def _seal(self, buffer: VersionBuffer, checksum: str) -> MappedVersion:
        region, version = buffer.region, buffer.version
        region.unlock()
        region.rename(self.path / f"{label('version', version)}.{checksum}.{region.size}.safetensors")
        if buffer.in_place:
            self._in_place[version] = region
        else:
            region.close()
        self._verified.add(region.path.name)  # it was hashed while it was written
        return self._map(SealedFile(version, checksum, region.size, region.path))


# -------------------------------------------------------------------------------------------------- owner of a folder


def clear_abandoned(base: Path | None = None) -> list[Path]:
    """Delete the folders whose owners are dead, which killed runs have left in memory. Returns which."""
    cleared: list[Path] = []
    for path in (base or default_base()).glob("tailrace-*"):
        try:
            lock = _lock(path, os.O_RDWR)
        except OSError:
            continue  # its owner is alive, it belongs to another user, or it is none of ours
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        cleared.append(path)
    return cleared


def _lock_folder(path: Path) -> int:
    """Lock a folder for as long as this process lives. If somebody deletes it meanwhile, create it again."""
    while True:
        _make_private(path)
        try:
            lock = _lock(path, os.O_RDWR | os.O_CREAT)
            if _is_same_file(path / "lock", lock):
                return lock
            os.close(lock)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            raise SharedMemoryError(f"{path} is in use by a live process: stop it, or rename the run") from None


def _make_private(path: Path) -> None:
    """The base folder may be writable for everybody on the host: refuse a folder that another user has put there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise SharedMemoryError(f"{path} belongs to another user: remove it, or give the run another name")


def _lock(path: Path, flags: int) -> int:
    file = os.open(path / "lock", flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _is_same_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
