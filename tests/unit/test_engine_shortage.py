"""An engine that finds no memory in the middle of a step: it goes on with less at once, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from buffers import added, job_of
from tailrace.config.tree import Config, Rollout, Sampling, Workload
from tailrace.engines.base import Job
from tailrace.engines.kv import KVCache
from tailrace.engines.native import NativeEngine
from tailrace.engines.scheduler import BatchPlan
from tailrace.model.memory import DoesNotFitError

SHAPE = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.6,
)
Fails = Callable[[BatchPlan], bool]


@pytest.fixture(autouse=True)
def _quick_collection() -> Iterator[None]:
    """Garbage is collected at every failure; what the tests have in memory by now need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()


def engine(blocks: int = 512) -> NativeEngine:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)
    config = Config(
        sampling=Sampling(temperature=1.0),
        rollout=Rollout(kv_tokens=4 * blocks, block_tokens=4, prefill_tokens=64),
        workload=Workload(prompt_tokens=40, max_completion_tokens=20),
    )
    return NativeEngine(model, lambda _: "", (), config, 7)


def prompt(group: int) -> tuple[int, ...]:
    return tuple((7 * group + 5 * place) % 95 + 1 for place in range(10 + 4 * group))


def jobs() -> list[Job]:
    """Groups of three: the second and third start from a copy of the block where their prompt ends."""
    return [
        job_of(10 * group + sample, group, prompt(group), len(prompt(group)), 6 + 3 * sample)
        for group in range(5)
        for sample in range(3)
    ]


class Short:
    """An executor that does the work, so that the pool is written to, and then has no memory for the result."""

    def __init__(self, engine: NativeEngine, fails: Fails, error: Exception) -> None:
        self._executor, self._fails, self._error = engine._executor, fails, error
        self.steps = engine._executor.steps
        self.failed = 0

    def run(self, plan: BatchPlan) -> Any:
        grown = self._executor.run(plan)
        if self._fails(plan):
            self.failed += 1
            raise self._error
        return grown


def short(subject: NativeEngine, fails: Fails, error: Exception | None = None) -> Short:
    subject._executor = executor = Short(subject, fails, error or torch.OutOfMemoryError("no memory"))  # type: ignore
    return executor


def played(subject: NativeEngine, work: Sequence[Job]) -> dict[int, tuple[list[int], list[float]]]:
    found: dict[int, tuple[list[int], list[float]]] = {job.id: ([], []) for job in work}
    for job in work:
        subject.submit(job)
    for _ in range(500):
        for sampled in added(subject.step()):
            found[sampled.id][0].extend(sampled.tokens)
            found[sampled.id][1].extend(sampled.logprobs)
        subject.check()
        if not (subject.stats().running or subject.stats().waiting):
            return found
    raise AssertionError("it did not come to an end")


def prefill(plan: BatchPlan) -> int:
    return sum(chunk.length for chunk in plan.chunks if not chunk.decodes)


@pytest.mark.parametrize("blocks", [512, 26])
def test_less_is_prefilled_at_once_and_everything_comes_out_the_same(caplog, blocks):
    subject = engine(blocks)
    executor = short(subject, lambda plan: prefill(plan) > 20)
    mine, theirs = played(subject, jobs()), played(engine(blocks), jobs())
    assert executor.failed == 2
    assert subject._scheduler.prefill_tokens == 16
    assert caplog.text.count("nothing is lost") == 2
    for id, (tokens, logprobs) in theirs.items():
        assert mine[id][0] == tokens
        assert mine[id][1] == pytest.approx(logprobs, abs=1e-4)


def test_every_step_may_fail_once(caplog):
    subject = engine(blocks=26)
    tried: list[BatchPlan] = []

    def every_other(plan: BatchPlan) -> bool:
        tried.append(plan)
        return len(tried) % 2 == 1

    short(subject, every_other)
    mine, theirs = played(subject, jobs()), played(engine(), jobs())
    assert {id: tokens for id, (tokens, _) in mine.items()} == {id: tokens for id, (tokens, _) in theirs.items()}
    assert subject._scheduler.prefill_tokens == 4
    assert caplog.text.count("from now on") == 4  # decoding does not make it any smaller


def test_copies_are_made_once_and_again_only_if_they_found_no_memory(monkeypatch):
    copied: list[int] = []
    copy = KVCache.copy

    def hesitant(cache: KVCache, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            copied.append(len(copies))
            if len(copied) == 1:
                raise torch.OutOfMemoryError("no memory")
        copy(cache, copies)

    monkeypatch.setattr(KVCache, "copy", hesitant)
    subject = engine()
    short(subject, lambda plan: prefill(plan) > 20)
    mine = played(subject, jobs())
    assert copied[0] == copied[1]
    assert sum(copied[1:]) == 10  # two of each group, whatever failed in between
    monkeypatch.setattr(KVCache, "copy", copy)
    theirs = played(engine(), jobs())
    assert {id: tokens for id, (tokens, _) in mine.items()} == {id: tokens for id, (tokens, _) in theirs.items()}


def test_what_fits_in_no_size_ends_with_what_to_change():
    subject = engine()
    executor = short(subject, lambda _: True)
    subject.submit(jobs()[0])
    with pytest.raises(DoesNotFitError, match=r"1 sequences beside 4 tokens .* rollout.max_running"):
        subject.step()
    assert executor.failed == 6  # 64, 32, 16, 8, 4 tokens, and 4 once more
    subject.check()


def test_decoding_without_memory_is_tried_once_more():
    subject = engine()
    subject.submit(jobs()[0])
    while not subject.step():
        pass
    executor = short(subject, lambda _: True)
    with pytest.raises(DoesNotFitError, match=r"a step of 1 sequences does not fit"):
        subject.step()
    assert executor.failed == 2
    assert subject._scheduler.prefill_tokens == 64


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    subject = engine()
    executor = short(subject, lambda _: True, RuntimeError("an illegal memory access"))
    subject.submit(jobs()[0])
    with pytest.raises(RuntimeError, match="illegal"):
        subject.step()
    assert executor.failed == 1
