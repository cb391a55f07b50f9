"""One card dealt to several processes: do two replicas and a trainer, each with its share, learn as one replica does?

    python benchmarks/gpu/dealing.py [one two ranks] [--steps 30] [--deadline 95]
    python benchmarks/gpu/dealing.py --device cpu --steps 2                       the same code without a GPU

    one     a replica and the trainer                            30 % and 70 % of the card
    two     two replicas and the trainer                         15 %, 15 % and 70 %
    ranks   a replica and two trainer ranks (FSDP2 over gloo)    30 %, 35 % and 35 %

Each is `tailrace train` on the default recipe (a tiny Llama, nothing is fetched), with held-out accuracy before and
after. What each process was dealt is read from its log; while a run goes on, the driver is asked what each really
holds. Results are written as they come; a case that fails is written with its reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
from processes import ROOT, tailrace, tails, trained_mini_batches  # noqa: E402

RECIPE = ROOT / "examples" / "running_total" / "running_total.toml"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_dealing.json"
CASES: dict[str, list[str]] = {
    "one": ["--local.replicas", "1"],
    "two": ["--local.replicas", "2"],
    "ranks": ["--local.replicas", "1", "--trainer.ranks", "2"],
}
SHARED = ["--trainer.cards", "0,0"]  # both ranks on the one card
ON_GPU = ["--rollout.kv_tokens", "0", "--trainer.compile", "false"]  # the share decides; a small model is soon compiled
ON_CPU = ["--rollout.device", "cpu", "--trainer.device", "cpu"]
DEALT = re.compile(r"INFO (\S+) starts as process (\d+)(?: with (.+))?$", re.MULTILINE)
SAMPLE_S = 2.0  # between two questions to the driver
Row = dict[str, Any]


class CardWatch:
    """The most memory that each process was seen to hold, by its number, and the whole card, in MiB."""

    def __init__(self, device: str) -> None:
        self.most: dict[str, int] = {}
        self._device, self._next = device, 0.0

    def look(self) -> bool:
        """Never enough."""
        if self._device != "cpu" and time.monotonic() >= self._next:
            self._next = time.monotonic() + SAMPLE_S
            for name, size in [*_asked("compute-apps=pid,used_memory"), *_asked("gpu=index,memory.used")]:
                self.most[name] = max(self.most.get(name, 0), size)
        return False


def _asked(query: str) -> list[tuple[str, int]]:
    """Process numbers as they are; the card as `gpu0`."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    prefix = "gpu" if query.startswith("gpu") else ""
    pairs = [line.split(",") for line in answer.splitlines() if line.count(",") == 1]
    return [(prefix + name.strip(), int(size)) for name, size in pairs if size.strip().isdecimal()]


def run(case: str, options: argparse.Namespace, folder: Path) -> Row:
    log, watch, began = folder / f"{case}.log", CardWatch(options.device), time.monotonic()
    words = [*CASES[case], *(ON_CPU if options.device == "cpu" else ON_GPU)]
    words += SHARED if case == "ranks" and options.device != "cpu" else []
    words += ["--run.folder", str(folder), "--run.name", case, "--run.steps", str(options.steps), *options.set]
    code = tailrace(["train", str(RECIPE), *words], log, options.deadline, enough=watch.look)
    row: Row = {"seconds": round(time.monotonic() - began, 1), **read(folder / case, watch)}
    if code != 0:
        row["error"] = f"ended with {code}\n{tails(folder / case, log)}"[-4000:]
    return row


def read(folder: Path, watch: CardWatch) -> Row:
    from tailrace.store.journal import Journal

    meta = Journal(folder).meta if (folder / "run.db").is_file() else {}
    row: Row = {key: float(meta[key]) for key in ("accuracy_before", "accuracy_after") if key in meta}
    row["mini_batches"] = trained_mini_batches(folder)
    row["processes"] = [
        {"name": name, "dealt": dealt, "most_mib": watch.most.get(pid)}
        for file in sorted(folder.glob("logs/*.log"))
        for name, pid, dealt in DEALT.findall(file.read_text())
        if name.startswith(("replica", "trainer"))
    ]
    row["card_most_mib"] = watch.most.get("gpu0")
    return row | figures(folder / "summary.json")


def figures(summary: Path) -> Row:
    if not summary.is_file():
        return {}
    found = json.loads(summary.read_text())
    return {key: found[key] for key in ("tokens_per_s", "steps", "trainer_idle", "rollout_idle") if key in found}


def main() -> None:
    options = parse()
    rows: dict[str, Row] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for case in options.cases:
        with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as folder:
            rows[case] = run(case, options, Path(folder)) | {"device": options.device, "wanted_steps": options.steps}
        print(f"{case:6} {json.dumps(rows[case], indent=1)}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for case in options.cases:
        print(line(case, rows[case]))


def line(case: str, row: Row) -> str:
    accuracy = " -> ".join(f"{row[key]:.3f}" for key in ("accuracy_before", "accuracy_after") if key in row)
    text = accuracy or ("failed" if "error" in row else "not measured")
    return f"{case:6} {text:16} {row['seconds']:6.0f} s  {row.get('tokens_per_s', 0):8,.0f} tokens/s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--deadline", type=float, default=95.0, help="seconds for one run")
    parser.add_argument("--scratch", default=None, help="where runs are kept while they last")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings, last")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"{', '.join(unknown)} is not one of {', '.join(CASES)}")
    return options


if __name__ == "__main__":
    main()
