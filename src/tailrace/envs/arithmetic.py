"""Built-in task `calculator`: arithmetic that is hard to do in the head and easy with a tool.

A prompt asks for the value of an expression and says how to call the calculator. The reward is 1 for the right value,
however it was found. `tasks.py` puts `ToolUse` around it. Rows are made on demand from (seed, index); which side a
question is on is a property of its text, so nothing that is held out is ever trained on.
"""

from __future__ import annotations

import random
import zlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.config.errors import ConfigError
from tailrace.envs.answers import exact
from tailrace.envs.base import Row, Scored, Turn
from tailrace.envs.tools import calculate

HELD_OUT_SHARE = 8  # one question in so many is held out
HOW = "You can compute with <tool>expression</tool> and read the result. Then write <answer>number</answer>."


class ArithmeticOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[task.options]` of this task."""

    terms: Annotated[int, Meta(ge=2, le=12)] = 3  # numbers in an expression
    digits: Annotated[int, Meta(ge=1, le=9)] = 2  # of each number, at most
    operators: str = "+-*"
    size: Annotated[int, Meta(ge=1)] = 10_000  # different training rows
    instruction: str = HOW


class Arithmetic:
    """The task itself, see `envs.base.Task`."""

    trusted = True  # `respond` compares two numbers
    single_turn = True

    def __init__(self, options: dict[str, Any], seed: int, held_out: int) -> None:
        self.options = _checked(options)
        self.seed, self.held_out_rows = seed, held_out

    def __len__(self) -> int:
        return self.options.size

    def row(self, index: int) -> dict[str, Any]:
        return self._draw(f"train {self.seed} {index}", held_out=False)

    def held_out(self) -> list[dict[str, Any]]:
        return [self._draw(f"held out {index}", held_out=True) for index in range(self.held_out_rows)]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        return Scored(exact(transcript[-1].text, row.columns["answer"]))

    def _draw(self, name: str, held_out: bool) -> dict[str, Any]:
        generator = random.Random(name)
        while True:
            expression = draw_expression(self.options, generator)
            if (zlib.crc32(expression.encode()) % HELD_OUT_SHARE == 0) == held_out:
                prompt = f"What is {expression}?\n{self.options.instruction}".strip()
                return {"prompt": prompt, "answer": calculate(expression)}


def draw_expression(options: ArithmeticOptions, generator: random.Random) -> str:
    parts = [str(_number(options, generator))]
    for _ in range(options.terms - 1):
        parts += [generator.choice(options.operators), str(_number(options, generator))]
    return " ".join(parts)


def _number(options: ArithmeticOptions, generator: random.Random) -> int:
    return generator.randrange(1, 10**options.digits)


def _checked(given: dict[str, Any]) -> ArithmeticOptions:
    try:
        options = msgspec.convert(given, ArithmeticOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(ArithmeticOptions.__struct_fields__)
        raise ConfigError(f"task.options of calculator: {error}; it takes {known}") from None
    if not options.operators or set(options.operators) - set("+-*"):
        raise ConfigError("task.options.operators is made of +, - and *; write for example '+-*'")
    return options
