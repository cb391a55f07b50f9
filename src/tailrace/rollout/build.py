"""From settings to a `Runner`: the engine that the replica uses, who judges, and the language between them."""

from __future__ import annotations

from tailrace.config.tree import Config
from tailrace.engines.emulated import EmulatedEngine
from tailrace.envs.base import Answer, Scored, Turn
from tailrace.rollout.runner import Key, Language, Runner
from tailrace.types import Row


def build_runner(config: Config) -> Runner:
    """A runner without weights of its own: they come as a version."""
    limit = config.workload.max_completion_tokens
    if config.rollout.engine == "emulated":
        return Runner(EmulatedEngine(config, config.run.seed), CoinJudge(config.run.seed), MUTE, limit)
    from tailrace.engines.native import build_engine
    from tailrace.envs.judges import build_judge
    from tailrace.envs.prompts import Prompts
    from tailrace.envs.tasks import build_task
    from tailrace.envs.tools import stop_strings
    from tailrace.model.load import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    engine = build_engine(config, tokenizer)
    task = build_task(config)
    language = Language(
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        observation_tokens=Prompts(task, tokenizer, config).observation_tokens,
        stop_tokens=frozenset(engine.stop_tokens),
        stop_strings=stop_strings(config),
    )
    return Runner(engine, build_judge(config, task), language, limit)


MUTE = Language(lambda _: "", lambda *_: (), frozenset())  # of an engine whose tokens mean nothing


class CoinJudge:
    """Judges what an emulated engine made: by the trajectory's number alone, half of them right."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._answers: list[tuple[Key, Answer]] = []

    def ask(self, key: Key, row: Row, transcript: tuple[Turn, ...]) -> None:
        heads = (key[0] * 2654435761 + self._seed) >> 7 & 1
        self._answers.append((key, Scored(float(heads))))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Key, Answer]]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        pass
