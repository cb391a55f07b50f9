r"""Built-in rewards: is the final answer of a completion the expected one?

Used for tasks without a reward of their own, by name (`task.reward = "math_verify"`), and by the built-in tasks. The
final answer is what stands in the last `<answer>` tags, in the last `\boxed{}` or behind the last `####`; without any
of these it is the last number where a number is expected, else the last line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tailrace.config.errors import ConfigError

NUMBER = re.compile(r"(?<![\w.)])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")

Match = Callable[[str, Any], float]  # completion, answer -> reward


def exact(completion: str, answer: Any) -> float:
    """1 if the final answer is the expected one: as a number where that is one, else word for word."""
    expected = _as_text(answer)
    given = final_answer(completion, expected)
    number = as_number(expected)
    if number is not None:
        return float(as_number(given) == number)
    return float(_words(given) == _words(expected) or _words(completion) == _words(expected))


def final_answer(completion: str, expected: str) -> str:
    """What the completion says in the end, given what kind of thing is asked for."""
    marked = _marked(completion)
    text = completion if marked is None else marked
    if as_number(expected) is not None:
        numbers = NUMBER.findall(text)
        return numbers[-1] if numbers else ""
    if marked is not None:
        return marked.strip()
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def as_number(text: str) -> Decimal | None:
    """The number that the whole text is, if it is one: `1,234.50`, `-3`."""
    stripped = text.strip().strip("$").rstrip(".")
    if not NUMBER.fullmatch(stripped):
        return None
    return Decimal(stripped.replace(",", "").replace("−", "-"))


def math_verify() -> Match:
    """Equality as mathematics (`1/2`, `0.5` and `\\frac{1}{2}`), by the package of that name."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError("task.reward is 'math_verify', which is not installed; run pip install math-verify") from None

    def judged(completion: str, answer: Any) -> float:
        # Without its own time limits, which would make a slow comparison a wrong answer: the judge has a deadline.
        gold: Any = parse(f"\\boxed{{{_as_text(answer)}}}", parsing_timeout=0)
        given: Any = parse(completion, parsing_timeout=0)
        return float(verify(gold, given, timeout_seconds=0))

    return judged


def _marked(completion: str) -> str | None:
    if (tagged := last_between(completion, "<answer>", "</answer>")) is not None:
        return tagged
    if (start := completion.rfind("\\boxed{")) >= 0:
        return _braced(completion[start + len("\\boxed{") :])
    _, mark, behind = completion.rpartition("####")
    return behind.strip().partition("\n")[0] if mark else None


def last_between(text: str, begin: str, end: str) -> str | None:
    """The last text between two marks. Not by a regular expression: its time would grow with the square of the number
    of marks, and it is the policy that writes them."""
    start = text.rfind(begin, 0, max(text.rfind(end), 0))
    return None if start < 0 else text[start + len(begin) : text.index(end, start)]


def _braced(text: str) -> str:
    """Up to the brace that closes the one before the text."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:index]
    return text


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer)


def _words(text: str) -> list[str]:
    return text.strip().rstrip(".").casefold().split()
