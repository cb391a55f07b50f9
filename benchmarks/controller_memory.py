"""The controller's memory over 100,000 finished trajectories.

    python benchmarks/controller_memory.py [--trajectories 100000] [--delete]

The real control plane, the real run.db and the live view, as the controller runs them; only the components are
modelled, in virtual time, and their share of the memory is in the figures. Tokens are none of the controller's
(`data_path.py`). Writes benchmarks/results/controller_memory.json.
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
from tailrace.protocol import Command, Event, Finished, Forget, Generate, SampleFailed, Train
from tailrace.sim.simulation import Simulation
from tailrace.store.run import RunStore

ROOT = Path(__file__).parents[1]
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
        store = self.store
        if isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, SampleFailed):
            store.trajectories.fail(event.trajectory, event.attempt, event.reason)
        seq = store.record(now, event, commands)
        self.live.see(now, event, commands)
        for command in commands:
            self._obey(command)
        if seq % EVENTS_PER_SNAPSHOT == 0 and self.simulation:
            store.snapshot(seq, self.simulation.plane.snapshot())
        if seq % EVENTS_PER_COMMIT == 0:
            store.commit()

    def _finish(self, event: Finished) -> None:
        self.store.trajectories.finish(event.meta)
        self.finished += 1
        if self.finished % EVERY == 0:
            self.looks.append({"finished": self.finished, "rss_mb": rss_mb()})

    def _obey(self, command: Command) -> None:
        table = self.store.trajectories
        if isinstance(command, Generate):
            table.assign(command.requests)
        elif isinstance(command, Train):
            ids = [id for group in command.groups for id in group.trajectories]
            table.results(ids)
            table.trained(ids, command.step)
        elif isinstance(command, Forget):
            table.forget(command.trajectories, self.archive, command.reason)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--delete", action="store_true", help="delete what is trained instead of archiving it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
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
        "looks": looks,
    }
    (ROOT / "benchmarks" / "results" / "controller_memory.json").write_text(json.dumps(out, indent=1) + "\n")
    table = Table("finished", "RSS, MB")
    for look in looks:
        table.add_row(f"{look['finished']:,.0f}", f"{look['rss_mb']:.1f}")
    console = Console()
    console.print(table)
    console.print(f"from the first look to the last: {growth:+.1f} MB; run.db has {size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
