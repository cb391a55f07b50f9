"""What looking at a run costs it: the default recipe with three pages open against none, in alternation.

    python benchmarks/page_cost.py [--rounds 5] [--pages 3] [--more]

One `tailrace page`, with the process of its text index, and so many clients, each of which asks for figures and samples
once a second, as a browser does. Writes benchmarks/results/page_cost.json; `--more` adds rounds to what is there. Run
it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import page_of  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "page_cost.json"
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"


@contextmanager
def looking(run: Path, pages: int) -> Iterator[None]:
    """Somebody has the page of this run open so many times."""
    with page_of(run) as (_, address):
        ended = threading.Event()
        threads = [threading.Thread(target=_ask, args=(address, ended)) for _ in range(pages)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _ask(address: str, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        for target in ("data", "samples"):
            with suppress(OSError):
                urllib.request.urlopen(address + target, timeout=10).read()


def training_s(folder: Path, pages: int) -> float:
    """Seconds in which the run was running, as it says itself."""
    command = [sys.executable, "-m", "tailrace", "train", str(RECIPE), "--run.name", "run", "--run.evaluate", "false"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = folder / "runs" / "run"
    while not (run / "run.db").exists():
        assert child.poll() is None, "the run did not start"
        time.sleep(0.1)
    with looking(run, pages) if pages else nullcontext():
        assert child.wait() == 0
    return json.loads((run / "summary.json").read_text())["wall_s"]


def row(pages: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    without, with_pages = (median(seconds) for seconds in taken.values())
    pairs = [late / early for early, late in zip(*taken.values(), strict=True)]  # of one round each
    ratios = {"ratio": with_pages / without, "ratio_of_rounds": median(pairs)}
    return {"cores": os.cpu_count(), "pages": pages, **ratios, "wall_s": taken}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--more", action="store_true")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {"0": [], str(arguments.pages): []}
    if arguments.more and RESULT.exists():
        taken = json.loads(RESULT.read_text())["wall_s"]
    for _ in range(arguments.rounds):
        for pages, seconds in taken.items():
            with tempfile.TemporaryDirectory() as name:
                seconds.append(training_s(Path(name), int(pages)))
    out = row(arguments.pages, taken)
    RESULT.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
