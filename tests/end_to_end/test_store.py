"""What a real run has committed survives the death of its process and a disk without room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sample_stores import PROMPT, grant, ids_in, piece, put, tokens_of
from tailrace.config import load
from tailrace.protocol import Finished, RelayJoined
from tailrace.samples.file import SampleFile
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file
from tailrace.store.journal import Journal, JournalError
from tailrace.store.run import RunStore

WRITER = """
import sys
from pathlib import Path
sys.path.append(sys.argv[2])
from sample_stores import PROMPT, grant, piece, put
from tailrace.config import load
from tailrace.protocol import Finished, Request, TrajectoryMeta
from tailrace.samples.file import SampleFile
from tailrace.samples.schema import sample_file
from tailrace.store.run import RunStore

folder = Path(sys.argv[1])
fresh = not folder.exists()
store = RunStore.create(folder, load([], ["--model.preset", "qwen2.5-7b"])) if fresh else RunStore.reopen(folder)
samples = SampleFile.at(sample_file(folder, 0))
samples.add_prompts([PROMPT])
for id in range(store.last_seq, 20_000):
    samples.assign([grant(id)])
    put(samples, 0, id, 1, 0, piece(id, 0, 50))
    samples.commit()
    store.trajectories.assign([Request(id, 1, id // 4, PROMPT.id, 3)])
    store.trajectories.finish(TrajectoryMeta(id, 1, 50, 1, 1, "stop", 1.0))
    seq = store.record(float(id), Finished(0, TrajectoryMeta(id, 1, 50, 1, 1, "stop", 1.0)), [])
    store.commit()
    print(seq, flush=True)
"""


def write_and_kill(folder: Path, after: int) -> int:
    """Let a process write until it has reported so many commits, then kill it; the last that it reported."""
    words = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parents[1])]
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
            assert {id: one.reward for id, one in store.trajectories.results(ids).items()} == dict.fromkeys(ids, 1.0)
        with closing(SampleReader(sample_file(folder, 0))) as reader:
            assert [ids_in(one) for one in reader.read(ids)] == [tokens_of(id, 0, 50).tolist() for id in ids]


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


def test_a_full_disk_leaves_the_samples_that_were_committed_and_the_store_goes_on_when_there_is_room(
    tiny_disk: Path,
) -> None:
    file = SampleFile.create(sample_file(tiny_disk, 0))
    file.add_prompts([PROMPT])
    file.assign([grant(0)])
    with pytest.raises(JournalError, match="the disk is full; what was committed before is kept"):
        grow_without_end(file)
    committed = file.heads[0].tokens
    file.close()
    assert committed > 1000
    remount(tiny_disk, "2m")
    with closing(SampleFile.open(sample_file(tiny_disk, 0))) as file:
        put(file, 0, 0, 1, committed, piece(0, committed, committed + 5))
        file.commit()
    with closing(SampleReader(sample_file(tiny_disk, 0))) as reader:
        assert ids_in(*reader.read([0])) == tokens_of(0, 0, committed + 5).tolist()


def grow_without_end(file: SampleFile) -> None:
    while True:
        start = file.heads[0].tokens if file.heads else 0
        put(file, 0, 0, 1, start, piece(0, start, start + 500))
        file.commit()


def remount(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True, timeout=20)
