"""What a real run has committed survives the death of its process and a disk without room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.config import load
from tailrace.protocol import Finished, RelayJoined
from tailrace.store.journal import Journal, JournalError
from tailrace.store.run import RunStore
from tailrace.types import Segment

WRITER = """
import sys
from pathlib import Path
from tailrace.config import load
from tailrace.protocol import Finished, TrajectoryMeta
from tailrace.store.run import RunStore
from tailrace.types import Row, Segment, id_bytes

folder = Path(sys.argv[1])
fresh = not folder.exists()
store = RunStore.create(folder, load([], ["--model.preset", "qwen2.5-7b"])) if fresh else RunStore.reopen(folder)
store.vault.add_prompts([Row(0, id_bytes((1, 2)), "p", {})])
for id in range(store.last_seq, 20_000):
    store.vault.assign(id, 1, id, 0, False)
    store.vault.append(id, 1, [Segment.of(0, (id,) * 50, (-0.5,) * 50)])
    store.vault.finish(id, 1, "stop", 1.0)
    seq = store.record(float(id), Finished(0, TrajectoryMeta(id, 1, 50, 0, 0, "stop", 1.0)), [])
    store.commit()
    print(seq, flush=True)
"""


def write_and_kill(folder: Path, after: int) -> int:
    """Let a process write until it has reported so many commits, then kill it; the last that it reported."""
    words = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [line for _, line in zip(range(after), process.stdout, strict=False)]
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
    return int((seen + [line for line in rest if line])[-1])


def test_a_killed_writer_loses_only_what_it_had_not_committed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for after in (1, 40, 700, 333):
        reported = write_and_kill(folder, after)
        ids = [entry.event.meta.id for entry in Journal(folder).entries() if isinstance(entry.event, Finished)]
        assert ids == list(range(len(ids)))
        assert len(ids) >= reported
        with RunStore.reopen(folder) as store:
            assert store.last_seq == len(ids)
            payloads = [one.segments[1] for one in store.vault.read(ids)]
            assert payloads == [Segment.of(0, (id,) * 50, (-0.5,) * 50) for id in ids]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def write_without_end(store: RunStore) -> None:
    while True:
        store.record(1.0, RelayJoined(0, 1), [])
        store.commit()


def test_a_full_disk_leaves_what_was_committed(tiny_disk: Path) -> None:
    folder = tiny_disk / "run"
    with RunStore.create(folder, load([], ["--model.preset", "qwen2.5-7b"])) as store:
        with pytest.raises(JournalError, match="the disk is full"):
            write_without_end(store)
        committed = store.last_seq - 1
    assert committed > 10
    assert len(list(Journal(folder).entries())) == committed
