"""Versions in shared memory: whole and checked, or not served at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import xxhash

from tailrace.weights import checksum
from tailrace.weights.region import SharedMemoryError
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader, clear_abandoned, shared_memory_path
from tailrace.weights.version_buffer import InterruptedVersionError, VersionBuffer

DATA = os.urandom(100_000)
SUM = xxhash.xxh3_64_hexdigest(DATA)


def write(memory: SharedMemory, version: int, data: bytes = DATA) -> VersionBuffer:
    buffer = memory.create(version, len(data))
    writer = buffer.whole()
    while writer.written < writer.size:
        (room,) = writer.claim(30_000)
        room[:] = data[writer.written : writer.written + len(room)]
        writer.advance(len(room))
    return buffer


def stored(memory: SharedMemory, version: int) -> Path:
    write(memory, version).seal(SUM)
    return next(memory.path.glob(f"v{version}.*"))


def test_a_sealed_version_is_read_by_anyone_and_can_be_written_by_none(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    stored(memory, 5)
    mapped = SharedMemoryReader(memory.path).open(5)
    assert bytes(mapped.buffer) == DATA
    assert mapped.buffer.readonly
    assert (memory.versions(), memory.held_bytes()) == ((5,), len(DATA))


def test_a_version_in_the_making_is_not_served_but_counted(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    writer = write(memory, 5)
    assert (memory.versions(), memory.held_bytes()) == ((), len(DATA))
    with pytest.raises(SharedMemoryError, match=r"v5 is not in .* holds nothing"):
        memory.open(5)
    writer.discard()
    assert memory.held_bytes() == 0


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    file = stored(memory, 5)
    file.chmod(0o600)
    file.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    with pytest.raises(SharedMemoryError, match="damaged: its checksum"):
        SharedMemoryReader(memory.path).open(5)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    os.truncate(_writable(stored(memory, 5)), 70_000)
    with pytest.raises(SharedMemoryError, match="70,000 bytes are left of 100,000"):
        SharedMemoryReader(memory.path).open(5)


def _writable(file: Path) -> Path:
    file.chmod(0o600)
    return file


def test_a_wrong_checksum_or_a_missing_end_is_never_sealed(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    damaged = write(memory, 5)
    with pytest.raises(SharedMemoryError, match="damaged in transit"):
        damaged.seal("0" * 16)
    short = memory.create(6, 10)
    with pytest.raises(SharedMemoryError, match="0 of 10 bytes arrived"):
        short.seal(SUM)
    assert memory.versions() == ()


def test_a_dropped_version_stays_valid_for_those_who_have_mapped_it(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    stored(memory, 5)
    mapped = SharedMemoryReader(memory.path).open(5)
    memory.drop(5)
    memory.drop(5)  # harmless
    assert bytes(mapped.buffer) == DATA
    assert (memory.versions(), memory.held_bytes()) == ((), 0)


def test_the_quota_bounds_what_is_sealed(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a", quota=150_000)
    stored(memory, 1)
    stored(memory, 2)  # on top, until the oldest is dropped
    with pytest.raises(SharedMemoryError, match=r"v3 of 0\.1 MB does not fit .* relay.quota_gbytes"):
        memory.create(3, len(DATA))
    memory.drop(1)
    stored(memory, 3)
    with pytest.raises(SharedMemoryError, match="does not fit"):
        SharedMemory(tmp_path / "b", quota=150_000).create(1, 150_001)


def test_a_full_memory_is_one_sentence_before_or_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(tmp_path / "a")
    with pytest.raises(SharedMemoryError, match="no room for v5"):
        memory.create(5, 1 << 60)
    writer = memory.create(6, 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=r"no room for v6 .* are free"):
        writer.whole().claim(10)


def test_what_a_dead_process_left_is_cleared_by_the_next_owner_and_a_live_one_is_respected(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    stored(memory, 5)
    write(memory, 6)
    with pytest.raises(SharedMemoryError, match="in use by a live process"):
        SharedMemory(tmp_path / "a")
    os.close(memory._lock)  # as the end of a process does
    assert SharedMemory(tmp_path / "a").held_bytes() == 0


def test_folders_of_dead_processes_are_cleared_and_others_are_left(tmp_path: Path) -> None:
    alive, dead = (SharedMemory(shared_memory_path(name, "h0", tmp_path)) for name in ("alive", "dead"))
    stored(dead, 5)
    os.close(dead._lock)  # as the end of a process does
    (tmp_path / "tailrace-notes").mkdir()
    assert clear_abandoned(tmp_path) == [dead.path]
    assert {path.name for path in tmp_path.iterdir()} == {alive.path.name, "tailrace-notes"}


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "real")
    with pytest.raises(SharedMemoryError, match="belongs to another user"):
        SharedMemory(tmp_path / "a")


def test_removed_shared_memory_leaves_nothing(tmp_path: Path) -> None:
    memory = SharedMemory(shared_memory_path("run/of mine", "h0", tmp_path))
    stored(memory, 5)
    memory.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_of_many_pieces_is_the_same_however_they_come_and_finds_a_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksum, "PIECE", 30_000)
    whole = checksum.checksum(DATA)
    growing = checksum.RunningChecksum(memoryview(DATA), parallel=True)
    for position in (1, 29_999, 30_001, 95_000, len(DATA)):
        growing.advance(position)
    assert growing.digest() == whole != SUM
    assert checksum.checksum(DATA[30_000:60_000] + DATA[:30_000] + DATA[60_000:]) != whole


def test_a_version_is_read_behind_its_writer_and_an_interruption_ends_the_wait(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "a")
    buffer = memory.create(5, len(DATA), content_id="first")
    assert bytes(buffer.ready(0, 0.0)) == b""
    part = buffer.whole()
    part.claim(len(DATA))[0][:] = DATA
    assert not part.confirm(len(DATA), bytes(8))  # wrong checksums: nothing can be read
    assert bytes(buffer.ready(0, 0.0)) == b""
    assert part.confirm(len(DATA), bytes.fromhex(SUM))
    assert bytes(buffer.ready(30_000, 0.0)) == DATA[30_000:]
    assert buffer.checksum(0.0) is None  # not before it is sealed
    part.pause(seconds=-1.0)
    with pytest.raises(InterruptedVersionError, match="v5 was interrupted after 100,000 bytes"):
        buffer.checksum(0.0)
    buffer.cancel()
    with pytest.raises(InterruptedVersionError, match="v5 was dropped while it was received"):
        buffer.seal(SUM)
