"""What looking at a run costs it: the default recipe with three pages open against none, in alternation.

    python benchmarks/page_cost.py [--rounds 5] [--pages 3] [--more]

One `tailrace page`, with the process of its text index, and so many clients, each of which asks for figures and samples
once a second, as a browser does, with the tag of what it has. Beside the seconds of training, which vary by more than a
page costs, the processor time of the page's processes per second of training is told: noise does not hide that. Writes
benchmarks/results/page_cost.json; `--more` adds rounds to what is there. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import page_of  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "page_cost.json"
RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"


class PageCost(NamedTuple):
    """Of one run: the seconds in which it was running, as it says itself, and processor time while the page was there,
    per second: of its server, of the process of its text index, and of the threads that ask here."""

    wall_s: float
    server: float = 0.0
    indexing: float = 0.0
    clients: float = 0.0


@contextmanager
def looking(run: Path, pages: int) -> Iterator[Callable[[], tuple[float, float, float]]]:
    """Somebody has the page of this run open so many times. Gives its costs so far, per second."""
    began = time.monotonic()
    with page_of(run) as (server, address):
        ended = threading.Event()
        threads = [threading.Thread(target=_ask, args=(address, ended)) for _ in range(pages)]
        own_s = time.process_time()
        for thread in threads:
            thread.start()

        def costs() -> tuple[float, float, float]:
            seconds = time.monotonic() - began
            spent = (_cpu_s(server.pid), sum(map(_cpu_s, _children(server.pid))), time.process_time() - own_s)
            return spent[0] / seconds, spent[1] / seconds, spent[2] / seconds

        try:
            yield costs
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _ask(address: str, ended: threading.Event) -> None:
    """As load.js does in a browser, which keeps its connection."""
    tags: dict[str, str] = {}
    with closing(http.client.HTTPConnection(address.split("/")[2], timeout=60)) as server:
        while not ended.wait(1.0):
            for target in ("/data?run=0", "/samples?run=0&limit=50"):
                server.request("GET", target, headers={"If-None-Match": tags[target]} if target in tags else {})
                answer = server.getresponse()
                answer.read()
                assert answer.status in (200, 304), answer.status
                tags[target] = answer.headers["ETag"]


def _cpu_s(pid: int) -> float:
    """User and system time so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def train(folder: Path, pages: int) -> PageCost:
    command = [sys.executable, "-m", "tailrace", "train", str(RECIPE), "--run.name", "run", "--run.evaluate", "false"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = folder / "runs" / "run"
    while not (run / "run.db").exists():
        assert child.poll() is None, "the run did not start"
        time.sleep(0.1)
    with looking(run, pages) if pages else nullcontext(lambda: (0.0, 0.0, 0.0)) as costs:
        assert child.wait() == 0
        shares = costs()
    return PageCost(json.loads((run / "summary.json").read_text())["wall_s"], *shares)


def row(pages: int, without: list[PageCost], looked_at: list[PageCost]) -> dict[str, Any]:
    pairs = [late.wall_s / early.wall_s for early, late in zip(without, looked_at, strict=True)]  # of one round each
    ratio = median(one.wall_s for one in looked_at) / median(one.wall_s for one in without)
    names = PageCost._fields[1:]
    cpu_s_per_s = {name: median(getattr(one, name) for one in looked_at) for name in names}
    costs = {"ratio": ratio, "ratio_of_rounds": median(pairs), "cpu_s_per_s": cpu_s_per_s}
    taken = {"0": without, str(pages): looked_at}
    rounds = {key: [one._asdict() for one in some] for key, some in taken.items()}
    return {"cores": os.cpu_count(), "pages": pages, **costs, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--more", action="store_true")
    arguments = parser.parse_args()
    taken: dict[int, list[PageCost]] = {0: [], arguments.pages: []}
    if arguments.more and RESULT.exists():
        known = json.loads(RESULT.read_text())["rounds"]
        taken = {int(pages): [PageCost(**one) for one in some] for pages, some in known.items()}
    for _ in range(arguments.rounds):
        for pages, costs in taken.items():
            with tempfile.TemporaryDirectory() as name:
                costs.append(train(Path(name), pages))
    out = row(arguments.pages, taken[0], taken[arguments.pages])
    RESULT.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
