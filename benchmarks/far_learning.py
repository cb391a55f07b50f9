"""Does the default recipe learn as well when all of its replicas are far away? 200 ms there and back, S = 4.

    sudo python benchmarks/far_learning.py [--seeds 1]        # writes benchmarks/results/far_learning.json

Controller, trainer, store and a relay are on one host. The replicas are on two others (network namespaces), which are a
site behind a link of 100 Mbit/s with 200 ms of round trip and 1 % of loss, and have a relay each. Both kinds train
the same number of samples and have the same bound on staleness; `near` has its replicas on the trainer's host. Accuracy
is held out, before and after. `to_site` are megabytes that went to the site for each version, weights and all else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos"), str(ROOT / "src")]

import guests  # noqa: E402
from hosts import missing  # noqa: E402

import runs  # noqa: E402
from tailrace.obs.summary import summarise  # noqa: E402

RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
RESULTS = ROOT / "benchmarks" / "results" / "far_learning.json"
LINK = {"rate_mbits": 100.0, "delay_s": 0.1, "loss": 0.01}
PATIENCE_S = 3600.0
Row = dict[str, Any]


def settings() -> str:
    return RECIPE.read_text().replace('path = "start"', f'path = "{RECIPE.parent / "start"}"')


def learn(kind: str, seed: int, steps: int, folder: Path) -> Row:
    words = ["--run.seed", str(seed), "--schedule.max_staleness", "4", "--run.steps", str(steps)]
    words += ["--local.replicas", "0"] if kind == "far" else []
    with guests.on_hosts(3, folder, settings(), *words) as (network, run, join):
        link = network.place([1, 2], **LINK)
        if kind == "far":
            for host in (1, 2):
                join(host, "--site", "far", "--stay", "--wait", "3600")
        status, out, err = run.wait()
        assert status == 0, f"{out}\n{err}\n{run.logs()}"
        return {"kind": kind, "seed": seed, **figures(run.folder), "to_site": round(link.bytes_in / 1e6 / steps, 2)}


def figures(run: Path) -> Row:
    report = summarise(run)
    summary, steps = report.summary, report.live.fold.steps
    return {
        "before": summary.accuracy.before,
        "after": summary.accuracy.after,
        "samples": summary.trained_samples,
        "seconds": round(steps[-1].ended - report.live.first_sample_at, 1),
        "staleness": summary.staleness.mean,
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seeds", type=int, default=1)
    words.add_argument("--steps", type=int, default=30)
    words.add_argument("--kinds", nargs="+", default=["far", "near"])
    options = words.parse_args()
    if reason := missing():
        sys.exit(f"no hosts: {reason}")
    guests.DEADLINE_S = runs.DEADLINE_S = PATIENCE_S
    rows: list[Row] = []
    for seed in range(options.seeds):
        for kind in options.kinds:
            with TemporaryDirectory() as folder:
                rows.append(learn(kind, seed, options.steps, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            RESULTS.write_text(json.dumps({"link": LINK, "max_staleness": 4, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
