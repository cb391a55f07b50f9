"""The one error that settings raise: a sentence for the person who wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.errors import TailraceError


class ConfigError(TailraceError):
    """What is wrong, where, and what to write instead."""


def refuse(problems: Sequence[str]) -> None:
    """Raise the first of several problems and count the others; no problem, no error."""
    if not problems:
        return
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise ConfigError(problems[0] + more)
