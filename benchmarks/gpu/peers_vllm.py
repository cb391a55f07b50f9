"""vLLM on the same cases, in a process and an environment of its own: nothing of tailrace is imported here.

    PYTHONPATH=SITE python benchmarks/gpu/peers_vllm.py CASE... [--rounds 1] [--graphs 1024]

Started by `rollout.py`, which reads the lines that begin with ROW. Log-probs of the sampled tokens, temperature 1, no
end token; start and warm-up are not counted. Weights are vLLM's own random ones: their values do not matter to its
speed. All cases of a call must be of one model, because the model is loaded once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from workloads import ROW, Case, Work, chosen, settings


def started(cases: list[Case], graphs: int, memory: float) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    folder = Path(tempfile.mkdtemp(prefix="vllm-model-"))
    (folder / "config.json").write_text(json.dumps({**settings(cases[0].model), "torch_dtype": "bfloat16"}))
    more: dict[str, Any] = {"compilation_config": {"max_cudagraph_capture_size": graphs}} if graphs else {}
    return LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=max(case.longest for case in cases) + 8,
        max_num_seqs=max(case.requests for case in cases),
        gpu_memory_utilization=memory,
        disable_log_stats=True,
        seed=0,
        **more,
    )


def generate(llm: Any, work: Work, logprobs: bool) -> float:
    """Seconds for the work; every token and log-prob must have come."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    wanted = {"logprobs": 0, "flat_logprobs": True} if logprobs else {}
    parameters = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, **wanted)
        for _, length in work
    ]
    began = time.perf_counter()
    found = llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert [len(each.outputs[0].token_ids) for each in found] == [length for _, length in work], "lengths differ"
    if logprobs:
        assert all(len(each.outputs[0].logprobs) == length for each, (_, length) in zip(found, work, strict=True))
        assert math.isfinite(float(found[0].outputs[0].cumulative_logprob))
    return seconds


def measure(llm: Any, case: Case, rounds: int, logprobs: bool) -> dict[str, Any]:
    generate(llm, case.warm_up(), logprobs)
    seconds = [generate(llm, case.work(number), logprobs) for number in range(rounds)]
    return {"engine": "vllm", "case": case.name, "seconds": seconds, "logprobs": logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--graphs", type=int, default=0, help="largest batch in a CUDA graph; 0: vLLM's choice (512)")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the card")
    parser.add_argument("--no-logprobs", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it looks for a package that a plain installation lacks
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = chosen(options.cases)
    assert len({case.model for case in cases}) == 1, "one model in a call"
    began = time.perf_counter()
    llm = started(cases, options.graphs, options.memory)
    print(f"vLLM started in {time.perf_counter() - began:.0f} s", flush=True)
    for case in cases:
        try:
            row = measure(llm, case, options.rounds, not options.no_logprobs)
        except Exception as error:  # one case must not take the others with it
            row = {"engine": "vllm", "case": case.name, "error": f"{type(error).__name__}: {error}"[:400]}
        print(ROW + json.dumps(row), flush=True)
    llm.llm_engine.engine_core.shutdown(30)  # its process holds the card
    os._exit(0)  # nothing is left to tidy up, and threads of a library must not keep us


if __name__ == "__main__":
    main()
