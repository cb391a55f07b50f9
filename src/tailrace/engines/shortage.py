"""Carries out a plan even if memory runs out on the way: with less prefill at once, and nothing lost.

The native engine hands its plans to `carry_out`. Until a plan is reported as computed the scheduler counts none of it,
and sampling depends on positions alone, so whatever a failed attempt wrote into the pool is written again. Only the
copies of blocks are made once: what they were copied from may be somebody else's by then.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tailrace.engines.eager import Drawn
from tailrace.engines.kv import KVCache
from tailrace.engines.scheduler import BatchPlan, Scheduler
from tailrace.model.memory import DoesNotFitError, free_memory, ran_out

log = logging.getLogger(__name__)


class Executor(Protocol):
    def run(self, plan: BatchPlan) -> Drawn: ...


def carry_out(plan: BatchPlan, executor: Executor, cache: KVCache, scheduler: Scheduler) -> tuple[BatchPlan, Drawn]:
    """As much of the plan as there is memory for, and what came of it."""
    copies, last_try = plan.copies, False
    while True:
        try:
            cache.copy(copies)
            copies = []
            return plan, executor.run(plan)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            if last_try:
                raise DoesNotFitError(_what_to_change(plan)) from None
        free_memory()  # not before: the error held on to it
        before, smaller = scheduler.prefill_tokens, scheduler.shrink(plan)
        if smaller is None:
            last_try = True  # with the memory that has just been freed
        else:
            plan = smaller
            _say_so(before, scheduler.prefill_tokens)


def _say_so(before: int, now: int) -> None:
    log.warning(
        f"no memory for a prefill of {before} tokens: from now on {now} (rollout.prefill_tokens); the step is "
        "repeated, nothing is lost"
    )


def _what_to_change(plan: BatchPlan) -> str:
    prefilled = sum(chunk.length for chunk in plan.chunks if not chunk.decodes)
    beside = f" beside {prefilled} tokens of prefill" if prefilled else ""
    return (
        f"a step of {len(plan.chunks)} sequences{beside} does not fit into memory; lower rollout.max_running, or "
        "rollout.memory or rollout.kv_tokens (the KV pool leaves too little for the rest), or end what else runs there"
    )
