"""The contract suite on the native and on the emulated engine, and that it notices an engine which breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engines_under_test as known
from runs import EMULATED
from tailrace.config import load
from tailrace.engines import contract
from tailrace.engines.contract import CHECKS, EngineUnderTest
from tailrace.engines.emulated import EmulatedEngine
from tailrace.engines.native import build_engine


@pytest.fixture(scope="module")
def native() -> EngineUnderTest:
    engine = build_engine(known.settings("--rollout.kv_tokens", "4096"), seed=3)
    engine.load_weights(0, known.weights(0))
    return EngineUnderTest(
        engine, known.PROMPTS, known.MAX_TOKENS, known.weights, known.truth, stop_tokens=known.stop_tokens()
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EngineUnderTest:
    file = tmp_path_factory.mktemp("emulated") / "run.toml"
    file.write_text(EMULATED)
    engine = EmulatedEngine(load([str(file)], ["--workload.lengths.median", "200"]), seed=0)
    engine.load_weights(0, {})
    return EngineUnderTest(engine, known.PROMPTS, known.MAX_TOKENS, lambda _: {})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_native_engine_keeps_the_contract(check: Callable[[EngineUnderTest], None], native: EngineUnderTest):
    check(native)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_emulated_engine_keeps_the_contract(check: Callable[[EngineUnderTest], None], emulated: EngineUnderTest):
    check(emulated)


class Spoilt:
    """The native engine, of which one thing is done wrong."""

    def __init__(self, engine: Any, **wrong: Any) -> None:
        self._engine, self._wrong = engine, wrong

    def __getattr__(self, name: str) -> Any:
        wrong = self._wrong.get(name)
        return getattr(self._engine, name) if wrong is None else lambda *given: wrong(self._engine, *given)


def _forgetful(engine: Any, ids: Any) -> list[Any]:
    engine.withdraw(ids)
    return []


def _sure(engine: Any) -> Any:
    output = engine.step()
    return output._replace(logprobs=np.zeros_like(output.logprobs))


def _stale(engine: Any, version: int, weights: Any, keep_kv: bool = False) -> None:
    engine.version = version


@pytest.mark.parametrize(
    ("wrong", "check", "sentence"),
    [
        ({"withdraw": _forgetful}, contract.a_withdrawn_job_has_every_token_and_goes_on, "withdraw did not return"),
        ({"step": _sure}, contract.answers_have_a_logprob_for_every_token, "are off by"),
        (
            {"load_weights": _stale},
            contract.new_weights_change_version_and_logprobs_of_running_answers,
            "are off by",
        ),
    ],
)
def test_an_engine_that_breaks_it_is_told_how(wrong: dict[str, Any], check: Any, sentence: str):
    engine = build_engine(known.settings("--rollout.kv_tokens", "4096"), seed=4)
    engine.load_weights(0, known.weights(0))
    spoilt: Any = Spoilt(engine, **wrong)
    subject = EngineUnderTest(spoilt, known.PROMPTS, known.MAX_TOKENS, known.weights, known.truth)
    with pytest.raises(AssertionError, match=sentence):
        check(subject)
