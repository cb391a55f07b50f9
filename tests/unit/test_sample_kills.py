"""A store process that is killed at random moments: what was acknowledged is there, once, and nothing else changes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from sample_stores import DEADLINE_S, client, ids_in, once_durable, piece, tokens_of, until
from tailrace.samples.client import SampleClient
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file

SAMPLES, KILLS = 12, 6
CHILD = """
import sys, threading
from pathlib import Path
from sample_stores import RunningStore, grant
running = RunningStore(Path(sys.argv[1]), int(sys.argv[2]))
running.assign(*[grant(id) for id in range(int(sys.argv[3]))])
print(running.port, flush=True)
threading.Event().wait()
"""


class StoreProcess:
    """On the same port each time, so that its clients find it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", CHILD, str(self._folder), str(self.port), str(SAMPLES)]
        environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline())

    def stop(self) -> None:
        """And wait until all of its threads stand still: the signal takes effect a little later."""
        self._child.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._child.pid}/task")
        until(lambda: all((each / "stat").read_text().rsplit(") ", 1)[1][0] == "T" for each in threads.iterdir()))

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate(timeout=DEADLINE_S)


class Generation:
    """Appends to all samples in turn, and notes what was acknowledged of each."""

    def __init__(self, replica: SampleClient) -> None:
        self._replica = replica
        self._chance = random.Random(0)
        self.lengths = [0] * SAMPLES
        self.acknowledged = [0] * SAMPLES

    def go_on(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            id, count = self._chance.randrange(SAMPLES), self._chance.randint(1, 40)
            start = self.lengths[id]
            if start + count <= 20_000:
                self._replica.append(id, 1, start, [piece(id, start, start + count, version=start // 1000)])
                self.lengths[id] += count
                once_durable(self._replica, id, 1, lambda id=id, end=start + count: self.note(id, end))
            time.sleep(0.0002)

    def note(self, id: int, end: int) -> None:
        assert end > self.acknowledged[id], "an action was called twice"
        self.acknowledged[id] = end


def test_what_was_acknowledged_survives_kills_at_random_moments_and_is_there_once(tmp_path: Path) -> None:
    chance, process = random.Random(7), StoreProcess(tmp_path)
    try:
        with client(process.port, credit_bytes=1 << 30) as replica:
            generation = Generation(replica)
            for _ in range(KILLS):
                generation.go_on(chance.uniform(0.02, 0.3))
                acknowledged = list(generation.acknowledged)
                process.kill()
                assert all(length <= found for length, found in zip(acknowledged, stored(tmp_path), strict=True))
                process.start()
            until(lambda: generation.acknowledged == generation.lengths)
            assert stored(tmp_path) == generation.lengths
            assert max(generation.lengths) > 0
            assert not replica.poll()
    finally:
        process.kill()


def test_what_was_sent_and_not_acknowledged_is_sent_again_by_itself(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path)
    try:
        with client(process.port) as replica:
            generation = Generation(replica)
            generation.go_on(0.05)
            until(lambda: generation.acknowledged == generation.lengths)
            process.stop()
            before = list(generation.acknowledged)
            generation.go_on(0.05)
            until(lambda: not replica._uploads.queue(0).ready)  # all of it is on its way
            process.kill()
            assert generation.acknowledged == before != generation.lengths
            process.start()
            until(lambda: generation.acknowledged == generation.lengths)
            assert stored(tmp_path) == generation.lengths
    finally:
        process.kill()


def stored(folder: Path) -> list[int]:
    """How many tokens the file has of each sample, and they are the right ones."""
    reader = SampleReader(sample_file(folder, 0))
    try:
        samples = reader.read(range(SAMPLES))
    finally:
        reader.close()
    found = [ids_in(sample) for sample in samples]
    assert found == [tokens_of(id, 0, len(ids)).tolist() for id, ids in enumerate(found)]
    return [len(ids) for ids in found]
