"""The trainer on one GPU: right against float32 first, then whole training steps of a 1.5B model.

PYTHONPATH=src python benchmarks/gpu/trainer.py   # about two minutes; writes benchmarks/results/gpu_trainer.json
PYTHONPATH=src python benchmarks/gpu/trainer.py --tiny   # the same with tiny models on any device: is it all there?

A step is `Learner.train_mini_batch`: everything from trajectories to changed weights (packing, forward, loss, backward,
clipping, AdamW), timed by the wall clock. Arithmetic is that of the model alone: six times the parameters of the trunk
for each token, six times those of the head for each sampled token, and causal attention; what is computed again to save
memory does not count, nor does padding. Needs torch, transformers, numpy and msgspec.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config.tree import Config, Model, Run, Trainer, Workload
from tailrace.model.packed import hidden_states, layout
from tailrace.model.varlen import attend_row
from tailrace.trainer.batch import plan_mini_batch, read_packs, sample_sizes
from tailrace.trainer.head import score, slope
from tailrace.trainer.packing import Pack
from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from tailrace.types import Segment, Trajectory

ROOT = Path(__file__).parents[2]
PRACTICE = 790e12  # operations per second that an H200 reaches in large bfloat16 products
LIMIT_S = 115.0  # after this no further case is begun
STEPS = 3
GROUP = 8
PROMPT = 128
BIG = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = BIG | {"vocab_size": 5003, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
SMALL |= {"intermediate_size": 1408}
TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


class Case(NamedTuple):
    name: str
    tokens: int  # in a micro-batch
    compile: bool
    recompute: bool


CASES = (
    Case("compiled, 32k", 32768, True, False),
    Case("compiled, 32k, recomputed", 32768, True, True),
    Case("plain, 32k, recomputed", 32768, False, True),
    Case("compiled, 16k", 16384, True, False),
    Case("plain, 16k", 16384, False, False),
)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true", help="tiny models, to see that everything runs")
    options.add_argument("--cases", nargs="+", metavar="NAME", default=[], help="only these")
    chosen = options.parse_args()
    tiny = chosen.tiny
    torch.backends.mkldnn.enabled = torch.cuda.is_available()  # its kernels end the process on some CPUs
    began = time.perf_counter()
    report: dict[str, Any] = {"device": _device_name(), "torch": torch.__version__, "cases": []}
    if torch.cuda.is_available():
        report["attention"] = _guarded("attention over rows", check_attention)
        report["scores"] = _guarded("scores of logits", check_scores)
    report["check"] = _guarded("check", lambda: check(SMALL | TINY if tiny else SMALL))
    write(report, tiny)
    for case in [case for case in CASES if not chosen.cases or case.name in chosen.cases]:
        if time.perf_counter() - began > LIMIT_S:
            print(f"{case.name}: left out, the time is up", flush=True)
            continue
        wanted = case._replace(tokens=case.tokens // 128) if tiny else case
        row = _guarded(case.name, lambda: measure(wanted, BIG | TINY if tiny else BIG, profile=case is CASES[0]))  # noqa: B023
        report["cases"].append({**case._asdict(), **row})
        write(report, tiny)
    table(report)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


def write(report: dict[str, Any], tiny: bool) -> None:
    text = json.dumps(report, indent=1) + "\n"
    places = [ROOT / "benchmarks" / "results"] if not tiny else []
    for folder in [*places, *([Path(os.environ["OUT"])] if "OUT" in os.environ else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_trainer.json").write_text(text)


def _guarded(name: str, work: Any) -> dict[str, Any]:
    """One case that fails does not take the others with it."""
    print(f"--- {name}", flush=True)
    try:
        found = work()
    except Exception as error:  # the border of a case
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    _free()
    return found


# ---------------------------------------------------------------------------------------------------------------- right


def check_attention() -> dict[str, Any]:
    """The kernel for variable lengths, padding and windows included, against float32 sequence by sequence."""
    found, rng = {}, np.random.default_rng()
    for heads, shared, width, window in ((12, 2, 128, 0), (8, 8, 64, 0), (4, 1, 96, 100)):
        lengths = rng.integers(1, 700, 9).tolist()
        where = layout(lengths, "cuda", sum(lengths) + 77)
        q, k, v = (torch.randn(sum(lengths) + 77, h, width, device="cuda") for h in (heads, shared, shared))
        exact = [x.bfloat16().float().requires_grad_() for x in (q, k, v)]
        fast = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        mine = attend_row(*fast, where.bounds, where.sizes, width**-0.5, window)[0]  # type: ignore[arg-type]
        theirs = _attended(exact, lengths, window)
        pull = torch.randn_like(theirs)
        pairs = zip(
            (mine, *torch.autograd.grad((mine * pull).sum(), fast)),
            (theirs, *torch.autograd.grad((theirs * pull).sum(), exact)),
            strict=True,
        )
        found[f"{heads}/{shared} heads of {width}, window {window}"] = [_error(a, b) for a, b in pairs]
    return _said(found)


def _attended(tensors: list[Tensor], lengths: list[int], window: int) -> Tensor:
    q, k, v = tensors
    pieces = []
    for part in zip(*(x[: sum(lengths)].split(lengths) for x in (q, k, v)), strict=True):
        one = [x.transpose(0, 1) for x in part]
        one[1:] = [x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in one[1:]]
        age = torch.arange(len(part[0]), device=q.device)[:, None] - torch.arange(len(part[0]), device=q.device)
        hidden = (age < 0) | (age >= (window or len(part[0])))
        scores = (one[0] @ one[1].mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        pieces.append((scores.softmax(-1) @ one[2]).transpose(0, 1))
    return torch.cat([*pieces, torch.zeros_like(q[sum(lengths) :])])


def check_scores() -> dict[str, Any]:
    """The kernel that scores logits, against float64."""
    found = {}
    for rows, words in ((257, 50257), (64, 151936)):
        logits = (3 * torch.randn(rows, words, device="cuda")).requires_grad_()
        targets, factor = torch.randint(words, (rows,), device="cuda"), 1 / 0.7
        table = (logits.double() * factor).log_softmax(-1)
        chosen, entropy = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
        pulls = torch.randn(rows, device="cuda"), torch.randn(rows, device="cuda")
        wanted = torch.autograd.grad((chosen * pulls[0] + entropy * pulls[1]).sum(), logits)[0]
        mine = score(logits.detach(), targets, factor)
        slopes = slope(logits.detach(), targets, mine[2], mine[1], pulls[0], pulls[1], factor, torch.bfloat16)
        found[f"{words} words"] = [_error(mine[0], chosen), _error(mine[1], entropy), _error(slopes, wanted)]
    return _said(found)


def _error(mine: Tensor, exact: Tensor) -> float:
    mine, exact = mine.detach().double(), exact.detach().double()
    return float((mine - exact).norm() / exact.norm())


def _said(errors: dict[str, Any]) -> dict[str, Any]:
    for name, each in errors.items():
        print(f"{name:>40}: " + " ".join(f"{error:.2e}" for error in each), flush=True)
    return errors | {"right": all(error < 0.02 for each in errors.values() for error in each)}


def check(shape: dict[str, Any]) -> dict[str, Any]:
    """Gradients, loss and log-probs in bfloat16, with every kernel, against float32 without any."""
    model = build(shape)
    groups = make_groups(4096 if shape is SMALL else 512, shape["vocab_size"], seed=3)
    exact = Learner(settings(4096, "float32"), model=copy.deepcopy(model))
    exact.policy.at_once = False
    groups = _sampled_by(exact, groups)
    fast = Learner(settings(4096, "bfloat16", compiled=False), model=model)
    rows = {"rows": fast._rows, "head_at_once": fast.policy.at_once}
    found = rows | _compare_logprobs(fast, groups) | _compare_gradients(fast, exact, groups)
    for name, value in found.items():
        print(f"{name:>28}: {value:.3g}" if isinstance(value, float) else f"{name:>28}: {value}", flush=True)
    found["right"] = found["gradient_error"] < 0.05 and found["logprob_error_mean"] < 0.05
    return found


def _sampled_by(learner: Learner, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """The same samples, as if these weights had drawn them not long ago."""
    rng = np.random.default_rng(5)
    batch = plan_mini_batch(*in_memory(groups), learner.settings)
    found: dict[int, Any] = {}
    for pack in read_packs(batch, range(len(batch.samples)), learner.budget.tokens, fold=False):
        logprobs = learner.scores(pack).logprobs.cpu().numpy() + rng.normal(0, 0.05, len(pack.targets))
        found |= {member: logprobs[pack.sequence == member] for member in pack.members}
    return [[_with(t, found[GROUP * at + i]) for i, t in enumerate(group)] for at, group in enumerate(groups)]


def _with(trajectory: Trajectory, logprobs: Any) -> Trajectory:
    prompt, answer = trajectory.segments
    segments = (prompt, Segment.of(0, answer.ids, logprobs))
    return Trajectory(trajectory.id, trajectory.group, trajectory.prompt, segments, "stop", trajectory.reward)


def _compare_logprobs(learner: Learner, groups: list[list[Trajectory]]) -> dict[str, float]:
    """Of the passes as they train, from the float32 weights in plain float32."""
    batch = plan_mini_batch(*in_memory(groups), learner.settings)
    pack = next(read_packs(batch, range(len(batch.samples)), min(4096, learner.budget.tokens), fold=False))
    mine, theirs = learner.scores(pack).logprobs, exact_logprobs(learner, pack)
    off = mine - theirs
    return {
        "logprob_error_mean": float(off.abs().mean()),
        "logprob_error_max": float(off.abs().max()),
        "mismatch_kl": float((off.exp() - off - 1).mean()),
    }


@torch.no_grad()
def exact_logprobs(learner: Learner, pack: Pack) -> Tensor:
    inputs, places, targets = (
        torch.from_numpy(x).to(learner.device, torch.int64) for x in (pack.inputs, pack.positions, pack.targets)
    )
    hidden = hidden_states(learner.model, inputs, layout(pack.lengths, learner.device))[places]
    head: Any = learner.model.get_output_embeddings()
    pieces = [
        head(h).float().log_softmax(-1).gather(-1, t[:, None])[:, 0]
        for h, t in zip(hidden.split(512), targets.split(512), strict=True)
    ]
    return torch.cat(pieces)


def _compare_gradients(fast: Learner, exact: Learner, groups: list[list[Trajectory]]) -> dict[str, Any]:
    both = fast, exact
    batches = [plan_mini_batch(*in_memory(groups), each.settings) for each in both]
    micro_batches = [each._micro_batches(0, 0, batch) for each, batch in zip(both, batches, strict=True)]
    metrics = [each._backward(some)[0] for each, some in zip(both, micro_batches, strict=True)]
    mine, theirs = ({name: p.grad for name, p in each.model.named_parameters() if p.grad is not None} for each in both)
    assert mine.keys() == theirs.keys()
    off = {name: float((mine[name] - theirs[name]).norm()) for name in theirs}
    size = {name: float(gradient.norm()) for name, gradient in theirs.items()}
    worst = max(off, key=lambda name: off[name] / size[name])
    return {
        "gradient_error": float(np.linalg.norm([*off.values()]) / np.linalg.norm([*size.values()])),
        "gradient_error_worst": off[worst] / size[worst],
        "gradient_worst": worst,
        "loss_bfloat16": metrics[0]["loss"],
        "loss_float32": metrics[1]["loss"],
    }


# ----------------------------------------------------------------------------------------------------------------- fast


def measure(case: Case, shape: dict[str, Any], profile: bool) -> dict[str, Any]:
    groups = make_groups(2 * case.tokens, shape["vocab_size"], seed=1)
    learner = Learner(settings(case.tokens, "bfloat16", case.compile, case.recompute), model=build(shape))
    found: dict[str, Any] = _compare_logprobs(learner, groups) if profile else {}
    _reset_peak()
    seconds, metrics = [], []
    for step in range(STEPS + 1):
        began = time.perf_counter()
        metrics.append(learner.train_mini_batch(step, 0, *in_memory(groups)))
        seconds.append(time.perf_counter() - began)
        print(f"step {step}: {seconds[-1]:.2f} s, loss {metrics[-1]['loss']:.6f}", flush=True)
    if profile:
        found["profile"] = _profile(lambda: learner.train_mini_batch(STEPS + 1, 0, *in_memory(groups)))
    return found | _figures(learner, groups, shape, seconds, metrics) | {"tokens_at_the_end": learner.budget.tokens}


def _figures(
    learner: Learner, groups: Any, shape: dict[str, Any], seconds: list[float], metrics: list[dict[str, float]]
) -> dict[str, Any]:
    batch = plan_mini_batch(*in_memory(groups), learner.settings)
    packs = list(read_packs(batch, range(len(batch.samples)), learner.budget.tokens, fold=False))
    lengths = np.array(sample_sizes(batch))
    head = shape["vocab_size"] * shape["hidden_size"]
    parameters = sum(p.numel() for p in learner.model.parameters())
    attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * float((lengths**2).sum())
    work = 6 * ((parameters - head) * float(lengths.sum()) + head * float(batch.counts.sum())) + attention
    typical = statistics.median(seconds[1:])
    return {
        "first_step_s": seconds[0],
        "step_s": typical,
        "steps_s": seconds[1:],
        "tokens_per_s": float(lengths.sum()) / typical,
        "tflops": work / typical / 1e12,
        "share": work / typical / PRACTICE,
        "attention_share": attention / work,
        "tokens": int(lengths.sum()),
        "sampled_tokens": int(batch.counts.sum()),
        "rows": [learner._room(len(pack.inputs)) or len(pack.inputs) for pack in packs],
        "peak_gb": _peak_gb(),
        "parameters": parameters,
        "compiled": learner._blocks is not None and learner._blocks.on,
        "first_loss": metrics[0]["loss"],
        "first_grad_norm": metrics[0]["grad_norm"],
    }


def _profile(work: Any) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    rows = [
        {
            "kernel": event.key[:100],
            "ms": event.self_device_time_total / 1e3,
            "share": event.self_device_time_total / total,
            "calls": event.count,
        }
        for event in kernels[:12]
    ]
    print(f"device busy for {total / 1e3:.0f} ms of a step", flush=True)
    for row in rows:
        print(f"{row['ms']:9.1f} ms {row['share']:6.1%} {row['calls']:6d}x  {row['kernel']}", flush=True)
    return rows


def table(report: dict[str, Any]) -> None:
    print(f"\n{'case':<28}{'step s':>8}{'tokens/s':>10}{'TFLOP/s':>9}{'of 790':>8}{'GB':>7}{'first s':>9}  grad norm")
    for row in report["cases"]:
        if "error" in row:
            print(f"{row['name']:<28}{row['error'][:90]}")
            continue
        print(
            f"{row['name']:<28}{row['step_s']:8.3f}{row['tokens_per_s']:10.0f}{row['tflops']:9.1f}{row['share']:8.1%}"
            f"{row['peak_gb']:7.1f}{row['first_step_s']:9.1f}  {row['first_grad_norm']:.5f}"
        )


# --------------------------------------------------------------------------------------------------- models and samples


def build(shape: dict[str, Any]) -> Any:
    """Random weights, the same every time, made where they are needed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape), dtype=torch.float32)
    return model.to(device).eval()


def settings(tokens: int, precision: Any, compiled: bool = False, recompute: bool = False) -> Config:
    trainer = Trainer(
        mini_batches=1,
        loss="grpo",
        learning_rate=1e-6,
        tokens_per_batch=tokens,
        precision=precision,
        compile=compiled,
        recompute=recompute,
    )
    return Config(model=Model(path="random"), trainer=trainer, workload=Workload(max_completion_tokens=4096), run=Run())


def make_groups(tokens: int, vocabulary: int, seed: int) -> list[list[Trajectory]]:
    """Groups of samples with log-normal lengths, of nearly so many tokens in all."""
    rng = np.random.default_rng(seed)
    longest = min(4096, tokens // 8)
    prompt = min(PROMPT, longest // 4)
    lengths: list[int] = []
    while sum(lengths) < 0.985 * tokens:
        length = prompt + int(np.clip(rng.lognormal(np.log(longest / 8), 0.8), 8, longest - prompt))
        lengths.append(min(length, max(prompt + 8, int(0.985 * tokens) - sum(lengths))))
    lengths += [prompt + 8] * (-len(lengths) % GROUP)
    made = [_trajectory(rng, i, length, prompt, vocabulary) for i, length in enumerate(lengths)]
    return [made[at : at + GROUP] for at in range(0, len(made), GROUP)]


def _trajectory(rng: np.random.Generator, i: int, length: int, prompt: int, vocabulary: int) -> Trajectory:
    tokens = rng.integers(0, vocabulary, length)
    chance = np.full(length - prompt, -np.log(vocabulary))
    segments = (Segment.of(None, tokens[:prompt]), Segment.of(0, tokens[prompt:], chance))
    return Trajectory(i, i // GROUP, i // GROUP, segments, "stop", float(rng.random()))


# ----------------------------------------------------------------------------------------------------------- the device


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    main()
