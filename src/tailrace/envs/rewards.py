"""The user's reward function: found by its path, called by the signature it has, its result checked.

`task.reward` is `module:function` or `file.py:function`. Which of the known signatures a function has, its own, TRL's,
verl's or verifiers', is told by the names of its parameters. `load_reward` runs what the user has written, so it
belongs into a judge, where that can do no harm.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tailrace.config.errors import ConfigError
from tailrace.envs import answers
from tailrace.envs.base import Row, Scored, Turn
from tailrace.envs.imports import load_object
from tailrace.errors import TailraceError

Transcript = tuple[Turn, ...]
Reward = Callable[[Row, Transcript], float]
Arguments = Callable[[Row, Transcript], dict[str, Any]]

BUILT_IN: dict[str, Callable[[], answers.Match]] = {
    "": lambda: answers.exact,
    "exact": lambda: answers.exact,
    "math_verify": answers.math_verify,
}
MOST_PARTS, LONGEST_PART = 32, 64  # of a reward: how many, and the letters of a name
KNOWN = "f(completion, answer), f(prompts, completions, **columns) or f(data_source, solution_str, ground_truth)"


class RewardError(TailraceError):
    """What a reward function answered is no reward."""


def needs_answer(path: str) -> bool:
    """Whether the reward compares with the row's answer, whatever else the row has."""
    return path in BUILT_IN


def load_reward(path: str, folders: Sequence[Path]) -> Reward:
    """The function at the path as a function of row and transcript, or ConfigError."""
    if path in BUILT_IN:
        match = BUILT_IN[path]()
        return lambda row, transcript: match(last_words(transcript), row.columns["answer"])
    function = load_object(path, folders, "task.reward", others=BUILT_IN)
    return UserReward(function, _signature(function, path), path)


class UserReward(NamedTuple):
    """A function of the user's with the builder of its arguments."""

    function: Callable[..., Any]
    arguments: Arguments
    path: str

    def __call__(self, row: Row, transcript: Transcript) -> float:
        return self.scored(row, transcript).reward

    def scored(self, row: Row, transcript: Transcript) -> Scored:
        """With what the function tells of its reward beside it."""
        arguments = self.arguments(row, transcript)
        result = self.function(**self._accepted(arguments))
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_awaited(result))
        reward = as_reward(result, self.path, one_of_a_list="completions" in arguments)
        return Scored(reward, parts_of(result))

    def check(self, row: Row) -> None:
        """ConfigError if a row like this lacks what the function wants. Nothing is called."""
        try:
            self._accepted(self.arguments(row, (Turn("policy", ""),)))
        except RewardError as error:
            raise ConfigError(f"task.{error}") from None

    def _accepted(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        parameters = inspect.signature(self.function).parameters.values()
        for each in parameters:
            optional = each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            if not optional and each.name not in arguments:
                known = ", ".join(arguments)
                raise RewardError(f"reward '{self.path}' wants '{each.name}', which the row lacks; it has {known}")
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return arguments
        return {each.name: arguments[each.name] for each in parameters if each.name in arguments}


async def _awaited(result: Any) -> Any:
    return await result


# --------------------------------------------------------------------------------------------------------- signatures


def _signature(function: Callable[..., Any], path: str) -> Arguments:
    """The builder of arguments for the signature that these parameters belong to."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"task.reward = '{path}' does not tell its parameters; write a function {KNOWN}") from None
    named = {name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    if named & {"prompts", "completions"} or (parameters and not named):
        return _for_trl
    if "solution_str" in named:
        return _for_verl
    if "completion" in named:
        return _for_verifiers if _of_verifiers(function, named) else _plain
    raise ConfigError(f"task.reward = '{path}' takes ({', '.join(parameters)}), which is not {KNOWN}")


def _of_verifiers(function: Callable[..., Any], named: set[str]) -> bool:
    return inspect.iscoroutinefunction(function) or bool(named & {"state", "info", "task", "parser"})


def _for_trl(row: Row, transcript: Transcript) -> dict[str, Any]:
    """Lists of one: a sample is judged alone, so that a function that hangs on it costs no other."""
    columns = {name: [value] for name, value in row.columns.items()}
    return columns | {"prompts": [row.prompt], "completions": [_completion(row, transcript)]}


def _for_verl(row: Row, transcript: Transcript) -> dict[str, Any]:
    columns = row.columns
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": last_words(transcript),
        "ground_truth": columns.get("ground_truth", columns.get("answer")),
        "extra_info": columns.get("extra_info"),
    }


def _for_verifiers(row: Row, transcript: Transcript) -> dict[str, Any]:
    answer = {"answer": row.columns.get("answer", ""), "info": {}, "task": ""}
    arguments = answer | row.columns | {"prompt": row.prompt, "completion": _completion(row, transcript)}
    return arguments | {"state": dict(arguments)}


def _plain(row: Row, transcript: Transcript) -> dict[str, Any]:
    return row.columns | {"prompt": row.prompt, "completion": last_words(transcript)}


def _completion(row: Row, transcript: Transcript) -> str | list[dict[str, str]]:
    """Messages for a prompt of messages, text for text, as both libraries have it."""
    if isinstance(row.prompt, str):
        return last_words(transcript)
    roles = {"policy": "assistant", "environment": "tool"}
    return [{"role": roles[turn.role], "content": turn.text} for turn in transcript]


def last_words(transcript: Transcript) -> str:
    """The policy's last turn: the completion, where there is one turn only."""
    return next((turn.text for turn in reversed(transcript) if turn.role == "policy"), "")


# ------------------------------------------------------------------------------------------------------------ results


def scored_by(reward: Reward, row: Row, transcript: Transcript) -> Scored:
    return reward.scored(row, transcript) if isinstance(reward, UserReward) else Scored(reward(row, transcript))


def parts_of(result: Any) -> dict[str, float]:
    """The finite numbers beside "score" in a dict (verl). They are shown and nothing depends on them, so that what is
    no number is left out instead of being an error."""
    found = cast("dict[Any, Any]", result) if isinstance(result, dict) else {}
    named = [(str(name)[:LONGEST_PART], value) for name, value in found.items() if name != "score"]
    numbers_in = [(name, float(value)) for name, value in named if isinstance(value, numbers.Real)]
    return {name: value for name, value in numbers_in[:MOST_PARTS] if math.isfinite(value) and name.isprintable()}


def as_reward(result: Any, path: str, one_of_a_list: bool = False) -> float:
    """The finite number in a result: plain, in a list of one (TRL), or under "score" (verl)."""
    value = _only(result, path) if one_of_a_list else result
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("score")
    return finite(value, f"reward '{path}' returned", result)


def finite(value: Any, says: str, result: Any) -> float:
    """The value as a plain float, whatever kind of number it is; RewardError if it is none or not finite. `result` is
    what to show of it."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # a tensor or array without dimensions
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{says} {_shown(result)}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RewardError(f"{says} a number that no float holds; a reward is a finite number") from None
    if not math.isfinite(number):
        raise RewardError(f"{says} {number}; a reward is a finite number")
    return number or 0.0  # no minus zero: SQLite and JSON do not agree on it


def _only(result: Any, path: str) -> Any:
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward '{path}' returned {_shown(result)}; it takes completions, so it returns a list")
    if len(cast("list[Any]", values)) != 1:
        raise RewardError(f"reward '{path}' returned {len(values)} rewards for 1 completion")
    return values[0]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
