"""A run that Ray has placed beside the same run on one machine: throughput, and how soon control hears and is heard.

    python benchmarks/cluster.py throughput [--rounds 5] [--steps 20]
    python benchmarks/cluster.py latency [--rounds 3]
    python benchmarks/cluster.py growth                  # two more nodes in the middle of a run

Five emulated replicas of examples/heavy_tail.toml, which take time and no processor. Locally they are all children of
the controller; on Ray one is, and two raylets of a cluster on this machine have an agent with two each. Both kinds of
run alternate; what counts is from the moment when all five replicas have finished a sample to the last step. For the
latency, the nodes of the local run are two `tailrace worker` that were started by hand. Writes
benchmarks/results/cluster.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "cluster")]

from ray_nodes import Nodes, ray_nodes  # noqa: E402

from tailrace.launch.placers.fleet import free_port  # noqa: E402
from tailrace.protocol import Finished, HostJoined, HostLeft, LoadWeights, Trained, WeightsLoaded  # noqa: E402
from tailrace.store.errors import JournalError  # noqa: E402
from tailrace.store.journal import Journal  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "cluster.json"
HEAVY = ROOT / "examples" / "heavy_tail.toml"
REPLICAS = 5
ENDLESS = 100_000  # steps
DEADLINE_S = 300.0
PULLS = 100  # of which the percentiles are taken


class Measured(NamedTuple):
    tokens_per_s: float
    pull_p50_ms: float
    pull_p99_ms: float
    lag_p99_ms: float


# ---------------------------------------------------------------------------------------------------------- the runs


def command(folder: Path, nodes: Nodes | None, steps: int) -> list[str]:
    """The same settings, placed here or by Ray."""
    place = ["train"] if nodes is None else ["launch", "ray", "--address", nodes.address]
    here = REPLICAS if nodes is None else 1
    settings = [
        "--local.replicas",
        str(here),
        "--run.steps",
        str(steps),
        "--run.folder",
        str(folder),
        "--run.name",
        "r",
    ]
    return [sys.executable, "-m", "tailrace", *place, str(HEAVY), *settings]


def finished_run(nodes: Nodes | None, steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        words = command(Path(folder), nodes, steps)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
        return measured(Path(folder) / "r")


def measured(run: Path) -> Measured:
    begin = everybody_at_work(run)
    ends = {entry.event.step: entry.now for entry in Journal(run).entries() if isinstance(entry.event, Trained)}
    counted = [step for step, now in sorted(ends.items()) if now > begin]
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as database:
        query = "SELECT sum(tokens) FROM trajectories WHERE step > ? AND step <= ?"
        (tokens,) = database.execute(query, (counted[0], counted[-1])).fetchone()
        lags = [value for (value,) in database.execute("SELECT value FROM metrics WHERE name LIKE '%loop_lag_p99_s'")]
    pulls = pull_times(run, begin)
    return Measured(
        tokens / (ends[counted[-1]] - ends[counted[0]]),
        1000 * median(pulls),
        1000 * quantiles(pulls, n=100)[-1],
        1000 * median(lags) if lags else 0.0,
    )


def everybody_at_work(run: Path) -> float:
    first: dict[int, float] = {}
    for entry in Journal(run).entries():
        if isinstance(entry.event, Finished):
            first.setdefault(entry.event.replica, entry.now)
    assert len(first) >= REPLICAS, f"{len(first)} replicas of {REPLICAS} have finished samples"
    return sorted(first.values())[REPLICAS - 1]


def pull_times(run: Path, begin: float) -> list[float]:
    """From the order to load weights to the answer: both ways of control, and a pull that always takes the same."""
    asked: dict[tuple[int, int], float] = {}
    found = list[float]()
    for entry in Journal(run).entries():
        if isinstance(entry.event, WeightsLoaded):
            since = asked.pop((entry.event.replica, entry.event.version), None)
            found += [entry.now - since] if since is not None and since > begin else []
        for order in entry.commands:
            if isinstance(order, LoadWeights):
                asked[order.replica, order.version] = entry.now
    return found


# --------------------------------------------------------------------------------------------------------- throughput


def throughput(rounds: int, steps: int) -> dict[str, Any]:
    found: dict[str, list[Measured]] = {"local": [], "ray": []}
    with ray_nodes(2) as nodes:
        for number in range(rounds):
            for kind, where in (("local", None), ("ray", nodes)):
                found[kind].append(finished_run(where, steps))
                print(f"round {number + 1}, {kind}: {found[kind][-1].tokens_per_s:,.0f} tokens/s", flush=True)
    medians = {kind: Measured(*map(median, zip(*runs, strict=True))) for kind, runs in found.items()}
    table = Table("median of " + str(rounds), *found)
    for field in Measured._fields:
        table.add_row(field, *[f"{getattr(medians[kind], field):,.1f}" for kind in found])
    Console().print(table)
    ratio = medians["ray"].tokens_per_s / medians["local"].tokens_per_s
    print(f"ray over local: {ratio:.3f}")
    runs = {kind: [each._asdict() for each in runs] for kind, runs in found.items()}
    return {
        "rounds": rounds,
        "steps": steps,
        "ratio": ratio,
        **{k: m._asdict() for k, m in medians.items()},
        "runs": runs,
    }


# ------------------------------------------------------------------------------------------------------------ latency


class ByHand:
    """Nodes without a cluster manager: each is a `tailrace worker` that somebody has started on this machine."""

    def __init__(self, count: int) -> None:
        self._port, self._count, self._folder = free_port("127.0.0.1"), count, Path()
        self.others: list[subprocess.Popen[bytes]] = []

    def command(self, folder: Path, steps: int) -> list[str]:
        self._folder = folder
        for _ in range(self._count):
            self.add()
        listen = ["--local.listen", "127.0.0.1", "--local.port", str(self._port), "--local.replicas", "1"]
        return [*command(folder, None, steps), *listen]

    def add(self) -> None:
        where = ["--join", f"127.0.0.1:{self._port}", "--key", str(self._folder / "r" / "join.key")]
        words = [sys.executable, "-m", "tailrace", "worker", *where, "--replicas", "2", "--wait", "120"]
        self.others.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        self.others.remove(node)
        node.kill()
        node.wait()

    def close(self) -> None:
        for node in self.others:
            node.terminate()
            node.wait(DEADLINE_S)


class Endless:
    """A run that goes on until it is ended, watched through its journal."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.run = folder / "r"
        self._said = folder / "said"
        self._events: list[Any] = []
        self._read = 0
        with self._said.open("wb") as said:
            self._child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said)

    def events(self, kind: type) -> list[Any]:
        if (self.run / "run.db").exists():
            with suppress(JournalError):  # while it is made
                for entry in Journal(self.run).entries(self._read):
                    self._read += 1
                    self._events.append(entry.event)
        return [event for event in self._events if isinstance(event, kind)]

    def working(self) -> set[int]:
        """Replicas that have finished a sample."""
        return {event.replica for event in self.events(Finished)}

    def count(self, words: str) -> int:
        return self._said.read_text().count(words)

    def end(self) -> float:
        began = time.monotonic()
        self._child.send_signal(signal.SIGINT)
        self._child.wait(DEADLINE_S)
        return time.monotonic() - began


def until(condition: Callable[[], object]) -> float:
    """Seconds until then."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + DEADLINE_S
        time.sleep(0.02)
    return time.monotonic() - began


def lives(nodes: Nodes | ByHand, run: Endless) -> dict[str, float]:
    """Two nodes join, one of them is lost, another one comes."""
    found = {"start to both nodes joined": until(lambda: len(run.events(HostJoined)) == 2)}
    until(lambda: len(run.working()) == REPLICAS)
    nodes.kill(nodes.others[0])
    found["node killed to the controller's loss of it"] = lost = until(lambda: run.events(HostLeft))
    if isinstance(nodes, Nodes):
        found["and to Ray's"] = lost + until(lambda: run.count("is lost; the run goes on without it"))
    nodes.add()
    found["node up to its agent's joining"] = back = until(lambda: len(run.events(HostJoined)) == 3)
    fresh = set(run.events(HostJoined)[-1].replicas)
    found["and to its first finished sample"] = back + until(lambda: fresh & run.working())
    until(lambda: len(run.events(WeightsLoaded)) >= PULLS)
    return found


def one_life(ray: bool) -> dict[str, float]:
    with ray_nodes(2) if ray else closing(ByHand(2)) as nodes, tempfile.TemporaryDirectory() as folder:
        words = (
            nodes.command(Path(folder), ENDLESS) if isinstance(nodes, ByHand) else command(Path(folder), nodes, ENDLESS)
        )
        run = Endless(words, Path(folder))
        try:
            found = lives(nodes, run)
        finally:
            ended = run.end()
        pulls = pull_times(run.run, everybody_at_work(run.run))
        found |= {"weight pull, p50": median(pulls), "weight pull, p99": quantiles(pulls, n=100)[-1]}
        return found | {"Ctrl-C to the end of the command": ended}


def latency(rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    for _ in range(rounds):
        for kind, each in found.items():
            each.append(one_life(kind == "ray"))
            print(kind, {name: round(value, 2) for name, value in each[-1].items()}, flush=True)
    table = Table("seconds, median (largest)", *found)
    for name in found["ray"][0]:
        cells = [[life[name] for life in each if name in life] for each in found.values()]
        table.add_row(name, *[f"{median(cell):.2f} ({max(cell):.2f})" if cell else "-" for cell in cells])
    Console().print(table)
    return {"rounds": rounds, "load": os.getloadavg(), **found}


# ------------------------------------------------------------------------------------------------------------- growth


def generated(run: Path, since: float) -> tuple[float, int]:
    """The run's clock, and tokens of samples that were finished after `since` of it."""
    found = [(entry.now, entry.event) for entry in Journal(run).entries()]
    done = [event.meta.tokens for now, event in found if isinstance(event, Finished) and now > since]
    return found[-1][0], sum(done)


def rate(run: Path, seconds: float) -> float:
    """Tokens per second of the run's own clock, from now on."""
    begin, _ = generated(run, 0.0)
    time.sleep(seconds)
    end, tokens = generated(run, begin)
    return tokens / (end - begin)


def growth(seconds: float = 30.0) -> dict[str, float]:
    with ray_nodes(1) as nodes, tempfile.TemporaryDirectory() as folder:
        run = Endless(command(Path(folder), nodes, ENDLESS), Path(folder))
        until(lambda: len(run.working()) == 3)
        before = rate(run.run, seconds)
        nodes.add()
        nodes.add()
        until(lambda: len(run.working()) == 7)
        after = rate(run.run, seconds)
        run.end()
    print(f"3 replicas: {before:,.0f} tokens/s; with two more nodes, 7: {after:,.0f} tokens/s ({after / before:.2f}x)")
    return {"tokens_per_s_3_replicas": before, "tokens_per_s_7_replicas": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "latency", "growth"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": lambda: throughput(asked.rounds, asked.steps),
        "latency": lambda: latency(asked.rounds),
        "growth": growth,
    }
    row = rows[asked.what]()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {asked.what: row, "cores": os.cpu_count()}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
