"""What the policy may call between its turns, and how it does that.

A call is an expression or a program between `<tool>` and `</tool>`. The closing tag is a stop string, so a turn ends
with its call; the result is what the policy reads next. `ToolUse` puts this around any task: it answers calls as long
as there are turns left, and leaves everything else to the task.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.envs.answers import last_between
from tailrace.envs.base import Observed, Row, Scored, Task, Turn
from tailrace.envs.sandbox import refuse_weak, run_python

CALL, CALL_END = "<tool>", "</tool>"

Tool = Callable[[str], str]


def stop_strings(config: Config) -> tuple[str, ...]:
    """Every string that ends a turn of the policy: the user's own, and the end of a call."""
    uses_tools = bool(config.task.tools) or config.task.name == "calculator"
    return tuple(dict.fromkeys((*config.sampling.stop, *((CALL_END,) if uses_tools else ()))))


class ToolUse:
    """A task whose policy may call a tool; see `envs.base.Task`."""

    def __init__(self, task: Task, name: str, max_turns: int, timeout_s: float, weak: bool = False) -> None:
        if max_turns < 2:
            raise ConfigError(
                f"task.max_turns is {max_turns}, so the policy would never read what a tool answers; write 2 or more"
            )
        self.task, self.max_turns = task, max_turns
        self.tool = make_tool(name, timeout_s, weak)
        self.trusted = name == "calculator" and getattr(task, "trusted", False)

    def __len__(self) -> int:
        return len(self.task)

    def row(self, index: int) -> dict[str, Any]:
        return self.task.row(index)

    def held_out(self) -> list[dict[str, Any]]:
        return self.task.held_out()

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored | Observed:
        call = self.call_in(transcript)
        return self.task.respond(row, transcript) if call is None else Observed(self.tool(call.strip()))

    def call_in(self, transcript: tuple[Turn, ...]) -> str | None:
        """The call that the last turn is to be answered to, if it has one and another turn may follow."""
        turns = sum(turn.role == "policy" for turn in transcript)
        return last_between(transcript[-1].text, CALL, CALL_END) if turns < self.max_turns else None

    def score(self, row: Row, transcript: tuple[Turn, ...]) -> Scored | Observed:
        """No tokens are left to read a result in: what the policy said last is its answer."""
        score = getattr(self.task, "score", None)
        if score is not None:
            return score(row, transcript)
        said = max(index for index, turn in enumerate(transcript) if turn.role == "policy")
        return self.task.respond(row, transcript[: said + 1])


def make_tool(name: str, timeout_s: float, weak: bool = False) -> Tool:
    """A tool by its name. A program has most of the time that a judge has, so that it is the program that ends. `weak`:
    programs may run where the machine cannot wall them off."""
    if name == "calculator":
        return calculate
    assert name == "python", name
    refuse_weak(allowed=weak)
    return lambda program: run_python(program, seconds=min(5.0, 0.6 * timeout_s))


# --------------------------------------------------------------------------------------------------------- calculator

LONGEST = 200  # characters of an expression
LARGEST = 4096  # bits of a whole number on the way

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or a line that says why there is none. Nothing else is ever run."""
    if len(expression) > LONGEST:
        return f"error: the expression has more than {LONGEST} characters"
    try:
        return _written(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError:
        return "error: this is not an arithmetic expression"
    except (ArithmeticError, ValueError) as error:
        return f"error: {error}"
    except (MemoryError, RecursionError):  # the parser's words for too many brackets
        return "error: the expression is nested too deeply"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType] (type() is not seen as a test)
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return _combined(node.op, _value(node.left), _value(node.right))
    raise ValueError("only numbers, brackets and + - * / // % ** are known")


def _combined(kind: ast.operator, left: float, right: float) -> int | float:
    if isinstance(kind, ast.Pow):
        _check_power(left, right)
    value = BINARY[type(kind)](left, right)
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    if isinstance(value, int) and value.bit_length() > LARGEST:
        raise ValueError("the number is too large")
    return value


def _check_power(base: float, exponent: float) -> None:
    """Before it is computed: a tower of powers would take all memory first."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > LARGEST:
        raise ValueError("the number is too large")


def _written(value: int | float) -> str:
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
    return str(int(value)) if whole else f"{value:.12g}"
