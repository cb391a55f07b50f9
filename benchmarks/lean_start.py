"""From a clone to the first training step on a fresh machine: seconds, and megabytes of .venv.

    python benchmarks/lean_start.py --label after            # this commit
    python benchmarks/lean_start.py --label before --ref REF # another one

Clones the repository into an empty folder, runs `make train` for one step there, with a Python environment of its own
and without pip's cache, and notes when pip was done and when the first step was. Packages come from where pip finds
them here. Rows are kept by label in results/lean_start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "lean_start.json"
OPTIONS = "OPTIONS=--run.steps 1 --run.evaluate false"


def measure(ref: str) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory(prefix="lean-start-") as folder:
        clone = Path(folder) / "tailrace"
        began = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", ref], check=True)
        installed, stepped, silent = follow(clone, began)
        return {
            "commit": output("git", "-C", str(clone), "rev-parse", "--short", "HEAD"),
            "seconds_to_installed": round(installed, 1),
            "seconds_to_first_step": round(stepped, 1),
            "longest_silence_s": round(silent, 1),
            "megabytes": round(size(clone / ".venv") / 1e6),
            "packages": len(list((clone / ".venv").glob("lib/python*/site-packages/*.dist-info"))),
        }


def follow(clone: Path, began: float) -> tuple[float, float, float]:
    """When everything was installed, when the first step was done, and the longest time without a line before that."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = subprocess.Popen(
        ["make", "train", OPTIONS],
        cwd=clone,
        env=environment | {"PIP_NO_CACHE_DIR": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert command.stdout is not None
    installed = stepped = silent = 0.0
    last = began
    for line in command.stdout:
        print(line, end="", flush=True)
        now = time.monotonic()
        silent, last = max(silent, now - last), now
        if "tailrace train" in line:
            installed = now - began
        if "step 1/1" in line:
            stepped = now - began
    if command.wait() or not stepped:
        raise SystemExit("it did not get to its first step")
    return installed, stepped, silent


def size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True)
    parser.add_argument("--ref", default="HEAD")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    row = measure(arguments.ref) | {"cores": os.cpu_count() or 0, "load_before": round(load, 1)}
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(rows | {arguments.label: row}, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
