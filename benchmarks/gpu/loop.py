"""The whole loop on one GPU with heavy-tailed answers: trained tokens/s of our schedules and of TRL's GRPO trainer.

    python benchmarks/gpu/loop.py [sync partial trajectory adaptive trl] [--steps 6] [--vllm-site SITE]
    python benchmarks/gpu/loop.py sync trajectory trl --device cpu --size tiny --steps 3

Everybody trains the same random model directory (`tail_model.py`), whose answers are heavy-tailed by construction, on
the same prompts in groups of the same size, one optimiser step on every batch, bf16 arithmetic on float32 weights. Each
runs alone on the card. Ours is `tailrace train examples/gpu/loop.toml`, replica and trainer in two processes. TRL
generates with vLLM in its own process (`vllm_mode="colocate"`, the fastest it offers on one card) where --vllm-site
names vLLM's folder, and with transformers' continuous batching otherwise.

Counted are the tokens of answers, between the end of the first steps (start, compilation, capture: --skip) and the
end of the last; the runs are ended there, so nobody is charged for a final checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
from processes import ROOT, tailrace, tails, trained_mini_batches  # noqa: E402
from workloads import ROW  # noqa: E402

RECIPE = ROOT / "examples" / "gpu" / "loop.toml"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_loop.json"
KINDS = ("sync", "partial", "trajectory", "adaptive", "trl")
Row = dict[str, Any]
# On a CPU: the same code in seconds.
TINY = {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 128}
TINY_MEANS = (20.0, 60.0)


class Batch:
    """How much is generated and trained at every step, as the recipe says."""

    def __init__(self, device: str) -> None:
        import tomllib

        workload = tomllib.loads(RECIPE.read_text())["workload"] | (TINY if device == "cpu" else {})
        self.prompts: int = workload["prompts_per_step"]
        self.group: int = workload["group_size"]
        self.most: int = workload["max_completion_tokens"]


def rates(ends: list[float], tokens: list[int], skip: int) -> Row:
    """From the end of step `skip` to the end of the last one."""
    if len(ends) <= skip:
        raise RuntimeError(f"only {len(ends)} steps were done, and {skip} of them are not counted")
    seconds, trained = ends[-1] - ends[skip - 1], sum(tokens[skip:])
    return {
        "tokens_per_s": round(trained / seconds, 1),
        "steps": len(ends) - skip,
        "seconds_per_step": round(seconds / (len(ends) - skip), 3),
        "tokens_per_step": round(trained / (len(ends) - skip)),
        "step_ends": [round(end - ends[0], 2) for end in ends],
    }


# ------------------------------------------------------------------------------------------------------------- ours


def run_ours(kind: str, options: argparse.Namespace, folder: Path) -> Row:
    """Start a run, end it after enough steps, read its journal."""
    run, log = folder / kind, folder / f"{kind}.log"
    tailrace(
        ["train", str(RECIPE), *words(kind, options, folder)],
        log,
        options.deadline,
        enough=lambda: trained_mini_batches(run) >= options.steps,
    )
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / "run.db", options.keep / f"{kind}.db")
    try:
        return read_run(run, options)
    except Exception as error:
        raise RuntimeError(f"{error}\n{tails(run, log)}") from error


def words(kind: str, options: argparse.Namespace, folder: Path) -> list[str]:
    settings = {
        "schedule.kind": kind,
        "run.folder": str(folder),
        "run.name": kind,
        "model.path": options.model,
        "task.data": f"{options.model}/prompts.jsonl",
    }
    if options.device == "cpu":
        settings |= {f"workload.{name}": str(value) for name, value in TINY.items()}
        settings |= {"rollout.kv_tokens": "20000", "rollout.precision": "float32", "trainer.precision": "float32"}
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return given + options.set


def read_run(run: Path, options: argparse.Namespace) -> Row:
    """Tokens of answers: what was trained, less the prompts."""
    from tailrace.obs.summary import summarise

    report = summarise(run)
    steps = report.live.fold.steps[: options.steps]
    lengths = [step.tokens - step.samples * prompt_tokens(options) for step in steps]
    row = rates([step.ended for step in steps], lengths, options.skip)
    summary = report.summary
    row |= {"staleness": summary.staleness.mean, "trainer_idle": summary.trainer_idle}
    row |= {"rollout_idle": summary.rollout_idle, "publish_stall_s": summary.publish_stall_s}
    row |= {"groups_trained": summary.ledger.trained, "groups_dropped": summary.ledger.dropped_stale}
    return row | {"mismatch_kl": measured(run, "mismatch_kl")}


def prompt_tokens(options: argparse.Namespace) -> int:
    line = Path(options.model, "prompts.jsonl").read_text().partition("\n")[0]
    return len(json.loads(line)["prompt"].split())


def measured(run: Path, name: str) -> float | None:
    """The last value of a metric of the trainer, under whatever prefix."""
    from tailrace.store.metrics import measurements

    found = [one.value for one in measurements(run) if one.name.endswith(name) and one.value is not None]
    return found[-1] if found else None


# -------------------------------------------------------------------------------------------------------------- TRL


def run_trl(options: argparse.Namespace, folder: Path) -> Row:
    command = [sys.executable, str(HERE / "loop.py"), "--child", "--model", options.model, "--device", options.device]
    command += ["--steps", str(options.trl_steps), "--skip", str(options.skip), "--trl-batch", str(options.trl_batch)]
    command += ["--vllm-site", options.vllm_site, "--vllm-memory", str(options.vllm_memory)]
    paths = [os.environ.get("PYTHONPATH", ""), options.vllm_site]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "HF_HUB_OFFLINE": "1"}
    given |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    log = folder / "trl.log"
    with log.open("w") as stream:
        try:
            subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, env=given, timeout=options.deadline, check=False
            )
        except subprocess.TimeoutExpired:
            stream.write(f"\nstopped after {options.deadline:.0f} s\n")
    rows = [line.removeprefix(ROW) for line in log.read_text().splitlines() if line.startswith(ROW)]
    if not rows:
        raise RuntimeError(f"TRL came to no figures\n--- {log.name}\n{log.read_text()[-3000:]}")
    return json.loads(rows[-1])


def trl_child(options: argparse.Namespace) -> None:
    """In TRL's process. A row after every step, so that a run that is cut short still says something."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    sys.path.insert(0, str(ROOT / "examples" / "gpu"))
    from coin import coin  # pyright: ignore[reportMissingImports]

    batch, ends, tokens = Batch(options.device), [], []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(each) for each in completion_ids))
        return [coin(completion) for completion in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if options.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if len(ends) > options.skip:
                name = {"engine": "vLLM" if options.vllm_site else "transformers"}
                print("\n" + ROW + json.dumps(rates(ends, tokens[: len(ends)], options.skip) | name), flush=True)

    lines = Path(options.model, "prompts.jsonl").read_text().splitlines()
    rows = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines])
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(options, batch)),
        train_dataset=rows,
        processing_class=PreTrainedTokenizerFast.from_pretrained(options.model, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()


def trl_settings(options: argparse.Namespace, batch: Batch) -> Row:
    """One generation and one optimiser step per step; nothing that costs time and ours does not do."""
    samples, micro = batch.prompts * batch.group, options.trl_batch
    settings: Row = {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "max_steps": options.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": samples // micro,
        "num_generations": batch.group,
        "max_completion_length": batch.most,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-7,
        "lr_scheduler_type": "constant",
        "bf16": options.device == "cuda",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
        "use_cpu": options.device == "cpu",
    }
    if options.vllm_site:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.vllm_memory}
        settings |= {"vllm_max_model_length": 256 + batch.most, "vllm_importance_sampling_correction": False}
    elif options.device == "cuda":
        settings["use_transformers_continuous_batching"] = True
    return settings


# -------------------------------------------------------------------------------------------------------- the driver


def main() -> None:
    options = parse()
    if options.child:
        trl_child(options)
        return
    make_model(options)
    rows: dict[str, Row] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as folder:
            began = time.monotonic()
            try:
                run = run_trl if kind == "trl" else lambda options, folder, kind=kind: run_ours(kind, options, folder)
                rows[kind] = run(options, Path(folder))
            except Exception as error:  # the others are still worth measuring
                print(f"{kind}: {type(error).__name__}: {error}", flush=True)
                continue
        print(f"{kind:11} {json.dumps(rows[kind])}  (took {time.monotonic() - began:.0f} s in all)", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    table(rows)


def make_model(options: argparse.Namespace) -> None:
    if Path(options.model, "prompts.jsonl").is_file():
        return
    began = time.monotonic()
    means = f", means={TINY_MEANS}" if options.device == "cpu" else ""
    call = f"make(Path({options.model!r}), {options.size!r}, {options.device!r}, rows=4096{means})"
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from pathlib import Path; from tail_model import make; {call}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=options.deadline)  # frees the card when it ends
    print(f"the model is in {options.model}, made in {time.monotonic() - began:.0f} s", flush=True)


def table(rows: dict[str, Row]) -> None:
    print(f"\n{'':11} {'tokens/s':>10} {'s a step':>9} {'tokens a step':>14}   over sync   over TRL")
    for kind in (kind for kind in KINDS if kind in rows):
        row = rows[kind]
        over = [
            f"{row['tokens_per_s'] / rows[one]['tokens_per_s']:.2f}" if one in rows else "-" for one in ("sync", "trl")
        ]
        print(
            f"{kind:11} {row['tokens_per_s']:10,.0f} {row['seconds_per_step']:9.2f} {row['tokens_per_step']:14,}"
            f"   {over[0]:>9}   {over[1]:>8}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--steps", type=int, default=6, help="of ours, the first ones included")
    parser.add_argument("--trl-steps", type=int, default=3)
    parser.add_argument("--skip", type=int, default=1, help="first steps that are not counted")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--model", default="", help="folder of the model; made if it is not there")
    parser.add_argument("--vllm-site", default="")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the card that TRL gives vLLM")
    parser.add_argument("--trl-batch", type=int, default=4, help="answers in one forward and backward pass of TRL")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of our runs, last")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for one run")
    parser.add_argument("--scratch", default=None, help="where runs are kept while they last")
    parser.add_argument("--keep", type=Path, help="folder for the journals of our runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"{', '.join(unknown)} is not one of {', '.join(KINDS)}")
    options.model = options.model or f"/tmp/tail-{options.size}"
    return options


if __name__ == "__main__":
    main()
