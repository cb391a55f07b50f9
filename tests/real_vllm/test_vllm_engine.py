"""vLLM as an engine, for real: the contract suite, stop strings, updates that are not taken, and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from served_models import engine_of, gone_soon, processes_of, settings, subject, use_loader

import engines_under_test as known
from buffers import added, job_of
from tailrace.config.errors import ConfigError
from tailrace.engines.base import Engine
from tailrace.engines.contract import CHECKS, EngineUnderTest
from tailrace.engines.vllm_engine import build_engine
from tailrace.engines.vllm_link import VllmLostError
from tailrace.model.load import load_tokenizer

STOP = ". ."  # two tokens, with which this model often ends


def play(engine: Engine, ids: set[int]) -> tuple[dict[int, list[int]], dict[int, str]]:
    """The answers of these to their ends, and why they ended."""
    tokens: dict[int, list[int]] = {id: [] for id in ids}
    finish: dict[int, str] = {}
    until = time.monotonic() + 300
    while len(finish) < len(ids):
        assert time.monotonic() < until, f"only {len(finish)} of {len(ids)} turns have ended"
        for one in added(engine.step()):
            tokens[one.id] += one.tokens
            finish |= {one.id: one.finish} if one.finish else {}
    return tokens, finish


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineUnderTest]:
    with subject() as started:
        yield started


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_keeps_the_contract(check: Callable[[EngineUnderTest], None], alone: EngineUnderTest):
    check(alone)


def test_the_group_shares_its_prompt_and_an_update_empties_the_prefix_cache(alone: EngineUnderTest):
    engine = alone.engine
    prompt = [50 + place % 60 for place in range(300)]  # some blocks of vLLM's

    def prefilled(first: int) -> float:
        before = engine.counters()["prefilled"]
        for id in range(first, first + 2):
            engine.submit(job_of(id, first, prompt, 300, 4))
            play(engine, {id})
        return engine.counters()["prefilled"] - before

    anew = prefilled(5000)
    again = prefilled(5100)
    engine.load_weights(engine.version + 1, alone.weights(engine.version + 1))
    assert 300 <= anew < 600
    assert again < 300
    assert prefilled(5200) == anew


def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it():
    engine = build_engine(settings("--sampling.stop", STOP), with_weights=True)
    try:
        for id in range(8):
            engine.submit(job_of(id, id, known.PROMPTS[id % 4], len(known.PROMPTS[id % 4]), 60))
        tokens, finish = play(engine, set(range(8)))
        decode = load_tokenizer(str(known.START)).decode
        for id, said in tokens.items():
            assert STOP not in decode(said[:-1])
            assert finish[id] != "length" or STOP not in decode(said)
        assert any(STOP in decode(said) for said in tokens.values())
    finally:
        engine.close()


def test_new_weights_that_vllm_does_not_take_end_the_replica(monkeypatch: pytest.MonkeyPatch):
    use_loader("ForgetsTheHead", monkeypatch)
    engine = build_engine(settings(), with_weights=True)
    with pytest.raises(VllmLostError, match=r"did not take the new weights of lm_head\.weight"):
        engine.load_weights(1, known.weights(1))
    assert gone_soon(engine.process.pid)


def test_a_killed_vllm_ends_the_engine_and_leaves_no_process():
    engine = engine_of()
    engine.submit(job_of(1, 1, known.PROMPTS[0], len(known.PROMPTS[0]), 150))
    workers = [pid for pid in processes_of(engine.process.pid) if pid != engine.process.pid]
    assert workers
    os.kill(max(workers), signal.SIGKILL)  # the youngest: a worker of the engine, not the process that we started
    with pytest.raises(VllmLostError):
        play(engine, {1})
    assert gone_soon(engine.process.pid)


def test_a_killed_server_leaves_no_process_even_if_its_replica_is_killed_too():
    engine = engine_of()
    group = engine.process.pid
    os.kill(group, signal.SIGKILL)  # nobody but its own workers is left to end the others
    assert gone_soon(group)


def test_vllm_ends_with_the_replica():
    engine = engine_of()
    engine.process._end_lifeline()  # as the kernel does when the replica is killed
    assert gone_soon(engine.process.pid)
    with pytest.raises(VllmLostError, match="killed by signal 9"):
        engine.process.receive(1.0)


def test_settings_that_vllm_does_not_know_are_refused_in_its_words():
    with pytest.raises(ConfigError, match=r"vLLM cannot start: .*no_such_setting"):
        build_engine(settings("--rollout.vllm.no_such_setting", "3"))
