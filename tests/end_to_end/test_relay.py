"""Relays as processes: a chain, a death in mid-transfer, and memory that counts once however many map it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relays import DEADLINE_S, RelayProcess, Weights, both_ways, ending, publish, relay_processes, take_way, until
from tailrace.weights.checksum import PIECE, checksum
from tailrace.weights.shared_memory import SharedMemory, default_base

DATA = os.urandom(8 * PIECE + 1000)
SMAPS = Path("/proc/self/smaps_rollup")


@pytest.fixture(autouse=True, params=both_ways())
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take_way(request.param, monkeypatch)


def test_a_version_travels_down_a_chain_of_processes(tmp_path: Path) -> None:
    with relay_processes(3, tmp_path) as (first, second, third):
        first.route(1, [second])
        second.route(2, [third])
        publish(first.address, Weights(1, DATA)).join(DEADLINE_S)
        for relay in (first, second, third):
            relay.wait_for("stored", 1)
            assert relay.read(1) == DATA


def test_a_relay_that_is_killed_in_mid_transfer_is_routed_around(tmp_path: Path) -> None:
    with relay_processes(3, tmp_path) as (first, second, third):
        first.route(1, [second])
        second.route(2, [third])
        weights = Weights(1, DATA, hold=True)
        publish(first.address, weights)
        until(lambda: third.arriving_bytes(1) > len(DATA) // 4, "the version to be under way everywhere")
        second.kill()
        third.wait_for("failed", 1)
        assert third.arriving_bytes(1) > len(DATA) // 4  # what has come is kept
        first.route(3, [third])
        weights.go.set()
        for relay in (first, third):
            relay.wait_for("stored", 1)
            assert relay.read(1) == DATA


def test_a_master_that_is_killed_in_mid_transfer_is_replaced_by_the_next_which_goes_on(tmp_path: Path) -> None:
    with relay_processes(3, tmp_path) as (first, second, third):
        first.route(1, [second])
        second.route(2, [third])
        publish(first.address, Weights(1, DATA, hold=True))
        until(lambda: third.arriving_bytes(1) > len(DATA) // 4, "the version to be under way everywhere")
        first.kill()
        second.wait_for("failed", 1)
        again = Weights(1, DATA)
        publish(second.address, again).join(DEADLINE_S)
        for relay in (second, third):
            relay.wait_for("stored", 1)
            assert relay.read(1) == DATA
        assert min(again.asked) == again.half  # the trainer sends the rest only
        assert third.reports == []  # nothing broke off further down


def test_a_relay_that_is_stopped_is_named_and_served_again_when_it_wakes(tmp_path: Path) -> None:
    with ending() as relays:
        relays += [RelayProcess(id, tmp_path, stall_s=1.0) for id in range(2)]
        first, second = relays
        first.route(1, [second])
        second.stop()
        publish(first.address, Weights(1, DATA)).join(DEADLINE_S)
        failure = first.wait_for("failed", 1)
        assert failure["target"] == 1
        assert f"receive from {second.address}: no data for 1.0 s (the handshake)" in failure["reason"]
        second.wake()
        second.wait_for("stored", 1)
        assert second.read(1) == DATA


def test_a_relay_that_starts_again_after_its_death_begins_with_empty_shared_memory(tmp_path: Path) -> None:
    with relay_processes(1, tmp_path) as (relay,):
        publish(relay.address, Weights(1, DATA)).join(DEADLINE_S)
        relay.wait_for("stored", 1)
        relay.kill()
    with relay_processes(1, tmp_path) as (again,):
        assert list(again.folder.glob("v*")) == []
        publish(again.address, Weights(2, DATA)).join(DEADLINE_S)
        again.wait_for("stored", 2)
        assert again.read(2) == DATA


READER = """
import sys
from pathlib import Path
from tailrace.weights.shared_memory import SharedMemoryReader
def pss(): return next(int(line.split()[1]) * 1024 for line in open("/proc/self/smaps_rollup") if line[:4] == "Pss:")
before = pss()
version = SharedMemoryReader(Path(sys.argv[1])).open(1)
print("mapped", flush=True)
sys.stdin.readline()
print(pss() - before, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells each process its share of a page")
def test_a_version_that_several_processes_map_is_in_memory_once(tmp_path: Path) -> None:
    size, readers = 16_000_000, 3
    memory = SharedMemory(default_base() / f"tailrace-test-{os.getpid()}")
    try:
        data = bytes(size)
        buffer = memory.create(1, size)
        buffer.whole().claim(size)[0][:] = data
        buffer.whole().advance(size)
        buffer.seal(checksum(data))
        del buffer  # its own mapping would count as one more
        shares = proportional_shares(memory.path, readers)
    finally:
        memory.remove()
    assert sum(shares) == pytest.approx(size, rel=0.25)


def proportional_shares(path: Path, readers: int) -> list[int]:
    """What each of several processes pays for having mapped and read the same version."""
    words = [sys.executable, "-c", READER, str(path)]
    started = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(readers)
    ]
    assert [_answer(process) for process in started] == ["mapped"] * readers
    shares = [int(_ask(process)) for process in started]
    for process in started:
        process.communicate("\n", timeout=DEADLINE_S)
    return shares


def _ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()
