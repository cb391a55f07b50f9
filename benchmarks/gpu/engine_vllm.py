"""The adapter for vLLM on a GPU: its contract, a whole run, and its speed beside `AsyncLLM` alone. At most six minutes.

    PYTHONPATH=SITE:src:tests:benchmarks python benchmarks/gpu/engine_vllm.py [PART ...] [--json FILE]

SITE has vLLM unpacked for this very Python (with the newest apache-tvm-ffi before it), so `rollout.python` is this
Python. Parts: contract, run, speed, experts (the contract with a mixture of experts). Without one the first three are
done, each in a process of its own, and one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "tests" / "real_vllm", ROOT / "benchmarks" / "gpu", ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))  # the last one is first: `engine_vllm` is the one for a CPU

PARTS = {"contract": 110, "run": 120, "speed": 330, "experts": 150}  # seconds
START = ROOT / "examples" / "running_total" / "start"
VLLM = ["--rollout.engine", "vllm", "--rollout.python", sys.executable]
SMALL = ["--rollout.memory", "0.2", "--local.replicas", "1", "--rollout.vllm.enforce_eager", "true"]
BFLOAT16 = 0.25  # how far log-probs may be off: of 33,000 tokens by transformers in bfloat16 the worst is off by 0.24


def contract() -> dict[str, Any]:
    """All checks, with the tiny Llama in bfloat16. The truth is computed in float32 from the same rounded weights."""
    import torch

    import engines_under_test as known
    from tailrace.engines.contract import EngineUnderTest
    from tailrace.engines.vllm_engine import build_engine

    def rounded(version: int) -> dict[str, torch.Tensor]:
        model = known.model_of(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        return {name: tensor.bfloat16() for name, tensor in known.weights(version).items()}

    engine = build_engine(known.settings(*VLLM, *SMALL))
    engine.load_weights(0, rounded(0))
    subject = EngineUnderTest(
        engine, known.PROMPTS, known.MAX_TOKENS, rounded, known.truth, BFLOAT16, known.stop_tokens()
    )
    return _checked(subject)


def _checked(subject: Any) -> dict[str, Any]:
    from tailrace.engines.contract import CHECKS

    found: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(subject)
            found[check.__name__] = "ok"
        except AssertionError as error:
            found[check.__name__] = str(error)
    subject.engine.close()
    return {"checks": found, "green": set(found.values()) == {"ok"}}


def experts() -> dict[str, Any]:
    """All checks with a tiny Qwen 3 MoE. Its log-probs are held against nothing: in bfloat16 a token may get another
    expert. Its weights are read back after every update, exactly."""
    import engines_under_test as known
    from tailrace.engines.contract import EngineUnderTest
    from tailrace.engines.vllm_engine import build_engine

    os.environ["TAILRACE_VLLM_PYTHON"] = sys.executable
    from served_models import mixture

    with tempfile.TemporaryDirectory() as folder:
        model = mixture("qwen3", Path(folder))
        engine = build_engine(known.settings(*VLLM, *SMALL, model=model))

        def weights(version: int) -> dict[str, Any]:
            return {name: tensor.bfloat16() for name, tensor in known.weights(version, model).items()}

        engine.load_weights(0, weights(0))
        stops = known.stop_tokens()
        return _checked(EngineUnderTest(engine, known.PROMPTS, known.MAX_TOKENS, weights, stop_tokens=stops))


def run() -> dict[str, Any]:
    """`tailrace train`, weights updated under running answers."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*VLLM, "--rollout.vllm.enforce_eager", "true", "--rollout.memory", "0.2", "--run.folder", folder]
        work = ["--run.steps", "12", "--run.evaluate", "false", "--local.replicas", "1", "--schedule.kind", "partial"]
        recipe = ROOT / "examples" / "running_total" / "running_total.toml"
        began = time.perf_counter()
        command = [sys.executable, "-m", "tailrace", "train", str(recipe), *options, *work, "--run.name", "vllm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        row: dict[str, Any] = {"status": done.returncode, "seconds": round(time.perf_counter() - began, 1)}
        if done.returncode:
            return row | {"error": (done.stderr + done.stdout)[-1500:]}
        return row | _of_run(Path(folder) / "vllm")


def _of_run(folder: Path) -> dict[str, Any]:
    import sqlite3

    summary = json.loads((folder / "summary.json").read_text())
    with sqlite3.connect(folder / "run.db") as database:
        query = "SELECT step, value FROM metrics WHERE name = 'mismatch_kl' ORDER BY step"
        mismatch = [value for _, value in database.execute(query)]
        loads = database.execute("SELECT count(*) FROM journal WHERE kind = 'WeightsLoaded'").fetchone()[0]
    with sqlite3.connect(folder / "samples-0.db") as database:
        query = "SELECT count(DISTINCT version) FROM segments WHERE version IS NOT NULL GROUP BY trajectory_id"
        spans = [count for (count,) in database.execute(query)]
    rows = {"weights_loaded": loads, "answers_of_several_versions": sum(count > 1 for count in spans)}
    return {"steps": summary.get("steps"), **rows, "mismatch_kl": [round(value, 6) for value in mismatch]}


def speed() -> dict[str, Any]:
    """1.5B of random weights, 256 requests."""
    from engine_vllm import measure
    from workloads import settings

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**settings("1.5b"), "torch_dtype": "bfloat16"}))
        options = argparse.Namespace(
            python=sys.executable,
            model=folder,
            dtype="bfloat16",
            requests=256,
            tokens=512,
            rounds=5,
            kv_tokens=0,
            memory=0.35,
            eager=False,
        )
        return measure(options) | {"model": "1.5b"}


def part_of(name: str, folder: Path) -> dict[str, Any]:
    """In a process of its own, so that a card is free again afterwards."""
    result = folder / f"{name}.json"
    command = [sys.executable, str(Path(__file__)), "--part", name, "--json", str(result)]
    try:
        subprocess.run(command, check=False, timeout=PARTS[name])
        return json.loads(result.read_text())
    except (subprocess.TimeoutExpired, FileNotFoundError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["contract", "run", "speed"])
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_engine_vllm.json")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # for `AsyncLLM` alone: a plain installation lacks it
    if options.part:
        row = {"contract": contract, "run": run, "speed": speed, "experts": experts}[options.part]()
        options.json.write_text(json.dumps(row))
        os._exit(0)  # nothing is left to tidy up, and threads of a library must not keep us
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, Any] = {}
        for name in options.parts:
            rows[name] = part_of(name, Path(folder))
            print(name, json.dumps(rows[name], indent=1), flush=True)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
