"""The engine's GPU form, with its kernels in Triton's interpreter: the same tokens as its CPU form."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
FAMILIES = ("qwen2", "qwen3")  # with biases, with norms of heads


def test_many_steps_per_round_trip_give_the_same_tokens() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == list(FAMILIES)


def compare(family: str) -> None:
    """Groups that share prompts, chunks of prompts beside decoding, stop tokens in the middle of a round trip, and a
    pool that is too small for all of them."""
    from tailrace.engines import native
    from tailrace.engines.eager import EagerExecutor
    from tailrace.engines.graphs import GraphExecutor
    from unit import test_engine as case

    model, work = case.tiny(family), case.jobs(group_size=2, lengths=(3, 17))
    work[1] = msgspec.structs.replace(work[1], failures=2)  # so its random numbers are not those of its id
    config = case.settings(temperature=1.0, kv_tokens=96, block_tokens=16, prefill_tokens=7, max_running=4)
    plain = case.engine(model, config, eos=(5, 11, 60))
    expected = case.run(plain, work)
    native.has_kernels = lambda device: True
    fused = case.engine(model, config, eos=(5, 11, 60))
    found = case.run(fused, work)
    assert isinstance(plain._executor, EagerExecutor)
    assert isinstance(fused._executor, GraphExecutor)
    native.has_kernels = lambda device: False
    assert found.tokens == expected.tokens
    assert found.finish == expected.finish
    assert "stop" in found.finish.values()
    for id, logprobs in found.logprobs.items():
        assert logprobs == pytest.approx(expected.logprobs[id], abs=1e-4)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for family in FAMILIES:
        compare(family)
        print(family, flush=True)
