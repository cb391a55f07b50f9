"""Rollout on one GPU: the native engine, vLLM and the floor of the matrix products, on the same prompts and lengths.

    python benchmarks/gpu/rollout.py [CASE...] [--only check native floor vllm] [--vllm-site SITE]
    python benchmarks/gpu/rollout.py 1.5b-256 --profile          # where the native engine's time goes
    python benchmarks/gpu/rollout.py tiny --device cpu           # the same code on a CPU, without vLLM

A case is a name from `workloads.py`, or a model for all of its cases. Engines run one after the other, each in a
process of its own, so that nobody shares the card; loading, compilation and a warm-up over all batch sizes are not
counted. First the native engine's tokens and log-probs are checked on fresh random models; if that fails nothing is
timed. A row is printed and written as soon as it is known, and a case that fails does not stop the others. The floor
is the time of the model's matrix products alone, in a CUDA graph, summed over the batch sizes of all decode steps;
prefill is left out.

vLLM needs a folder of its own on PYTHONPATH (`--vllm-site`), because it pins what it depends on; without one it is
left out. It gets CUDA graphs up to the largest batch of the cases, which is more than its own choice of 512.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]
from workloads import ROW, Case, Work, chosen  # noqa: E402

if TYPE_CHECKING:
    import torch

    from tailrace.engines.native import NativeEngine

RESULTS = ROOT / "benchmarks" / "results" / "gpu_rollout.json"
DEFAULT = ["1.5b", "7b"]
PHASES = ("check", "native", "floor", "vllm")
Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------- the native engine


def native_engine(model: Any, cases: list[Case], options: argparse.Namespace, temperature: float = 1.0) -> NativeEngine:
    from tailrace.config.tree import Config, Rollout, Sampling, Workload
    from tailrace.engines.native import NativeEngine

    limits = Workload(prompt_tokens=max(case.longest for case in cases), max_completion_tokens=1)
    running = max(case.requests for case in cases)
    rollout = Rollout(max_running=running, prefill_tokens=options.prefill_tokens, kv_tokens=options.kv_tokens)
    config = Config(workload=limits, rollout=rollout, sampling=Sampling(temperature=temperature))
    return NativeEngine(model, lambda tokens: "", (), config, seed=0)


def play(engine: NativeEngine, work: Work, first: int = 0) -> dict[int, tuple[list[int], list[float]]]:
    """Everything sampled, by request."""
    import numpy as np

    from tailrace.engines.base import Job
    from tailrace.types import id_bytes

    found: dict[int, tuple[list[int], list[float]]] = {first + at: ([], []) for at in range(len(work))}
    for at, (prompt, length) in enumerate(work, first):
        engine.submit(Job(at, at, id_bytes(prompt), len(prompt), length))
    open_ones = len(work)
    while open_ones:
        for id, tokens, logprobs, finish in engine.step().additions():
            found[id][0].extend(np.frombuffer(tokens, np.int32).tolist())
            found[id][1].extend(np.frombuffer(logprobs, np.float32).tolist())
            if finish:
                open_ones -= 1
                engine.forget([id])
    return found


def native_rows(cases: list[Case], options: argparse.Namespace) -> Iterator[Row]:
    for model in dict.fromkeys(case.model for case in cases):
        yield from model_rows(model, [case for case in cases if case.model == model], options)
        free(options.device)


def model_rows(model: str, cases: list[Case], options: argparse.Namespace) -> Iterator[Row]:
    """One engine for all cases: its pool fits the longest."""
    import torch
    from models import random_model

    began = time.perf_counter()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    engine = native_engine(random_model(model, options.device, dtype), cases, options)
    seconds = time.perf_counter() - began
    print(f"native engine of {model}: ready in {seconds:.1f} s, KV pool {engine.kv_capacity:,} tokens", flush=True)
    for number, case in enumerate(cases):
        yield _guarded("native", case, partial(timed_native, engine, case, number, options.rounds))


def timed_native(engine: NativeEngine, case: Case, number: int, rounds: int) -> Row:
    first = number * 1_000_000
    play(engine, case.warm_up(), first)
    seconds = []
    for at in range(rounds):
        work = case.work(at)
        began = time.perf_counter()
        found = play(engine, work, first + (at + 1) * 10_000)
        seconds.append(time.perf_counter() - began)
        got = [(len(tokens), len(logprobs)) for tokens, logprobs in found.values()]
        assert got == [(length, length) for _, length in work], "a request did not get what it asked for"
    return {"engine": "native", "case": case.name, "seconds": seconds}


def free(device: str) -> None:
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------- the checks

SMALL = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 4096}
SPREAD = 0.05  # of the weights: logits far enough apart that rounding decides few greedy tokens


def check_rows(cases: list[Case], options: argparse.Namespace) -> Iterator[Row]:
    """Fresh random models: log-probs against float32, greedy tokens against the CPU."""
    import torch
    from models import random_model

    seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    for tied in (True, False):
        changed = {**SMALL, "tie_word_embeddings": tied, "initializer_range": SPREAD}
        model = random_model("tiny", options.device, dtype, seed, **changed)
        yield {"check": "log-probs", "seed": seed, "tied": tied, **logprob_errors(model, seed, options)}
        model = random_model("tiny", "cpu", torch.float32, seed, **changed)
        yield {"check": "greedy", "seed": seed, "tied": tied, **greedy_agreement(model, seed, options)}


def ragged(seed: int) -> Work:
    """Prompts and answers of all kinds of lengths, around the edges of blocks."""
    import random

    draw = random.Random(seed)
    prompts = [1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200, 255, 257, *(draw.randrange(1, 400) for _ in range(10))]
    return [([draw.randrange(SMALL["vocab_size"]) for _ in range(size)], draw.randrange(1, 80)) for size in prompts]


def small_engine(model: Any, options: argparse.Namespace, temperature: float) -> NativeEngine:
    return native_engine(model, [Case("small", "tiny", 24, 512, 96)], options, temperature)


def logprob_errors(model: Any, seed: int, options: argparse.Namespace) -> Row:
    """The engine's log-probs must be as near to a float32 forward pass as transformers' own in the same precision."""
    import copy

    import torch

    reference = copy.deepcopy(model).float()
    plain = copy.deepcopy(model)
    work = ragged(seed)
    found = play(small_engine(model, options, 1.0), work)
    ours, theirs = [], []
    for (prompt, _), (tokens, logprobs) in zip(work, found.values(), strict=True):
        exact = sequence_logprobs(reference, prompt, tokens)
        ours.append(torch.tensor(logprobs) - exact)
        theirs.append(sequence_logprobs(plain, prompt, tokens) - exact)
    own, other = torch.cat(ours), torch.cat(theirs)
    row = {"mean_error": float(own.abs().mean()), "transformers_error": float(other.abs().mean())}
    row |= {"max_error": float(own.abs().max()), "mismatch_kl": float((own.exp() - 1 - own).mean())}
    return row | {"ok": row["mean_error"] <= 1.5 * row["transformers_error"] + 1e-4 and row["mismatch_kl"] < 1e-3}


def sequence_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of every token of the answer, by one forward pass of the whole sequence."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def greedy_agreement(model: Any, seed: int, options: argparse.Namespace) -> Row:
    """In float32, where both paths differ by the order of sums alone."""
    import copy

    work = ragged(seed)
    here = play(small_engine(copy.deepcopy(model), options, 0.0), work)
    there = play(small_engine(copy.deepcopy(model).to(options.device), options, 0.0), work)
    same = [here[at][0] == there[at][0] for at in here]
    return {"same_sequences": sum(same), "sequences": len(same), "ok": sum(same) >= len(same) - 1}


# ---------------------------------------------------------------------------------------------------------- the floor


def floor_rows(cases: list[Case], options: argparse.Namespace) -> Iterator[Row]:
    for model in dict.fromkeys(case.model for case in cases):
        mine = [case for case in cases if case.model == model]
        largest = max(case.requests for case in mine)
        sizes = sorted({size for size in (1, 16, 64, 128, 256, 512, 768, 1024) if size < largest} | {largest})
        times = product_times(model, sizes, options.device)
        print(f"matrix products of {model}, ms a step: ", end="")
        print({size: round(1e3 * seconds, 3) for size, seconds in times.items()}, flush=True)
        for case in mine:
            yield {"engine": "floor", "case": case.name, "seconds": [decode_floor(case.lengths(), times)]}
        free(options.device)


def decode_floor(lengths: list[int], times: dict[int, float]) -> float:
    """Every request starts at once; step t runs with those that want more than t tokens."""
    import numpy as np

    running = (np.asarray(lengths)[None, :] > np.arange(max(lengths))[:, None]).sum(1)
    return float(np.interp(running, list(times), list(times.values())).sum())


def product_times(model: str, sizes: list[int], device: str) -> dict[int, float]:
    """Seconds of all products of one decode step. Every layer has weights of its own, as in the model."""
    import torch
    from models import products
    from workloads import SHAPES

    layer, layers = products(model)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02

    weights = [[matrix(*shape) for shape in layer] for _ in range(layers)]
    weights.append([matrix(SHAPES[model]["vocab_size"], SHAPES[model]["hidden_size"])])
    times = {}
    for size in sizes:
        inputs = {columns: matrix(size, columns) for _, columns in layer}
        step = _products_step(weights, inputs)
        times[size] = _graph_time(step) if device == "cuda" else _host_time(step)
    return times


def _products_step(weights: list[list[torch.Tensor]], inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
    import torch

    def step() -> None:
        for layer in weights:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return step


def _graph_time(step: Callable[[], None], repeats: int = 20) -> float:
    """Median of replays of one captured step."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode():
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def _host_time(step: Callable[[], None], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return median(times)


# -------------------------------------------------------------------------------------------------------- the profile


def profile(case: Case, options: argparse.Namespace) -> None:
    """The kernels of some steps in the middle of a case, and how long no kernel ran."""
    import torch
    from models import random_model
    from torch.profiler import ProfilerActivity, profile

    from tailrace.engines.base import Job
    from tailrace.types import id_bytes

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    engine = native_engine(random_model(case.model, options.device, dtype), [case], options)
    play(engine, case.warm_up(), 1_000_000)
    for at, (prompt, length) in enumerate(case.work()):
        engine.submit(Job(at, at, id_bytes(prompt), len(prompt), length))
    while engine.stats().waiting:
        engine.step()
    for _ in range(3):
        engine.step()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if options.device == "cuda" else [])
    began = time.perf_counter()
    with profile(activities=kinds) as found:
        tokens = sum(len(engine.step().tokens) for _ in range(options.profile_steps))
        seconds = time.perf_counter() - began
    order = "self_device_time_total" if options.device == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=70))
    print(f"{case.name}: {options.profile_steps} engine steps, {tokens:,} tokens, {1e3 * seconds:.1f} ms (profiled)")
    if options.device == "cuda":
        print_idle(found)


def print_idle(found: Any) -> None:
    from torch._C._autograd import DeviceType

    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        print("the profiler saw no kernel")
        return
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - spans[0][0]
    print(
        f"kernels and copies run {busy / 1e3:.1f} of {span / 1e3:.1f} ms: {1 - busy / span:.1%} of the time none runs"
    )


# -------------------------------------------------------------------------------------------------------- the driver


def _guarded(engine: str, case: Case, action: Callable[[], Row]) -> Row:
    """One case must not take the others with it."""
    try:
        return action()
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"engine": engine, "case": case.name, "error": f"{type(error).__name__}: {error}"[:400]}


def child(phase: str, cases: list[Case], options: argparse.Namespace) -> None:
    """In the process of one phase."""
    rows = {"check": check_rows, "native": native_rows, "floor": floor_rows}[phase]
    for row in rows(cases, options):
        print(ROW + json.dumps(row), flush=True)


def started(phase: str, cases: list[Case], options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a phase as they come from its process."""
    names = [case.name for case in cases]
    environment = dict(os.environ)
    if phase == "vllm":
        graphs = max(case.requests for case in cases) if options.vllm_graphs < 0 else options.vllm_graphs
        words = [str(HERE / "peers_vllm.py"), *names, "--rounds", str(options.rounds), "--graphs", str(graphs)]
        environment["PYTHONPATH"] = options.vllm_site
    else:
        words = [str(HERE / "rollout.py"), *names, "--child", phase, *_passed_on(options)]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    )
    stopper = threading.Timer(options.deadline, os.killpg, (process.pid, signal.SIGKILL))  # with its own children
    stopper.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(ROW):
                yield json.loads(line.removeprefix(ROW))
            else:
                print(f"  {phase}: {line}", end="", flush=True)
    finally:
        code = process.wait()
        stopper.cancel()
        if code:
            why = f" (its time of {options.deadline:.0f} s is over)" if code == -9 else ""
            print(f"{phase} ended with status {code}{why}", flush=True)


def _passed_on(options: argparse.Namespace) -> list[str]:
    names = ("device", "rounds", "prefill_tokens", "kv_tokens")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    return words + (["--seed", str(options.seed)] if options.seed is not None else [])


class Report:
    """Rows of all phases; prints each and keeps the file up to date."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, Row] = json.loads(file.read_text()) if file.is_file() else {}
        self.failed = False

    def add(self, row: Row) -> None:
        if "check" in row:
            self.failed |= not row["ok"]
            print(f"check {row['check']}: " + json.dumps(row), flush=True)
            self.rows[f"check {row['check']} tied={row['tied']}"] = row
        else:
            self._add_case(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.rows, indent=1) + "\n")

    def _add_case(self, row: Row) -> None:
        case = chosen([row["case"]])[0]
        if "error" in row:
            print(f"{case.name:10} {row['engine']:7} failed: {row['error']}", flush=True)
            return
        entry = self.rows.setdefault(case.name, {"tokens": sum(case.lengths())})
        rate = sum(case.lengths()) / median(row["seconds"])
        entry[row["engine"]] = {"tokens_per_s": round(rate, 1), "seconds": [round(s, 4) for s in row["seconds"]]}
        if "native" in entry:
            self._relate(entry)
        print(f"{case.name:10} {row['engine']:7} {rate:10,.0f} tokens/s  {row['seconds']}", flush=True)

    @staticmethod
    def _relate(entry: Row) -> None:
        own = entry["native"]["tokens_per_s"]
        if "vllm" in entry:
            entry["over_vllm"] = round(own / entry["vllm"]["tokens_per_s"], 2)
        if "floor" in entry:
            entry["share_of_floor"] = round(own / entry["floor"]["tokens_per_s"], 3)

    def table(self, cases: list[Case]) -> None:
        print(f"\n{'case':10} {'native':>10} {'vLLM':>10} {'ratio':>6} {'floor':>10} {'share':>6}   tokens/s")
        for case in cases:
            entry = self.rows.get(case.name, {})
            rates = [_shown(entry.get(name, {}).get("tokens_per_s"), ",.0f") for name in ("native", "vllm", "floor")]
            ratio, share = _shown(entry.get("over_vllm"), ".2f"), _shown(entry.get("share_of_floor"), ".0%")
            print(f"{case.name:10} {rates[0]:>10} {rates[1]:>10} {ratio:>6} {rates[2]:>10} {share:>6}", flush=True)


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def main() -> None:
    options = parse()
    cases = chosen(options.cases)
    if options.child:
        child(options.child, cases, options)
    elif options.profile:
        profile(cases[0], options)
    else:
        compare(cases, options)


def compare(cases: list[Case], options: argparse.Namespace) -> None:
    report = Report(options.out)
    for phase in (phase for phase in PHASES if phase in options.only):
        if phase == "vllm" and not options.vllm_site:
            print("vllm: left out, because no --vllm-site names its folder")
            continue
        models = dict.fromkeys(case.model for case in cases) if phase == "vllm" else [""]
        for model in models:  # vLLM loads one model a process
            for row in started(phase, [case for case in cases if model in ("", case.model)], options):
                report.add(row)
        if report.failed and not options.anyway:
            raise SystemExit("the native engine's results are wrong (see the checks above); nothing is timed")
    report.table(cases)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=DEFAULT, help="cases or models of workloads.py")
    parser.add_argument("--only", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--anyway", action="store_true", help="time even what fails its checks")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="of the checks' random models; unset: a fresh one")
    parser.add_argument("--prefill-tokens", type=int, default=0, help="0: the engine's choice")
    parser.add_argument("--kv-tokens", type=int, default=0, help="size of the KV pool; 0: what memory allows")
    parser.add_argument("--vllm-site", default="", help="folder with vLLM and what it depends on")
    parser.add_argument("--vllm-graphs", type=int, default=-1, help="0: its own choice; -1: up to the largest batch")
    parser.add_argument("--profile", action="store_true", help="of the first case, native engine only")
    parser.add_argument("--profile-steps", type=int, default=8)
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds for one phase")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
