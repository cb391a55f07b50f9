"""What an unknown key was meant to be: the key for another framework's name, or one of ours that is misspelt.

A wrong suggestion is worse than none. So a key is that of another framework (`other_frameworks.py`), or ours in
another section, or misspelt (`spelling.py`), or simply unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tailrace.config.fields import fields, leaf, sections
from tailrace.config.other_frameworks import FRAMEWORK_NAMES, FrameworkName
from tailrace.config.spelling import near

TELLING = 9  # letters of a last word that says enough without its section
RENAMED = {"costs.train_part": "costs.train_mini_batch", "groups.attempts": "groups.max_failures"}


class Spelling(NamedTuple):
    """How a setting is written where it was given: what it is called there, and a key of ours."""

    kind: str
    write: Callable[[str], str]


IN_A_FILE = Spelling("a setting", str)
AS_OPTION = Spelling("an option", "--{}".format)


def unknown(key: str, spelling: Spelling = IN_A_FILE) -> str:
    """A sentence about a key that is not ours: whose name it is, or the one it looks like."""
    kind, write = spelling
    written = write(key)
    if key in RENAMED:
        return f"{written} is called {write(RENAMED[key])} now; write that"
    found = _framework_name(key)
    if found:
        return f"{written} is {found.framework}'s name, {_instead(found, spelling)}"
    meant = nearest(key)
    if meant:
        return f"{written} is not {kind}; did you mean {write(meant)}?"
    theirs = near(leaf(key), filter(_is_telling, FRAMEWORK_NAMES))
    if theirs:
        found = FRAMEWORK_NAMES[theirs]
        return f"{written} is not {kind}; {theirs} is {found.framework}'s name, {_instead(found, spelling)}"
    return f"{written} is not {kind}; --dry-run prints every setting"


def _instead(found: FrameworkName, spelling: Spelling) -> str:
    kind, write = spelling
    simulated = f"; to simulate, {write(found.simulated)}" if found.simulated else ""
    if found.key:
        note = f" ({found.note})" if found.note else ""
        return f"not {kind} here; write {write(found.key)}{note}{simulated}"
    if simulated:
        return f"not {kind} here: {found.note}{simulated}"
    return f"and there is nothing like it here: {found.note}"


def nearest(key: str) -> str | None:
    """Our key that this one is for certain: without its section, its last word in another section, or a typo."""
    for found in (_of_training(_without_section(key)), _of_training(_in_another_section(key))):
        if len(found) == 1:
            return found[0]
    section, dot, word = key.rpartition(".")
    if dot:
        return _misspelt(section, word)
    meant = near(key, {leaf(each) for each in fields() if _is_telling(leaf(each))})
    found = _of_training([each for each in fields() if leaf(each) == meant])
    return found[0] if len(found) == 1 else None


def _misspelt(section: str, word: str) -> str | None:
    """A typo in the section or in the last word, not in both."""
    if section not in sections():
        right = near(section, sections(), short=2)
        return f"{right}.{word}" if f"{right}.{word}" in fields() else None
    right = near(word, [leaf(each) for each in fields() if each.rpartition(".")[0] == section], short=2)
    return f"{section}.{right}" if right else None


def _without_section(key: str) -> list[str]:
    """`lengths.sigma` for `workload.lengths.sigma`; `actor.model.path`, whose end is ours; `run_seed`, with a dot."""
    joined = key.replace(".", "_")
    return [
        each
        for each in fields()
        if each.endswith(f".{key}") or key.endswith(f".{each}") or each.replace(".", "_") == joined
    ]


def _in_another_section(key: str) -> list[str]:
    return [each for each in fields() if leaf(each) == leaf(key) and _is_telling(leaf(key))]


def _of_training(keys: list[str]) -> list[str]:
    """Some settings are there for evaluations too; without a section, those of training are meant."""
    return [key for key in keys if not key.startswith("eval.")] if len(keys) > 1 else keys


def _is_telling(word: str) -> bool:
    return "_" in word or len(word) >= TELLING


def _framework_name(key: str) -> FrameworkName | None:
    return next((FRAMEWORK_NAMES[tail] for tail in _tails(key) if tail in FRAMEWORK_NAMES), None)


def _tails(key: str) -> Iterator[str]:
    words = key.split(".")
    for start in range(len(words)):
        yield ".".join(words[start:])
