"""How long a broadcast takes on links that are slow, far or lossy, with 1 to 8 relays, and what encryption costs.

    sudo python benchmarks/network.py                # 1, 2, 4, 8 relays, each on a host of its own
    python benchmarks/network.py --links             # only the throughput of one link, plain, encrypted and by NIXL
    sudo python benchmarks/network.py --streams      # only one hop over a long way, with 1, 4 and 8 connections

Hosts are network namespaces, joined by the switch of tests/chaos/hosts.py, which gives every host a link of so many
Mbit/s, delays every frame and loses some of them. A relay is a process; the trainer is one more host. The time is from
the order to publish until the last relay has sealed the version, so encrypted connections are made within it. Every
relay's bytes are compared with what was sent. `of_one` is the time over that of a single relay under the same
conditions, and `switch_share_of_a_processor` shows whether the test network itself was the limit. Writes
benchmarks/results/network.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

from hosts import hosts, missing  # noqa: E402

from relays import TOKEN, RelayProcess, ending, made_up  # noqa: E402
from tailrace.weights.channel import Channel  # noqa: E402
from tailrace.weights.checksum import RunningChecksum, piece_checksums  # noqa: E402
from tailrace.weights.messages import PullVersion  # noqa: E402
from tailrace.weights.nixl_transport import FLAVOURS, NixlAgent, NixlTransport  # noqa: E402
from tailrace.weights.part import Part  # noqa: E402
from tailrace.weights.shared_memory import SharedMemory  # noqa: E402
from tailrace.weights.transfer import CHUNK, receive, send  # noqa: E402
from tailrace.wire.tls import Identity  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "network.json"
COUNTS = [1, 2, 4, 8]
JUMBO = 9000  # fewer frames for the switch, which is a program that shares this machine with the relays
CONDITIONS: dict[str, dict[str, float]] = {
    "50 Mbit/s": {"rate_mbits": 50},
    "50 Mbit/s, 200 ms": {"rate_mbits": 50, "delay_s": 0.1},
    "20 Mbit/s, 200 ms": {"rate_mbits": 20, "delay_s": 0.1},
    "50 Mbit/s, 5 % lost": {"rate_mbits": 50, "loss": 0.05},
    "50 Mbit/s, 200 ms, 5 % lost": {"rate_mbits": 50, "delay_s": 0.1, "loss": 0.05},
}
PATIENCE_S = 400.0
FAR = {"rate_mbits": 200.0, "delay_s": 0.2}
STREAMS = [1, 4, 8, 0]


# ---------------------------------------------------------------------------------------------------------- broadcasts


def _with_counts(
    name: str, conditions: dict[str, float], counts: list[int], size: int, rounds: int, congestion: str
) -> Iterator[dict[str, Any]]:
    alone = 0.0
    for count in counts:
        times, busy = _broadcast(count, conditions, size, rounds, congestion)
        alone = alone or median(times)
        yield {
            "links": name,
            "relays": count,
            "mbytes": size / 1e6,
            "seconds": round(median(times), 2),
            "all_seconds": [round(each, 2) for each in times],
            "of_one": round(median(times) / alone, 3),
            "congestion": congestion,
            "switch_share_of_a_processor": round(busy, 3),
        }


def _broadcast(
    count: int, conditions: dict[str, float], size: int, rounds: int, congestion: str
) -> tuple[list[float], float]:
    """The seconds of each round, and what the switch needed of a processor meanwhile."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, hosts(count + 1, JUMBO) as network, ending() as made:
        made += [_relay(id, Path(folder), network[id].inside, congestion) for id in range(count + 1)]
        *chain, trainer = made
        for relay, following in pairwise(chain):
            relay.route(1, [following])
        network.set(**conditions)
        busy = network.switch.busy_s
        times = [_publish(version, size, chain, trainer) for version in range(1, rounds + 1)]
        return times, (network.switch.busy_s - busy) / sum(times)


def _relay(id: int, folder: Path, inside: list[str], congestion: str) -> RelayProcess:
    return RelayProcess(id, folder, inside, "10.77.0.0/24", congestion=congestion)


def _publish(version: int, size: int, chain: list[RelayProcess], trainer: RelayProcess) -> float:
    data = made_up(version, size)
    trainer.publish(version, size, chain[0])
    began = trainer.wait_for("began", version, PATIENCE_S)["at"]
    ends = [relay.wait_for("stored", version, PATIENCE_S)["at"] for relay in chain]
    assert all(relay.read(version) == data for relay in chain), "a relay has other bytes than were sent"
    return max(ends) - began


# ----------------------------------------------------------------------------------------------------------- one hop


def streams(size: int, rounds: int) -> list[dict[str, Any]]:
    """From a relay to the next one, far away, the number of connections in turns; 0 lets the relay decide."""
    found: dict[int, list[float]] = {count: [] for count in STREAMS}
    with hosts(2, JUMBO) as network:
        network.set(**FAR)
        for _ in range(rounds):
            for count, times in found.items():
                times.append(_one_hop(count, size, [network[0].inside, network[1].inside]))
    return [
        {
            "streams": count or "as the relay decides",
            "mbytes": size / 1e6,
            "seconds": round(median(times), 2),
            "mbits_per_s": round(size * 8 / 1e6 / median(times), 1),
            "all_seconds": [round(each, 2) for each in times],
        }
        for count, times in found.items()
    ]


def _one_hop(count: int, size: int, insides: list[Any]) -> float:
    """The trainer is on the host of the first relay."""
    data = made_up(1, size)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ending() as made:
        made += [
            RelayProcess(id, Path(folder), insides[id > 1], "10.77.0.0/24", streams=count if id == 1 else 1)
            for id in range(3)
        ]
        trainer, near, far = made
        near.route(1, [far])
        trainer.publish(1, size, near)
        began = trainer.wait_for("began", 1, PATIENCE_S)["at"]
        end = far.wait_for("stored", 1, PATIENCE_S)["at"]
        assert far.read(1) == data, "the relay has other bytes than were sent"
        return end - began


# ---------------------------------------------------------------------------------------------------------- one link


def links(mbytes: float, rounds: int) -> list[dict[str, Any]]:
    """One sender and one receiver on the loopback, in turns plain, encrypted and, where it is installed, by NIXL."""
    kinds: dict[str, tuple[Identity | None, bool]] = {"plain": (None, False), "encrypted": (Identity(), False)}
    if any(map(find_spec, FLAVOURS)):
        kinds["encrypted, chunks by NIXL"] = (Identity(), True)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    data = made_up(0, int(mbytes * 1e6))
    for _ in range(rounds):
        for name, kind in kinds.items():
            rates[name].append(_rate(data, *kind))
    return [
        {
            "link": name,
            "mbytes_per_s": round(median([rate for rate, _ in each])),
            "cpu_s_per_gbyte": round(median([cpu for _, cpu in each]), 2),
            "all_mbytes_per_s": [round(rate) for rate, _ in each],
        }
        for name, each in rates.items()
    ]


class _Version:
    """A version to send."""

    version, content_id, generation = 0, "", 0

    def __init__(self, data: bytes) -> None:
        self.part = Part.whole(len(data))
        self._data = memoryview(data)
        self._sums = RunningChecksum(self._data)

    def ready(self, position: int, timeout_s: float) -> memoryview:
        return self._data[position:]

    def checksums(self, start: int, end: int) -> bytes:
        self._sums.advance(end)
        return self._sums.checksums(start, end)

    def checksum(self, timeout_s: float) -> str:
        return self._sums.digest()


class _Elsewhere(Channel):
    """Within a host, links are plain; here one is not."""

    def is_local(self) -> bool:
        return False


def _rate(data: bytes, identity: Identity | None, by_nixl: bool) -> tuple[float, float]:
    """Megabytes per second, and seconds of processors, of both ends, for a gigabyte."""
    kind = _Elsewhere if identity else Channel
    before = sum(os.times()[:4])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        buffer = SharedMemory(Path(folder) / "receiver").create(0, len(data))
        child = os.fork()
        if not child:
            _send(kind(socket.create_connection(listener.getsockname()), "the receiver", 30.0), data, identity, by_nixl)
            os._exit(0)
        transport = NixlTransport(NixlAgent("lo")) if by_nixl else None
        connection, _ = listener.accept()
        with kind(connection, "the sender", 30.0) as channel:
            channel.answer(TOKEN, identity)
            began = time.perf_counter()
            with transport.receiving(channel, "the sender") if transport else nullcontext() as reader:
                buffer.seal(receive(channel, buffer.whole(), reader))
            took = time.perf_counter() - began
    os.waitpid(child, 0)
    return len(data) / 1e6 / took, (sum(os.times()[:4]) - before) / len(data) * 1e9


def _send(channel: Channel, data: bytes, identity: Identity | None, by_nixl: bool) -> None:
    version, transport = _Version(data), NixlTransport(NixlAgent("lo")) if by_nixl else None
    channel.call(TOKEN, identity.fingerprint if identity else "")
    channel.send(PullVersion(0))
    with transport.sending(channel) if transport else nullcontext() as sender:
        send(channel, version, 0, CHUNK, sender)


def hashing(mbytes: float, rounds: int) -> dict[str, float]:
    """Gigabytes per second that one core sums up."""
    data = memoryview(made_up(0, int(mbytes * 1e6)))
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        piece_checksums(data)
        took.append(time.perf_counter() - began)
    return {"gbytes_per_s": round(len(data) / 1e9 / median(took), 2)}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument(
        "--mbytes", type=float, default=250.0, help="size of a version; SmolLM2-135M in bfloat16 is a little more"
    )
    words.add_argument("--relays", type=int, nargs="+", default=COUNTS)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--links", action="store_true", help="only the throughput of one link")
    words.add_argument("--streams", action="store_true", help="only one hop, with several connections")
    words.add_argument("--only", choices=CONDITIONS, help="only under these conditions")
    words.add_argument("--congestion", default="bbr", help="TCP's algorithm on broadcasts: bbr or cubic")
    options = words.parse_args()
    if options.streams:
        _save(**{"one hop, 200 Mbit/s, 400 ms": streams(int(options.mbytes * 1e6), options.rounds)})
        return
    if options.links or not options.only:
        _save(link=links(200.0, 5), checksum=[hashing(200.0, 5)])
    if not options.links:
        if reason := missing():
            sys.exit(f"no hosts: {reason}")
        for name in [options.only] if options.only else CONDITIONS:
            size, how = int(options.mbytes * 1e6), (options.rounds, options.congestion)
            rows = list(_with_counts(name, CONDITIONS[name], options.relays, size, *how))
            _save(**{f"broadcast, {name}{'' if how[1] == 'bbr' else f', {how[1]}'}": rows})


def _save(**tables: list[dict[str, Any]]) -> None:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(found | tables, indent=1) + "\n")
    for title, rows in tables.items():
        _show(title, rows)


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
