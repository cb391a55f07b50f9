"""What the vLLM process counts of its engine's work, and when its engine is said to be busy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace.engines.vllm_process import vllm_messages

sys.path.insert(0, str(Path(vllm_messages.__file__).parent))  # as in vLLM's Python, where it is a script
from vllm_server import StepTally


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(tally: StepTally, clock: Clock, until: float, tokens: int, prompts: int = 0) -> None:
    clock.now = until
    scheduler = SimpleNamespace(kv_cache_usage=0.5, num_waiting_reqs=3)
    computed = SimpleNamespace(computed=prompts)
    iteration = SimpleNamespace(num_generation_tokens=tokens, prompt_token_stats=computed) if tokens else None
    tally.record(scheduler, iteration)


def counted(tally: StepTally) -> tuple[Any, ...]:
    totals = tally.totals()
    return totals.busy_s, totals.steps, totals.decoded, totals.kv_read, totals.prefilled


def test_it_is_busy_from_the_first_request_to_the_last_step():
    clock = Clock()
    tally = StepTally(clock)
    clock.now = 10.0
    tally.begin_request()
    step(tally, clock, 11.0, 0)  # a chunk of the prompt
    tally.begin_request()
    step(tally, clock, 12.0, 1, prompts=40)
    step(tally, clock, 13.0, 2, prompts=20)
    tally.end_request()
    tally.end_request()
    clock.now = 50.0  # new weights, say
    tally.begin_request()
    step(tally, clock, 50.5, 1)
    tally.read_kv(40, 2)
    assert counted(tally) == (3.5, 3, 4, 40 + 41, 60)


def test_what_nobody_asked_for_is_no_work():
    clock = Clock()
    tally = StepTally(clock)
    tally.capacity = 1000
    step(tally, clock, 1.0, 1, prompts=1)  # of a request that only warms up
    assert counted(tally) == (0.0, 0, 0, 0, 0)
    assert (tally.totals().kv_tokens, tally.totals().waiting) == (500, 3)
