"""Built-in task: any generator of the package reasoning-gym, by its name and with its own settings.

`[task.options]` takes `dataset`, `size`, `threshold`, `instruction`, and whatever the generator takes. Rows are made on
demand from (seed, index) and carry only their index, so a judge makes the question again and needs nothing else. Which
side a question is on is a property of its text: nothing that is held out is ever trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.config.errors import ConfigError
from tailrace.config.spelling import near
from tailrace.envs.answers import final_answer
from tailrace.envs.base import Row, Scored, Turn

HELD_OUT_SHARE = 8  # one question in so many is held out
TRIES = 400  # draws until one falls on the wanted side; a generator of one question only never gets there


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is ours in `[task.options]`; the rest is the generator's."""

    dataset: str = "chain_sum"
    size: Annotated[int, Meta(ge=1)] = 10_000  # different training rows
    # a score below this counts as 0, because generators give crumbs for junk; 1: solved or not
    threshold: Annotated[float, Meta(ge=0, le=1)] = 1.0
    instruction: str = ""  # put behind every question


class ReasoningGym:
    """The task itself, see `envs.base.Task`."""

    single_turn = True

    def __init__(self, options: dict[str, Any], seed: int, held_out: int) -> None:
        own = {name: value for name, value in options.items() if name in ReasoningOptions.__struct_fields__}
        self.options = _converted(own)
        self.held_out_rows = held_out
        settings = {name: value for name, value in options.items() if name not in own}
        self.generator = _generator(self.options, settings, seed)
        self._entry = functools.lru_cache(maxsize=64)(self.generator.__getitem__)  # a group asks for one many times

    def __len__(self) -> int:
        return self.options.size

    def row(self, index: int) -> dict[str, Any]:
        return self._row(index, held_out=False)

    def held_out(self) -> list[dict[str, Any]]:
        return [self._row(index, held_out=True) for index in range(self.held_out_rows)]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        entry = self._entry(row.columns["index"])
        answer = final_answer(transcript[-1].text, str(entry["answer"]))
        score = float(self.generator.score_answer(answer=answer, entry=entry))
        return Scored(score if score >= self.options.threshold else 0.0)

    def _row(self, index: int, held_out: bool) -> dict[str, Any]:
        for draw in range(index, TRIES * self.options.size, self.options.size):
            entry = self._entry(draw)
            question = str(entry["question"])
            if (zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0) == held_out:
                prompt = f"{question}\n{self.options.instruction}".strip()
                return {"prompt": prompt, "answer": str(entry["answer"]), "index": draw}
        raise ConfigError(
            f"task.options: '{self.options.dataset}' makes too few different questions with these settings to hold "
            f"some out; widen them, or write task.eval_rows = 0"
        )


def _converted(options: dict[str, Any]) -> ReasoningOptions:
    try:
        return msgspec.convert(options, ReasoningOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"task.options of reasoning_gym: {error}") from None


def _generator(options: ReasoningOptions, settings: dict[str, Any], seed: int) -> Any:
    gym = _package()
    known = gym.factory.DATASETS
    if options.dataset not in known:
        raise ConfigError(f"task.options.dataset = '{options.dataset}' is unknown; {_nearest(options.dataset, known)}")
    _check_names(settings, [field.name for field in dataclasses.fields(known[options.dataset][1])], options.dataset)
    try:
        return gym.create_dataset(options.dataset, seed=seed * 1_000_003, size=options.size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.options: '{options.dataset}' refuses these settings: {error}") from None


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError:
        raise ConfigError(
            "task.name is 'reasoning_gym', which is not installed; run pip install 'tailrace[tasks]'"
        ) from None
    return reasoning_gym


def _check_names(settings: dict[str, Any], known: list[str], dataset: str) -> None:
    for name in settings:
        if name not in known or name == "seed":
            hint = "the seed is run.seed" if name == "seed" else _nearest(name, known)
            raise ConfigError(f"task.options.{name} is unknown to '{dataset}'; {hint}")


def _nearest(name: str, known: Any) -> str:
    close = near(name, known)
    return f"did you mean '{close}'?" if close else f"there are {', '.join(sorted(known))}"
