"""From settings to a `Runner`: the engine that the replica uses, who judges, and the language between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tailrace.config.tree import Config
from tailrace.engines.base import Engine
from tailrace.engines.emulated import EmulatedEngine
from tailrace.envs.base import Answer, Scored, Turn
from tailrace.rollout.runner import Key, Language, Runner
from tailrace.types import ReplicaId, Row

if TYPE_CHECKING:
    from tailrace.envs.prompts import Prompts


def build_runner(config: Config, memory: float = 0.0, with_weights: bool = False, replica: ReplicaId = 0) -> Runner:
    """A runner whose weights come as a version; `with_weights`: it begins with those of `model.path`. `memory`: its
    share of a GPU; 0: not dealt. `replica`: whose it is."""
    limit = config.workload.max_completion_tokens
    if config.rollout.engine == "emulated":
        judge = CoinJudge(config.run.seed, config.workload.reward_s)
        own = msgspec.structs.replace(config, costs=config.costs.at_speed(config.rollout.speed(replica)))
        return Runner(EmulatedEngine(own, config.run.seed), judge, MUTE, limit)
    from tailrace.envs.judges import Judges

    config = with_all_stops(config)
    judges = Judges(config)
    judges.start()  # beside the engine, which takes longer
    engine = _engine(config, memory, with_weights)
    return Runner(engine, judges, _language(config, _prompts(config)), limit)


def _engine(config: Config, memory: float, with_weights: bool) -> Engine:
    if config.rollout.engine == "vllm":
        from tailrace.engines.vllm_engine import build_engine as build_vllm

        return build_vllm(config, memory, with_weights)
    from tailrace.engines.native import build_engine

    return build_engine(config, config.run.seed, memory)


def held_out_rows(config: Config) -> list[Row]:
    return _prompts(config).held_out()


def with_all_stops(config: Config) -> Config:
    """A turn also ends where a tool is called."""
    from tailrace.envs.tools import stop_strings

    sampling = msgspec.structs.replace(config.sampling, stop=stop_strings(config))
    return msgspec.structs.replace(config, sampling=sampling)


def _prompts(config: Config) -> Prompts:
    from tailrace.envs.prompts import Prompts
    from tailrace.envs.tasks import build_task
    from tailrace.model.load import context_length, load_tokenizer

    path = config.model.path
    return Prompts(build_task(config), load_tokenizer(path), config, context_length(path))


def _language(config: Config, prompts: Prompts) -> Language:
    from tailrace.model.load import end_tokens

    rendering = prompts.rendering
    ends = end_tokens(config.model.path, rendering.tokenizer)
    return Language(
        decode=lambda tokens: rendering.turn_text(tokens, ends),
        observation_tokens=rendering.observation_tokens,
        observation_text=rendering.observation_text,
        stop_tokens=ends,
        stop_strings=config.sampling.stop,
    )


MUTE = Language(lambda _: "", lambda *_: (), lambda _: "", frozenset())  # of an engine whose tokens mean nothing


class CoinJudge:
    """Judges what an emulated engine made: by the trajectory's number alone, half of them right. It takes as long for
    each as a simulation would."""

    def __init__(self, seed: int, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seed, self._seconds, self._clock = seed, seconds, clock
        self._answers: deque[tuple[float, Key, Answer]] = deque()  # with the time at which each is due

    def ask(self, key: Key, row: Row, transcript: tuple[Turn, ...]) -> bool:
        heads = (key[0] * 2654435761 + self._seed) >> 7 & 1
        self._answers.append((self._clock() + self._seconds, key, Scored(float(heads))))
        return True

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Key, Answer]]:
        answers: list[tuple[Key, Answer]] = []
        while self._answers and self._answers[0][0] <= self._clock():
            answers.append(self._answers.popleft()[1:])
        return answers

    def close(self) -> None:
        pass
