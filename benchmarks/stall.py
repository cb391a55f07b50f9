"""Trainer stall per weight publish, in real runs with 1, 2, 4 and 8 relays on this machine.

python benchmarks/stall.py     # prints the table, writes benchmarks/results/stall.json

The default recipe. `benchmarks/publish.py` measures the relay tier alone, with a version of 538 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.obs.summary import summarise
from tailrace.store.metrics import measurements

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
RELAYS = (1, 2, 4, 8)
STEPS = 10


def run(relays: int, folder: Path) -> dict[str, Any]:
    name = f"relays-{relays}"
    words = ["--local.relays", str(relays), "--run.steps", str(STEPS), "--run.evaluate", "false"]
    place = ["--run.folder", str(folder), "--run.name", name]
    command = [sys.executable, "-m", "tailrace", "train", str(RECIPE), *words, *place]
    subprocess.run(command, check=True, capture_output=True)
    live = summarise(folder / name).live
    stalls = [one.value for one in measurements(folder / name) if one.name == "publish/stall_s" and one.value]
    step_s = (live.fold.steps[-1].ended - live.first_sample_at) / len(live.fold.steps)
    return {"relays": relays, "stall_s": median(stalls), "step_s": step_s, "share": median(stalls) / step_s}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(relays, Path(folder)) for relays in RELAYS]
    table = Table("relays", "trainer stall per weight publish, ms", "step, s", "% of step time")
    for row in rows:
        table.add_row(str(row["relays"]), f"{row['stall_s'] * 1e3:.2f}", f"{row['step_s']:.2f}", f"{row['share']:.2%}")
    Console().print(table)
    (ROOT / "benchmarks" / "results" / "stall.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
