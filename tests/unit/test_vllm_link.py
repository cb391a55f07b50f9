"""The adapter for vLLM against a scripted process: its language, its numbers, its versions, and its ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import engines_under_test as known
import scripted_vllm
from buffers import added, ids_of, job_of
from tailrace.engines.contract import CHECKS, EngineUnderTest
from tailrace.engines.vllm_engine import VllmEngine
from tailrace.engines.vllm_link import VllmLostError, VllmProcess
from tailrace.engines.vllm_process import vllm_messages as words

SCRIPT = Path(scripted_vllm.__file__)
PROMPT = [1, 2, 3]


def started(script: str = "") -> VllmProcess:
    process = VllmProcess(sys.executable, SCRIPT)
    process.send(words.StartEngine({}, {"script": script}, 0, 0.5, 0.5))
    return process


def engine_on(process: VllmProcess, *options: str) -> VllmEngine:
    ready, _ = process.wait_for(words.EngineReady, "start", 30)
    return VllmEngine(process, ready, lambda tokens: " ".join(map(str, tokens)), known.settings(*options))


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    process = started()
    yield engine_on(process)
    process.close()


@pytest.fixture(scope="module")
def subject() -> Iterator[EngineUnderTest]:
    process = started()
    engine = engine_on(process)
    engine.load_weights(0, {"w": known.weights(0)["model.norm.weight"]})
    yield EngineUnderTest(engine, known.PROMPTS, 60, lambda _: {"w": known.weights(0)["model.norm.weight"]})
    process.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Callable[[EngineUnderTest], None], subject: EngineUnderTest):
    check(subject)


def play(engine: VllmEngine, ids: set[int]) -> dict[int, tuple[list[int], list[float]]]:
    found: dict[int, tuple[list[int], list[float]]] = {id: ([], []) for id in ids}
    until = time.monotonic() + 30
    while ids and time.monotonic() < until:
        for one in added(engine.step()):
            found[one.id][0].extend(one.tokens)
            found[one.id][1].extend(one.logprobs)
            ids = ids - {one.id} if one.finish else ids
    return found


def test_every_token_comes_once_with_its_own_logprob(engine: VllmEngine):
    for id in (1, 2):
        engine.submit(job_of(id, id, [0] * (id * 10), id * 10, 30))
    for id, (tokens, logprobs) in play(engine, {1, 2}).items():
        places = list(range(id * 10, id * 10 + 30))
        assert tokens == [100 + place for place in places]
        np.testing.assert_allclose(logprobs, [-place / 1000 for place in places], rtol=1e-6)


def test_what_still_comes_of_a_withdrawn_job_is_nobodys(engine: VllmEngine):
    engine.submit(job_of(7, 0, PROMPT, 3, 200))
    while not (said := [token for one in added(engine.step()) for token in one.tokens]):
        pass
    time.sleep(0.05)  # more has arrived, and has not been handed out
    engine._hear(0.0)
    (job,) = engine.withdraw([7])
    assert ids_of(job) == PROMPT + said
    assert job.max_tokens == 200 - len(said)
    engine.submit(job)
    assert play(engine, {7})[7][0] == [100 + place for place in range(3 + len(said), 203)]


def test_tokens_that_came_before_an_update_are_of_the_version_before(engine: VllmEngine):
    engine.load_weights(4, {"w": known.weights(0)["model.norm.weight"]})
    engine.submit(job_of(1, 0, PROMPT, 3, 400))
    time.sleep(0.1)
    engine.load_weights(5, {"w": known.weights(0)["model.norm.weight"]})
    assert engine.version == 5
    first = engine.step()
    assert (first.version, len(first.tokens) > 0) == (4, True)
    versions = [first.version]
    tokens = first.tokens.tolist()
    while len(tokens) < 400:
        output = engine.step()
        tokens += output.tokens.tolist()
        versions += [output.version] if output.ids else []
    assert tokens == [100 + place for place in range(3, 403)]
    assert versions == sorted(versions, key=lambda one: one or 0)
    assert versions[-1] == 5


def test_a_stop_string_cuts_what_vllm_went_on_with():
    process = started()
    engine = engine_on(process, "--sampling.stop", "109 110")
    try:
        engine.submit(job_of(1, 0, PROMPT, 3, 50))
        tokens, logprobs = play(engine, {1})[1]
        assert tokens == list(range(103, 111))
        assert len(logprobs) == 8
        engine.submit(job_of(1, 0, [*PROMPT, *tokens], 3, 5))
        assert play(engine, {1})[1][0] == list(range(111, 116))
    finally:
        process.close()


def test_a_killed_process_is_told_with_its_signal():
    engine = engine_on(started("dies"))
    engine.submit(job_of(1, 0, PROMPT, 3, 5))
    with pytest.raises(VllmLostError, match="killed by signal 9"):
        play(engine, {1})


def test_its_own_sentence_is_the_reason():
    with pytest.raises(VllmLostError, match="no such model"):
        engine_on(started("fails"))


def test_silence_has_a_deadline_that_says_what_was_waited_for():
    process = started("silent")
    try:
        with pytest.raises(VllmLostError, match=r"did not start within 0\.3 s"):
            process.wait_for(words.EngineReady, "start", 0.3)
    finally:
        process.close()


def test_closing_ends_the_whole_group():
    process = started("silent")
    process.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_frames_are_read_from_any_pieces():
    whole = words.frame(words.Abort([1, 2])) + words.frame(words.EngineFailed("x" * 1000))
    for step in (1, 3, 100):
        buffer, found = bytearray(), list[bytes]()
        for at in range(0, len(whole), step):
            buffer += whole[at : at + step]
            found += words.take_frames(buffer)
        assert (len(found), len(buffer)) == (2, 0)


def test_what_is_no_frame_is_refused():
    with pytest.raises(ValueError, match="another language"):
        list(words.take_frames(bytearray(b"\xff" * 8)))
