"""The controller's memory over 100,000 finished trajectories, and the speed of its store.

    python benchmarks/controller_memory.py [--trajectories 100000] [--delete]

The real control plane, the real store with every token, and the live view, as the controller runs them; only the
components are modelled, in virtual time, and their share of the memory is in the figures. Writes
benchmarks/results/controller_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.config import load, with_values
from tailrace.obs.live import LiveRun
from tailrace.protocol import Command, Event, Finished, Forget, Generate, PromptsAdded, SampleFailed, Train
from tailrace.sim.simulation import Simulation
from tailrace.store.run import RunStore
from tailrace.types import Row, Segment, id_bytes

ROOT = Path(__file__).parents[1]
PIECE = 64  # tokens that a replica sends at a time
EVENTS_PER_COMMIT = 20
EVENTS_PER_SNAPSHOT = 5000
EVERY = 10_000  # trajectories between two looks
PAGE = os.sysconf("SC_PAGE_SIZE")


class Controller:
    """What the controller does with every event, beside sending messages."""

    def __init__(self, store: RunStore, archive: bool, live: LiveRun) -> None:
        self.store = store
        self.archive = archive
        self.live = live
        self.simulation: Simulation | None = None
        self.finished = 0
        self.looks: list[dict[str, float]] = []

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        store, vault = self.store, self.store.vault
        if isinstance(event, PromptsAdded):
            vault.add_prompts([Row(p.id, id_bytes(range(p.tokens)), "a prompt", {}) for p in event.prompts])
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, SampleFailed):
            vault.fail(event.trajectory, event.attempt, event.reason)
        seq = store.record(now, event, commands)
        self.live.see(now, event, commands)
        for command in commands:
            self._obey(command)
        if seq % EVENTS_PER_SNAPSHOT == 0 and self.simulation:
            store.snapshot(seq, self.simulation.plane.snapshot())
        if seq % EVENTS_PER_COMMIT == 0:
            store.commit()

    def _finish(self, event: Finished) -> None:
        meta, vault = event.meta, self.store.vault
        for start in range(0, meta.tokens, PIECE):
            tokens = range(start, min(start + PIECE, meta.tokens))
            vault.append(meta.id, meta.attempt, [Segment.of(meta.oldest, tokens, (-0.5,) * len(tokens))])
        vault.finish(meta.id, meta.attempt, meta.finish, 1.0)
        self.finished += 1
        if self.finished % EVERY == 0:
            self.looks.append({"finished": self.finished, "rss_mb": rss_mb()})

    def _obey(self, command: Command) -> None:
        vault = self.store.vault
        if isinstance(command, Generate):
            for one in command.requests:
                vault.assign(one.trajectory, one.attempt, one.group, one.prompt, one.resume)
        elif isinstance(command, Train):
            ids = [id for group in command.groups for id in group.trajectories]
            vault.read(ids)
            vault.trained(ids, command.step)
        elif isinstance(command, Forget):
            vault.forget(command.trajectories, self.archive, command.reason)


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def long_run(folder: Path, trajectories: int, archive: bool) -> list[dict[str, float]]:
    settings = {"cluster.gpus": 16, "schedule.kind": "trajectory", "workload.max_completion_tokens": 1024}
    settings |= {"trainer.checkpoint_every": 1}  # what none covers is kept, however long that is
    base = with_values(load([ROOT / "examples" / "clusters" / "own_box.toml"]), settings)
    steps = trajectories // base.workload.trajectories_per_step + 2
    config = with_values(base, {"run.steps": steps})
    with RunStore.create(folder, config) as store:
        controller = Controller(store, archive, LiveRun(config))
        controller.simulation = Simulation(config, controller.see)
        controller.simulation.run()
    return controller.looks


def vault_speed(folder: Path, count: int = 1000, pieces: int = 16) -> dict[str, float]:
    """Appends of 64 tokens, committed 20 at a time, and the best of five reads of 500 trajectories of 1,024 tokens; in
    seconds of CPU, because nothing here waits and the machine may be shared."""
    tokens = range(PIECE)
    piece = [Segment.of(0, tokens, (-0.5,) * PIECE)]
    with RunStore.create(folder, load([], ["--model.preset", "qwen2.5-7b"])) as store:
        store.vault.add_prompts([Row(0, id_bytes(tokens), "a prompt", {})])
        for id in range(count):
            store.vault.assign(id, 1, id // 8, 0, resume=False)
        begin = time.process_time()
        for place in range(count * pieces):
            store.vault.append(place % count, 1, piece)
            if place % EVENTS_PER_COMMIT == 0:
                store.commit()
        appends = count * pieces / (time.process_time() - begin)
        return {"appends_per_cpu_s": appends, "read_500_cpu_s": min(_seconds_to_read(store, count) for _ in range(5))}


def _seconds_to_read(store: RunStore, count: int) -> float:
    begin = time.process_time()
    store.vault.read(range(0, count, 2))
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--delete", action="store_true", help="delete what is trained instead of archiving it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        speed = vault_speed(Path(name) / "speed")
        begin = time.perf_counter()
        looks = long_run(Path(name) / "run", arguments.trajectories, not arguments.delete)
        seconds = time.perf_counter() - begin
        size = (Path(name) / "run" / "run.db").stat().st_size
    growth = looks[-1]["rss_mb"] - looks[0]["rss_mb"]
    out = {
        "trajectories": looks[-1]["finished"],
        "archived": not arguments.delete,
        "growth_mb": growth,
        "run_db_mb": size / 1e6,
        "wall_s": seconds,
        "vault": speed,
        "looks": looks,
    }
    (ROOT / "benchmarks" / "results" / "controller_memory.json").write_text(json.dumps(out, indent=1) + "\n")
    table = Table("finished", "RSS, MB")
    for look in looks:
        table.add_row(f"{look['finished']:,.0f}", f"{look['rss_mb']:.1f}")
    console = Console()
    console.print(table)
    console.print(f"from the first look to the last: {growth:+.1f} MB; run.db has {size / 1e6:,.0f} MB")
    appends, read = speed["appends_per_cpu_s"], speed["read_500_cpu_s"]
    console.print(f"{appends:,.0f} appends a CPU second; 500 trajectories read in {read:.3f} s of CPU")


if __name__ == "__main__":
    main()
