"""A run whose replicas are all far away: three sites behind slow, lossy links. One is cut off for a minute, one is
killed, and a stranger lies.

    sudo python benchmarks/sites.py                          # writes benchmarks/results/sites.json
    sudo python benchmarks/sites.py --whole                  # the same without differences between versions
    sudo python benchmarks/sites.py --calm 20 --cut 20       # shorter
    sudo python benchmarks/sites.py --cuts 61 20 59 62 40 60 # only: all sites are cut off, one time after the other

Home has controller, trainer, store, one relay and the replica that checks what strangers hand in. Each site is two
machines (network namespaces) with `tailrace worker --site`, two replicas each: twelve in all. Round trips, rates and
loss are in `SITES`. The switch, tests/chaos/hosts.py, has a link for each site, which its machines share. Trainer and
engines are emulated: they take the time that `[costs]` says, and a version has so many megabytes, of which every step
moves one element in a hundred.

A stranger is one more machine at the near site, with a key of its own; it hands in log-probs that are not those of its
tokens.

Phases: calm; the middle site cut off; calm again, as it comes back; the stranger joins, until it is sent away; the last
site killed (-9). For each: steps, the
learner's idle share (of the time, that in which the trainer had no mini-batch, by the journal), and bytes over each
site's link in both directions for each version. At the end `tests/chaos/proof.py` goes through the journal and the
stores: nothing was lost, and nothing counted twice. `network`: what the test network carries by itself, as plain TCP to
all sites at once, and the share of one processor that its switch takes.

`cuts`: for each of them how many machines joined in the `AFTER_CUT_S` seconds after it, and how many of these left
again. Each of the six should join once; after a cut of a minute it may be giving the run up just then.

`TROUBLES` is where further phases go: functions of the bed that return the name of what they did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos"), str(ROOT / "src")]

import guests  # noqa: E402
from fleet import FLEET  # noqa: E402
from guests import LIES, Guest, on_hosts, trained_of_strangers  # noqa: E402
from hosts import Network, SiteLink, hosts, missing  # noqa: E402
from proof import prove  # noqa: E402

import runs  # noqa: E402
from runs import Run  # noqa: E402
from tailrace.launch.workers import workers  # noqa: E402
from tailrace.obs.summary import summarise  # noqa: E402
from tailrace.protocol import Train, Trained  # noqa: E402
from tailrace.store.journal import Journal  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sites.json"
SITES: dict[str, dict[str, float]] = {
    "near": {"rate_mbits": 100, "delay_s": 0.01, "loss": 0.01},  # 20 ms there and back
    "middle": {"rate_mbits": 50, "delay_s": 0.04, "loss": 0.01},
    "abroad": {"rate_mbits": 20, "delay_s": 0.1, "loss": 0.01},
}
MACHINES, REPLICAS = 2, 2  # of a site; of a machine
MINI_BATCH_S, MINI_BATCHES = 2.0, 2
WEIGHT_MBYTES = 20.0
STRANGER = 1 + MACHINES * len(SITES)  # number of its host
AFTER_CUT_S = 30.0  # to join again
START_S = 600.0  # for 30 processes on a busy machine
SLOWER = {  # than tests/chaos/fleet.py, whose workload it is; all replicas are elsewhere, but for a checker
    "rollout.stream_tokens": 64,
    "trainer.mini_batches": MINI_BATCHES,
    "trainer.checkpoint_every": 10,
    "costs.decode_step": 0.05,
    "costs.decode_sequence": 0.0002,
    "costs.train_mini_batch": MINI_BATCH_S,
    "costs.weight_mbytes": WEIGHT_MBYTES,
    "schedule.kind": "trajectory",
    "schedule.max_staleness": 4,
    "repack.every_s": 5.0,
    "strangers.checkers": 1,
    "local.replicas": 1,
    "local.relays": 1,
    "run.steps": 100_000,
}
Row = dict[str, Any]


@dataclass
class Bed:
    """What a trouble can lay hands on."""

    network: Network
    run: Run
    links: dict[str, SiteLink]
    machines: dict[str, list[int]]  # numbers of hosts
    join: Callable[..., Guest]
    workers: dict[str, list[Guest]] = field(default_factory=dict[str, list[Guest]])
    _at: tuple[int, int, dict[str, int]] = (0, 0, {})

    def begin(self) -> None:
        self._at = (self.run.events(), self.steps(), self._bytes())

    def measure(self, phase: str) -> Row:
        """Since `begin`."""
        first, steps, before = self._at
        done, crossed = self.steps() - steps, self._bytes()
        each = {name: round((crossed[name] - before[name]) / max(done, 1)) for name in crossed}
        return {
            "phase": phase,
            "events": (first, self.run.events()),
            "steps": done,
            "bytes_per_version": each,
            "of_a_version": {name: round(size / (WEIGHT_MBYTES * 1e6), 4) for name, size in each.items()},
        }

    def steps(self) -> int:
        return self.run.events("Trained") // MINI_BATCHES

    def _bytes(self) -> dict[str, int]:
        into = {f"to {name}": link.bytes_in for name, link in self.links.items()}
        return into | {f"from {name}": link.bytes_out for name, link in self.links.items()}


def cut_off(bed: Bed, seconds: float) -> Row:
    bed.begin()
    numbers = bed.machines["middle"]
    others = [host.number for host in bed.network if host.number not in numbers]
    bed.network.cut(*((inside, outside) for inside in numbers for outside in others))
    time.sleep(seconds)
    row = bed.measure("the middle site is cut off")
    bed.network.heal()
    return row


def killed(bed: Bed, seconds: float) -> Row:
    bed.begin()
    for worker in bed.workers["abroad"]:
        for process in [worker.child.pid, *worker.components().values()]:
            os.kill(process, 9)
    time.sleep(seconds)
    return bed.measure("the site abroad is killed")


def calm(bed: Bed, seconds: float) -> Row:
    bed.begin()
    time.sleep(seconds)
    return bed.measure("calm")


def back(bed: Bed, seconds: float) -> Row:
    bed.begin()
    time.sleep(seconds)
    return bed.measure("the middle site comes back")


def lied_to(bed: Bed, seconds: float) -> Row:
    """Until it is sent away, and for so long at least."""
    workers(bed.run.folder, "mallory", None, "")
    bed.begin()
    began = time.monotonic()
    liar = bed.join(STRANGER, key="workers/mallory.key", program=(sys.executable, str(LIES), "logprobs"))
    until(bed.run, lambda: bed.run.events("HandedIn"), "something handed in")
    worked = time.monotonic()
    assert liar.child.wait(START_S) == 2, liar.child.communicate()[1]
    found_after_s = time.monotonic() - worked
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    return bed.measure("a stranger lies") | {"found_after_s": round(found_after_s, 1)}


def lies_told(run: Run) -> Row:
    record = summarise(run.folder).summary.strangers["mallory"]
    trained = len(trained_of_strangers(run))
    return {"handed_in": record.handed_in, "checked": record.scored, "trained": trained, "excluded": record.excluded}


TROUBLES: list[Callable[[Bed, float], Row]] = [calm, cut_off, back, lied_to, killed]


def measure(options: argparse.Namespace) -> Row:
    more = ["--relay.full_every", "1"] if options.whole else []
    with TemporaryDirectory(dir="/dev/shm") as folder, bed_of(Path(folder), more) as bed:
        until(bed.run, lambda: bed.steps() >= 5, "five steps")
        rows = [trouble(bed, options.cut if trouble is cut_off else options.calm) for trouble in TROUBLES]
        busy, ended = bed.network.switch.busy_s, endings(bed)
        status, _, err = bed.run.interrupt()
        assert status == 130, err
        proof = prove(bed.run.folder)
        rows = [row | idle(bed.run, *row.pop("events")) for row in rows]
        kept = {"steps": proof.steps, "groups": proof.trained, "failed": proof.failed, "repeated": proof.repeated}
        return {
            "differences": not options.whole,
            "weight_mbytes": WEIGHT_MBYTES,
            "max_staleness": 4,
            "phases": rows,
            "joined": len(guests.joined(bed.run)),
            "left": len(guests.left(bed.run)),
            "proved": kept,
            "stranger": lies_told(bed.run),
            "workers_that_ended": ended,
            "switch_busy_s": round(busy, 1),
        }


def cut_again_and_again(seconds: list[float]) -> list[Row]:
    """All sites at once."""
    with TemporaryDirectory(dir="/dev/shm") as folder, bed_of(Path(folder), []) as bed:
        until(bed.run, lambda: bed.steps() >= 5, "five steps")
        rows = [_cut_all(bed, each) for each in seconds]
        status, _, err = bed.run.interrupt()
        assert status == 130, err
        prove(bed.run.folder)
    return rows


def _cut_all(bed: Bed, seconds: float) -> Row:
    for number in (number for numbers in bed.machines.values() for number in numbers):
        bed.network.isolate(number)
    time.sleep(seconds)
    before = {one.host for one in guests.joined(bed.run)}
    bed.network.heal()
    time.sleep(AFTER_CUT_S)
    joined = {one.host for one in guests.joined(bed.run)} - before
    gone = {one.host: one.reason for one in guests.left(bed.run)}
    return {"cut_s": seconds, "joined": len(joined), "left_again": [gone[host] for host in joined if host in gone]}


def endings(bed: Bed) -> dict[str, list[str]]:
    """Of workers that are gone before the end: exit code and last words, by site."""
    found = {
        name: [one.child for one in workers if one.child.poll() is not None] for name, workers in bed.workers.items()
    }
    return {name: [f"{one.returncode} {one.communicate()[1][-300:]}" for one in gone] for name, gone in found.items()}


def idle(run: Run, first: int, last: int) -> Row:
    """Between two events of the journal."""
    seconds = idle_s = before = 0.0
    given: set[tuple[int, int]] = set()
    for number, entry in enumerate(Journal(run.folder).entries(), 1):
        if first < number <= last:
            seconds += entry.now - before
            idle_s += 0.0 if given else entry.now - before
        before = entry.now
        if isinstance(entry.event, Trained):
            given.discard((entry.event.step, entry.event.mini_batch))
        given |= {(one.step, one.mini_batch) for one in entry.commands if isinstance(one, Train)}
    return {"seconds": round(seconds, 1), "learner_idle": round(idle_s / max(seconds, 1e-9), 4)}


class bed_of:  # noqa: N801
    """Everybody at work; gone at the end."""

    def __init__(self, folder: Path, more: list[str]) -> None:
        guests.DEADLINE_S = runs.DEADLINE_S = START_S
        slower = [f"--{key}={value}" for key, value in SLOWER.items()]
        self._hosts = on_hosts(STRANGER + 1, folder, FLEET, *slower, *more)

    def __enter__(self) -> Bed:
        network, run, join = self._hosts.__enter__()
        bed = Bed(network, run, {}, {}, join)
        for number, (name, link) in enumerate(SITES.items()):
            bed.machines[name] = [1 + MACHINES * number + each for each in range(MACHINES)]
            strangers = [STRANGER] if name == "near" else []
            bed.links[name] = network.place(bed.machines[name] + strangers, **link)
        words = ("--replicas", str(REPLICAS), "--stay", "--wait", "3600", "--site")
        for name, numbers in bed.machines.items():
            bed.workers[name] = [join(number, *words, name) for number in numbers]
        return bed

    def __exit__(self, *error: Any) -> None:
        self._hosts.__exit__(*error)


def until(run: Run, holds: Callable[[], object], what: str) -> None:
    run.until(holds, what)


# -------------------------------------------------------------------------------------------------- the network itself

SINK = "import socket,sys; s=socket.create_server(('0.0.0.0',5555)); c,_=s.accept(); print('ready',flush=True)\n"
SINK += "import time; n=0; b=time.time()\nwhile d:=c.recv(1<<20): n+=len(d)\nprint(n*8/1e6/(time.time()-b))"
SOURCE = "import socket,sys,time; s=socket.create_connection((sys.argv[1],5555)); e=time.time()+float(sys.argv[2])\n"
SOURCE += "while time.time()<e: s.sendall(bytes(1<<16))"


def network_alone(seconds: float) -> list[Row]:
    """One plain TCP connection to each site, all at once."""
    with hosts(1 + len(SITES)) as network:
        for number, link in enumerate(SITES.values()):
            network.place([number + 1], **link)
        began, busy = time.monotonic(), network.switch.busy_s
        sinks = [_python(network[number + 1].inside, SINK) for number in range(len(SITES))]
        time.sleep(2.0)
        targets = [network[number + 1].address for number in range(len(SITES))]
        for source in [_python(network[0].inside, SOURCE, target, str(seconds)) for target in targets]:
            source.wait(120)
        rates = [float(sink.communicate(timeout=120)[0].split()[-1]) for sink in sinks]
        share = (network.switch.busy_s - busy) / (time.monotonic() - began)
    names = zip(SITES.items(), rates, strict=True)
    rows: list[Row] = [
        {"site": n, "mbits_per_s": round(rate, 1), "of": link["rate_mbits"]} for (n, link), rate in names
    ]
    return [*rows, {"switch_share_of_a_processor": round(share, 2)}]


def _python(inside: list[str], code: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*inside, sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--calm", type=float, default=60.0, help="seconds of every phase but the cut")
    words.add_argument("--cut", type=float, default=60.0, help="seconds for which a site is cut off")
    words.add_argument("--whole", action="store_true", help="versions are never sent as differences")
    words.add_argument(
        "--cuts", type=float, nargs="+", metavar="S", help="only this: cut all sites off for so long each"
    )
    words.add_argument("--network", action="store_true", help="only what the network carries by itself")
    options = words.parse_args()
    if reason := missing():
        sys.exit(f"no hosts: {reason}")
    if options.cuts:
        save(cuts=cut_again_and_again(options.cuts))
        return
    save(network=network_alone(10.0))
    if not options.network:
        save(**{"whole versions" if options.whole else "differences": measure(options)})


def save(**found: Any) -> None:
    print(json.dumps(found, indent=1), flush=True)
    known: Row = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
