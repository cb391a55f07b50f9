"""Versions in shared memory: whole and checked, or not served at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import xxhash

from tailrace.relay import checksum
from tailrace.relay.arena import Arena, ArenaError, ArenaReader, Writer, arena_path, clear_abandoned

DATA = os.urandom(100_000)
SUM = xxhash.xxh3_64_hexdigest(DATA)


def write(arena: Arena, version: int, data: bytes = DATA) -> Writer:
    writer = arena.create(version, len(data))
    while writer.written < writer.size:
        room = writer.claim(30_000)
        room[:] = data[writer.written : writer.written + len(room)]
        writer.advance(len(room))
    return writer


def stored(arena: Arena, version: int) -> Path:
    write(arena, version).seal(SUM)
    return next(arena.path.glob(f"v{version}.*"))


def test_a_sealed_version_is_read_by_anyone_and_can_be_written_by_none(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    stored(arena, 5)
    mapped = ArenaReader(arena.path).open(5)
    assert bytes(mapped.buffer) == DATA
    assert mapped.buffer.readonly
    assert (arena.versions(), arena.held_bytes()) == ((5,), len(DATA))


def test_a_version_in_the_making_is_not_served_but_counted(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    writer = write(arena, 5)
    assert (arena.versions(), arena.held_bytes()) == ((), len(DATA))
    with pytest.raises(ArenaError, match=r"v5 is not in .* holds nothing"):
        arena.open(5)
    writer.discard()
    assert arena.held_bytes() == 0


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    file = stored(arena, 5)
    file.chmod(0o600)
    file.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    with pytest.raises(ArenaError, match="damaged: its checksum"):
        ArenaReader(arena.path).open(5)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    os.truncate(_writable(stored(arena, 5)), 70_000)
    with pytest.raises(ArenaError, match="70,000 bytes are left of 100,000"):
        ArenaReader(arena.path).open(5)


def _writable(file: Path) -> Path:
    file.chmod(0o600)
    return file


def test_a_wrong_checksum_or_a_missing_end_is_never_sealed(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    damaged = write(arena, 5)
    with pytest.raises(ArenaError, match="damaged on its way"):
        damaged.seal("0" * 16)
    short = arena.create(6, 10)
    with pytest.raises(ArenaError, match="0 of 10 bytes arrived"):
        short.seal(SUM)
    assert arena.versions() == ()


def test_a_dropped_version_stays_valid_for_those_who_have_mapped_it(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    stored(arena, 5)
    mapped = ArenaReader(arena.path).open(5)
    arena.drop(5)
    arena.drop(5)  # harmless
    assert bytes(mapped.buffer) == DATA
    assert (arena.versions(), arena.held_bytes()) == ((), 0)


def test_the_quota_bounds_what_is_sealed(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", quota=150_000)
    stored(arena, 1)
    stored(arena, 2)  # on top, until the oldest is dropped
    with pytest.raises(ArenaError, match=r"v3 of 0\.1 MB does not fit .* relay.quota_gbytes"):
        arena.create(3, len(DATA))
    arena.drop(1)
    stored(arena, 3)
    with pytest.raises(ArenaError, match="does not fit"):
        Arena(tmp_path / "b", quota=150_000).create(1, 150_001)


def test_a_full_memory_is_one_sentence_before_or_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(tmp_path / "a")
    with pytest.raises(ArenaError, match="no room for v5"):
        arena.create(5, 1 << 60)
    writer = arena.create(6, 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match=r"no room for v6 .* are free"):
        writer.claim(10)


def test_what_a_dead_process_left_is_cleared_by_the_next_owner_and_a_live_one_is_respected(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a")
    stored(arena, 5)
    write(arena, 6)
    with pytest.raises(ArenaError, match="in use by a process that is alive"):
        Arena(tmp_path / "a")
    os.close(arena._lock)  # as the end of a process does
    assert Arena(tmp_path / "a").held_bytes() == 0


def test_arenas_of_dead_processes_are_cleared_and_others_are_left(tmp_path: Path) -> None:
    alive, dead = (Arena(arena_path(name, "h0", tmp_path)) for name in ("alive", "dead"))
    stored(dead, 5)
    os.close(dead._lock)  # as the end of a process does
    (tmp_path / "tailrace-notes").mkdir()
    assert clear_abandoned(tmp_path) == [dead.path]
    assert {path.name for path in tmp_path.iterdir()} == {alive.path.name, "tailrace-notes"}


def test_an_arena_in_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "real")
    with pytest.raises(ArenaError, match="belongs to somebody else"):
        Arena(tmp_path / "a")


def test_a_removed_arena_leaves_nothing(tmp_path: Path) -> None:
    arena = Arena(arena_path("run/of mine", "h0", tmp_path))
    stored(arena, 5)
    arena.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_of_many_pieces_is_the_same_however_they_come_and_finds_a_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksum, "PIECE", 30_000)
    whole = checksum.checksum(DATA)
    growing = checksum.Checksum(memoryview(DATA), several=True)
    for position in (1, 29_999, 30_001, 95_000, len(DATA)):
        growing.advance(position)
    assert growing.digest() == whole != SUM
    assert checksum.checksum(DATA[30_000:60_000] + DATA[:30_000] + DATA[60_000:]) != whole
