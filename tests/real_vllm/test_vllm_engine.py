"""vLLM as an engine, for real: the contract suite, stop strings, updates that are not taken, and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import engines_under_test as known
from buffers import added, job_of
from tailrace.config.errors import ConfigError
from tailrace.engines import vllm_engine
from tailrace.engines.contract import CHECKS, EngineUnderTest
from tailrace.engines.vllm_engine import VllmEngine, build_engine
from tailrace.engines.vllm_link import VllmLostError
from tailrace.model.load import load_tokenizer

PYTHON = os.environ["TAILRACE_VLLM_PYTHON"]
HERE = Path(__file__).parent
OPTIONS = ["--rollout.engine", "vllm", "--rollout.python", PYTHON, "--rollout.kv_tokens", "8192"]
STOP = ". ."  # two tokens, with which this model often ends
EAGER = ["--rollout.vllm.enforce_eager", "true"]


def processes_of(group: int) -> list[int]:
    """That are alive in the group of a vLLM process."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def gone_soon(group: int) -> bool:
    until = time.monotonic() + 20
    while processes_of(group) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes_of(group)


def engine_of(*options: str) -> VllmEngine:
    engine = build_engine(known.settings(*OPTIONS, *EAGER, *options))
    engine.load_weights(0, known.weights(0))
    return engine


def play_on(engine: VllmEngine) -> None:
    for _ in range(3000):
        engine.step()


def subject_of(engine: VllmEngine) -> EngineUnderTest:
    return EngineUnderTest(
        engine, known.PROMPTS, known.MAX_TOKENS, known.weights, known.truth, stop_tokens=known.stop_tokens()
    )


@pytest.fixture(scope="module")
def subject() -> Iterator[EngineUnderTest]:
    engine = engine_of()
    yield subject_of(engine)
    group = engine.process.pid
    engine.close()
    assert gone_soon(group), "processes of vLLM are left"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_keeps_the_contract(check: Callable[[EngineUnderTest], None], subject: EngineUnderTest):
    check(subject)


def test_the_group_shares_its_prompt_and_an_update_empties_the_prefix_cache(subject: EngineUnderTest):
    engine = subject.engine
    prompt = [50 + place % 60 for place in range(300)]  # some blocks of vLLM's

    def prefilled(first: int) -> float:
        before = engine.counters()["prefilled"]
        for id in range(first, first + 2):
            engine.submit(job_of(id, first, prompt, 300, 4))
            while not any(one.finish for one in added(engine.step())):
                pass
        return engine.counters()["prefilled"] - before

    alone = prefilled(5000)
    again = prefilled(5100)
    engine.load_weights(engine.version + 1, subject.weights(engine.version + 1))
    assert 300 <= alone < 600
    assert again < 300
    assert prefilled(5200) == alone


def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it():
    engine = build_engine(known.settings(*OPTIONS, *EAGER, "--sampling.stop", STOP), with_weights=True)
    try:
        for id in range(8):
            engine.submit(job_of(id, id, known.PROMPTS[id % 4], len(known.PROMPTS[id % 4]), 60))
        tokens: dict[int, list[int]] = {id: [] for id in range(8)}
        finish: dict[int, str] = {}
        while len(finish) < 8:
            for one in added(engine.step()):
                tokens[one.id] += one.tokens
                finish |= {one.id: one.finish} if one.finish else {}
        decode = load_tokenizer(str(known.START)).decode
        for id, said in tokens.items():
            assert STOP not in decode(said[:-1])
            assert finish[id] != "length" or STOP not in decode(said)
        assert any(STOP in decode(said) for said in tokens.values())
    finally:
        engine.close()


def test_new_weights_that_vllm_does_not_take_end_the_replica(monkeypatch: pytest.MonkeyPatch):
    real = vllm_engine._start

    def with_stale_loader(*given: Any) -> Any:
        start = real(*given)
        return msgspec.structs.replace(
            start, arguments=start.arguments | {"worker_extension_cls": "stale_loader.StaleLoader"}
        )

    monkeypatch.setattr(vllm_engine, "_start", with_stale_loader)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    engine = build_engine(known.settings(*OPTIONS, *EAGER), with_weights=True)
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
        play_on(engine)
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
        build_engine(known.settings(*OPTIONS, "--rollout.vllm.no_such_setting", "3"))


def test_tensor_parallelism_keeps_the_contract():
    engine = engine_of("--rollout.vllm.tensor_parallel_size", "2")
    try:
        assert len(processes_of(engine.process.pid)) >= 4  # ours, the engine, two workers
        for check in CHECKS:
            check(subject_of(engine))
    finally:
        engine.close()
